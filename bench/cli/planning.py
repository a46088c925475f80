"""`moebench plan`: a schedule, and where a system has a planner of its own, why this one."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import executed, options
from bench.cli.asking import asks, best
from bench.cli.describing import described, show_plan
from bench.cli.options import RUN_MICROBATCHES
from bench.cli.pairs import PairsCommand
from bench.cli.refining import Here, Refining, Run, explain_choice, explained, explained_phases, planner_of, way_of
from bench.errors import BadInput

if TYPE_CHECKING:
    from bench.case import Case, CaseSpec, Layout
    from bench.evaluate import CostModel

RUN_OPTION = " Of --refine run. Default: {}."
_ASKED_FOR_WITH_A_LAYOUT = "nothing beside --layout, with which nothing is planned"


def add_verbs(app: typer.Typer) -> None:
    example = (
        "moebench plan ep --model tiny --cluster h800x1 --seq-len 64 --global-batch-tokens 1024 --layout ep=4 pp=2"
    )
    app.command("plan", cls=PairsCommand, epilog=f"Example: {example}")(plan)


@dataclass(frozen=True)
class Asked:
    """The options of `moebench plan`; those of a planner of its own are None where they were not given."""

    system: options.System_
    model: options.Model_
    cluster: Annotated[
        str | None,
        options.word("--cluster", "NAME|FILE", "Cluster, as of simulate; with --refine run, what its ranks are."),
    ] = None
    seq_len: Annotated[int | None, options.number("--seq-len", "Sequence length.", "TOKENS")] = None
    global_batch_tokens: options.Batch = None
    layout: options.Layout_ = None
    dtype: Annotated[
        str | None, options.word("--dtype", "bf16|fp32", "Default: bf16; fp32 for --refine run on a CPU.")
    ] = None
    assumptions: options.AssumptionSet = None
    set_: options.Setting = None
    seq_len_schedule: Annotated[
        str | None,
        options.word(
            "--seq-len-schedule",
            "TEXT",
            "Instead of --seq-len: lengths with steps, 4096:2000,16384:500, or a mixture, 4096@0.8,32768@0.2. "
            "Plans every phase and prices the moves between.",
        ),
    ] = None
    refine: Annotated[
        str | None,
        options.word(
            "--refine",
            "simulate|run|none",
            "How a planner of its own times the neighbours of its split: simulated, or run on this machine. "
            "Default: simulate.",
        ),
    ] = None
    budget: Annotated[int | None, options.number("--budget", "Most layouts that --refine times. Default: 64.")] = None
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            parser=options.seconds,
            help="Of each programme that a planner of its own solves; then its best so far is taken. Default: 10.",
            show_default=False,
        ),
    ] = None
    ranks: Annotated[int | None, options.number("--ranks", "Processes to start." + RUN_OPTION.format(4))] = None
    device: Annotated[
        str | None, options.word("--device", "cpu|cuda", "cpu (gloo) or cuda (NCCL)." + RUN_OPTION.format("cpu"))
    ] = None
    steps: Annotated[int | None, options.number("--steps", "Optimizer steps of a layout." + RUN_OPTION.format(8))] = (
        None
    )
    results: Annotated[
        Path | None, options.word("--results", "DIR", "Where trials are kept." + RUN_OPTION.format("results/local"))
    ] = None

    def costs(self) -> "CostModel":
        """Raises BadInput."""
        return options.cost_model(self.assumptions, self.set_)

    def given(self) -> "Layout | None":
        """The layout that was asked for. Raises BadInput."""
        return options.layout_of(self.system, self.layout)

    def refining(self) -> Refining:
        """How a planner of its own is to refine. Raises BadInput."""
        if self.budget is not None:
            options.at_least_one("budget", self.budget)
        how, here = way_of(self.refine), Here(self.ranks, self.device, self.steps, self.results)
        if how != "run":
            here.require_unused()
        return Refining(how, self.budget, self.time_limit, Run.of(here) if how == "run" else None)

    def require_heeded(self, print_schedule: bool) -> None:
        """Raises BadInput where an option would go unheeded: nothing plans, or it plans something else."""
        planners = {"--refine": self.refine, "--budget": self.budget, "--time-limit": self.time_limit}
        if self.seq_len_schedule is not None:
            planner_of(self.system, "explain_schedule", "--seq-len-schedule", self.seq_len_schedule)
            planned = "nothing beside --seq-len-schedule: every phase is planned, and refined by simulation"
            way = None if self.refine == "simulate" else self.refine
            printed = "given" if print_schedule else None
            _require_none({"--layout": self.layout, "--print-schedule": printed, "--refine": way}, planned)
        for option, value in planners.items():
            if value is not None:
                planner_of(self.system, "explain", option, value)
        if self.layout is not None:
            priced = {"--assumptions": self.assumptions, "--set": self.set_}
            _require_none(planners, _ASKED_FOR_WITH_A_LAYOUT)
            _require_none(priced, "nothing beside --layout, with which nothing is priced")
        if self.refine == "none":
            _require_none({"--budget": self.budget}, "nothing beside --refine none, which times no layouts")
        if self.refine == "run" and print_schedule:
            raise BadInput("--refine", "run", "simulate or none with --print-schedule")

    def length(self) -> int:
        """The length to begin with. Raises BadInput unless exactly one of the two options is given."""
        if self.seq_len is None and self.seq_len_schedule is None:
            raise BadInput("--seq-len", None, "a number of tokens (it is required), or --seq-len-schedule instead")
        if self.seq_len_schedule is None:
            return self.seq_len or 0
        if self.seq_len is not None:
            raise BadInput("--seq-len", self.seq_len, "nothing beside --seq-len-schedule, which has its own lengths")
        from systems.disagmoe.planner.schedule import parse_schedule

        return parse_schedule(self.seq_len_schedule).phases[0].seq_len

    def blamed(self, error: BadInput, length: int) -> BadInput:
        """The error, of the schedule where that has the length that is refused."""
        field = error.field.lstrip("-").replace("-", "_").rpartition(".")[2]
        if self.seq_len_schedule is None or field not in ("seq_len", "global_batch_tokens"):
            return error
        if field == "global_batch_tokens" and length > 0:
            tokens = options.DEFAULT_BATCH_TOKENS if self.global_batch_tokens is None else self.global_batch_tokens
            if tokens < 1:
                return error
            return BadInput("--seq-len-schedule", length, f"lengths that divide the global batch of {tokens} tokens")
        return BadInput("--seq-len-schedule", length, error.allowed)

    def spec(self, run: Run | None) -> "CaseSpec":
        """What is planned: on a cluster, or on this machine's ranks. Raises BadInput."""
        length, tokens = self.length(), self.global_batch_tokens
        if run is None:
            cluster = options.required("--cluster", self.cluster)
            how = (self.dtype or "bf16", "balanced", 0)
            try:
                return options.spec_on(self.system, self.model, cluster, length, tokens, *how)
            except BadInput as error:
                raise self.blamed(error, length) from None
        here = executed.local_cluster(run.ranks, run.device, self.cluster)
        batch = RUN_MICROBATCHES * run.ranks * length if tokens is None else tokens
        dtype = self.dtype or ("fp32" if run.device == "cpu" else "bf16")
        return options.spec_of(self.system, self.model, here, length, batch, dtype, "learned", 0)


