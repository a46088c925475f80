"""`reference`: one process that holds the whole model and does one thing after the other.

What it trains is `bench.execute.reference`, plain torch without any of the code that the other systems share; its plan
exists so that its step can be printed and simulated as any other's.
"""

from collections.abc import Iterator

from bench.case import Case, CaseSpec, Layout
from bench.placement import Placement
from bench.plan import Plan
from systems.baselines.ep import ExpertParallel


class Reference:
    """The model on one GPU: the mathematics that every other system has to equal."""

    name = "reference"
    summary = "one process, no parallelism: loss and gradients that every system has to equal"
    fields = frozenset({"mbs", "replicas", "recompute"})

    def __init__(self) -> None:
        self._whole = ExpertParallel()

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        for recompute in ("none", "full"):
            yield Layout.make(replicas=1, recompute=recompute)

    def placement(self, case: Case) -> Placement:
        return self._whole.placement(case)

    def plan(self, case: Case) -> Plan:
        plan = self._whole.plan(case)
        return Plan(self.name, plan.placement, plan.queues, plan.num_microbatches, plan.copies, plan.recompute)
