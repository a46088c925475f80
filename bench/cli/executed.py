"""The case that verbs which execute describe: on processes or GPUs of this machine, with a layout that fits on them."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.cli.options import device_of, layout_of, spec_of

if TYPE_CHECKING:
    from bench.case import Case, Layout
    from bench.clusters import Cluster
    from bench.system import System

DEFAULT_MICROBATCHES = 4
CORPORA = ("text", "synthetic")


def run_case(
    system: str,
    model: str,
    ranks: int,
    device: str,
    seq_len: int,
    batch_tokens: int | None,
    dtype: str,
    routing: str,
    seed: int,
    pairs: list[str] | None,
    cluster_name: str | None = None,
    *,
    transport: str = "auto",
    with_reference: bool = False,
) -> "Case":
    """The case that `run`, `verify` and an executed trace have in common. Raises BadInput.

    `with_reference` says that the whole model is needed in one process as well, to compare with.
    """
    from bench.errors import BadInput
    from bench.execute.support import require_replayable, require_supported
    from bench.fits import require_fits_here
    from bench.models import get_model
    from bench.system import get_system

    cluster = local_cluster(ranks, device_of(device), cluster_name, transport)
    known = get_system(system)
    if "modelled-only" in getattr(known, "traits", ()):
        raise BadInput("system", system, "one that can be executed; its plans are modelled-only")
    layout = layout_of(system, pairs) or layout_on(known, ranks, get_model(model).num_experts)
    if batch_tokens is None:
        one_sequence = spec_of(system, model, cluster, seq_len, seq_len, dtype, routing, seed).with_layout(layout)
        recorded = one_sequence.workload.recorded
        batch_tokens = _default_batch_tokens(one_sequence, ranks) if recorded is None else recorded.tokens
    case = spec_of(system, model, cluster, seq_len, batch_tokens, dtype, routing, seed).with_layout(layout)
    require_supported(case.model)
    require_replayable(case.workload)
    require_fits_here(case, with_reference=with_reference, ranks_per_gpu=ranks_per_gpu(ranks, device))
    return case


def local_cluster(
    ranks: int, device: Literal["cpu", "cuda"], name: str | None = None, transport: str = "auto"
) -> "Cluster":
    """The cluster that `ranks` processes on this machine are: CPUs, or the GPUs that torch finds; or as named.

    Where several ranks share a GPU, each counts as one.

    Raises BadInput.
    """
    from bench.clusters import CLUSTERS, GPUS, Cluster, get_cluster
    from bench.errors import BadInput
    from bench.transports import Carrier

    if not 1 <= ranks <= 64:
        raise BadInput("ranks", ranks, "1 to 64")
    if device == "cpu":
        Carrier.of(transport, device, ranks, 0)
    if name is not None:
        given = get_cluster(name)
        if given.num_gpus != ranks:
            raise BadInput("ranks", ranks, f"the {given.num_gpus} GPUs of {given.name}")
        return given
    if device == "cpu":
        fields = {**CLUSTERS["cpu"].model_dump(), "gpus_per_node": ranks, "nics_per_node": ranks}
        return Cluster.from_fields(fields)
    import torch

    Carrier.of(transport, device, ranks, torch.cuda.device_count())
    gpu_name = torch.cuda.get_device_name(0)
    known = next((gpu for gpu in GPUS if gpu in gpu_name.lower().split()), None)
    if known is None:
        raise BadInput("device", gpu_name, f"a GPU that is known: {', '.join(GPUS)} (name others with --cluster FILE)")
    return get_cluster(f"{known}x{ranks}gpu")


def layout_on(system: "System", ranks: int, num_experts: int) -> "Layout":
    """For a run without a layout: half of the ranks for attention, or as many expert-parallel ranks as divide.

    Raises BadInput where the ranks are too few.
    """
    from bench.errors import BadInput
    from bench.system import default_layout

    choice: dict[str, int] = {"replicas": 1}
    if "attention_ranks" in system.fields:
        if ranks < 2:
            raise BadInput("ranks", ranks, f"2 or more, for {system.name}")
        attention = ranks // 2
        expert = max(n for n in range(1, ranks - attention + 1) if num_experts % n == 0)
        choice = {"attention_ranks": attention, "expert_ranks": expert}
    elif "ep" in system.fields:
        choice = {"ep": max(n for n in range(1, ranks + 1) if num_experts % n == 0 and ranks % n == 0)}
    return default_layout(system).model_copy(update=choice)


def ranks_per_gpu(ranks: int, device: str) -> int:
    """How many of the ranks share a GPU of this machine; 1 on CPUs."""
    if device != "cuda":
        return 1
    import torch

    return -(-ranks // max(1, torch.cuda.device_count()))


def _default_batch_tokens(case: "Case", ranks: int) -> int:
    """Tokens of `DEFAULT_MICROBATCHES`, or of as many as a text has, on every replica that `ranks` hold."""
    from bench.loading import WrittenPlan
    from bench.system import get_system

    system = get_system(case.system)
    case.layout.require_only(case.system, system.fields)
    placement = system.placement(case)
    replicas = case.layout.replicas or max(1, ranks // placement.size)
    num_microbatches = system.written.num_microbatches if isinstance(system, WrittenPlan) else DEFAULT_MICROBATCHES
    return num_microbatches * replicas * placement.data_ranks * case.layout.mbs * case.workload.seq_len


def corpus_of(word: str) -> str:
    """The name that `open_corpus` takes; a path is made absolute. Raises BadInput."""
    from bench.errors import unknown
    from bench.execute.data import is_path

    if word not in CORPORA and is_path(word):
        return str(Path(word).absolute())
    if word not in CORPORA:
        raise unknown("data", word, CORPORA)
    return word
