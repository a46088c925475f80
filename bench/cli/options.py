"""Options that verbs share, each defined once, and the cases they describe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bench.case import CaseSpec, Layout
    from bench.clusters import Cluster
    from bench.evaluate import CostModel

DEFAULT_BATCH_TOKENS = 1 << 22
DEFAULT_SEQUENCES_PER_GPU = 32
RUN_MICROBATCHES = 8  # on every rank, where several systems or layouts are run beside each other


def whole_number(word: str) -> int:
    """An option's number; typer puts the option's name before the error."""
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not valid; allowed: a whole number") from None


def seconds(word: str) -> float:
    """An option's number of seconds."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{word!r} is not valid; allowed: a number of seconds above 0")
    return value


def number(option: str, says: str, metavar: str = "NUMBER") -> Any:
    """A whole number that may be left out."""
    return typer.Option(option, metavar=metavar, parser=whole_number, help=says, show_default=False)


def word(option: str, metavar: str, says: str) -> Any:
    """A word that may be left out."""
    return typer.Option(option, metavar=metavar, help=says, show_default=False)


System_ = Annotated[
    str, typer.Argument(metavar="SYSTEM", help="Training system; see `moebench list systems`.", show_default=False)
]
_MODEL = typer.Option(
    "--model",
    metavar="NAME|FILE",
    help="Model: a name (`moebench list models`), a file with its fields, or a Hugging Face config.json.",
    show_default=False,
)
Model_ = Annotated[str, _MODEL]
# Of a verb that may take them from elsewhere.
SystemOrNone = Annotated[
    str | None,
    typer.Argument(metavar="SYSTEM", help="Training system; see `moebench list systems`.", show_default=False),
]
ModelOrNone = Annotated[str | None, _MODEL]
Cluster_ = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Cluster: a name, GPUxNODES such as h800x16, or a file with its fields.",
    ),
]
SeqLen = Annotated[
    int, typer.Option("--seq-len", metavar="TOKENS", parser=whole_number, help="Sequence length in tokens.")
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--global-batch-tokens",
        metavar="TOKENS",
        parser=whole_number,
        help="Global batch of one optimizer step, in tokens. Default: 4194304 (at most 32 sequences a GPU) simulated, "
        "4 micro-batches executed.",
        show_default=False,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="bf16|fp32", help="Training dtype.")]
Routing_ = Annotated[
    str,
    typer.Option(
        "--routing",
        metavar="ROUTING",
        help="How tokens choose experts: learned, balanced, zipf:ALPHA, hot-rank, rotating-hot-rank, half-idle, "
        "empty-expert, or recorded:FILE[@STEP], as a run recorded it.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", parser=whole_number, help="Seed of weights, data and routing.")
]
Layout_ = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="KEY=VALUE ...",
        help="Layout, e.g. `--layout ep=16 pp=8`; what is not named has its default.",
        show_default=False,
    ),
]
AssumptionSet = Annotated[
    str | None,
    typer.Option(
        "--assumptions", metavar="SET", help="Cost model; see `moebench list assumptions`.", show_default=False
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE ...", help="Another value for a field of the cost model.", show_default=False
    ),
]
Ranks = Annotated[
    int, typer.Option("--ranks", metavar="NUMBER", parser=whole_number, help="Processes to start on this machine.")
]
Device = Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="cpu (gloo) or cuda (NCCL).")]
Transport = Annotated[
    str,
    typer.Option(
        "--transport",
        metavar="auto|host|nccl[:BLOCKS]|copy",
        help="What carries payload between GPUs: through host memory (also with several ranks on one GPU), NCCL (with "
        "as many thread blocks at most), or copy engines. Default: NCCL, or host with more ranks than GPUs.",
        show_default=False,
    ),
]
Serial = Annotated[
    bool,
    typer.Option("--serial", help="Run the plan without overlap: the same work, transfers behind what makes them."),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights", metavar="host|device", help="Where weights are drawn: device is quicker, and other numbers."
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="text|synthetic|PREFIX",
        help="Python's own sources as bytes, random tokens, or Megatron's PREFIX.bin and PREFIX.idx.",
    ),
]
Trainer_ = Annotated[
    str | None,
    typer.Option(
        "--trainer",
        metavar="plan|native",
        help="plan: this harness executes the system's plan; native: the system's own code trains, of those that have "
        "some. Default: the first that `moebench list systems` names.",
        show_default=False,
    ),
]
RunCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="What this machine's ranks are, where its GPU is not a known one. Default: found out.",
        show_default=False,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        metavar="NUMBER",
        parser=whole_number,
        help="Layouts to simulate for each system. Default: 64.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Results = Annotated[
    Path | None,
    typer.Option("--results", metavar="DIR", help="Where trials are kept. Default: results/local.", show_default=False),
]


