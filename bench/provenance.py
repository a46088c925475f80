"""Where a result comes from: the code, the packages, the machine; and a digest of the code for simulated results.

Nothing here names a user, a host or a path: hosts are told apart by a digest. Of the environment only an allow-list is
read.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.devices import gpu_facts

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = (
    "disagmoe-bench", "pydantic", "numpy", "numba", "scipy", "pandas", "matplotlib", "torch", "megatron-core", "triton",
    "pyarrow", "msgspec", "nvidia-ml-py", "psutil", "submitit",
)  # fmt: skip

# Variables that change what is run or how fast it is.
ENVIRONMENT = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CGA_CLUSTER_SIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
    "NCCL_PROTO",
    "NCCL_PXN_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NUMBA_DISABLE_JIT",
    "NUMBA_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_HIGH_PRIORITY",
)

MAX_VALUE_CHARS = 200

_VERSION = re.compile(r"^Version: *(\S+)\s*$", re.MULTILINE)

# The job that a result was made in: numbers and sizes, no names of users, accounts or nodes.
SLURM = (
    "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_PARTITION",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE",
)  # fmt: skip

# Parts of bench that cannot change a simulated number: they run, keep or show.
_NOT_SIMULATION = (
    "cli", "devices.py", "doctor", "execute", "kineto", "measured.py", "micro", "migrations.py", "provenance.py",
    "results", "steady.py", "telemetry", "trace.py", "trial.py",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Provenance of a result made now, as a JSON-like mapping. torch, GPUs and driver are named if torch is loaded."""
    facts: dict[str, Any] = {
        "git": git_state(ROOT),
        "packages": package_versions(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "num_cpus": os.cpu_count(),
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "environment": _variables(ENVIRONMENT),
    }
    job = _variables(SLURM)
    if job:
        facts["slurm"] = job
    if "torch" in sys.modules:
        facts["torch"] = _torch_facts()
        facts["gpus"] = gpu_facts()
    return facts


def _variables(names: Sequence[str]) -> dict[str, str]:
    """Those that are set; a value that is a path says nothing of the run, and only that it is one is kept."""
    found = {name: os.environ[name][:MAX_VALUE_CHARS] for name in names if name in os.environ}
    return {name: "(a path)" if value.startswith(("/", "~")) else value for name, value in found.items()}


@cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that results depend on, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            text = importlib.metadata.distribution(name).read_text("METADATA") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        # The line is near the beginning; parsing all of it, as `importlib.metadata.version` does, takes far longer.
        version = _VERSION.search(text)
        found[name] = version[1] if version else importlib.metadata.version(name)
    return found


@cache
def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and whether the work tree differs from it; None where `root` is not a git work tree or has no commit."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return facts


def code_digest(system: str) -> str:
    """16 hex digits over the sources that make a simulated result: those of `bench` that simulate, and `systems`.

    A system that an installed package brings adds that package's sources, a schedule file itself. Raises BadInput for
    an unknown system.
    """
    from bench.loading import is_schedule_file
    from bench.system import get_system

    if is_schedule_file(system):
        get_system(system)  # refuses a file that is none
        return hashlib.sha256(_digest(None).encode() + Path(system).read_bytes()).hexdigest()[:16]
    package = type(get_system(system)).__module__.split(".")[0]
    return _digest(None if package in ("bench", "systems") else package)


@cache
def _digest(package: str | None) -> str:
    files = {
        path for path in _sources(ROOT / "bench") if path.relative_to(ROOT / "bench").parts[0] not in _NOT_SIMULATION
    }
    files |= _sources(ROOT / "systems")
    if package is not None:
        files |= _sources(Path(sys.modules[package].__file__ or "").parent)
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
        content = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*.py") if "__pycache__" not in path.parts}
