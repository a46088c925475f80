"""What is run: a `CaseSpec` (model x cluster x workload x system), and a `Case`, which has its layout as well.

All are frozen and strict. A case's id is a hash of its content, so equal cases have equal ids on every machine.
"""

import hashlib
import json
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from bench.action import MAX_CHUNKS
from bench.clusters import Cluster
from bench.errors import BadInput, from_pydantic, unknown
from bench.models import Model
from bench.placement import Placement
from bench.recorded import PREFIX, Recorded

Count = Annotated[int, Field(ge=1, le=1 << 20)]
MAX_MICROBATCHES = 1 << 14
ROUTINGS = (
    r"^(learned|balanced|hot-rank|rotating-hot-rank|half-idle|empty-expert"
    r"|zipf:\d+(\.\d+)?|recorded:[0-9a-f]{12})$"
)
ROUTING_WORDS = (
    "learned, balanced, hot-rank, rotating-hot-rank, half-idle, empty-expert, zipf:ALPHA such as zipf:1.2, "
    "recorded:FILE[@STEP]"
)
LATER_FIELDS = frozenset({"tp", "cp", "offload", "microbatch_group", "ranks_over_nodes", "shift_at"})


def _known_routing(routing: Any) -> Any:
    if isinstance(routing, str) and not re.match(ROUTINGS, routing):
        raise BadInput("", routing, ROUTING_WORDS)
    return routing


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def to_text(self) -> str:
        """Canonical JSON; `parse` is its inverse."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `to_text`. Raises BadInput naming field, value and what is allowed."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise from_pydantic(error, cls.__name__.lower(), cls) from None

    @classmethod
    def make(cls, **fields: Any) -> Self:
        """Validated construction. Raises BadInput instead of pydantic's error."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise from_pydantic(error, cls.__name__.lower(), cls) from None


