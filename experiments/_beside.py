"""Tables of runs and of their predictions, side by side."""

from typing import TYPE_CHECKING

from bench.predict import GIB
from experiments import Table

if TYPE_CHECKING:
    from pandas import DataFrame


def tables(rows: "DataFrame") -> list[Table]:
    """Speed, and what is predicted. Rows as of `experiments.h200x2.table`."""
    if not len(rows):
        return []
    speed, beside = [], []
    for row in rows.to_dict("records"):
        named = [row["model"], row["system"] + (", serial" if row["serial"] else ""), row["transport"]]
        spread = f"{row['step_time_low_s'] * 1e3:.1f} to {row['step_time_high_s'] * 1e3:.1f}"
        shares = [_percent(row[name]) for name in ("mfu", "hidden_share", "fraction_of_bound")]
        speed.append([*named, row["step_time_s"] * 1e3, spread, row["tokens_per_s_per_gpu"], *shares, row["layout"]])
        beside.append(
            [
                *named,
                row["step_time_s"] * 1e3,
                row["predicted_step_time_s"] * 1e3,
                _percent(row["predicted_over_measured"] - 1),
                _gib(row["peak_memory_bytes"]),
                _gib(row["predicted_peak_memory_bytes"]),
                _percent(_less_one(row["predicted_over_measured_memory"])),
            ]
        )
    return [
        Table(
            "measured, medians over the steps of all rounds",
            (
                "model",
                "system",
                "transport",
                "step ms",
                "rounds",
                "tokens/s/GPU",
                "MFU",
                "hidden",
                "of bound",
                "layout",
            ),
            speed,
        ),
        Table(
            f"measured, and simulated with {rows['assumptions'].iloc[0]}",
            ("model", "system", "transport", "step ms", "simulated", "error", "peak GiB", "simulated", "error"),
            beside,
        ),
    ]


def _percent(share: float | None) -> str | None:
    return None if share is None or share != share else f"{share:.1%}"


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _gib(size: float | None) -> str | None:
    return None if size is None or size != size else f"{size / GIB:.1f}"
