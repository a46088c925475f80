"""What the cost model assumes of a GPU, measured on one: single operations, and a training step by its operations.

1. The kernels that the trainer uses, one by one, as shares of the GPU's peaks, beside the fields of the assumptions
   that they stand for.
2. A step of `ep` on one GPU, where nothing crosses a link: what every kind of operation takes, beside the simulation.

With `--device cpu` the same path runs with tiny shapes: to see that it works, and no result. Where there is no GPU,
what is published is drawn again.
"""

from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.action import Kind, Pass, view
from bench.assumptions import DEFAULT_ASSUMPTIONS, get_assumptions
from bench.case import Case
from bench.clusters import GPUS
from bench.errors import BadInput
from bench.predict import predict
from bench.program import Op
from bench.results import PUBLISHED, Store
from bench.timeline import Timeline
from experiments import Evidence, Request, Table
from experiments._rounds import known_gpu, num_gpus
from experiments.levers import cases

if TYPE_CHECKING:
    from pandas import DataFrame


SUMMARY = (
    "what the cost model assumes of a GPU, measured on one: single operations, and a step by its operations (measured)"
)
DEVICES = ("cuda", "cpu")
FOLDER = PUBLISHED / "costs"
STEPS, ROUNDS = 6, 3
STEP = "step"


def run(request: Request) -> Evidence:
    """Measures; or draws what is published where no device was asked for and there is no GPU."""
    device = request.device or ("cuda" if num_gpus() else None)
    if device is None:
        return published()
    if device == "cuda" and not num_gpus():
        raise BadInput("device", "cuda", "cpu: there is no GPU")
    return evidence(_measured(request, device))  # type: ignore[arg-type]


def published(folder: Path = FOLDER) -> Evidence:
    """What was measured before. Raises BadInput where nothing is published."""
    import pandas as pd

    path = folder / "costs.csv"
    if not path.exists():
        raise BadInput("device", "no GPU", "cpu (--device cpu), or a host with a GPU")
    return evidence(pd.read_csv(path, keep_default_na=False, na_values=[""]))


def _measured(request: Request, device: Literal["cpu", "cuda"]) -> "DataFrame":
    """One row an operation; those of a step behind the single ones."""
    import pandas as pd

    from bench.execute.pool import RankPool

    name = "cpu" if device == "cpu" else known_gpu()
    with RankPool(cases(device)[0].cluster.num_gpus, device) as pool:
        request.progress(0, 2, "single operations")
        (rows,) = pool.run(single, name, device, request.quick, world_size=1)
        request.progress(1, 2, "a step by its operations")
        rows += _of_a_step(request, device, pool)
    import torch

    facts = {"gpu": name, "torch": torch.__version__, "source": "measured"}
    return pd.DataFrame(rows).assign(**facts)


def single(gpu: str, device: str, quick: bool) -> list[dict[str, Any]]:
    """Single operations on this rank's device, a row each."""
    from experiments._operations import readings
    from experiments._timed import SMALL, Device, Shapes

    on = Device(device, SMALL if quick or device == "cpu" else Shapes())
    known, dtype = GPUS[gpu], on.dtype_name
    return [
        {
            "part": "single",
            **{"field": one.field, "operation": one.name, "shape": one.shape, "x": one.x or None},
            **{"measured_s": one.took.short_s, "share": one.share(known, dtype)},
            "share_of_long_run": one.share(known, dtype, long=True),
        }
        for one in readings(on, 1 if quick else ROUNDS)
    ]


def measured_values(rows: "DataFrame") -> dict[str, float]:
    """Values of the assumptions' fields that rows stand for; of the attention core by a fit over its lengths."""
    from experiments._operations import fitted

    values: dict[str, float] = {}
    curves: dict[str, list[tuple[float, float]]] = {"attention_forward": [], "attention_backward": []}
    for row in rows[rows["field"].astype(bool) & rows["field"].notna()].to_dict("records"):
        if row["field"] in curves:
            curves[row["field"]].append((row["x"], row["share"]))
        else:
            values[row["field"]] = row["measured_s"] if isnan(row["share"]) else row["share"]
    forward, backward, half = fitted(*curves.values())
    return values | {"attention_forward": forward, "attention_backward": backward, "attention_half_span": half}


def _of_a_step(request: Request, device: Literal["cpu", "cuda"], pool: Any) -> list[dict[str, Any]]:
    """Operations of the last step of a run of `ep`, by kind and pass, and what a simulation says of them."""
    from bench.measured import measure

    case = cases(device)[0]
    done = measure(
        case,
        steps=3 if request.quick else STEPS,
        device=device,
        data="synthetic",
        weights="device",
        pool=pool,
        keep_timeline=True,
        telemetry_hz=None,
    )
    Store(request.results).write(done.trial)
    if done.timeline is None or done.trial.status != "ok":
        raise BadInput("run", f"{done.trial.status}: {done.trial.message}", "a run that ends well")
    return of_timeline(done.timeline, case)


