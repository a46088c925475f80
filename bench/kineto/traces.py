"""From files to an `Analysis`: one file a rank, read one after the other."""

from collections.abc import Sequence
from pathlib import Path

from bench.errors import BadInput
from bench.kineto.analyze import label, rank_time, require_communication
from bench.kineto.classes import UNKNOWN, KernelTable, read_table
from bench.kineto.document import BLOCK_BYTES
from bench.kineto.reader import read_trace
from bench.kineto.skew import Durations, Member, durations, skew_of
from bench.kineto.times import Analysis, RankTime

UNKNOWN_SHARE = 0.05  # of a GPU's busy time; more of it is worth a warning
_SUFFIXES = (".json", ".json.gz")


def trace_files(path: Path | str) -> list[Path]:
    """The file itself, or the .json and .json.gz files of a directory by name. Raises BadInput where there are none."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file())
    if not files:
        raise BadInput("trace", str(path), f"a trace or a directory of {' or '.join(_SUFFIXES)} files")
    return files


def analyze_traces(
    paths: Sequence[Path | str], table: KernelTable | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Analysis:
    """Numbers of all ranks of one job, and how they differ.

    Args:
        paths: one file a rank, gzipped or not, in any order.
        table: names of kernels; the built-in ones where None.
    Raises BadInput where a file is not a whole trace or has no GPU work, two files are of one rank, or several ranks
    took part in a trace in which no communication is recognised.
    """
    if not paths:
        raise BadInput("trace", None, "at least one file")
    table = read_table() if table is None else table
    files: dict[int, Path] = {}
    ranks: list[RankTime] = []
    collectives: dict[Member, Durations] = {}
    bases, warnings = set(), []
    for position, path in enumerate(paths):
        trace = read_trace(path, position, block_bytes)
        if trace.rank in files:
            raise BadInput("trace", str(path), f"one file a rank; {files[trace.rank]} is of rank {trace.rank} as well")
        files[trace.rank] = Path(path)
        if not trace.rank_is_known and len(paths) > 1:
            warnings.append(f"{trace.path.name} does not say its rank; taken as {trace.rank}, by its position")
        labelled = label(trace, table)
        require_communication(labelled, len(paths))
        found = rank_time(labelled)
        ranks.append(found)
        bases.add(trace.base_ns is None)
        collectives.update({(trace.rank, gpu.device): durations(labelled, gpu.device) for gpu in found.gpus})
        warnings += _warnings(found)
    ranks.sort(key=lambda rank: rank.rank)
    return Analysis(tuple(ranks), skew_of(ranks, collectives, one_clock=len(bases) == 1), tuple(warnings))


def _warnings(rank: RankTime) -> list[str]:
    said = []
    for gpu in rank.gpus:
        unknown = next((time.busy_s for time in gpu.classes if time.name == UNKNOWN), 0.0)
        if unknown > UNKNOWN_SHARE * gpu.time.busy_s:
            said.append(
                f"rank {rank.rank} GPU {gpu.device}: {unknown / gpu.time.busy_s:.0%} of its busy time is in kernels of "
                "no known class, counted as compute; name them in a file for --kernels"
            )
    return said
