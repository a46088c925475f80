"""The named assumptions of the cost model: what of each peak is reached, and what actions and messages cost besides.

A peak or a bandwidth comes from the cluster; an assumption says which share of it is reached. No constant here was
chosen to make a figure look like a published one.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import BadInput, from_pydantic, unknown

Share = Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=1 << 40)]


class Assumptions(BaseModel):
    """Shares of the data sheet's figures that are reached, and fixed costs. Immutable; printed with every figure.

    Attributes:
        gemm, grouped_gemm, grouped_gemm_backward: share of the dense peak; the last is for input and weight
            gradients of grouped GEMMs, whose rows are few per expert.
        attention_forward, attention_backward: share of the dense peak that the attention core reaches on long spans.
        attention_half_span: mean span of keys, in tokens, at which the core reaches half of that share:
            share(span) = share * span / (span + attention_half_span); a causal sequence's span is its length.
        attention_backward_factor: work of the core's backward over that of its forward.
        hbm, optimizer: share of the memory bandwidth reached by elementwise kernels, and by the optimizer's.
        nvlink, nic_all_to_all, nic_many_to_many, nic_collective: share of a link's bandwidth, for exchanges inside one
            group, between two groups, and for gradient sums.
        cross_rail: share of that NIC rate between GPUs with different numbers on their nodes; gradient sums, and rows
            sent once a node, stay on their rail.
        incast: share of time that a receiving NIC loses for each doubling of the sources that send to it at once.
        transfer_s: seconds of every transfer on top of the link's latency.
        kernel_s: seconds of every kernel on top of its roofline time.
        communication_sms: streaming multiprocessors taken from the computation of every system while transfers run:
            a step is charged the share of its computing time in which they do (see `bench.predict`).
        saturating_sms: those that the exchange of a fused kernel needs to reach the links' shares; with fewer, it
            reaches as much less (see `bench.fusion`).
        tensor_exposed: share of the all-gathers and reduce-scatters round tensor-parallel attention that nothing hides.
        ring_exposed: share of a ring of keys and values that the attention core beside it does not hide even where it
            takes longer.
        host_link: share of the bandwidth to the host's memory, both directions at once on every GPU of a node.
        context_bytes: memory of a GPU that the CUDA context takes, with the libraries' kernels and workspaces.
        communicator_bytes: buffers of each communicator of a rank: one for exchanges, one for every kind of sum.
        fragmentation: share of a GPU's memory that the caching allocator reserves and cannot use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gemm: Share
    grouped_gemm: Share
    grouped_gemm_backward: Share
    attention_forward: Share
    attention_backward: Share
    attention_half_span: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
    attention_backward_factor: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]
    hbm: Share
    optimizer: Share
    nvlink: Share
    nic_all_to_all: Share
    nic_many_to_many: Share
    nic_collective: Share
    cross_rail: Share
    incast: Fraction
    transfer_s: Seconds
    kernel_s: Seconds
    communication_sms: Annotated[int, Field(ge=0, le=4096)]
    saturating_sms: Annotated[int, Field(ge=1, le=4096)]
    tensor_exposed: Fraction
    ring_exposed: Fraction
    host_link: Share
    context_bytes: Bytes
    communicator_bytes: Bytes
    fragmentation: Annotated[float, Field(ge=0, le=0.9, allow_inf_nan=False)]

    def __hash__(self) -> int:
        # A few fields tell most apart, and what is found once is looked up by these again and again.
        return hash((self.gemm, self.kernel_s, self.transfer_s, self.communication_sms))

    def without_overheads(self) -> "Assumptions":
        """The same without fixed costs of kernels and transfers and without SMs given to communication."""
        return _without_overheads(self)

    def __str__(self) -> str:
        """``key=value`` for every field; `with_overrides` reads them."""
        return " ".join(f"{key}={getattr(self, key)!r}" for key in type(self).model_fields)

    def with_overrides(self, pairs: Iterable[str]) -> "Assumptions":
        """These with ``key=value`` pairs put in. Raises BadInput naming the key or the value."""
        values = self.model_dump()
        for pair in pairs:
            key, equals, word = pair.partition("=")
            if not equals:
                raise BadInput("assumptions", pair, "key=value")
            if key not in values:
                raise unknown("assumptions", key, values)
            whole = type(self).model_fields[key].annotation is int
            try:
                values[key] = int(word) if whole else float(word)
            except ValueError:
                raise BadInput(f"assumptions.{key}", word, "a whole number" if whole else "a number") from None
        try:
            return type(self)(**values)
        except ValidationError as error:
            raise from_pydantic(error, "assumptions", type(self)) from None


