"""Small cases and random layouts that several tests use."""

from typing import Any

from hypothesis import strategies as st

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.models import Model, get_model


def make_case(
    system: str,
    model: str | Model = "tiny",
    cluster: str = "h800x1",
    microbatches: int = 4,
    seq_len: int = 16,
    **layout: Any,
) -> Case:
    """A case of one replica (unless `replicas` says otherwise) with that many micro-batches."""
    shape = model if isinstance(model, Model) else get_model(model)
    choice = Layout.make(**{"replicas": 1, **layout})
    ranks = choice.attention_ranks if system == "disagmoe" else choice.ep
    tokens = seq_len * microbatches * choice.mbs * ranks * (choice.replicas or 1) // choice.sequence_ranks
    spec = CaseSpec(
        model=shape,
        cluster=get_cluster(cluster),
        workload=Workload(seq_len=seq_len, global_batch_tokens=tokens),
        system=system,
    )
    return spec.with_layout(choice)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random small cases of the systems that have plans."""
    model = get_model(draw(st.sampled_from(["tiny", "tiny-shared", "tiny-sigmoid"])))
    microbatches = draw(st.sampled_from([1, 2, 3, 4, 8]))
    common = {
        "copies": draw(st.sampled_from(["expert", "rank", "node"])),
        "recompute": draw(st.sampled_from(["none", "full", "redispatch"])),
        "mbs": draw(st.integers(1, 2)),
        "microbatches": microbatches,
        "cluster": "h800x2",
    }
    if microbatches >= 4 and draw(st.integers(0, 3)) == 0:
        pp = draw(st.sampled_from([stages for stages in (1, 2, 4) if 2 * stages <= microbatches]))
        return make_case("dualpipe", model, ep=draw(st.sampled_from([1, 2, 4])), pp=pp, **common)
    if draw(st.booleans()):
        pp = draw(st.sampled_from([1, 2, 4]))
        vpp = draw(st.sampled_from([1, 2])) if pp == 2 and microbatches % pp == 0 else 1
        system = draw(st.sampled_from(["ep", "megatron", "tutel", "comet"]))
        if system == "megatron":
            common |= {"copies": "expert", "recompute": draw(st.sampled_from(["none", "redispatch"]))}
        sliced = {} if system in ("ep", "megatron") else {"chunks": draw(st.sampled_from([1, 2, 4, 8]))}
        fused = {"comm_sms": draw(st.sampled_from([1, 20, 40]))} if system == "comet" else {}
        ranks = draw(st.sampled_from([1, 2, 4]))
        return make_case(system, model, ep=ranks, pp=pp, vpp=vpp, **sliced, **fused, **common)
    groups = draw(st.integers(1, 4))
    chunk = draw(st.integers(1, model.num_layers // groups))
    shared = draw(st.sampled_from(["attention", "expert"])) if model.num_shared_experts else "attention"
    return make_case(
        "disagmoe",
        model,
        groups=groups,
        layers_per_chunk=chunk,
        attention_ranks=draw(st.integers(1, 2)),
        expert_ranks=draw(st.sampled_from([1, 2])),
        round_length=draw(st.integers(1, 8)),
        head_group=draw(st.one_of(st.none(), st.integers(0, groups - 1))),
        shift_at=draw(st.sampled_from([None, *range(chunk, model.num_layers, chunk)])),
        shared_on=shared,
        **common,
    )
