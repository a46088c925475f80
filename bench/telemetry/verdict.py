"""Whether the GPUs of a run had what they should: clean, throttled, power-capped, shared."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.telemetry.energy import points
from bench.telemetry.nvml import POWER_CAP, THERMAL_OR_BRAKE, reasons_of
from bench.telemetry.session import RankTelemetry

SHARED, THROTTLED, CAPPED, CLEAN = "shared GPU", "throttled", "power-capped", "clean"
ORDER = (SHARED, THROTTLED, CAPPED)
"""Worst first: with another process on the GPU, nothing else says much."""


class Finding(NamedTuple):
    """What was seen of one rank's GPU in the window: in which share of its samples, and details."""

    rank: int
    what: str
    share: float
    details: str


class Verdict(NamedTuple):
    """`word` is the worst finding's, ``clean``, or None where nothing could be looked at.

    unchecked: what could not be looked at, with the reason, on the first rank where it could not.
    """

    word: str | None
    findings: list[Finding]
    unchecked: dict[str, str]


def judge(ranks: Sequence[RankTelemetry], windows: Sequence[tuple[float, float]]) -> Verdict:
    """The verdict on all ranks' samples within their windows of time."""
    findings: list[Finding] = []
    unchecked: dict[str, str] = {}
    looked = False
    for one, (start, end) in zip(ranks, windows, strict=True):
        for field in ("event_reasons", "other_processes"):
            times, values = points(one.samples.columns, field)
            seen = values[(times >= start) & (times <= end)]
            if not len(seen):
                reason = one.samples.absent.get(field, "no sample falls into the window")
                unchecked.setdefault(field, reason)
                continue
            looked = looked or field == "event_reasons"
            findings += _reasons(one.rank, seen) if field == "event_reasons" else _others(one.rank, seen)
        if one.samples.ended:
            unchecked.setdefault("after the sampler ended", one.samples.ended)
    word = next((what for what in ORDER if any(found.what == what for found in findings)), None)
    return Verdict(word or (CLEAN if looked else None), findings, unchecked)


def _reasons(rank: int, masks: Any) -> list[Finding]:
    found = []
    for what, bits in ((THROTTLED, THERMAL_OR_BRAKE), (CAPPED, POWER_CAP)):
        hit = [int(mask) for mask in masks if int(mask) & sum(bits)]
        if hit:
            union = 0
            for mask in hit:
                union |= mask & sum(bits)
            found.append(Finding(rank, what, len(hit) / len(masks), ", ".join(reasons_of(union))))
    return found


def _others(rank: int, counts: Any) -> list[Finding]:
    hit = counts[counts > 0]
    if not len(hit):
        return []
    return [Finding(rank, SHARED, len(hit) / len(counts), f"up to {int(hit.max())} other processes")]


def disturbances(ranks: Sequence[RankTelemetry]) -> list[tuple[str, float, float]]:
    """(kind, start, end) on rank 0's clock of what may have got into steps: pauses, throttled and capped samples.

    A sample stands for the time up to the next one.
    """
    found = []
    for one in ranks:
        found += [(kind, start + one.offset_s, end + one.offset_s) for kind, start, end in one.pauses]
        times, masks = points(one.samples.columns, "event_reasons")
        ends = [*times[1:], *times[-1:]]
        for start, end, mask in zip(times, ends, masks, strict=True):
            for what, bits in ((THROTTLED, THERMAL_OR_BRAKE), (CAPPED, POWER_CAP)):
                if int(mask) & sum(bits):
                    found.append((what, float(start) + one.offset_s, float(end) + one.offset_s))
    return found
