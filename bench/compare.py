"""Several systems on one model, cluster and workload: tuned alike, simulated, and run alike on this machine."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.evaluate import CostModel, nothing_fits, predicted_trial, tuned_trial
from bench.loading import WrittenPlan
from bench.placement import Placement
from bench.predict import GIB, Prediction, predict
from bench.system import get_system, systems
from bench.trial import Trial
from bench.tune import DEFAULT_BUDGET, TuneResult, tune

if TYPE_CHECKING:
    from bench.execute.report import VerifyReport
    from bench.timeline import Timeline

COLUMNS = (
    "system", "step ms", "vs first", "tokens/s/GPU", "MFU", "bound ms", "of bound", "overlapped", "bubble",
    "exposed comm. ms", "peak GiB", "layout",
)  # fmt: skip
RUN_COLUMNS = ("system", "verified", "worst gradient error", "tokens/s", "loss", "ranks", "layout")


@dataclass(frozen=True)
class Compared:
    """One system's side of a comparison; `best` is None where no layout fits in memory.

    refused: reasons for which layouts of its space were refused, each with the number of layouts.
    fault: where nothing fits, why.
    """

    label: str
    trial: Trial
    best: Prediction | None
    refused: tuple[tuple[str, int], ...] = ()
    fault: BadInput | None = None

    def row(self, first: "Compared") -> tuple[object, ...]:
        """Under `COLUMNS`; "vs first" is throughput over that of `first`."""
        if self.best is None:
            return (self.label, *[None] * (len(COLUMNS) - 2), self.trial.message)
        found = self.best
        m, base = found.metrics, first.best
        return (
            self.label,
            m.step_time_s * 1e3,
            f"{base.metrics.step_time_s / m.step_time_s:.3f}x" if base else None,
            m.tokens_per_s_per_gpu,
            None if m.mfu is None else f"{m.mfu:.1%}",
            found.bound_s * 1e3,
            f"{found.bound_s / m.step_time_s:.1%}",
            f"{max(0.0, m.overlapped_fraction):.1%}",
            f"{m.bubble_fraction:.1%}",
            m.exposed_comm_s * 1e3,
            found.peak_memory_bytes / GIB,
            _layout(self.trial),
        )


@dataclass(frozen=True)
class Ran:
    """One system's verification and run on this machine; `timeline` is its last step's, None where it failed."""

    label: str
    report: "VerifyReport"
    trial: Trial
    timeline: "Timeline | None"
    placement: Placement

    @property
    def ok(self) -> bool:
        return self.report.ok and self.trial.status == "ok"

    def row(self) -> tuple[object, ...]:
        """Under `RUN_COLUMNS`."""
        losses = self.trial.samples.get("loss", [])
        return (
            self.label,
            "yes" if self.report.ok else "NO",
            f"{self.report.worst.gradient_error:.1e}",
            self.trial.metrics.get("tokens_per_s"),
            f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else self.trial.status,
            self.report.num_ranks,
            _layout(self.trial),
        )


def _layout(trial: Trial) -> str:
    """With what sets the plan apart."""
    return " ".join([trial.layout or "defaults", *(f"({trait})" for trait in trial.traits)])


def resolve(word: str) -> str:
    """The system that a word means: a name, a schedule file, or the beginning of one name alone. Raises BadInput."""
    begun = [name for name in systems() if name.startswith(word)]
    name = begun[0] if word not in systems() and len(begun) == 1 else word
    get_system(name)
    return name


def labels(names: Sequence[str]) -> list[str]:
    """What systems are called in tables and drawings: by their own name, by their file where two have the same."""
    own = [get_system(name).name for name in names]
    return [label if own.count(label) == 1 else name for name, label in zip(names, own, strict=True)]


def compare(
    specs: Sequence[CaseSpec],
    costs: CostModel,
    *,
    budget: int | None = DEFAULT_BUDGET,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Compared]:
    """Tunes and simulates every spec with the same budget; specs differ in their system only.

    Args:
        specs: a case among them is simulated in its layout.
        progress: called with (label, simulations done, layouts to consider), before each system and in between.
    Raises:
        BadInput (PlanError): a case that does not fit in memory; a schedule file whose plan is faulty in a layout that
            was tried.
    """
    found = []
    for label, spec in zip(labels([spec.system for spec in specs]), specs, strict=True):

        def advance(done: int, left: int, label: str = label) -> None:
            if progress is not None:
                progress(label, done, done + left)

        advance(0, 1)
        if isinstance(spec, Case):
            given = predict(spec, costs.values)
            given.require_fits()
            found.append(Compared(label, predicted_trial(given, costs), given))
            continue
        tuned = tune(spec, costs.values, budget=budget, progress=advance)
        fault = nothing_fits(tuned, costs) if tuned.best is None else None
        found.append(Compared(label, tuned_trial(tuned, costs, (), budget), tuned.best, _refusals(tuned), fault))
    return found


def _refusals(tuned: TuneResult) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for candidate in tuned.candidates:
        if candidate.status == "refused":
            counts[candidate.reason] = counts.get(candidate.reason, 0) + 1
    return tuple(sorted(counts.items(), key=lambda item: -item[1]))


def described(entry: Compared) -> dict[str, Any]:
    """One entry for JSON."""
    case = entry.trial.case
    return {
        "system": case.system,
        "label": entry.label,
        "status": entry.trial.status,
        "message": entry.trial.message,
        "layout": entry.trial.layout,
        "traits": list(entry.trial.traits),
        **entry.trial.metrics,
        "search": entry.trial.search,
        "refused": [{"reason": reason, "layouts": number} for reason, number in entry.refused],
        "case_id": entry.trial.case_id,
        "trial": entry.trial.name,
        "command": entry.trial.command,
    }


def sequences_for(names: Sequence[str], ranks: int, at_least: int) -> int:
    """Sequences of a batch that all systems can be run on beside each other: what a plan in a text is written for fits.

    Raises BadInput for a plan of more ranks than there are.
    """
    written = [system for system in map(get_system, names) if isinstance(system, WrittenPlan)]
    for system in written:
        if system.written.placement.size > ranks:
            raise BadInput("ranks", ranks, f"{system.written.placement.size} or more, the ranks of {system.name}")
    return math.lcm(at_least, *(system.sequences_a_round for system in written))


def trying_layout(spec: CaseSpec) -> Layout:
    """The layout of a system's space that tries most of its schedule on few ranks: one replica on all ranks of the
    cluster, groups of two ranks or more, the pipeline moving on between groups most often; of equals the first.

    Raises BadInput where no layout of the space is possible.
    """
    best: tuple[tuple[bool, bool, int], Layout] | None = None
    for layout in _possible(spec):
        placement = get_system(spec.system).placement(spec.with_layout(layout))
        homes = [*placement.attention, placement.head]
        moves = sum(here != there for here, there in pairwise(homes))
        score = (placement.size == spec.cluster.num_gpus, placement.data_ranks > 1, moves)
        if best is None or score > best[0]:
            best = score, layout
    if best is None:
        raise BadInput("ranks", spec.cluster.num_gpus, f"as many as a replica of {spec.system} has")
    return best[1]


def _possible(spec: CaseSpec) -> Iterator[Layout]:
    """Layouts of one replica that are not refused."""
    system = get_system(spec.system)
    seen = set()
    for choice in system.space(spec):
        copies = "rank" if choice.copies == "node" else choice.copies  # per node is simulated only
        layout = choice.model_copy(update={"replicas": 1, "mbs": 1, "recompute": "none", "copies": copies})
        layout = choice if isinstance(system, WrittenPlan) else layout
        if layout not in seen and (layout.replicas or 1) == 1:
            seen.add(layout)
            try:
                system.plan(spec.with_layout(layout))
            except BadInput as error:
                if error.fault:
                    raise
                continue
            yield layout


def run(
    cases: Iterable[Case],
    *,
    steps: int,
    device: str,
    data: str = "text",
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Ran]:
    """Verifies every case against the reference, then trains it, all on the same ranks, one case after the other.

    Raises BadInput where a case cannot be executed on this machine.
    """
    from bench.execute.pool import RankPool
    from bench.execute.verify import verify
    from bench.measured import measure
    from bench.system import plan_of

    todo = list(cases)
    on: Any = device
    with RankPool(max(case.cluster.num_gpus for case in todo), on) as pool:
        for number, (label, case) in enumerate(zip(labels([case.system for case in todo]), todo, strict=True)):
            if progress is not None:
                progress(label, number, len(todo))
            report = verify(case, pool)
            done = measure(case, steps=steps, device=on, data=data, pool=pool, keep_timeline=True)
            yield Ran(label, report, done.trial, done.timeline, plan_of(case).placement)
