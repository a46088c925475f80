"""A plan given as text: its placement, order and number of micro-batches are fixed."""

from collections.abc import Iterator
from functools import cache

from bench.action import Action
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.check import PlanError, check
from bench.errors import BadInput
from bench.loading.faults import FIXED_BY_PLAN, raise_fault, require_placement, with_lines
from bench.lower import lower
from bench.models import Model
from bench.placement import Placement
from bench.plan import Plan
from bench.system import divisors

WRITTEN_FIELDS = frozenset({"mbs", "replicas", "shard_state", "comm_sms", *FIXED_BY_PLAN})


class WrittenPlan:
    """The system of a plan's text, called by its file. What is left to choose is how many sequences make a
    micro-batch, and the number of replicas.
    """

    fields = WRITTEN_FIELDS

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        try:
            self.written = Plan.parse(text)
        except BadInput as error:
            line = error.field.removeprefix("plan text, ")
            where = f"{name}, {line}" if line != error.field else f"{name}: {error.field}"
            raise BadInput(where, error.value, error.allowed) from None
        self.summary = f"the plan written in {name}"
        self.traits = self.written.traits
        self.defaults = {field: getattr(self.written, field) for field in FIXED_BY_PLAN}
        self._checked = cache(self._check)

    @property
    def sequences_a_round(self) -> int:
        """Sequences of a replica's batch with one sequence a micro-batch and data rank."""
        return self.written.num_microbatches * self.written.placement.data_ranks

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        size = self.written.placement.size
        require_placement(self.name, self.written.placement, spec.model)
        fits = spec.cluster.num_gpus // size
        if not fits:
            raise BadInput("cluster", spec.cluster.num_gpus, f"{size} GPUs or more, the ranks of {self.name}")
        found = False
        for replicas in sorted(divisors(spec.workload.num_sequences), reverse=True):
            mbs, uneven = divmod(spec.workload.num_sequences, replicas * self.sequences_a_round)
            if replicas <= fits and not uneven and mbs:
                found = True
                yield Layout.make(mbs=mbs, replicas=replicas, **self.defaults)
        if not found:
            written = self.written
            raise BadInput(
                "workload.global_batch_tokens",
                spec.workload.global_batch_tokens,
                f"a multiple of {self.sequences_a_round * spec.workload.seq_len} for {self.name}: replicas (at most "
                f"{fits} of {size} GPUs) x {written.num_microbatches} micro-batches x {written.placement.data_ranks} "
                "data ranks x seq_len",
            )

    def placement(self, case: Case) -> Placement:
        require_placement(self.name, self.written.placement, case.model)
        return self.written.placement

    def plan(self, case: Case) -> Plan:
        written = self.written
        for field, value in self.defaults.items():
            if getattr(case.layout, field) != value:
                raise BadInput(f"layout.{field}", getattr(case.layout, field), f"{value}, as {self.name} says")
        dealt = batch_of(case, self.placement(case))
        if dealt.num_microbatches != written.num_microbatches:
            raise BadInput(
                "workload.global_batch_tokens",
                case.workload.global_batch_tokens,
                f"{written.num_microbatches} micro-batches, as {self.name} says; this layout makes "
                f"{dealt.num_microbatches}",
            )
        self._checked(case.model)
        return written

    def _check(self, model: Model) -> None:
        try:
            check(lower(self.written, model))
        except PlanError as error:
            raise_fault(self.located(error))

    def located(self, error: PlanError, _case: Case | None = None) -> PlanError:
        """The same fault, with the lines where its actions stand."""
        return with_lines(error, self.name, self._lines_of(error.actions))

    def _lines_of(self, actions: tuple[Action, ...]) -> list[int]:
        words = [str(action) for action in actions]
        lines = [set(line.split("#")[0].split()) for line in self.text.splitlines()]
        return [number for word in words for number, line in enumerate(lines, 1) if word in line]
