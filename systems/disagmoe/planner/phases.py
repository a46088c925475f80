"""When the workload changes: a plan for every phase of a sequence-length schedule, and whether changing it pays.

Steps of several lengths come in phases (``4096:2000,16384:500``: 2000 steps of 4K, then 500 of 16K), or mixed
(``4096@0.8,32768@0.2``: four steps of five are of 4K, in no order). Between phases weights and optimizer state can
move to another layout; in a mixture the layout stays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout, Workload
from bench.errors import BadInput
from bench.timing import Evaluate, simulated
from systems.disagmoe.planner.allocation import allocate
from systems.disagmoe.planner.explain import Table
from systems.disagmoe.planner.move import Move, move
from systems.disagmoe.planner.problem import Choices, problem
from systems.disagmoe.planner.refine import Try, refine
from systems.disagmoe.planner.roofline import check_lengths

GIB = 2**30
PHASE_BUDGET = 8


class Phase(NamedTuple):
    """Steps of one length; in a mixture `num_steps` is a share of all steps."""

    seq_len: int
    num_steps: float


class Schedule(NamedTuple):
    """Phases in their order, or (`mixed`) shares of lengths without one."""

    phases: tuple[Phase, ...]
    mixed: bool


@dataclass(frozen=True)
class PhasePlan:
    """What one phase does.

    Args:
        layout: what it runs on; `own_layout`: the best for this phase alone.
        step_s, own_step_s: seconds of a step of either.
        kept_step_s: of the layout of the phase before, None where it does not fit or does not divide the batch.
        move: from the layout of the phase before, None where it stays.
        pays_after_steps: steps from which changing to its own layout pays, None where it never does or must.
    """

    phase: Phase
    layout: Layout
    step_s: float
    own_layout: Layout
    own_step_s: float
    kept_step_s: float | None
    move: Move | None
    pays_after_steps: float | None


@dataclass(frozen=True)
class PhasesPlan:
    """The whole schedule: seconds with the moves, and without any (None where no placement fits every length).

    Without a move what GPUs hold stays; how they work (rounds, recomputation, copies, micro-batch) may still change.
    """

    schedule: Schedule
    phases: tuple[PhasePlan, ...]
    total_s: float
    unmoved_s: float | None

    def sentences(self) -> list[str]:
        said = [_phase_in_words(each, self.schedule.mixed) for each in self.phases]
        if self.schedule.mixed:
            return [*said, f"A mean step takes {self.total_s:.4g} s."]
        if self.unmoved_s is None:
            return [*said, f"The schedule takes {self.total_s:.4g} s; without a move some length fits nowhere."]
        gain = 100 * (self.unmoved_s / self.total_s - 1)
        said.append(
            f"The schedule takes {self.total_s:.4g} s, {self.unmoved_s:.4g} s if weights and optimizer state never "
            f"move: re-allocating gains {gain:.2g} %."
        )
        return said

    def tables(self) -> list[Table]:
        rows: list[list[object]] = [
            [
                each.phase.seq_len,
                each.phase.num_steps,
                str(each.layout),
                each.step_s,
                None if each.move is None else each.move.total_bytes / GIB,
                None if each.move is None else each.move.seconds,
                each.pays_after_steps,
            ]
            for each in self.phases
        ]
        columns = ["tokens", "steps", "layout", "step s", "moved GiB", "move s", "own layout pays after steps"]
        return [Table("phases", columns, rows)]

    def to_json(self) -> dict[str, Any]:
        return {
            "mixed": self.schedule.mixed,
            "total_s": self.total_s,
            "unmoved_s": self.unmoved_s,
            "phases": [_plain(each) for each in self.phases],
            "sentences": self.sentences(),
        }


def parse_schedule(text: str) -> Schedule:
    """``LEN:STEPS,...`` or ``LEN@SHARE,...``. Raises BadInput: not positive, not sorted."""
    mixed = "@" in text
    mark = "@" if mixed else ":"
    phases = []
    for word in text.split(","):
        length, found, steps = word.partition(mark)
        try:
            phases.append(Phase(int(length), float(steps) if mixed else int(steps)))
        except ValueError:
            found = ""
        if not found or not 0 < phases[-1].num_steps < math.inf:
            raise BadInput("seq-len-schedule", word, "LENGTH:STEPS or LENGTH@SHARE with positive numbers")
    check_lengths([phase.seq_len for phase in phases])
    if mixed:
        total = sum(phase.num_steps for phase in phases)
        phases = [Phase(phase.seq_len, phase.num_steps / total) for phase in phases]
    return Schedule(tuple(phases), mixed)


def plan_phases(
    spec: CaseSpec,
    schedule: Schedule,
    assumptions: Assumptions,
    *,
    choices: Choices | None = None,
    evaluate: Evaluate | None = None,
    budget: int = PHASE_BUDGET,
    progress: Callable[[int, int, str], None] | None = None,
) -> PhasesPlan:
    """The fastest way through a schedule at the global batch of `spec`, by dynamic programming over layouts.

    Candidates of every phase are all phases' own best layouts, and what needs least memory on the same placements.
    `budget` is of each phase's own search; besides, every candidate is evaluated once at every length.
    Raises BadInput where a length does not divide the batch, or nothing fits it.
    """
    timing = evaluate or simulated(assumptions)
    specs = [_of_length(spec, phase.seq_len) for phase in schedule.phases]
    own: list[Try] = []
    for number, each in enumerate(specs):
        own.append(_best(each, assumptions, choices, evaluate, budget))
        if progress is not None:
            progress(number + 1, len(specs), f"sequences of {each.workload.seq_len}")
    best = [each.layout for each in own]
    layouts = list(dict.fromkeys([*best, *map(_smallest, best)]))
    seconds = [[_step_s(each, layout, own[i], timing) for layout in layouts] for i, each in enumerate(specs)]
    moves = {(a, b): _moved(specs, a, b, assumptions) for a in layouts for b in layouts if a != b}
    steps = [phase.num_steps for phase in schedule.phases]
    way, unmoved_s = _unmoved(steps, seconds, layouts)
    total_s = unmoved_s
    if not schedule.mixed:
        way, total_s = _way(steps, seconds, layouts, moves)
    if total_s == math.inf:
        raise BadInput("seq-len-schedule", [p.seq_len for p in schedule.phases], "lengths that one placement fits")
    plans = [_phase_plan(i, schedule, way, layouts, seconds, own, moves) for i in range(len(specs))]
    return PhasesPlan(schedule, tuple(plans), total_s, unmoved_s if unmoved_s < math.inf else None)


def _smallest(layout: Layout) -> Layout:
    """On the same placement, the way of working that needs least memory."""
    return layout.model_copy(update={"recompute": "redispatch", "round_length": 1, "deferred_w": 0, "mbs": 1})


def _held_by(layout: Layout) -> Layout:
    """The layout with only what decides which GPU holds what."""
    return _smallest(layout).model_copy(update={"copies": "rank", "lookahead": 1})


def _unmoved(
    steps: Sequence[float], seconds: Sequence[Sequence[float]], layouts: Sequence[Layout]
) -> tuple[list[int], float]:
    """The fastest way through all phases on one placement."""
    ways = []
    for held in dict.fromkeys(map(_held_by, layouts)):
        mine = [k for k, layout in enumerate(layouts) if _held_by(layout) == held]
        way = [min(mine, key=lambda k: row[k]) for row in seconds]
        ways.append((sum(n * row[k] for n, row, k in zip(steps, seconds, way, strict=True)), way))
    total_s, way = min(ways)
    return way, total_s


def _of_length(spec: CaseSpec, seq_len: int) -> CaseSpec:
    workload = Workload.make(**{**spec.workload.model_dump(), "seq_len": seq_len})
    _ = workload.num_sequences  # refuses a length that does not divide the batch
    return CaseSpec(model=spec.model, cluster=spec.cluster, workload=workload, system=spec.system)


def _best(
    spec: CaseSpec, assumptions: Assumptions, choices: Choices | None, evaluate: Evaluate | None, budget: int
) -> Try:
    seed = allocate(problem(spec, assumptions, choices)).layout
    found = refine(spec, [seed], assumptions, evaluate=evaluate, budget=budget).best
    if found is None:
        raise BadInput("cluster", spec.cluster.name, f"a cluster on which sequences of {spec.workload.seq_len} fit")
    return found


def _step_s(spec: CaseSpec, layout: Layout, own: Try, evaluate: Evaluate) -> float:
    """Infinite where the layout does not fit."""
    if layout == own.layout:
        return own.step_time_s or 0.0
    try:
        found = evaluate(spec.with_layout(layout))
    except BadInput:
        return math.inf
    return found.step_time_s if found.status == "ok" and found.step_time_s is not None else math.inf


def _moved(specs: Sequence[CaseSpec], a: Layout, b: Layout, assumptions: Assumptions) -> Move:
    """Between two layouts, of which either may not divide the batch of some lengths."""
    for spec in specs:
        try:
            return move(spec.with_layout(a), spec.with_layout(b), assumptions)
        except BadInput:  # one of the two does not divide this length's batch
            continue
    return Move(math.inf, math.inf)


def _way(
    steps: Sequence[float],
    seconds: Sequence[Sequence[float]],
    layouts: Sequence[Layout],
    moves: dict[tuple[Layout, Layout], Move],
) -> tuple[list[int], float]:
    """Number of the layout of every phase, and the seconds of all; moves are paid between phases."""

    def moved_s(a: int, b: int) -> float:
        return 0.0 if a == b else moves[layouts[a], layouts[b]].seconds

    every = range(len(layouts))
    reached = [(steps[0] * seconds[0][k], [k]) for k in every]
    for n, row in zip(steps[1:], seconds[1:], strict=True):
        reached = [
            min((before + moved_s(way[-1], k) + n * row[k], [*way, k]) for before, way in reached) for k in every
        ]
    total_s, way = min(reached)
    return way, total_s


def _phase_plan(
    number: int,
    schedule: Schedule,
    way: Sequence[int],
    layouts: Sequence[Layout],
    seconds: Sequence[Sequence[float]],
    own: Sequence[Try],
    moves: dict[tuple[Layout, Layout], Move],
) -> PhasePlan:
    here, mine, phase = way[number], own[number], schedule.phases[number]
    own_s = mine.step_time_s or 0.0
    before = way[number - 1] if number else here
    kept = seconds[number][before]
    pays = None
    if not schedule.mixed and mine.layout != layouts[before] and own_s < kept < math.inf:
        pays = moves[layouts[before], mine.layout].seconds / (kept - own_s)
    return PhasePlan(
        phase,
        layouts[here],
        seconds[number][here],
        mine.layout,
        own_s,
        kept if number and kept < math.inf else None,
        moves[layouts[before], layouts[here]] if here != before else None,
        pays,
    )


def _phase_in_words(each: PhasePlan, mixed: bool) -> str:
    steps = f"{100 * each.phase.num_steps:.0f} % of the steps" if mixed else f"{each.phase.num_steps:.0f} steps"
    said = f"{steps} of {each.phase.seq_len} tokens: {each.step_s:.4g} s a step on {each.layout}"
    if each.move is not None and each.move.total_bytes:
        said += f", after moving {each.move.total_bytes / GIB:.4g} GiB in {each.move.seconds:.3g} s"
        if each.kept_step_s is None:
            said += "; the layout before does not fit"
    if each.pays_after_steps is not None:
        said += f"; its own best layout ({each.own_step_s:.4g} s) pays after {each.pays_after_steps:.3g} steps"
    return said + "."


def _plain(each: PhasePlan) -> dict[str, Any]:
    return {
        "seq_len": each.phase.seq_len,
        "num_steps": each.phase.num_steps,
        "layout": each.layout.model_dump(mode="json"),
        "step_s": each.step_s,
        "own_layout": each.own_layout.model_dump(mode="json"),
        "own_step_s": each.own_step_s,
        "kept_step_s": each.kept_step_s,
        "move_bytes": None if each.move is None else each.move.total_bytes,
        "move_s": None if each.move is None else each.move.seconds,
        "pays_after_steps": each.pays_after_steps,
    }
