"""What a trial keeps of its telemetry: sums over a window of steps, the verdict, and every sample.

Energy is by the GPUs' counters where all have one, else integrated power; both are given where both are there. Bytes
are what counters rose by, beside what the plan's messages held. All is of the window of steps that is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.telemetry.energy import counted, integrated, resolution_s, within
from bench.telemetry.session import RankTelemetry
from bench.telemetry.verdict import judge

MAX_FINDINGS = 12
LINKS = ("nvlink", "pcie")  # counters of a GPU
PORTS = ("ib", "eth", "lo")  # counters of a host
LACKING = ("counter_energy_j", "power_energy_j", "step_energy_j", "bytes")  # sums over all ranks
MIN_RESOLUTIONS = 2  # of the energy counter, that a step must last to have an energy of its own

Window = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """What a trial keeps.

    facts: for `Trial.telemetry`. metrics, step_samples: for its metrics and samples; `step_start_s` is on the clock of
    the samples. samples: every sample of every rank.
    """

    facts: dict[str, Any]
    metrics: dict[str, float | None]
    step_samples: dict[str, list[float]]
    samples: dict[str, list[float | None]]


def summarise(ranks: Sequence[RankTelemetry], first: int, last: int, tokens_per_step: int) -> Summary:
    """Telemetry of all ranks over the steps `first` to `last`, both included.

    Ranks that noted no step of the window (they failed before it) count with all the time they were sampled in.
    """
    windows = [_window(one, first, last) for one in ranks]
    absent = {name: reason for one in ranks for name, reason in one.samples.absent.items()}
    num_steps = last - first + 1
    missing = max(0, ranks[0].num_ranks - len(ranks))
    energy = {} if missing else _energy(ranks, windows, absent)
    if missing:
        absent.update(dict.fromkeys(LACKING, f"{missing} of {ranks[0].num_ranks} ranks brought no telemetry"))
    verdict = judge(ranks, windows)
    joules = energy.get("energy_j")
    facts: dict[str, Any] = {
        "verdict": verdict.word,
        "findings": [found._asdict() for found in verdict.findings[:MAX_FINDINGS]],
        "num_findings": len(verdict.findings),
        "unchecked": verdict.unchecked,
        "window": {"first_step": first, "last_step": last, "seconds": max(end - start for start, end in windows)},
        **energy,
        "gpu": _gpu(ranks, windows),
        "bytes": {} if missing else _bytes(ranks, windows, first, last),
        "host": _host(ranks, windows),
        "sampler": _sampler(ranks),
        "pauses": pauses_json(ranks),
        "absent": absent,
    }
    jumps = max((one.wall_jump_s for one in ranks), key=abs)
    if abs(jumps) > 0.1:
        facts["wall_clock_jump_s"] = jumps
    per_step = {} if missing else _step_energy(ranks, absent)
    if ranks[0].rank == 0:
        per_step["step_start_s"] = [span.start_s - ranks[0].steps[0].start_s for span in ranks[0].steps]
    return Summary(
        facts=facts,
        metrics={} if joules is None else {"joules_per_token": joules / (tokens_per_step * num_steps)},
        step_samples=per_step,
        samples=_all_samples(ranks),
    )


def _window(one: RankTelemetry, first: int, last: int) -> Window:
    """On the rank's own clock."""
    inside = [span for span in one.steps if first <= span.step <= last]
    if inside:
        return inside[0].start_s, inside[-1].end_s
    times = [time for time in one.samples.columns["time_s"] if time is not None]
    return (times[0], times[-1]) if times else (0.0, 0.0)