def required(name: str, value: str | None) -> str:
    """Raises BadInput where an option was not given."""
    from bench.errors import BadInput

    if value is None:
        raise BadInput(name, None, "a value (it is required)")
    return value


def at_least_one(option: str, number: int) -> int:
    """The number. Raises BadInput where it is less than 1."""
    from bench.errors import BadInput

    if number < 1:
        raise BadInput(option, number, "at least 1")
    return number


def budget_of(number: int | None) -> int:
    """The number, or the search's own. Raises BadInput."""
    from bench.tune import DEFAULT_BUDGET

    return DEFAULT_BUDGET if number is None else at_least_one("budget", number)


def words_of(pairs: list[str] | None) -> list[str]:
    """Pairs one by one, also where several stand in one quoted word."""
    return [word for pair in pairs or [] for word in pair.split()]


def cost_model(name: str | None, pairs: list[str] | None) -> "CostModel":
    """The set of that name with the pairs of --set put in. Raises BadInput, of the option that is wrong."""
    from bench.errors import BadInput
    from bench.evaluate import CostModel

    CostModel.named(name)
    try:
        return CostModel.named(name, words_of(pairs))
    except BadInput as error:
        key = error.field.partition(".")[2]
        raise BadInput("--set", f"{key}={error.value}" if key else error.value, error.allowed) from None


def layout_of(system: str, pairs: list[str] | None) -> "Layout | None":
    """The layout that the pairs give for a system, or None where none is given. Raises BadInput."""
    from bench.case import Layout
    from bench.system import default_layout, get_system

    return Layout.from_pairs(words_of(pairs), default_layout(get_system(system))) if pairs else None


def spec_of(
    system: str, model: str, cluster: "Cluster", seq_len: int, batch_tokens: int, dtype: str, routing: str, seed: int
) -> "CaseSpec":
    """What a verb's options describe. Raises BadInput for what is unknown or absurd."""
    from bench.case import CaseSpec, Workload
    from bench.models import get_model
    from bench.recorded import routing_fields
    from bench.system import get_system

    get_system(system)
    how = routing_fields(routing)
    workload = Workload.make(seq_len=seq_len, global_batch_tokens=batch_tokens, dtype=dtype, seed=seed, **how)
    spec = CaseSpec.make(model=get_model(model), cluster=cluster, workload=workload, system=system)
    _ = workload.num_sequences  # refuses a batch that the sequence length does not divide
    return spec


def spec_on(
    system: str,
    model: str,
    cluster: str,
    seq_len: int,
    batch_tokens: int | None,
    dtype: str,
    routing: str,
    seed: int,
) -> "CaseSpec":
    """`spec_of` with a cluster's name and the default global batch. Raises BadInput."""
    from bench.clusters import get_cluster

    known = get_cluster(cluster)
    tokens = min(DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES_PER_GPU * known.num_gpus * seq_len)
    return spec_of(
        system, model, known, seq_len, batch_tokens if batch_tokens is not None else tokens, dtype, routing, seed
    )


def device_of(word: str) -> Literal["cpu", "cuda"]:
    """Raises BadInput."""
    from bench.errors import BadInput

    match word:
        case "cpu":
            return "cpu"
        case "cuda":
            return "cuda"
    raise BadInput("device", word, "cpu or cuda")
