"""A thread that takes readings at a rate, times itself, reads less often what costs much, and survives a failure."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.errors import BadInput

MAX_HZ = 1000.0
GIVE_UP_AFTER = 3  # failures of a reading in a row
RESCHEDULE_EVERY = 10  # samples
STOP_S = 5.0
MAX_REASON_CHARS = 160


class Probe(NamedTuple):
    """A reading of one or more fields.

    fields: their names, with units. read: gives their values, None for one that has none just now; may raise.
    every: samples from one reading to the next, at least. weight: its part of the time for readings, against others'.
    """

    fields: tuple[str, ...]
    read: Callable[[], Sequence[float | None]]
    every: int = 1
    weight: float = 1.0


class Reading(NamedTuple):
    """How a probe was read: samples from one reading to the next, and mean processor seconds of a reading."""

    every: int
    cpu_s: float


@dataclass
class Samples:
    """What a sampler saw.

    Attributes:
        columns: field -> values, one a sample, None where nothing was read; ``time_s`` is the sampler's clock.
        absent: field -> why it was never read, or since when and why it was read no more.
        period_s: asked for. read_s: seconds spent reading, of `elapsed_s`. longest_read_s: one sample's.
        cpu_s: processor seconds of the thread. missed: samples left out because the one before took too long.
        readings: first field of a probe -> how it was read in the end.
        ended: why the thread ended before it was told to; "" where it did not.
    """

    period_s: float
    columns: dict[str, list[float | None]] = field(default_factory=lambda: {"time_s": []})
    absent: dict[str, str] = field(default_factory=dict)
    elapsed_s: float = 0.0
    read_s: float = 0.0
    longest_read_s: float = 0.0
    cpu_s: float = 0.0
    missed: int = 0
    readings: dict[str, Reading] = field(default_factory=dict)
    ended: str = ""

    def __len__(self) -> int:
        return len(self.columns["time_s"])


class Sampler:
    """Reads `probes` until it is stopped; what it has read is never lost, whatever ends it.

    Args:
        probes: the fast ones are read first, in the order given. Each is tried once before the thread starts.
        hz: samples a second; above 0, at most `MAX_HZ`.
        absent: fields that are known to be unreadable, with reasons.
        clock: of the time stamps, in seconds.
        max_share: of a processor, for all readings together; what costs more than its part is read less often. None
            reads everything in every sample that `Probe.every` allows.
    Raises BadInput for a rate out of range.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        hz: float,
        absent: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_share: float | None = None,
    ) -> None:
        if not 0 < hz <= MAX_HZ:
            raise BadInput("telemetry.hz", hz, f"above 0, at most {MAX_HZ:g}")
        self._probes = sorted(probes, key=lambda probe: probe.every > 1)
        self._every = [probe.every for probe in self._probes]
        self._max_share = max_share
        self._cost_s, self._num_readings = [0.0] * len(self._probes), [0] * len(self._probes)
        self._clock, self._stop, self._going = clock, threading.Event(), threading.Event()
        self._going.set()
        self.samples = Samples(period_s=1 / hz, absent=dict(absent or {}))
        self._failures = [0] * len(self._probes)
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._begun = self._begun_monotonic = 0.0

    def start(self) -> None:
        """Tries every probe, takes the first sample and starts the thread."""
        self._begun, self._begun_monotonic = self._clock(), time.monotonic()
        for number, probe in enumerate(self._probes):
            self.samples.columns.update({name: [] for name in probe.fields})
            self._failures[number] = GIVE_UP_AFTER - 1  # one that fails at once is not tried again
        self._sample(None)
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context without samples, which do not count as missed."""
        self._going.clear()
        try:
            yield
        finally:
            self._going.set()

    def stop(self) -> Samples:
        """Ends the thread, takes a last sample, and gives everything."""
        self._stop.set()
        self._going.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            self.samples.ended = self.samples.ended or f"a reading did not come back for {STOP_S:g} s"
        elif not self.samples.ended:
            self._sample(None)
        self.samples.elapsed_s = time.monotonic() - self._begun_monotonic
        for probe, every, cost_s, count in zip(
            self._probes, self._every, self._cost_s, self._num_readings, strict=True
        ):
            if count:
                self.samples.readings[probe.fields[0]] = Reading(every, cost_s / count)
        return self.samples

    def _run(self) -> None:
        cpu, begun, tick = time.thread_time(), time.monotonic(), 0
        try:
            while True:
                late = time.monotonic() - begun
                due = max(tick + 1, int(late / self.samples.period_s))
                self.samples.missed += due - tick - 1
                tick = due
                if self._stop.wait(max(0.0, begun + tick * self.samples.period_s - time.monotonic())):
                    break
                if not self._going.is_set():
                    self._going.wait()
                    tick = int((time.monotonic() - begun) / self.samples.period_s)
                    continue
                if self._max_share is not None and tick % RESCHEDULE_EVERY == 1:
                    self._reschedule(self._max_share * self.samples.period_s)
                self._sample(tick)
        except Exception as error:
            self.samples.ended = f"{type(error).__name__}: {error}"
        self.samples.cpu_s = time.thread_time() - cpu

    def _reschedule(self, budget_s: float) -> None:
        """Deals processor seconds a sample out by weight; what cheap probes leave over goes to the dearer ones."""
        costs = {
            number: self._cost_s[number] / count
            for number, count in enumerate(self._num_readings)
            if count and self._failures[number] < GIVE_UP_AFTER
        }
        weight = sum(self._probes[number].weight for number in costs)
        for number in sorted(costs, key=lambda number: costs[number] / self._probes[number].weight):
            probe, cost_s = self._probes[number], costs[number]
            part_s = budget_s * probe.weight / weight
            self._every[number] = max(probe.every, math.ceil(cost_s / part_s))
            budget_s -= cost_s / self._every[number]
            weight -= probe.weight

    def _sample(self, tick: int | None) -> None:
        """One row of all that is due at `tick`, of everything where that is None."""
        start = self._clock()
        row: dict[str, float | None] = {}
        stamp: float | None = None
        for number, (probe, every) in enumerate(zip(self._probes, self._every, strict=True)):
            if probe.every > 1 and stamp is None:
                stamp = (start + self._clock()) / 2
            # Probes that are read every so often are not all read in the same sample.
            due = tick is None or (tick - number) % every == 0
            if due and self._failures[number] < GIVE_UP_AFTER:
                row.update(self._read(number, probe, start))
        end = self._clock()
        columns = self.samples.columns
        # A sample appears in all columns or in none, even if the process ends here.
        row["time_s"] = (start + end) / 2 if stamp is None else stamp
        for name, values in columns.items():
            values.append(row.get(name))
        self.samples.read_s += end - start
        self.samples.longest_read_s = max(self.samples.longest_read_s, end - start)

    def _read(self, number: int, probe: Probe, now: float) -> dict[str, float | None]:
        begun = time.thread_time()
        try:
            values = probe.read()
            found = {
                name: None if value is None else float(value) for name, value in zip(probe.fields, values, strict=True)
            }
        except Exception as error:
            self._failures[number] += 1
            if self._failures[number] >= GIVE_UP_AFTER:
                since = f"after {now - self._begun:.3g} s: " if len(self.samples) else ""
                reason = f"{since}{type(error).__name__}: {error}"
                self.samples.absent.update(dict.fromkeys(probe.fields, " ".join(reason.split())[:MAX_REASON_CHARS]))
            return {}
        self._failures[number] = 0
        self._cost_s[number] += time.thread_time() - begun
        self._num_readings[number] += 1
        return found