def _require_none(given: Mapping[str, object], allowed: str) -> None:
    """Raises BadInput for the first option that has a value."""
    for option, value in given.items():
        if value is not None:
            raise BadInput(option, " ".join(value) if isinstance(value, list) else value, allowed)


@asks
def plan(
    asked: Asked,
    print_schedule: Annotated[
        bool, typer.Option("--print-schedule", help="Print the plan's text and nothing else.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show and check a system's schedule: placement, counts, whether it can run.

    Without a layout it is tuned; a system that has a planner of its own plans instead, and says why. With --refine run
    the neighbours of its split are trained on processes of this machine, and every trial is kept.
    """
    from bench.system import get_system

    own = hasattr(get_system(asked.system), "explain")
    costs, given = asked.costs(), asked.given()
    asked.require_heeded(print_schedule)
    refining = asked.refining()
    spec = asked.spec(refining.run)
    if asked.seq_len_schedule is not None:
        explain_choice(explained_phases(spec, asked.seq_len_schedule, costs, refining), json)
        return
    if given is None and own:
        reasons = explained(spec, costs, refining)
        if not print_schedule:
            explain_choice(reasons, json)
            if json:
                return
        given = reasons.layout
    _show(spec.with_layout(given) if given is not None else best(spec, costs)[0].case, print_schedule, json)


def _show(case: "Case", print_schedule: bool, json: bool) -> None:
    """Checks the case's plan and says what it is. Raises BadInput (PlanError) where it cannot run."""
    from bench.check import check
    from bench.cli.output import print_json
    from bench.lower import lower
    from bench.system import plan_of

    schedule = plan_of(case)
    program = lower(schedule, case.model)
    check(program)
    if json:
        text = {"schedule": str(schedule)} if print_schedule else {}
        print_json({**described(case, schedule), "num_operations": program.num_ops, "check": "ok", **text})
    elif print_schedule:
        sys.stdout.write(str(schedule))
    else:
        show_plan(case, schedule, program.num_ops)