def of_timeline(measured: Timeline, case: Case) -> list[dict[str, Any]]:
    """What rank 0 computes in a step by kind and pass; rows like those of `single`, and one of the whole step."""
    of_step = {"part": "step", "field": ""}
    rows = [
        {**of_step, "operation": name, "shape": f"{number} times in a step", "x": number, "measured_s": seconds}
        for name, (number, seconds) in by_operation(measured).items()
    ]
    return [*rows, {**of_step, "operation": STEP, "shape": str(case), "x": 1, "measured_s": measured.step_time_s}]


def by_operation(timeline: Timeline) -> dict[str, tuple[int, float]]:
    """Number and seconds of what rank 0 computes, by kind and pass; its sums and updates by kind."""
    found: dict[str, tuple[int, float]] = {}
    for i in _order(timeline):
        action = view(int(timeline.code[i]))
        name = action.kind.name.lower()
        if timeline.op[i] == Op.COMPUTE:
            name += f" {action.pass_.name}"
        number, seconds = found.get(name, (0, 0.0))
        found[name] = number + 1, seconds + float(timeline.end_s[i] - timeline.start_s[i])
    return found


def _order(timeline: Timeline) -> Iterator[int]:
    """Numbers of the operations that `by_operation` counts, kinds in their order and passes in theirs."""
    transfers = (timeline.op == Op.SEND) | (timeline.op == Op.RECV)
    wanted = [i for i in range(len(timeline)) if timeline.rank[i] == 0 and not transfers[i]]

    def place(i: int) -> tuple[Kind, Pass]:
        action = view(int(timeline.code[i]))
        return action.kind, action.pass_

    yield from sorted(wanted, key=place)


def evidence(rows: "DataFrame") -> Evidence:
    """What rows as of `_measured` say, with what is assumed and simulated today."""
    rows = beside(rows)
    return Evidence({"frame": rows}, rows, [shown_single(rows), shown_step(rows)])


def beside(rows: "DataFrame") -> "DataFrame":
    """Rows with the value that each field comes to and the one that is assumed, and with simulated seconds."""
    values, assumed = measured_values(rows), get_assumptions(DEFAULT_ASSUMPTIONS)
    case = cases("cpu" if rows["gpu"].iloc[0] == "cpu" else "cuda")[0]
    found = predict(case, assumed)
    simulated = {name: seconds for name, (_, seconds) in by_operation(found.timeline).items()}
    simulated[STEP] = found.step_time_s
    of_step = rows["part"] == "step"
    return rows.assign(
        field=rows["field"].fillna(""),
        value=rows["field"].map(values),
        assumed=rows["field"].map(assumed.model_dump()),
        simulated_s=rows["operation"].map(simulated).fillna(0.0).where(of_step),
        assumptions=DEFAULT_ASSUMPTIONS,
    )


def shown_single(rows: "DataFrame") -> Table:
    """Single operations beside the fields that they stand for, for people."""
    first, lines = rows.iloc[0], []
    for row in rows[rows["part"] == "single"].to_dict("records"):
        shares = ["" if row[name] != row[name] else f"{row[name]:.1%}" for name in ("share", "share_of_long_run")]
        values = [_digits(row[name]) if row["field"] else "" for name in ("value", "assumed")]
        lines.append(
            [row["operation"], row["shape"], f"{row['measured_s'] * 1e6:,.1f}", *shares, row["field"], *values]
        )
    columns = ("operation", "shape", "us", "of the peak", "in a long run", "stands for", "measured", "assumed")
    title = f"measured: single operations on {first['gpu']}, torch {first['torch']}, beside {first['assumptions']}"
    return Table(title, columns, lines)


def _digits(value: float) -> str:
    return f"{value * 1e6:.1f} us" if value < 1e-3 else f"{value:.3g}" if value < 10 else f"{value:,.0f}"


def shown_step(rows: "DataFrame") -> Table:
    """Operations of a step, measured and simulated."""
    lines = []
    for row in rows[rows["part"] == "step"].to_dict("records"):
        measured, simulated = row["measured_s"] * 1e3, row["simulated_s"] * 1e3
        lines.append([row["operation"], f"{measured:.1f}", f"{simulated:.1f}", f"{simulated / measured:.2f}"])
    first = rows.iloc[0]
    title = f"measured: a step of ep on {first['gpu']}, by its operations, and simulated with {first['assumptions']}"
    return Table(title, ("operation", "ms in a step", "simulated ms", "simulated over measured"), lines)
