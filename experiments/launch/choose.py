"""From an experiment to tasks: its specs, those that are asked for, their layouts and their repeats."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.case import Case, CaseSpec
from bench.errors import BadInput, unknown
from bench.system import get_system
from experiments import get_experiment, names
from experiments.launch.work import Backend, Settings, Task

FIELDS: Mapping[str, Callable[[CaseSpec], object]] = {
    "model": lambda spec: spec.model.name,
    "system": lambda spec: spec.system,
    "cluster": lambda spec: spec.cluster.name,
    "nodes": lambda spec: spec.cluster.num_nodes,
    "seq_len": lambda spec: spec.workload.seq_len,
    "routing": lambda spec: spec.workload.routing,
    "dtype": lambda spec: spec.workload.dtype,
    "seed": lambda spec: spec.workload.seed,
}
"""What `--only` can tell specs by."""


def module_of(experiment: str) -> Any:
    """An experiment, by its name or a Python file, that has ``specs(quick)``. Raises BadInput."""
    module = _file(Path(experiment)) if experiment.endswith(".py") else get_experiment(experiment)
    if not hasattr(module, "specs"):
        raise unknown("experiment", experiment, [name for name in names() if hasattr(get_experiment(name), "specs")])
    return module


def specs_of(experiment: str, quick: bool, backend: Backend = "simulate") -> list[CaseSpec]:
    """The specs of an experiment. Raises BadInput.

    With `quick`, for the backend ``run``, those of its ``quick_runs()``, where it has that: cases that a few processes
    train in seconds.
    """
    module = module_of(experiment)
    small = quick and backend == "run" and hasattr(module, "quick_runs")
    found = module.quick_runs() if small else module.specs(quick)
    specs = list(found) if isinstance(found, Iterable) else [found]
    wrong = next((spec for spec in specs if not isinstance(spec, CaseSpec)), None)
    if wrong is not None:
        raise BadInput(f"{experiment}: specs", wrong, "a list of CaseSpec or Case")
    return list(dict.fromkeys(specs))


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BadInput("experiment", str(path), "a Python file that can be read")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BadInput:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput("experiment", str(path), f"a file that Python can run ({reason})") from None
    return module


def only(specs: Sequence[CaseSpec], words: Sequence[str]) -> list[CaseSpec]:
    """The specs that ``field=value`` words choose; several values of one field are alternatives. Raises BadInput."""
    wanted: dict[str, set[str]] = {}
    for word in (part for given in words for part in given.split(",")):
        field, equals, value = word.partition("=")
        if not equals:
            raise BadInput("only", word, "field=value[,field=value ...]")
        if field not in FIELDS:
            raise unknown("only", field, FIELDS)
        known = sorted({str(FIELDS[field](spec)) for spec in specs})
        if value not in known:
            raise unknown("only", word, [f"{field}={one}" for one in known])
        wanted.setdefault(field, set()).add(value)
    chosen = [spec for spec in specs if all(str(FIELDS[field](spec)) in values for field, values in wanted.items())]
    if not chosen:
        raise BadInput("only", ",".join(words), f"what at least one of the {len(specs)} cases has")
    return chosen


def tasks_of(specs: Sequence[CaseSpec], settings: Settings, repeats: int) -> list[Task]:
    """One task a spec and repeat. Raises BadInput where a system is unknown, or a simulation is to be repeated."""
    if not 1 <= repeats <= 1000:
        raise BadInput("repeats", repeats, "1 to 1000")
    if settings.backend == "simulate" and repeats > 1:
        raise BadInput("repeats", repeats, "1 for a simulation, which comes out the same every time")
    for spec in specs:
        get_system(spec.system)
    return [Task(spec, settings, repeat) for repeat in range(repeats) for spec in specs]


def without_layout(specs: Sequence[CaseSpec]) -> list[CaseSpec]:
    """Specs that need a layout before they can be run."""
    return [spec for spec in specs if not isinstance(spec, Case)]
