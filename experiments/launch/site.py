"""Settings of a cluster, written once by its user into a small TOML file; options of the command line win over it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import BadInput, from_pydantic
from bench.files import parse_mapping

VARIABLE = "MOEBENCH_SITE"
TIME_FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)
MAX_DAYS = 365
OFF = ("", "none")
"""Words that switch a default of the site file off."""

Name = Annotated[str, Field(pattern=r"^[\w.,:@+/=-]+$")]
Option = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
OneLine = Annotated[str, Field(pattern=r"^[^\r\n]*$")]
Positive = Annotated[int, Field(ge=1, le=1 << 20)]

TEMPLATE = """\
# Settings of this cluster for `moebench sweep`. Every line may be left out; options of the command line win,
# and an option with the value none, such as `--account none`, switches a line off.

# executor = "slurm"            # inprocess, debug, local or slurm
# partition = "gpu"
# account = "my-project"
# qos = "normal"
# constraint = "h100"
# exclude = "node013,node047"
# time = "00:30:00"             # limit of one run, hours:minutes:seconds
# max_nodes = 16                # larger cases are refused
# gpus_per_node = 8             # ranks of a run on one node; each takes the GPU of its local rank
# gpu_request = "gpus-per-node" # or gres, or none where nodes are handed out whole
# exclusive = true              # whole nodes
# cpus_per_task = 8
# mem = "0"                     # memory of a node, as for sbatch; 0 is all of it
# jobs = 8                      # jobs at a time
# max_attempts = 3              # starts of a run that is preempted, timed out, or loses its node
# poll_s = 15.0                 # seconds between looks at the queue
# heartbeat_s = 10.0            # seconds between signs of life of a job
# python = "python"             # how a node starts Python, e.g. "apptainer exec --nv image.sif python"

# Lines of shell that every job runs first.
# setup = ["module load cuda/12.8", "export NCCL_SOCKET_IFNAME=ib0", "export GLOO_SOCKET_IFNAME=ib0"]
# srun_args = ["--mpi=none"]

# More options of sbatch.
# [sbatch]
# reservation = "paper"
"""


class Site(BaseModel):
    """See `TEMPLATE` for what the fields mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    executor: Literal["inprocess", "debug", "local", "slurm"] = "inprocess"
    partition: Name | None = None
    account: Name | None = None
    qos: Name | None = None
    constraint: str | None = None
    exclude: Name | None = None
    time: str = "00:30:00"
    max_nodes: Positive | None = None
    gpus_per_node: Positive | None = None
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    exclusive: bool = False
    cpus_per_task: Positive | None = None
    mem: Name | None = None
    jobs: Positive | None = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    poll_s: Annotated[float, Field(ge=0.1, le=3600)] = 15.0
    heartbeat_s: Annotated[float, Field(ge=0.1, le=600)] = 10.0
    python: str | None = None
    setup: tuple[str, ...] = Field((), strict=False)
    srun_args: tuple[str, ...] = Field((), strict=False)
    sbatch: Mapping[Option, OneLine | int | Literal[True]] = {}

    @classmethod
    def make(cls, **fields: Any) -> Self:
        """Raises BadInput naming the field, as ``site.FIELD``."""
        try:
            site = cls(**fields)
        except ValidationError as error:
            raise from_pydantic(error, "site", cls) from None
        try:
            _ = site.minutes
        except BadInput as error:
            raise BadInput(f"site.{error.field}", error.value, error.allowed) from None
        return site

    @property
    def minutes(self) -> int:
        """The time limit of one run, rounded up. Raises BadInput."""
        minutes = minutes_of("time", self.time)
        if minutes > MAX_DAYS * 24 * 60:
            raise BadInput("time", self.time, f"at most {MAX_DAYS} days")
        return minutes


def minutes_of(field: str, text: str) -> int:
    """Minutes of a time in one of Slurm's `TIME_FORMS`, rounded up. Raises BadInput."""
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if found is None:
        raise BadInput(field, text, TIME_FORMS)
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    # Days are followed by hours; without them one number is minutes, and two are minutes and seconds.
    if days is None and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    total = ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise BadInput(field, text, "more than no time")
    return -(-total // 60)


def clock(minutes: int) -> str:
    """Minutes as hours:minutes:seconds."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def default_path() -> Path:
    """Where the file is looked for: $MOEBENCH_SITE, or ``moebench/site.toml`` in the user's configuration."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "moebench" / "site.toml"


def load(path: Path | None, options: Mapping[str, Any]) -> Site:
    """The site file (the default one may be missing) with the options that were given put in; a None was not given.

    Raises BadInput for a file that cannot be read, an unknown key, or a value that is not allowed: named ``site.FIELD``
    in the file and ``--field`` as an option.
    """
    chosen = default_path() if path is None else path
    given_by_name = path is not None or bool(os.environ.get(VARIABLE))
    fields = _read(chosen) if given_by_name or chosen.exists() else {}
    Site.make(**fields)
    for key, value in options.items():
        if value is None:
            continue
        if isinstance(value, str) and value in OFF:
            fields.pop(key, None)
        else:
            fields[key] = value
    try:
        return Site.make(**fields)
    except BadInput as error:  # the file is right, so it is an option
        option = error.field.removeprefix("site.").partition(".")[0].replace("_", "-")
        raise BadInput(f"--{option}", error.value, error.allowed) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput("site", str(path), f"a readable file ({reason})") from None
    return parse_mapping(text, "toml", f"site file {path.name}")


def write_template(path: Path) -> None:
    """Raises BadInput where there is a file, or none can be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        raise BadInput("out", str(path), "a file that does not exist yet") from None
    except OSError as error:
        raise BadInput("out", str(path), f"a file that can be written ({error.strerror})") from None