ASSUMPTIONS: dict[str, Assumptions] = {
    # A plain roofline: every peak is reached and nothing else costs time or memory. No kernel can do better.
    "datasheet": Assumptions(
        gemm=1.0,
        grouped_gemm=1.0,
        grouped_gemm_backward=1.0,
        attention_forward=1.0,
        attention_backward=1.0,
        attention_half_span=0.0,
        attention_backward_factor=2.5,
        hbm=1.0,
        optimizer=1.0,
        nvlink=1.0,
        nic_all_to_all=1.0,
        nic_many_to_many=1.0,
        nic_collective=1.0,
        cross_rail=1.0,
        incast=0.0,
        transfer_s=0.0,
        kernel_s=0.0,
        communication_sms=0,
        saturating_sms=1,
        tensor_exposed=1.0,
        ring_exposed=0.0,
        host_link=1.0,
        context_bytes=0,
        communicator_bytes=0,
        fragmentation=0.0,
    ),
    # From measurements on one H200 (`moebench figure costs`; torch 2.11, bf16, peak 989 TFLOP/s) and, for links, on two
    # of one host (NCCL 2.28.9; one run).
    "h200-measured": Assumptions(
        gemm=0.82,
        grouped_gemm=0.80,
        grouped_gemm_backward=0.64,
        attention_forward=0.69,
        attention_backward=0.58,
        attention_half_span=1000.0,
        attention_backward_factor=2.5,
        hbm=0.88,
        optimizer=0.88,
        nvlink=0.87,
        nic_all_to_all=0.86,
        nic_many_to_many=0.86,
        nic_collective=0.86,
        cross_rail=1.0,
        incast=0.0,
        transfer_s=24e-6,
        kernel_s=1.8e-6,
        communication_sms=0,
        saturating_sms=20,
        tensor_exposed=1.0,
        ring_exposed=0.77,
        host_link=0.6,
        context_bytes=2436 * 2**20,
        communicator_bytes=512 * 2**20,
        fragmentation=0.03,
    ),
}