class Workload(_Frozen):
    """What every system has to do per optimizer step; the global batch is fixed per cell, in tokens.

    `routing` names how tokens choose experts: ``learned`` (the router's choice; simulated as balanced), ``balanced``,
    ``zipf:ALPHA``, ``hot-rank``, ``rotating-hot-rank``, ``half-idle``, ``empty-expert`` (see `bench.routing`), or
    ``recorded:DIGEST``, that of the counts in `recorded`, which `bench.recorded.routing_fields` makes of a file; `seed`
    seeds data, weights and routing.
    """

    seq_len: Annotated[int, Field(ge=2, le=1 << 22)]
    global_batch_tokens: Annotated[int, Field(ge=2, le=1 << 34)]
    dtype: Literal["bf16", "fp32"] = "bf16"
    routing: Annotated[str, BeforeValidator(_known_routing), Field(pattern=ROUTINGS)] = "balanced"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    recorded: Recorded | None = None

    @model_validator(mode="after")
    def _has_its_counts(self) -> Self:
        digest = None if self.recorded is None else PREFIX + self.recorded.digest
        if self.routing.startswith(PREFIX) and digest is None:
            raise BadInput("routing", self.routing, "recorded:FILE, a file that a run recorded its routing in")
        if digest is not None and digest != self.routing:
            raise BadInput("routing", self.routing, f"{digest}, the digest of the recorded counts")
        return self

    @model_serializer(mode="wrap")
    def _without_counts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the field where there are none, so that ids of earlier cases stay what they were."""
        fields: dict[str, Any] = handler(self)
        return fields if self.recorded is not None else {k: v for k, v in fields.items() if k != "recorded"}

    def __hash__(self) -> int:
        # A few fields tell most apart, and what is found once is looked up by these again and again.
        return hash((self.seq_len, self.global_batch_tokens, self.routing, self.seed))

    @property
    def num_sequences(self) -> int:
        """GBS in sequences. Raises BadInput where the sequence length does not divide the global batch."""
        if self.global_batch_tokens % self.seq_len:
            raise BadInput("workload.global_batch_tokens", self.global_batch_tokens, f"a multiple of {self.seq_len}")
        return self.global_batch_tokens // self.seq_len


class Layout(_Frozen):
    """What a system may choose. Each system declares which fields it uses; setting another is an error.

    Colocated systems use `ep` (ranks that share the experts), `pp` and `vpp`, and those of megatron-core
    `microbatch_group` (micro-batches that pass a chunk together, `pp` where not given); `disagmoe` uses
    `attention_ranks` (M) and `expert_ranks` (N) per group, `groups` (p, of each kind; `expert_groups`
    of the experts' where that differs), `layers_per_chunk` (neighbouring layers on one group), `shift_at` (attention
    of layers from this one on is one group further, so that windowed layers are spread over the groups),
    `round_length` (micro-batches that pass a group's layer together), `deferred_w` (weight gradients that a group may
    put off) and `lookahead` (micro-batches by which recomputation runs ahead). `mbs` is sequences per attention rank.
    `chunks` is the number of slices in which a micro-batch passes a layer's experts, `comm_sms` the streaming
    multiprocessors that a fused kernel gives to its communication. `tp` x `cp` ranks that hold attention share the
    sequences of one data rank: its heads and its tokens (see `bench.sequence`).
    `offload` keeps the optimizer's `state` in the host's memory, from where the update streams it; or sends there the
    `activations` that attention and experts keep for their backward, which fetches them; or does both (`all`).
    `ranks_over_nodes` fills one node after the other, or deals neighbouring ranks over a replica's nodes in turn (see
    `bench.nodes`).
    """

    mbs: Count = 1
    replicas: Count | None = None
    ep: Count = 1
    pp: Count = 1
    vpp: Count = 1
    microbatch_group: Count | None = None
    attention_ranks: Count = 1
    expert_ranks: Count = 1
    groups: Count = 1
    expert_groups: Count | None = None
    layers_per_chunk: Count = 1
    round_length: Count = 1
    deferred_w: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    lookahead: Count = 4
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] = 1
    comm_sms: Annotated[int, Field(ge=0, le=4096)] = 0
    tp: Count = 1
    cp: Count = 1
    head_group: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    shift_at: Count | None = None
    shared_on: Literal["attention", "expert"] = "attention"
    copies: Literal["expert", "rank", "node"] = "rank"
    recompute: Literal["none", "full", "redispatch"] = "none"
    shard_state: bool = True
    offload: Literal["none", "state", "activations", "all"] = "none"
    ranks_over_nodes: Literal["packed", "strided"] = "packed"

    def __str__(self) -> str:
        """key=value for every field that differs from its default; `from_pairs` is the inverse."""
        return " ".join(f"{key}={_word(getattr(self, key))}" for key in type(self).model_fields if self._set(key))

    @property
    def sequence_ranks(self) -> int:
        """tp x cp: ranks over which a sequence is dealt."""
        return self.tp * self.cp

    @property
    def offloads_state(self) -> bool:
        return self.offload in ("state", "all")

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "all")

    @model_serializer(mode="wrap")
    def _without_later_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A field that came later is left out at its default, so that ids of earlier cases stay what they were."""
        return {key: value for key, value in handler(self).items() if key not in LATER_FIELDS or self._set(key)}

    def _set(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @classmethod
    def from_pairs(cls, pairs: Iterable[str], base: "Layout | None" = None) -> "Layout":
        """`base` (default: the defaults) with ``key=value`` pairs put in. Raises BadInput."""
        values = base.model_dump() if base else {}
        for pair in pairs:
            key, equals, word = pair.partition("=")
            if not equals:
                raise BadInput("layout", pair, "key=value")
            if key not in cls.model_fields:
                raise unknown("layout", key, cls.model_fields)
            values[key] = _value(key, word, cls.model_fields[key].annotation)
        return cls.make(**values)

    def require_only(self, system: str, used: frozenset[str]) -> None:
        """Raises BadInput where a field is set that `system` does not use."""
        for key in type(self).model_fields:
            if key not in used and self._set(key):
                raise BadInput(
                    f"layout.{key}",
                    getattr(self, key),
                    f"not used by {system}, which uses {', '.join(sorted(used))}",
                )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def _value(key: str, word: str, annotation: Any) -> object:
    kinds = _plain_types(annotation)
    if word == "none" and type(None) in kinds:
        return None
    if bool in kinds:
        if word not in ("true", "false"):
            raise BadInput(f"layout.{key}", word, "true or false")
        return word == "true"
    if int in kinds:
        try:
            return int(word)
        except ValueError:
            raise BadInput(f"layout.{key}", word, "a whole number") from None
    return word


def _plain_types(annotation: Any) -> set[Any]:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return set().union(*(_plain_types(part) for part in get_args(annotation)))
    return {annotation}


class CaseSpec(_Frozen):
    """What is compared: every system gets the same model, cluster and workload, and chooses its layout."""

    model: Model
    cluster: Cluster
    workload: Workload
    system: str

    @model_validator(mode="after")
    def _counts_are_of_this_model(self) -> Self:
        model, recorded = self.model, self.workload.recorded
        if recorded is not None:
            layers = model.num_layers - model.num_dense_layers
            recorded.require_fits(model.name, layers, model.num_experts, model.top_k)
        return self

    def with_layout(self, layout: Layout) -> "Case":
        return Case(model=self.model, cluster=self.cluster, workload=self.workload, system=self.system, layout=layout)


class Case(CaseSpec):
    """One run: a spec and its layout."""

    layout: Layout

    @property
    def id(self) -> str:
        """16 hex digits of the content's SHA-256."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]


class Batch(NamedTuple):
    """How a case's global batch is dealt: replica x micro-batch x data rank x mbs sequences.

    tp x cp ranks that share sequences are one data rank here.
    """

    num_replicas: int
    num_microbatches: int
    num_ranks: int
    mbs: int

    @property
    def num_sequences(self) -> int:
        return self.num_replicas * self.num_microbatches * self.num_ranks * self.mbs


def batch(case: Case, data_ranks: int, replica_size: int) -> Batch:
    """Replicas that fit on the cluster, and micro-batches that make up the global batch.

    Of a micro-batch, every rank has mbs x seq_len / (tp x cp) tokens, which the layout's chunks divide.

    Args:
        data_ranks: M, ranks over which a micro-batch's sequences are dealt, tp x cp of them together.
        replica_size: GPUs of one replica.
    Raises BadInput where the cluster is too small or the batch does not divide.
    """
    _require_shares(case, data_ranks)
    if case.layout.offloads_activations and case.layout.recompute != "none":
        allowed = f"none or state with recompute={case.layout.recompute}: what is computed again is not kept"
        raise BadInput("layout.offload", case.layout.offload, allowed)
    if case.layout.ranks_over_nodes == "strided" and replica_size % case.cluster.gpus_per_node:
        allowed = f"packed: a replica of {replica_size} ranks is not whole nodes of {case.cluster.gpus_per_node} GPUs"
        raise BadInput("layout.ranks_over_nodes", "strided", allowed)
    data_ranks //= case.layout.sequence_ranks
    tokens = case.layout.mbs * case.workload.seq_len // case.layout.sequence_ranks
    if tokens % case.layout.chunks:
        raise BadInput("layout.chunks", case.layout.chunks, f"a divisor of a micro-batch's {tokens} tokens a rank")
    fit = case.cluster.num_gpus // replica_size
    num_replicas = fit if case.layout.replicas is None else case.layout.replicas
    if not 1 <= num_replicas <= fit:
        need = replica_size * max(num_replicas, 1)
        raise BadInput(
            "layout",
            str(case.layout),
            f"at most the {case.cluster.num_gpus} GPUs of {case.cluster.name}; needs {need}",
        )
    per_round = num_replicas * data_ranks * case.layout.mbs
    sequences = case.workload.num_sequences
    if sequences % per_round:
        raise BadInput(
            "workload.global_batch_tokens",
            case.workload.global_batch_tokens,
            f"a multiple of replicas x data ranks x mbs x seq_len = {per_round * case.workload.seq_len}",
        )
    if sequences // per_round > MAX_MICROBATCHES:
        most = MAX_MICROBATCHES * per_round * case.workload.seq_len
        allowed = f"at most {MAX_MICROBATCHES} micro-batches: {most} tokens for this layout"
        raise BadInput("workload.global_batch_tokens", case.workload.global_batch_tokens, allowed)
    return Batch(
        num_replicas=num_replicas,
        num_microbatches=sequences // per_round,
        num_ranks=data_ranks,
        mbs=case.layout.mbs,
    )


def _require_shares(case: Case, ranks: int) -> None:
    """Raises BadInput where tp x cp ranks of a node cannot share a sequence, or tp of them the heads."""
    layout, model, shared = case.layout, case.model, case.layout.sequence_ranks
    field = "layout.cp" if layout.cp > 1 else "layout.tp"
    for whole, what in ((ranks, "ranks that hold attention"), (case.cluster.gpus_per_node, "GPUs of a node")):
        if whole % shared:
            raise BadInput(field, getattr(layout, field[7:]), f"tp x cp that divides the {whole} {what}")
    if model.num_heads % layout.tp or model.num_kv_heads % layout.tp:
        allowed = f"a divisor of the {model.num_heads} heads and {model.num_kv_heads} key-value heads of {model.name}"
        raise BadInput("layout.tp", layout.tp, allowed)
    pieces = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if case.workload.seq_len % pieces:
        allowed = f"pieces ({pieces}) that divide {case.workload.seq_len} tokens"
        raise BadInput(field, getattr(layout, field[7:]), allowed)


def batch_of(case: Case, placement: Placement) -> Batch:
    """`batch` for a placement."""
    return batch(case, placement.data_ranks, placement.size)
