"""Checks of the machine itself: Python, packages, the simulator, disk, clocks, network, Slurm."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.doctor.check import Check
from bench.results.files import write_once

NEEDED_DISK_BYTES = 2**30
BASE = ("pydantic", "numpy", "numba", "scipy", "pandas", "pyarrow", "msgspec", "typer", "rich", "matplotlib", "psutil")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python() -> Check:
    right = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("python", "ok" if right else "broken", platform.python_version(), "" if right else "use 3.11 to 3.13")


def packages() -> Check:
    missing = [name for name in BASE if importlib.util.find_spec(name) is None]
    if missing:
        return Check("packages", "absent", f"without {', '.join(missing)}", "make setup, or pip install .")
    return Check("packages", "ok", ", ".join(f"{name} {_version(name)}" for name in ("numpy", "pydantic", "pandas")))


def _tiny_step_s() -> float:
    from bench.case import CaseSpec, Layout, Workload
    from bench.clusters import get_cluster
    from bench.evaluate import CostModel
    from bench.models import get_model
    from bench.predict import predict

    workload = Workload(seq_len=64, global_batch_tokens=512)
    spec = CaseSpec(model=get_model("tiny"), cluster=get_cluster("h800x1"), workload=workload, system="ep")
    return predict(spec.with_layout(Layout(ep=2)), CostModel.named().values).metrics.step_time_s


def simulator() -> Check:
    from bench.simulate.loops import always_compile

    start = time.perf_counter()
    always_compile()
    step_s = _tiny_step_s()
    took = time.perf_counter() - start
    return Check("simulator", "ok", f"simulated a step of {step_s:.2g} s in {took:.2g} s, compiling included")


def simulator_is_there() -> Check:
    there = importlib.util.find_spec("numba") is not None
    if not there:
        return Check("simulator", "absent", "no numba", "make setup")
    return Check("simulator", "not tried", "numba is installed", "without --quick it is compiled")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def folder(results: Path) -> Check:
    """Results need names that appear at once and refuse to overwrite: hard links."""
    place = _existing(results)
    advice = "another --results on a file system with hard links (local, NFS, Lustre, GPFS)"
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".moebench-") as folder:
            write_once(Path(folder) / "a", "b")
    except OSError as error:
        return Check("results folder", "broken", f"{place}: {error.strerror}", advice)
    return Check("results folder", "ok", f"{place} can be written and has hard links")


def disk(results: Path) -> Check:
    usage = shutil.disk_usage(_existing(results))
    enough = usage.free >= NEEDED_DISK_BYTES
    return Check(
        "disk",
        "ok" if enough else "broken",
        f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f}",
        "" if enough else "make room: a full disk costs the trials that do not fit",
    )


def _wall_ahead_s() -> float:
    """Wall clock minus monotonic clock; of several pairs of readings the one that nothing got between."""
    pairs = []
    for _ in range(20):
        start = time.monotonic()
        wall = time.time()
        end = time.monotonic()
        pairs.append((end - start, wall - (start + end) / 2))
    return min(pairs)[1]


def clocks() -> Check:
    """That the clock of measurements is fine, and that the wall clock keeps up with it."""
    resolution = time.get_clock_info("perf_counter").resolution
    before = _wall_ahead_s()
    time.sleep(0.2)
    drift = abs(_wall_ahead_s() - before)
    if resolution > 1e-6 or drift > 0.05:
        found = f"resolution {resolution:.1g} s, wall clock moved {drift:.2g} s in 0.2 s"
        return Check("clocks", "broken", found, "look at the host's time synchronisation (chronyc tracking)")
    return Check("clocks", "ok", f"resolution {resolution:.1g} s, wall clock keeps up within {drift * 1e3:.2g} ms")


def infiniband(root: Path = Path("/sys/class/infiniband")) -> Check:
    states = {
        f"{path.parts[-4]}/{path.parts[-2]}": path.read_text().split(":")[-1].strip()
        for path in sorted(root.glob("*/ports/*/state"))
    }
    if not states:
        return Check("infiniband", "absent", "no port", "ranks of several nodes talk over Ethernet")
    down = [name for name, state in states.items() if state != "ACTIVE"]
    advice = f"not active: {', '.join(down)}" if down else ""
    return Check("infiniband", "ok" if len(down) < len(states) else "broken", f"{len(states)} ports", advice)


def submitit() -> Check:
    version = _version("submitit")
    return Check("submitit", "ok" if version else "absent", version or "not installed", "" if version else "make setup")


def slurm() -> Check:
    missing = [name for name in ("sbatch", "squeue", "scancel", "sinfo") if shutil.which(name) is None]
    if missing:
        return Check("slurm", "absent", f"no {', '.join(missing)}", "a login node of a Slurm cluster")
    done = subprocess.run(["sinfo", "-h", "-o", "%P %a"], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())[:200]
        return Check("slurm", "broken", said, "the controller does not answer: scontrol ping")
    up = [line.split()[0].rstrip("*") for line in done.stdout.splitlines() if line.endswith(" up")]
    job = f"; inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    advice = "" if up else "no partition is up"
    return Check("slurm", "ok" if up else "broken", f"partitions {', '.join(up) or 'none'}{job}", advice)
