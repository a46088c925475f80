"""The paper's claims judged by trials: value and verdict for each set of assumptions, computed and never typed in."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.assumptions import ASSUMPTIONS, DEFAULT_ASSUMPTIONS, DEPARTURES
from bench.case import Case
from bench.evaluate import CostModel
from bench.results import PUBLISHED, Store
from bench.trial import Trial, content_id
from experiments import Request, fig7, virtual_stages
from experiments._paper import Claim, claims
from experiments._study import Cell, trials_of
from experiments._sweep import Job

COMES_OUT, MORE, LESS, DOES_NOT, NO_DATA = "comes out", "comes out, and more", "in part", "does not", "no trials"
TOLERANCE = 0.05
"""By how much, relative, a factor may miss the paper's span and still count as it."""

STEADY = 0.005
"""By how much, relative, a rate may fall and still count as not falling: what a search within a budget leaves open."""

BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"


class Finding(NamedTuple):
    """What one claim comes to under one set of assumptions; `cells` has the numbers behind the value."""

    claim: Claim
    assumptions: str
    value: str
    verdict: str
    cells: Mapping[str, float | None]


class Ground(NamedTuple):
    """The trials that claims are judged by: Figure 7's, and those of the study of virtual stages with their cells."""

    throughput: Sequence[Trial]
    stages: Sequence[tuple[Cell, Trial]]


def ground(request: Request) -> Ground:
    """Simulates what is missing, under the request's assumptions."""
    cells = virtual_stages.cells(request.quick)
    return Ground(fig7.trials(request), list(zip(cells, trials_of(request, cells), strict=True)))


def published_ground(assumptions: str, folder: Path = PUBLISHED) -> Ground:
    """What is published for a set of assumptions, whatever code made it; nothing is simulated."""
    model, known = CostModel.named(assumptions), Store(folder).trials()
    cells = virtual_stages.cells()
    throughput = [_newest(known, Job(spec, model)) for spec in fig7.specs()]
    stages = [(cell, _newest(known, Job(cell.spec, model, cell.fixed))) for cell in cells]
    return Ground([t for t in throughput if t is not None], [(c, t) for c, t in stages if t is not None])


def _newest(known: Sequence[Trial], job: Job) -> Trial | None:
    wanted, values = content_id(job.spec), job.model.values.model_dump(mode="json")
    for trial in reversed(known):
        same_search = trial.search.get("fixed") == list(job.fixed)
        if same_search and trial.assumption_values == values and content_id(trial.spec) == wanted:
            return trial
    return None


def published_sets(folder: Path = PUBLISHED) -> list[str]:
    """Sets of assumptions that published trials rest on, the default first."""
    found = {trial.assumptions for trial in Store(folder).trials()} & set(ASSUMPTIONS)
    return sorted(filter(None, found), key=lambda name: (name != DEFAULT_ASSUMPTIONS, name))


def judge(claim: Claim, assumptions: str, on: Ground) -> Finding:
    """One claim under one set of assumptions."""
    match claim.measure:
        case "speedup":
            return _speedup(claim, assumptions, on.throughput)
        case "attention share":
            return _attention_share(claim, assumptions, on.throughput)
        case "virtual stages":
            return _virtual_stages(claim, assumptions, on.stages)


def judge_all(grounds: Mapping[str, Ground]) -> list[Finding]:
    """Every claim under every set, claim by claim."""
    return [judge(claim, name, on) for claim in claims() for name, on in grounds.items()]


def overall(findings: Sequence[Finding]) -> str:
    """The verdict on a claim from its findings under several sets, with what decides where they differ."""
    by_verdict: dict[str, list[str]] = {}
    findings = [each for each in findings if each.verdict != NO_DATA] or findings
    for finding in findings:
        by_verdict.setdefault(finding.verdict, []).append(finding.assumptions)
    if len(by_verdict) == 1:
        return next(iter(by_verdict))
    kinds = {finding.assumptions: finding.verdict.partition(":")[0] for finding in findings}
    said = "; ".join(f"{verdict} under {', '.join(names)}" for verdict, names in by_verdict.items())
    return said if len(set(kinds.values())) == 1 else f"depends on {_deciding(kinds)}: {said}"


def _deciding(kinds: Mapping[str, str]) -> str:
    """The assumptions by which sets with another verdict than the default's differ from it; "the assumptions" where
    these are many."""
    others = [name for name, kind in kinds.items() if kind != kinds.get(DEFAULT_ASSUMPTIONS)]
    fields = dict.fromkeys(DEPARTURES[name].field for name in others if name in DEPARTURES)
    return " and ".join(fields) if all(name in DEPARTURES for name in others) else "the assumptions"


