"""Series of a trial as Parquet files: columns of doubles, where None is null and NaN stays NaN."""

import io
from pathlib import Path
from typing import Any

from bench.errors import BadInput
from bench.results.files import write_once
from bench.trial import SERIES, Series, SeriesName, Trial, series_digest


def put_series(directory: Path, trial: Trial) -> Trial:
    """Writes the trial's series below `directory`; the trial that its record holds, without them but with their names.

    Columns of unequal length (a run that broke off) are filled up with nothing. Raises OSError, and BadInput for a
    trial whose series were left behind elsewhere.
    """
    for one in trial.series.values():
        if not (directory / one.file).exists():
            raise BadInput("series", one.file, "a trial with its series read in, as read_trial gives it")
    kept: dict[SeriesName, Series] = dict(trial.series)
    for kind in SERIES:
        columns: dict[str, list[float | None]] = getattr(trial, kind)
        if not columns:
            continue
        digest = series_digest(columns)
        one = Series(
            file=f"{trial.case_id}-{kind}-{digest}.parquet", rows=max(map(len, columns.values())), digest=digest
        )
        write_once(directory / one.file, _parquet(columns))
        kept[kind] = one
    return trial.model_copy(update={"samples": {}, "telemetry_samples": {}, "series": kept})


def take_series(directory: Path, trial: Trial) -> Trial:
    """The inverse of `put_series`. Raises BadInput where a file is missing, cut or not the one that was written."""
    if not trial.series:
        return trial
    found: dict[str, Any] = {kind: _read(directory / one.file, one) for kind, one in trial.series.items()}
    return trial.model_copy(update={**found, "series": {}})


def _parquet(columns: dict[str, list[float | None]]) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    rows = max(map(len, columns.values()))
    arrays = {
        name: pa.array([*values, *[None] * (rows - len(values))], pa.float64()) for name, values in columns.items()
    }
    # How long each column is: a column that ends early does not end in nulls that were read.
    lengths = {f"length:{name}": str(len(values)) for name, values in columns.items()}
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays).replace_schema_metadata(lengths), buffer, compression="zstd")
    return buffer.getvalue()


def _read(path: Path, expected: Series) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    allowed = f"the whole file {expected.file} that lies beside the record"
    try:
        table = pq.read_table(io.BytesIO(path.read_bytes()))
        lengths = {
            key.decode().removeprefix("length:"): int(value) for key, value in (table.schema.metadata or {}).items()
        }
        columns = {name: table[name].to_pylist()[: lengths.get(name)] for name in table.column_names}
        digest = series_digest(columns)
    except (OSError, ValueError, TypeError, MemoryError, pa.ArrowException) as error:
        raise BadInput("series", path.name, f"{allowed} ({str(error)[:40]})") from None
    if digest != expected.digest:
        raise BadInput("series", path.name, f"{allowed} (its values are others)")
    return columns
