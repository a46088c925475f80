"""Experiments, one file each; a file is found by its name, so that a new one needs no registration.

A module here that is no package and has no leading underscore is an experiment: it has ``SUMMARY``, one line, and
``run(request)``, which gives the `Evidence` that the module of the same name in ``paper_figs`` draws. Its name on the
command line has dashes for underscores.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bench.errors import unknown
from bench.results import PUBLISHED, Store

if TYPE_CHECKING:
    from pandas import DataFrame

Progress = Callable[[int, int, str], None]
"""Called with the number done, the number of all, and what was done last or is being done."""


@dataclass(frozen=True)
class Request:
    """What is asked of an experiment.

    results: directory of trials, read and written. quick: fewer cells, to see that it works. fresh: take no trial from
    the published ones. assumptions: name of the cost model's set; None for the default. device: ``cpu`` or ``cuda``,
    for an experiment with ``DEVICES``; None where it chooses.
    """

    results: Path
    quick: bool
    progress: Progress
    fresh: bool = False
    assumptions: str | None = None
    device: str | None = None

    def store(self) -> Store:
        """Where trials are found and kept."""
        return Store(self.results, also=() if self.fresh else (PUBLISHED,))


class Table(NamedTuple):
    """A result for the terminal."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


class Evidence(NamedTuple):
    """What an experiment found.

    drawn: keyword arguments of the figure's ``draw`` in ``paper_figs``. data: the same as a table, for the CSV file.
    tables: what the terminal shows. failures: one line each for what it should show and what did not
    hold. figure: module in ``paper_figs`` that draws it, where that is not the experiment's own name.
    """

    drawn: Mapping[str, Any]
    data: "DataFrame"
    tables: Sequence[Table]
    failures: Sequence[str] = ()
    figure: str | None = None


class Experiment(Protocol):
    """A module of this package."""

    SUMMARY: str

    def run(self, request: Request) -> Evidence: ...


def names() -> list[str]:
    """Names of all experiments."""
    modules = [found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg]
    return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))


def get_experiment(name: str) -> Any:
    """The `Experiment` module of that name. Raises BadInput listing the known ones."""
    if name not in names():
        raise unknown("experiment", name, names())
    return importlib.import_module(f"experiments.{name.replace('-', '_')}")