def _speedup(claim: Claim, assumptions: str, trials: Sequence[Trial]) -> Finding:
    ratios = {
        f"{model} {seq_len // 1024}K": fig7.speedup(cell, claim.over)
        for (model, seq_len), cell in fig7.cells_of(trials).items()
        if fig7.OURS in cell and set(claim.over) & set(cell)  # a trial that is not there says nothing
    }
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known or claim.high is None:
        return Finding(claim, assumptions, "-", NO_DATA, ratios)
    low, high = min(known.values()), max(known.values())
    left_out = f", {len(ratios) - len(known)} where one side has no layout" if len(known) < len(ratios) else ""
    value = f"{low:.2f}x to {high:.2f}x over {len(known)} cells{left_out}"
    if claim.low is None:
        return Finding(claim, assumptions, value, _up_to(high, claim.high), ratios)
    reached = [name for name, ratio in known.items() if ratio >= claim.low * (1 - TOLERANCE)]
    if len(reached) == len(known):
        verdict = MORE if high > claim.high * (1 + TOLERANCE) else COMES_OUT
    else:
        verdict = f"{LESS}: {len(reached)} of {len(known)} cells reach it" if reached else DOES_NOT
    return Finding(claim, assumptions, value, verdict, ratios)


def _up_to(ours: float, claimed: float) -> str:
    """The largest factor beside the claimed one."""
    if ours <= 1:
        return DOES_NOT
    if ours < claimed * (1 - TOLERANCE):
        return f"{LESS}: faster, by less"
    return MORE if ours > claimed * (1 + TOLERANCE) else COMES_OUT


def attention_share(case: Case) -> float:
    """Share of a `disagmoe` layout's GPUs that hold attention."""
    layout = case.layout
    attention = layout.groups * layout.attention_ranks
    return attention / (attention + (layout.expert_groups or layout.groups) * layout.expert_ranks)


def _attention_share(claim: Claim, assumptions: str, trials: Sequence[Trial]) -> Finding:
    lines: dict[str, list[tuple[int, float]]] = {}
    for trial in trials:
        if trial.case.system == fig7.OURS and trial.status == "ok" and isinstance(trial.case, Case):
            point = (trial.case.workload.seq_len, attention_share(trial.case))
            lines.setdefault(trial.case.model.name, []).append(point)
    shares = {model: [share for _, share in sorted(line)] for model, line in lines.items() if len(line) > 1}
    grows = [line[-1] > line[0] and line == sorted(line) for line in shares.values()]
    cells = {f"{model} {seq_len // 1024}K": share for model, line in lines.items() for seq_len, share in sorted(line)}
    value = "; ".join(f"{model} {_percent(line[0])} to {_percent(line[-1])}" for model, line in shares.items())
    return Finding(claim, assumptions, value or "-", _of_models(grows), cells)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _virtual_stages(claim: Claim, assumptions: str, stages: Sequence[tuple[Cell, Trial]]) -> Finding:
    lines: dict[str, dict[float, float | None]] = {}
    for cell, trial in stages:
        if cell.spec.system == fig7.OURS:
            lines.setdefault(cell.panel, {})[cell.x] = fig7.rate(trial)
    helps, words = [], []
    for model, line in lines.items():
        rates = [line[x] for x in sorted(line)]
        # A search that finds nothing ends the line: what comes after it has to be nothing as well.
        fitting = [rate for rate in rates if rate is not None]
        unbroken = rates == [*fitting, *[None] * (len(rates) - len(fitting))]
        rises = all(after >= (1 - STEADY) * before for before, after in pairwise(fitting))
        helps.append(len(fitting) > 1 and unbroken and rises and fitting[-1] > fitting[0])
        parts = (f"{x:g}: {'-' if line[x] is None else f'{line[x]:,.0f}'}" for x in sorted(line))
        words.append(f"{model} {', '.join(parts)}")
    cells = {f"{model} {x:g}": rate for model, line in lines.items() for x, rate in line.items()}
    return Finding(claim, assumptions, f"tokens/s/GPU: {'; '.join(words)}" if words else "-", _of_models(helps), cells)


def _of_models(holds: Sequence[bool]) -> str:
    """A verdict from one answer a model."""
    if not holds:
        return NO_DATA
    if all(holds):
        return COMES_OUT
    return f"{LESS}: {sum(holds)} of {len(holds)} models" if any(holds) else DOES_NOT


def markdown(findings: Sequence[Finding]) -> str:
    """The table of the README, with its title line; says so where nothing is published."""
    if all(finding.verdict == NO_DATA for finding in findings):
        return "No trials that a claim could be judged by are published yet.\n"
    columns = ["the paper says", "under", "here, simulated", "verdict"]
    rows = []
    for claim in dict.fromkeys(finding.claim for finding in findings):
        mine = [finding for finding in findings if finding.claim == claim]
        says = f"**{claim.says}** ({claim.source})"
        rows += [[says if one is mine[0] else "", f"`{one.assumptions}`", one.value, one.verdict] for one in mine]
        if len({one.verdict for one in mine} - {NO_DATA}) > 1:
            rows.append(["", "all", "", f"**{overall(mine)}**"])
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str | None:
    """`text` with the table between the two marks; None where it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}{END}{after}" if begin and end else None
