"""The process that keeps one local job: it starts the ranks, keeps the time limit, and ends all of them when one fails.

What Slurm and srun do on a cluster, for this machine: ``python -m experiments.launch.controller FOLDER ELEMENT``.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments.launch.ledger import replace
from experiments.launch.submission import JobFolder, JobRecord

TIMED_OUT = 124
KILL_WAIT_S = 5.0
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


def main(arguments: list[str]) -> int:
    folder, element = JobFolder(Path(arguments[0])), int(arguments[1])
    record = JobRecord.read(folder.path)
    assert record is not None, "a job has a record"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks: list[subprocess.Popen[bytes]] = []
    code = 1
    try:
        ranks += [_start(folder, record, element, rank) for rank in range(record.shape.ranks_per_node)]
        code = _wait(ranks, time.monotonic() + 60 * record.minutes)
    finally:
        _end(ranks)
        replace(folder.path / f"ended.{element}", f"{code}\n")
    return code


def _start(folder: JobFolder, record: JobRecord, element: int, rank: int) -> "subprocess.Popen[bytes]":
    job_id = str(os.getpid())
    env = {
        **os.environ,
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": job_id,
        "SUBMITIT_LOCAL_NTASKS": str(record.shape.ranks_per_node),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }
    log = folder.path / f"{job_id}_{element}_{rank}_log"
    words = folder.launch_line().replace("ELEMENT", str(element))
    with log.with_suffix(".out").open("ab") as out, log.with_suffix(".err").open("ab") as err:
        return subprocess.Popen(
            ["sh", "-ec", words],
            env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has one thread
        )  # fmt: skip


def _end_with_parent() -> None:
    """In a rank before it begins: the kernel kills it with its controller. Elsewhere the rank looks, once it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(ranks: "list[subprocess.Popen[bytes]]", deadline: float) -> int:
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        bad = next((code for code in codes if code), 0)
        if bad or all(code == 0 for code in codes):
            return 128 - bad if bad < 0 else bad
        time.sleep(0.02)
    return TIMED_OUT


def _end(ranks: "list[subprocess.Popen[bytes]]") -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(stop)
        patience = time.monotonic() + KILL_WAIT_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < patience:
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
