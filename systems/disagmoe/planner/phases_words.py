"""A plan for a schedule of lengths: what every phase does, with both sides of whether re-allocating pays, in words."""

from dataclasses import dataclass
from typing import Any, Literal

from bench.case import Layout
from systems.disagmoe.planner.counting import counted
from systems.disagmoe.planner.move import Move
from systems.disagmoe.planner.schedule import Phase, Schedule
from systems.disagmoe.planner.tables import Table
from systems.disagmoe.planner.words import GIB, sooner

Verdict = Literal["first", "same", "must", "never", "pays", "stays"]


@dataclass(frozen=True)
class PhasePlan:
    """What one phase does.

    Args:
        layout, step_s: what it runs on, and seconds of a step.
        own_layout, own_step_s: the best for this length by itself.
        kept_layout, kept_step_s: the best on the placement of the phase before (of a mixture: on the one of all), None
            where that does not fit or does not divide the batch.
        compared: whether there is a placement to keep: False of the first phase.
        own_move: what it takes to go to its own placement (of a mixture: there and back), None where that is kept.
        move: what is moved, None where the placement stays.
        gap: by what share the rate of a split may be higher by the programme, where the solver was stopped at this
            length; None where its optimum is proven.
        settled, own_settled, kept_settled: whether the refinement of what it runs on, of its own best and of what is
            kept ended by itself; else its budget ended it, and a neighbour may be faster.
        elsewhere: whether it runs neither on its own placement nor on that of the phase before.
    """

    phase: Phase
    layout: Layout
    step_s: float
    own_layout: Layout
    own_step_s: float
    kept_layout: Layout | None
    kept_step_s: float | None
    compared: bool
    own_move: Move | None
    move: Move | None
    gap: float | None = None
    settled: bool = True
    own_settled: bool = True
    kept_settled: bool | None = None
    elsewhere: bool = False

    @property
    def pays_after_steps(self) -> float | None:
        """Steps after which the seconds of the move are won back; None where never, or where there is no choice."""
        if self.own_move is None or self.kept_step_s is None or self.kept_step_s <= self.own_step_s:
            return None
        return self.own_move.seconds / (self.kept_step_s - self.own_step_s)

    @property
    def all_settled(self) -> bool:
        """Whether no refinement that decided here was ended by its budget."""
        return self.settled and self.own_settled and self.kept_settled is not False

    @property
    def verdict(self) -> Verdict:
        """What becomes of the placement of the phase before.

        first: there is none; same: it is the best of this length too; must: it does not do for it, and is left; never:
        it is as fast as any, and kept; pays: it is left; stays: it is kept, as a move would take longer to pay.
        """
        if not self.compared:
            return "first"
        if self.kept_step_s is None:
            return "must"
        if self.own_move is None:
            return "same"
        if self.pays_after_steps is None:
            return "never"
        return "stays" if self.move is None else "pays"


@dataclass(frozen=True)
class PhasesPlan:
    """The whole schedule: seconds with the moves, and without any (None where no placement does for every length).

    Without a move what GPUs hold stays; how they work may still change. Of a mixture both are of a mean step.
    """

    schedule: Schedule
    phases: tuple[PhasePlan, ...]
    total_s: float
    unmoved_s: float | None

    def sentences(self) -> list[str]:
        said = [_in_words(number, each, self.schedule.mixed) for number, each in enumerate(self.phases, 1)]
        return [*said, self._together()]

    def _together(self) -> str:
        if self.schedule.mixed:
            alone_s = sum(each.phase.num_steps * each.own_step_s for each in self.phases)
            loses = 100 * (self.total_s / alone_s - 1)
            return (
                f"Together: a mean step takes {self.total_s:.4g} s on one placement; with every length on its own, and "
                f"moves for nothing, it would take {alone_s:.4g} s: one placement takes {loses:.2g} % longer."
            )
        if self.unmoved_s is None:
            return f"Together: the schedule takes {self.total_s:.4g} s; no placement fits every length: it has to move."
        saved = 100 * (1 - self.total_s / self.unmoved_s)
        both = f"the schedule takes {self.total_s:.4g} s; {self.unmoved_s:.4g} s on one placement throughout"
        if not any(each.move for each in self.phases):
            return f"Together: {both}: nothing moves."
        return f"Together: {both}: re-allocating saves {saved:.2g} % of that."

    def tables(self) -> list[Table]:
        share = "share of steps" if self.schedule.mixed else "steps"
        columns = [
            "tokens",
            share,
            "kept, step s",
            "own, step s",
            "moved GiB",
            "move s",
            "pays after steps",
            "does",
            "settled",
        ]
        rows: list[list[object]] = [
            [
                each.phase.seq_len,
                each.phase.num_steps,
                each.kept_step_s,
                each.own_step_s,
                each.own_move and each.own_move.total_bytes / GIB,
                each.own_move and each.own_move.seconds,
                "never" if each.verdict == "never" else each.pays_after_steps,
                "moves" if each.move else "starts" if each.verdict == "first" else "stays",
                "yes" if each.all_settled else "no",
            ]
            for each in self.phases
        ]
        layouts: list[list[object]] = []
        for each in self.phases:
            ways = {"runs": each.layout, "kept": each.kept_layout, "own": each.own_layout}
            for way in dict.fromkeys(way for way in ways.values() if way):
                names = ", ".join(name for name, other in ways.items() if other == way)
                layouts.append([each.phase.seq_len, names, str(way) or "defaults"])
        return [Table("phases (simulated)", columns, rows), Table("layouts", ["tokens", "of", "layout"], layouts)]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "simulated",
            "mixed": self.schedule.mixed,
            "total_s": self.total_s,
            "unmoved_s": self.unmoved_s,
            "phases": [_plain(each) for each in self.phases],
            "sentences": self.sentences(),
        }