def _energy(ranks: Sequence[RankTelemetry], windows: Sequence[Window], absent: dict[str, str]) -> dict[str, Any]:
    """Sums over the GPUs; a sum that lacks one of them is absent."""
    found: dict[str, Any] = {}
    pairs = [(one.samples.columns, window) for one, window in zip(ranks, windows, strict=True)]
    by_counter = [counted(columns, "energy_j", *window) for columns, window in pairs]
    name = "power_instant_w" if all("power_instant_w" not in one.samples.absent for one in ranks) else "power_w"
    by_power = [integrated(columns, name, *window) for columns, window in pairs]
    for field, values in (("counter_energy_j", by_counter), ("power_energy_j", by_power)):
        if None not in values:
            found[field] = float(sum(value for value in values if value is not None))
        else:
            reason = absent.get("energy_j" if field.startswith("counter") else name)
            absent[field] = reason or "the window is not between two samples on every rank"
    if "power_energy_j" in found:
        found["integrated_field"] = name
    if found:
        source = "counter" if "counter_energy_j" in found else "power"
        found["energy_j"], found["energy_by"] = found[f"{source}_energy_j"], source
        seconds = sum(end - start for start, end in windows)
        found["mean_power_w_per_gpu"] = found["energy_j"] / seconds if seconds > 0 else None
    return found


def _step_energy(ranks: Sequence[RankTelemetry], absent: dict[str, str]) -> dict[str, list[float]]:
    """Joules and mean watts of each step, over all GPUs, where the counters tell single steps apart."""
    resolutions = [resolution_s(one.samples.columns, "energy_j") for one in ranks]
    spans = [{span.step: span for span in one.steps} for one in ranks]
    steps = sorted(set.intersection(*(set(by_step) for by_step in spans))) if spans else []
    if None in resolutions or not steps:
        absent["step_energy_j"] = absent.get("energy_j", "the energy counter changed less than twice")
        return {}
    shortest = min(span.end_s - span.start_s for span in ranks[0].steps)
    finest = max(value for value in resolutions if value is not None)
    if shortest < MIN_RESOLUTIONS * finest:
        absent["step_energy_j"] = (
            f"a step took {shortest:.3g} s, and the counter is seen to change every {finest:.3g} s"
        )
        return {}
    joules, watts = [], []
    for step in steps:
        parts = []
        for one, by_step in zip(ranks, spans, strict=True):
            span = by_step[step]
            parts.append(
                (counted(one.samples.columns, "energy_j", span.start_s, span.end_s), span.end_s - span.start_s)
            )
        if any(energy is None for energy, _ in parts):
            absent["step_energy_j"] = f"step {step} is not between two samples"
            return {}
        joules.append(sum(energy for energy, _ in parts if energy is not None))
        watts.append(sum(energy / seconds for energy, seconds in parts if energy is not None))
    return {"step_energy_j": joules, "step_power_w": watts}


def _gpu(ranks: Sequence[RankTelemetry], windows: Sequence[Window]) -> dict[str, Any]:
    """Extremes over ranks and samples of the window, and the GPUs' own limits."""
    found: dict[str, Any] = {}
    for field in ("temperature_c", "sm_clock_mhz", "memory_clock_mhz", "gpu_utilisation", "memory_used_bytes"):
        parts = [within(one.samples.columns, field, *window) for one, window in zip(ranks, windows, strict=True)]
        values = np.concatenate(parts)
        if len(values):
            found[field] = {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}
    for name in ("power_limit_w", "max_sm_clock_mhz"):
        limits = sorted({one.facts[name] for one in ranks if name in one.facts})
        if limits:
            found[name] = limits[0] if len(limits) == 1 else limits
    return found


