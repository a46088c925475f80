"""A figure's published table, and whether a fresh one says the same."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput
from bench.results import PUBLISHED

if TYPE_CHECKING:
    from pandas import DataFrame

RATE = "tokens_per_s_per_gpu"
TOLERANCE = 1e-3
"""Relative, on tokens/s/GPU. The same code gives the same numbers; rounding of another numpy may tip a search between
layouts whose steps are equal to within this."""

KEY = ("assumptions", "model", "cluster", "seq_len", "global_batch_tokens", "system")


def published_table(name: str, folder: Path = PUBLISHED) -> "DataFrame":
    """The committed table of a figure. Raises BadInput where there is none."""
    import pandas as pd

    path = folder / name / f"{name}.csv"
    if not path.exists():
        having = sorted(found.stem for found in folder.glob("*/*.csv") if found.parent.name == found.stem)
        raise BadInput("figure", name, f"one that is published: {', '.join(having) or 'none is yet'}")
    table = pd.read_csv(path)
    absent = [column for column in (*KEY, "status", RATE) if column not in table.columns]
    if absent:
        raise BadInput("figure", name, f"one whose published table has the columns {', '.join(absent)}")
    return table


def differences(fresh: "DataFrame", published: "DataFrame") -> list[str]:
    """Cells of `fresh` that the published table has otherwise or not at all, a line each.

    Statuses are equal and rates within `TOLERANCE`. Published cells that `fresh` leaves out are not missed.
    """
    known = {_key(row): row for row in published.to_dict("records")}
    found = []
    for row in fresh.to_dict("records"):
        words, before = " ".join(str(part) for part in _key(row)), known.get(_key(row))
        if before is None:
            found.append(f"{words}: not published")
        elif row["status"] != before["status"]:
            found.append(f"{words}: {row['status']}, published {before['status']}")
        elif row["status"] == "ok" and not math.isclose(row[RATE], before[RATE], rel_tol=TOLERANCE):
            both = f"{row[RATE]:.6g} tokens/s/GPU, published {before[RATE]:.6g}"
            found.append(f"{words}: {both}, allowed {TOLERANCE:.0e}")
    return found


def _key(row: Mapping[Any, Any]) -> tuple[object, ...]:
    return tuple(row.get(name) for name in KEY)
