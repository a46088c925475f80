"""`dualpipe-v`: DualPipe folded into a V: every rank holds one stage of the first half and one of the second, and each
parameter exists once.

Rank h of H holds chunk h (phase 0) and chunk 2H-1-h (phase 1). The eight steps are those of DeepSeek's dualpipev.py,
with F0, F1 forwards and B0, B1 backwards of the two phases, W a put-off weight gradient, & a woven pair.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from bench.action import Action, Pass
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.placement import Placement
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.interleaved import Turn
from systems.baselines.weave import Streams, new_streams, weave


class DualPipeV(Colocated):
    """Two chunks a rank in V shape; forward and backward woven; weight gradients fill the ends."""

    name = "dualpipe-v"
    summary = "DualPipe folded into a V: woven forward and backward, weight gradients put off at the ends"

    def stage_of(self, chunk: int, pp: int) -> int:
        return min(chunk, 2 * pp - 1 - chunk)

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        for layout in super().space(spec):
            microbatches = spec.workload.num_sequences // ((layout.replicas or 1) * layout.ep * layout.mbs)
            if layout.pp > 1 and layout.vpp == 2 and microbatches >= 2 * layout.pp:
                yield layout

    def placement(self, case: Case) -> Placement:
        if case.layout.pp < 2 or case.layout.vpp != 2:
            raise BadInput("layout", str(case.layout), "pp of 2 or more and vpp=2: the V holds two chunks a stage")
        return super().placement(case)

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        # Steps 1 and 2: 2 (H - h - 1) forwards of phase 0, then h + 1 of each.
        return 2 * layout.pp

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> dict[str, list[Action]]:
        if num_microbatches < 2 * case.layout.pp:
            raise BadInput("layout.pp", case.layout.pp, f"at most half of the {num_microbatches} micro-batches")
        return _VSchedule(stage, number, case.layout.pp, num_microbatches).streams


class _VSchedule:
    """The eight steps of one rank."""

    def __init__(self, stage: Stage, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.stage = stage
        self.streams: Streams = new_streams()
        self._next = {(pass_, chunk): count() for pass_ in (Pass.F, Pass.B) for chunk in (0, 1)}
        self._weights: deque[list[Action]] = deque()
        self._run(rank, num_ranks - rank - 1, num_microbatches - 2 * num_ranks + rank + 1, rank == num_ranks - 1)

    def _run(self, rank: int, behind: int, pairs: int, middle: bool) -> None:
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, put_off=True)
            self._weight()
            self._forward(1)
        for pair in range(pairs):
            if pair == 0 and middle:
                # Its own last forward is what the backward waits for: nothing to weave.
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0, 1)
            self._pair(1, 0)
        for _ in range(behind):
            self._backward(1)
            self._pair(1, 0)
        put_off = False
        for i in range(rank + 1):
            put_off = put_off or (i == (rank + 1) // 2 and rank % 2 == 1)
            self._backward(1, put_off)
            put_off = put_off or (i == (rank + 1) // 2 and rank % 2 == 0)
            self._backward(0, put_off)
        for _ in range(behind):
            self._weight()
            self._backward(0, put_off=True)
        while self._weights:
            self._weight()

    def _turn(self, pass_: Pass, chunk: int) -> Turn:
        return Turn(pass_, chunk, next(self._next[pass_, chunk]))

    def _forward(self, chunk: int) -> None:
        weave(self.stage, self._turn(Pass.F, chunk), None, self.streams)

    def _backward(self, chunk: int, put_off: bool = False) -> None:
        later: list[Action] | None = [] if put_off else None
        weave(self.stage, None, self._turn(Pass.B, chunk), self.streams, later)
        if later is not None:
            self._weights.append(later)

    def _pair(self, forward: int, backward: int) -> None:
        weave(self.stage, self._turn(Pass.F, forward), self._turn(Pass.B, backward), self.streams)

    def _weight(self) -> None:
        self.streams["compute"] += self._weights.popleft()
