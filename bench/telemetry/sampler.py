"""A thread that takes readings at a rate, times itself, and survives a reading that fails."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.errors import BadInput

MAX_HZ = 1000.0
GIVE_UP_AFTER = 3  # failures of a reading in a row
STOP_S = 5.0
MAX_REASON_CHARS = 160


class Probe(NamedTuple):
    """A reading of one or more fields.

    fields: their names, with units. read: gives their values, None for one that has none just now; may raise.
    every: read in every so manieth sample only, for readings that are slow.
    """

    fields: tuple[str, ...]
    read: Callable[[], Sequence[float | None]]
    every: int = 1


@dataclass
class Samples:
    """What a sampler saw.

    Attributes:
        columns: field -> values, one a sample, None where nothing was read; ``time_s`` is the sampler's clock.
        absent: field -> why it was never read, or since when and why it was read no more.
        period_s: asked for. read_s: seconds spent reading, of `elapsed_s`. longest_read_s: one sample's.
        cpu_s: processor seconds of the thread. missed: samples left out because the one before took too long.
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
    Raises BadInput for a rate out of range.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        hz: float,
        absent: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 < hz <= MAX_HZ:
            raise BadInput("telemetry.hz", hz, f"above 0, at most {MAX_HZ:g}")
        self._probes = sorted(probes, key=lambda probe: probe.every > 1)
        self._clock, self._stop = clock, threading.Event()
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
        self._sample(0)
        self._thread.start()

    def stop(self) -> Samples:
        """Ends the thread, takes a last sample, and gives everything."""
        self._stop.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            self.samples.ended = self.samples.ended or f"a reading did not come back for {STOP_S:g} s"
        elif not self.samples.ended:
            self._sample(0)
        self.samples.elapsed_s = time.monotonic() - self._begun_monotonic
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
                self._sample(tick)
        except Exception as error:
            self.samples.ended = f"{type(error).__name__}: {error}"
        self.samples.cpu_s = time.thread_time() - cpu

    def _sample(self, tick: int) -> None:
        start = self._clock()
        row: dict[str, float | None] = {}
        stamp: float | None = None
        for number, probe in enumerate(self._probes):
            if probe.every > 1 and stamp is None:
                stamp = (start + self._clock()) / 2
            if self._failures[number] < GIVE_UP_AFTER and tick % probe.every == 0:
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
        return found