REASONS: dict[str, str] = {
    "gemm": "measured: 8192^3 on random data, in short runs; in a long run of nothing else the power limit leaves 0.69",
    "grouped_gemm": "measured: grouped_mm, 16 experts x 4096 rows, 4096 x 3072, in short runs; 0.67 in a long one",
    "grouped_gemm_backward": "measured: both gradients of the same, weights' added up in fp32; 0.54 in a long run, "
    "0.29 with 256 rows an expert, where fp32 gradients' memory traffic is counted besides",
    "attention_forward": "measured: cuDNN's causal attention of one sequence, 32 heads of 128, at 4096 to 32768 tokens",
    "attention_backward": "measured on the same, counted as 2.5 forwards",
    "attention_half_span": "least squares over the four lengths, forward and backward",
    "attention_backward_factor": "flash kernels compute the scores again: five products where the forward has two "
    "(arXiv 2205.14135, app. B); in every set",
    "hbm": "measured: SwiGLU and its gradients, one kernel each",
    "optimizer": "measured: AdamW of 2 GiB of main weights, one kernel a tensor",
    "nvlink": "measured: NCCL both ways at once, 187 GiB/s at 16 MiB and 275 at 256 MiB are a line of 313 GB/s of the "
    "360 usable, and 29 us",
    "nic_all_to_all": "not measured there: 43 of 50 GB/s, all-to-all of 16 ranks over two nodes (deepseek-ai/DeepEP, "
    "README)",
    "nic_many_to_many": "nothing public says how it differs from an all-to-all: taken to be equal",
    "cross_rail": "not measured: a fabric of full bisection bandwidth loses nothing; a rail-optimized one may "
    "have less between rails (juniper.net, JVD AI data center, rail optimized fabric); in every set",
    "incast": "not measured: the NIC's shares are of whole exchanges, with what 16 ranks lose to it; how it grows "
    "depends on the transport's congestion control (arXiv 2407.15266); in every set",
    "nic_collective": "nothing public says how it differs from an all-to-all: taken to be equal",
    "transfer_s": "measured: the 29 us of NVLink, less the 5 us that are the cluster's own latency",
    "kernel_s": "measured: kernels of a few bytes, one behind the other in one stream",
    "communication_sms": "copy engines or the NIC's own DMA: 7 % of the transfer's time was lost to the GEMM beside "
    "it, where NCCL's kernels took 77 %; 20 charges every system what DeepEP's kernels take",
    "saturating_sms": "not measured: thread blocks of DeepEP's kernels in DeepSeek's published training profile "
    "(deepseek-ai/profile-data)",
    "tensor_exposed": "the GEMMs round them need their result; megatron-core overlaps them in pieces only if asked "
    "(tp_comm_overlap, off by default); in every set",
    "ring_exposed": "measured: of the time of an NCCL exchange beside a GEMM, 0.77 was lost to the GEMM",
    "host_link": "not measured (one GPU alone reaches 0.79): eight GPUs, both ways, share the memory of two sockets "
    "with eight channels of DDR5-4800 each, 614 GB/s: 38 of 64 GB/s a GPU and direction",
    "context_bytes": "measured on one H200: 2,436 MiB beside torch's own memory, with NCCL up (no peers to buffer for) "
    "and all kernels loaded at the start, as ranks here load them; loaded as they are used, one tensor on a GPU takes "
    "0.5 to 0.7 GiB (discuss.pytorch.org/t/73021)",
    "communicator_bytes": "not measured there: NCCL 2.28.9 allocates 2^29 bytes for send and receive over the network "
    "for each communicator (NVIDIA/nccl#2363); direct NVLink connections take more (#1685)",
    "fragmentation": "not measured: what expandable segments leave of the 15 % that the allocator loses without them "
    "(arXiv 2401.08156)",
}
"""Where the values of ``h200-measured`` come from, by field; ``datasheet`` takes every peak and nothing besides."""

DEFAULT_ASSUMPTIONS = "h200-measured"


class Departure(NamedTuple):
    """What a set takes otherwise than the default one: one field, its value, and why."""

    field: str
    value: float
    why: str


DEPARTURES: dict[str, Departure] = {
    # One field each, so that a claim's verdict that differs says on what it depends. Of the fields that move the
    # speed-ups most (`moebench figure sensitivity`), those of which public reports differ from the default's value.
    "sm-exchange": Departure(
        "communication_sms",
        20,
        "exchanges of every system run as kernels beside the computation: thread blocks of DeepEP's in DeepSeek's "
        "training profile (deepseek-ai/profile-data); the default stands for copy engines or the NIC's own DMA",
    ),
    "nccl-all-to-all": Departure(
        "nic_all_to_all",
        0.5,
        "all-to-alls are NCCL's, and the many-to-many exchange has a library of its own, as the paper's has: users "
        "report 20 to 28 GB/s on 8 nodes of H800 and 16 of H20 (NVIDIA/nccl#1531, #1792), of which 7/8 and 15/16 cross "
        "NICs, of 50 GB/s if they are those of the paper; NCCL's developers call it too little. A reading in favour of "
        "disaggregation: the many-to-many exchange keeps the default's share",
    ),
}
"""Sets that are the default with one thing otherwise, for the questions that no measurement here answers."""

ASSUMPTIONS |= {
    name: ASSUMPTIONS[DEFAULT_ASSUMPTIONS].model_copy(update={field: value})
    for name, (field, value, _) in DEPARTURES.items()
}


def get_assumptions(name: str = DEFAULT_ASSUMPTIONS, overrides: Iterable[str] = ()) -> Assumptions:
    """A named set with ``key=value`` overrides put in. Raises BadInput."""
    if name not in ASSUMPTIONS:
        raise unknown("assumptions", name, ASSUMPTIONS)
    return ASSUMPTIONS[name].with_overrides(overrides)


@lru_cache(maxsize=64)
def _without_overheads(assumed: Assumptions) -> Assumptions:
    bare = assumed.model_copy(update={"kernel_s": 0.0, "transfer_s": 0.0, "communication_sms": 0})
    return assumed if bare == assumed else bare
