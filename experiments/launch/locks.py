"""Who holds a lock: processes told apart by host, id and start time, and heartbeats for hosts one cannot look into."""

import contextlib
import os
import socket
import threading
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

BEAT_S = 10.0
STALE_BEATS = 12
"""Who has not beaten for so many intervals is taken for dead, where one cannot look."""


@dataclass(frozen=True)
class Process:
    """A process that no other is mistaken for: ids are used again, but not with the same start."""

    host: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> "Process":
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this host."""
        return cls(socket.gethostname(), pid, started_at(pid) or "")

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "Process":
        return cls(str(fields["host"]), int(fields["pid"]), str(fields["started"]))

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def name(self) -> str:
        """As part of a file name."""
        return f"{self.host}-{self.pid}-{self.started.replace('/', '-')}"

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def runs_here(self) -> bool:
        """Whether it runs, for a process of this host."""
        return bool(self.started) and started_at(self.pid) == self.started


def started_at(pid: int) -> str | None:
    """When a process of this host started, as a word that only it has; None where it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _started_elsewhere(pid)
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{_boot()}.{fields[19]}"


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "boot"


def _started_elsewhere(pid: int) -> str | None:
    """On systems without /proc."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.Error:
        return None


class Heartbeats:
    """Files that processes touch, in a folder that all hosts see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stopped = threading.Event()

    def start(self) -> None:
        """Shows that this process lives, from now until `stop`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / Process.current().name
        own.touch()
        self._stopped.clear()

        def beat() -> None:
            while not self._stopped.wait(BEAT_S):
                with contextlib.suppress(OSError):
                    own.touch()

        threading.Thread(target=beat, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        (self.folder / Process.current().name).unlink(missing_ok=True)

    def alive(self, process: Process) -> bool:
        """Whether a process runs, as far as one can tell."""
        if process.is_here:
            return process.runs_here()
        age = self.age_s(self.folder / process.name)
        return age is not None and age < STALE_BEATS * BEAT_S

    def age_s(self, path: Path) -> float | None:
        """Seconds since a file was touched, by the clock of the file system; None where there is none."""
        try:
            touched = path.stat().st_mtime
        except OSError:
            return None
        return self.now() - touched

    def now(self) -> float:
        """The file system's time, which need not be this host's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".now-{Process.current().name}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        return now