def _bytes(ranks: Sequence[RankTelemetry], windows: Sequence[Window], first: int, last: int) -> dict[str, Any]:
    """Bytes a step: of the plan's messages between ranks, and by every kind of counter that there is."""
    steps = last - first + 1
    planned = sum(span.sent_bytes for one in ranks for span in one.steps if first <= span.step <= last) / steps
    found: dict[str, Any] = {"planned_per_step": planned}
    hosts = {one.host: number for number, one in reversed(list(enumerate(ranks)))}
    for kind, numbers in [(kind, range(len(ranks))) for kind in LINKS] + [(kind, hosts.values()) for kind in PORTS]:
        for direction in ("tx", "rx"):
            field = f"{kind}_{direction}_bytes"
            parts = [counted(ranks[i].samples.columns, field, *windows[i]) for i in numbers]
            if parts and None not in parts:
                found[f"{field}_per_step"] = sum(part for part in parts if part is not None) / steps
    if planned > 0:
        moved = [found.get(f"{kind}_tx_bytes_per_step") for kind in (*LINKS, "ib", "lo")]
        if any(value is not None for value in moved):
            found["counted_over_planned"] = {
                kind: value / planned
                for kind, value in zip((*LINKS, "ib", "lo"), moved, strict=True)
                if value is not None
            }
    return found


def _host(ranks: Sequence[RankTelemetry], windows: Sequence[Window]) -> dict[str, Any]:
    pairs = [(one.samples.columns, window) for one, window in zip(ranks, windows, strict=True)]
    found: dict[str, Any] = {}
    seconds = sum(end - start for start, end in windows)
    cpu = [counted(columns, "process_cpu_s", *window) for columns, window in pairs]
    if None not in cpu and seconds > 0:
        found["cpus_per_rank"] = sum(value for value in cpu if value is not None) / seconds
    for field in ("process_major_faults", "process_minor_faults"):
        parts = [counted(columns, field, *window) for columns, window in pairs]
        if None not in parts:
            found[field] = sum(value for value in parts if value is not None)
    for field, pick in (
        ("process_rss_bytes", np.max),
        ("host_cpu_fraction", np.mean),
        ("host_available_bytes", np.min),
    ):
        values = np.concatenate([within(columns, field, *window) for columns, window in pairs])
        if len(values):
            found[field] = float(pick(values))
    return found


def _sampler(ranks: Sequence[RankTelemetry]) -> dict[str, Any]:
    """The sampler's own cost, on the rank where it was largest."""
    samples = [one.samples for one in ranks]
    found: dict[str, Any] = {
        "period_s": samples[0].period_s,
        "num_samples": sum(map(len, samples)),
        "missed": sum(one.missed for one in samples),
        "cpu_fraction": max(one.cpu_s / one.elapsed_s for one in samples if one.elapsed_s) if samples else None,
        "read_fraction": max(one.read_s / one.elapsed_s for one in samples if one.elapsed_s) if samples else None,
        "longest_read_s": max(one.longest_read_s for one in samples),
        "readings": {name: one._asdict() for name, one in samples[0].readings.items()},
    }
    ended = {one.rank: one.samples.ended for one in ranks if one.samples.ended}
    if ended:
        rank, reason = next(iter(ended.items()))
        found["ended_early"] = {"ranks": len(ended), "first_rank": rank, "reason": reason}
    return found


def _all_samples(ranks: Sequence[RankTelemetry]) -> dict[str, list[float | None]]:
    """Every sample of every rank, rank after rank; times on rank 0's clock since its first step (or sample) began."""
    origin = _window(ranks[0], 0, 0)[0] + ranks[0].offset_s
    names = list(dict.fromkeys(name for one in ranks for name in one.samples.columns if name != "time_s"))
    table: dict[str, list[float | None]] = {"rank": [], "time_s": [], **{name: [] for name in names}}
    for one in ranks:
        columns, count = one.samples.columns, len(one.samples)
        table["rank"] += [float(one.rank)] * count
        table["time_s"] += [None if t is None else t + one.offset_s - origin for t in columns["time_s"]]
        for name in names:
            table[name] += columns.get(name, [None] * count)
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def pauses_json(ranks: Sequence[RankTelemetry]) -> dict[str, Any]:
    """How many pauses of each kind, and their seconds, over all ranks."""
    found: dict[str, Any] = {}
    for one in ranks:
        for pause in one.pauses:
            entry = found.setdefault(pause.kind, {"count": 0, "seconds": 0.0})
            entry["count"] += 1
            entry["seconds"] += pause.end_s - pause.start_s
    return found
