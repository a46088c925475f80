"""Costs of cases, for tests."""

from cases import make_case

from bench import predict
from bench.action import Action
from bench.assumptions import Assumptions, get_assumptions
from bench.case import Case
from bench.cost import Costs
from bench.edges import edges
from bench.placement import Placement
from bench.system import plan_of

DATASHEET = get_assumptions("datasheet")


def placement_of(case: Case) -> Placement:
    return plan_of(case).placement


def costs_of(case: Case, assumed: Assumptions = DATASHEET) -> Costs:
    return predict.costs_of(case, placement_of(case), assumed)


def with_routing(case: Case, name: str) -> Case:
    return case.model_copy(update={"workload": case.workload.model_copy(update={"routing": name})})


def actions_of(costs: Costs) -> set[Action]:
    graph = edges(costs.case.model, costs.placement, costs.recompute, costs.chunks)
    return {end for edge in graph for end in (edge.src, edge.dst, edge.via) if end is not None}


def m2n(copies: str = "expert") -> Costs:
    """Two groups of 2 attention and 4 expert ranks, tiny model (H 64, 8 experts, top 2), 16 tokens a rank."""
    layout = {"groups": 2, "attention_ranks": 2, "expert_ranks": 4, "copies": copies}
    return costs_of(make_case("disagmoe", cluster="h800x2", **layout))


def sliced(system: str, chunks: int, model: str = "mixtral-8x7b", ep: int = 8, **layout: int) -> Costs:
    case = make_case(system, model, cluster="h800x2", ep=ep, seq_len=4096, chunks=chunks, **layout)
    return costs_of(case, get_assumptions("h200-measured"))