def _in_words(number: int, each: PhasePlan, mixed: bool) -> str:
    steps = f"{100 * each.phase.num_steps:.3g} % of the steps" if mixed else counted(each.phase.num_steps, "step")
    said = f"Phase {number}: " if not mixed else ""
    said += f"{steps} of {each.phase.seq_len} tokens, {each.step_s:.4g} s a step on {str(each.layout) or 'defaults'}; "
    return said + _both_sides(each, mixed) + _stopped(each) + _unsettled(each)


def _stopped(each: PhasePlan) -> str:
    if each.gap is None:
        return ""
    return (
        f" At this length the solver ran out of time: by the programme a split may take up to {sooner(each.gap)} less "
        "than the one that its search began with."
    )


def _unsettled(each: PhasePlan) -> str:
    if each.all_settled:
        return ""
    names = ["of its own best"] if not each.own_settled else []
    names += ["of the kept placement"] if each.kept_settled is False and each.kept_layout != each.own_layout else []
    ways = (each.own_layout, each.kept_layout)
    names += ["of what it runs on"] if not each.settled and each.layout not in ways else []
    return f" The budget ended the refinement {' and '.join(names)}: a neighbour may be faster."


def _both_sides(each: PhasePlan, mixed: bool) -> str:
    kept_on = "this placement" if mixed else "the placement of the phase before"
    match each.verdict:
        case "first":
            same = each.layout == each.own_layout
            return "its own best." if same else f"its own best takes {each.own_step_s:.4g} s; what follows decides."
        case "same":
            own = f"{kept_on} is its own best as well"
            return f"{own}; what follows decides: {_moving(each.move)}." if each.move else f"{own}: nothing to move."
        case "must":
            return f"{kept_on} does not do for this length: {_moving(each.move)}."
        case "never":
            as_fast = f"on {kept_on} it is as fast as on any other: re-allocating never pays"
            return f"{as_fast} here; what follows decides: {_moving(each.move)}." if each.move else f"{as_fast}."
    away = _moving(each.own_move)
    away = f"; there and back is {away}" if mixed else f" after {away}"
    would = "would pay" if mixed or each.verdict == "stays" else "pays"
    said = (
        f"on {kept_on} {each.kept_step_s:.4g} s, on its own {each.own_step_s:.4g} s{away}: re-allocating {would} after "
    )
    said += f"{each.pays_after_steps:.3g} steps"
    if mixed:
        return f"{said} of this length in a row; a mixture stays where it is."
    if each.elsewhere:
        return f"{said}; it moves to a third placement, which what follows shares: {_moving(each.move)}."
    return f"{said}, and it {'moves' if each.move else 'stays'}."


def _moving(what: Move | None) -> str:
    return "" if what is None else f"moving {what.total_bytes / GIB:.4g} GiB in {what.seconds:.3g} s"


def _plain(each: PhasePlan) -> dict[str, Any]:
    def moved(what: Move | None) -> dict[str, float] | None:
        return None if what is None else {"bytes": what.total_bytes, "seconds": what.seconds}

    return {
        "seq_len": each.phase.seq_len,
        "num_steps": each.phase.num_steps,
        "layout": each.layout.model_dump(mode="json"),
        "step_s": each.step_s,
        "own_layout": each.own_layout.model_dump(mode="json"),
        "own_step_s": each.own_step_s,
        "own_move": moved(each.own_move),
        "kept_layout": each.kept_layout.model_dump(mode="json") if each.kept_layout else None,
        "kept_step_s": each.kept_step_s,
        "move": moved(each.move),
        "proven": each.gap is None,
        "gap": each.gap,
        "settled": each.settled,
        "own_settled": each.own_settled,
        "kept_settled": each.kept_settled,
        "verdict": each.verdict,
        "pays_after_steps": each.pays_after_steps,
    }
