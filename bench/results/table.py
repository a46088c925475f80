"""Trials as a table. Files are read without building every field of every case, so that very many are read soon."""

from collections.abc import Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Workload
from bench.errors import BadInput
from bench.migrations import SCHEMA_VERSION, current
from bench.results.files import Foreign, json_files
from bench.trial import Trial

if TYPE_CHECKING:
    from pandas import DataFrame


WORK = tuple(name for name in Workload.model_fields if name != "recorded")
"""Fields of a workload that have a column; the name of a routing says which counts were recorded."""


def load(paths: Iterable[Path | str]) -> "DataFrame":
    """Trials in files and directories as a table, one row a trial; see `frame` for its columns.

    Only records are read, not the series beside them. Files that are none are named in one warning.
    """
    foreign, rows = Foreign(), []
    for path in json_files(Path(path) for path in paths):
        try:
            rows.append(read_row(path.read_bytes()))
        except (OSError, BadInput) as error:
            foreign.add(path, error)
    foreign.warn()
    return _table(rows)


def frame(trials: Iterable[Trial]) -> "DataFrame":
    """Trials as a table, one row a trial.

    Columns: case_id, source, status, message, system, model, cluster, num_gpus, seq_len, global_batch_tokens, dtype,
    routing, seed, layout (text), traits (text), assumptions, code_digest, created, command, verdict (of telemetry), and
    one for each metric, whose name carries its unit.
    """
    return _table([_row(trial, trial.created) for trial in trials])


def _table(rows: list[dict[str, Any]]) -> "DataFrame":
    import pandas as pd

    return pd.DataFrame(rows)


def read_row(text: bytes) -> dict[str, Any]:
    """The row of a record of any version. Raises BadInput for what is none, naming the first field that is wrong."""
    import msgspec

    try:
        record = _decoder().decode(text)
        if record.schema_version != SCHEMA_VERSION:
            record = Trial.parse(text)
            return _row(record, record.created)
        return _row(record, datetime.fromisoformat(record.created))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        current(text)  # says it better where the file is cut, newer or something else
        raise BadInput("trial", text[:40], str(error)) from None


def _row(trial: Any, created: datetime) -> dict[str, Any]:
    """`trial` is a `Trial`, or a record that has those of its fields that a row needs."""
    case = trial.case
    cluster = case.cluster
    return {
        "case_id": trial.case_id,
        "source": trial.source,
        "status": trial.status,
        "message": trial.message,
        "system": case.system,
        "model": case.model.name,
        "cluster": cluster.name,
        "num_gpus": cluster.num_nodes * cluster.gpus_per_node,
        **{name: getattr(case.workload, name) for name in WORK},
        "layout": trial.layout,
        "traits": " ".join(trial.traits),
        "assumptions": trial.assumptions,
        "code_digest": trial.code_digest,
        "created": created,
        "command": trial.command,
        "verdict": trial.telemetry.get("verdict"),
        **{name: _number(value) for name, value in trial.metrics.items()},
    }


def _number(value: float | str | None) -> float | None:
    """What JSON has no number for is a word in a record."""
    return float(value) if isinstance(value, str) else value


@cache
def _decoder() -> Any:
    """Reads and checks the fields of a row, and checks that the rest is whole JSON."""
    import msgspec

    class Named(msgspec.Struct):
        name: str

    class Gpus(msgspec.Struct):
        name: str
        num_nodes: int
        gpus_per_node: int

    work = msgspec.defstruct("Work", [(name, Workload.model_fields[name].annotation) for name in WORK])

    class What(msgspec.Struct):
        system: str
        model: Named
        cluster: Gpus
        workload: work  # type: ignore[valid-type]

    class Record(msgspec.Struct):
        schema_version: int
        case: What
        case_id: str
        source: str
        status: str
        command: str
        created: str
        message: str = ""
        layout: str | None = None
        traits: tuple[str, ...] = ()
        metrics: dict[str, float | str | None] = {}
        assumptions: str | None = None
        code_digest: str | None = None
        telemetry: dict[str, Any] = {}

    return msgspec.json.Decoder(Record)
