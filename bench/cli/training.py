"""`moebench run`: a system trains on processes of this machine, and its trial is kept."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import executed, options
from bench.cli.asking import asks
from bench.cli.pairs import PairsCommand

if TYPE_CHECKING:
    from bench.case import CaseSpec
    from bench.cli.resuming import Resumed
    from bench.execute.train import StepRecord
    from bench.trial import Trial


def add_verbs(app: typer.Typer) -> None:
    example = "moebench run disagmoe --model tiny --ranks 4 --steps 20 --layout attention_ranks=2 expert_ranks=2"
    app.command("run", cls=PairsCommand, epilog=f"Example: {example}")(run)


@dataclass(frozen=True)
class Run:
    """What `moebench run` is asked."""

    system: options.SystemOrNone = None
    model: options.ModelOrNone = None
    ranks: options.Ranks = 4
    device: options.Device = "cpu"
    steps: Annotated[
        int, typer.Option("--steps", metavar="NUMBER", parser=options.whole_number, help="Optimizer steps.")
    ] = 20
    layout: options.Layout_ = None
    seq_len: options.SeqLen = 64
    global_batch_tokens: options.Batch = None
    dtype: options.Dtype = "fp32"
    transport: options.Transport = "auto"
    serial: options.Serial = False
    weights: options.Weights = "host"
    data: options.Data = "text"
    routing: options.Routing_ = "learned"
    seed: options.Seed = 0
    cluster: options.RunCluster = None
    trainer: options.Trainer_ = None
    results: options.Results = None
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Keep checkpoints there, one after the last step."),
    ] = None
    save_every: Annotated[
        int | None,
        typer.Option("--save-every", metavar="STEPS", parser=options.whole_number, help="And one every so many steps."),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            help="Go on from the last checkpoint there, as the run that saved it, but for the system, layout, ranks, "
            "device, steps and folders that are named.",
        ),
    ] = None
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", parser=options.seconds, help="A step or a save that takes longer is a hang."
        ),
    ] = 300.0
    record_routing: Annotated[
        Path | None,
        typer.Option(
            "--record-routing",
            metavar="FILE",
            help="Write there how many tokens every expert got in every step; --routing recorded:FILE replays it.",
        ),
    ] = None
    json: options.Json = False

    def started(self, ctx: typer.Context) -> "Resumed":
        """The run that these options describe, or a checkpoint and those of them that were given. Raises BadInput."""
        from bench.cli.resuming import Resumed, resumed, saving_of

        if self.resume is not None:
            return resumed(ctx, self.resume)
        saving = saving_of(self.save, self.save_every)
        case = executed.run_case(
            options.required("system", self.system),
            options.required("--model", self.model),
            *(self.ranks, self.device, self.seq_len, self.global_batch_tokens, self.dtype, self.routing, self.seed),
            *(self.layout, self.cluster),
            transport=self.transport,
        )
        return Resumed(case, self.device, self.data, self.steps, saving)

    def measured(self, run: "Resumed", trainer: str, on_step: "Callable[[StepRecord], None]") -> "Trial":
        """Trains."""
        from bench.measured import measure

        return measure(
            run.case,
            steps=run.steps,
            device=options.device_of(run.device),
            transport=self.transport,
            serial=self.serial,
            weights=self.weights,
            data=executed.corpus_of(run.data),
            on_step=on_step,
            trainer=trainer,
            saving=run.saving,
            resume=self.resume,
            on_saved=None if self.json else lambda folder: typer.echo(f"saved {folder}"),
            timeout_s=self.timeout,
            keep_routing=self.record_routing is not None,
        ).trial


@asks
def run(asked: Run, ctx: typer.Context) -> None:
    """Train on processes of this machine and keep the trial: loss, speed and gradient norm of every step.

    Without a layout, disagmoe takes half of the ranks for attention, ep as many as divide the experts. Exit code 1
    where the run fails or diverges.
    """
    require_torch()
    from bench.cli.output import require_folder, require_new_file
    from bench.results import LOCAL, Store
    from bench.system import trainer_of

    started = asked.started(ctx)
    kept = LOCAL if asked.results is None else asked.results
    require_folder("results", kept)
    if asked.record_routing is not None:
        require_new_file("record-routing", asked.record_routing)
    trainer = trainer_of(started.case, asked.trainer)
    show = (lambda _: None) if asked.json else _shower(_headline(started, trainer), started.steps)
    done: list[StepRecord] = []

    def on_step(record: "StepRecord") -> None:
        done.append(record)
        show(record)

    trial = asked.measured(started, trainer, on_step)
    path = Store(kept).write(trial)
    if asked.record_routing is not None and done:
        asked.record_routing.write_text(_recorded(trial.case, done), encoding="utf-8")
    _tell(trial, path, asked.json)
    if trial.status != "ok":
        _tell_failure(trial, started)
        raise typer.Exit(1)


def _headline(started: "Resumed", trainer: str) -> str:
    from bench.system import plan_of

    case = started.case
    named = ", ".join([trainer, *plan_of(case).traits])
    where = f"{case.cluster.num_gpus} x {started.device}"
    return f"{case.system} ({named}) for {case.model.name}, layout {case.layout}, {where}, case {case.id}"


def _tell(trial: "Trial", path: Path, json: bool) -> None:
    from bench.cli.output import print_json

    if json:
        print_json(trial_fields(trial))
    else:
        _show_end(trial)
        typer.echo(f"wrote {path}")


def _tell_failure(trial: "Trial", started: "Resumed") -> None:
    from bench.execute.manifest import LATEST

    lines = [f"moebench: {trial.status}: {trial.message}", *trial.last_actions]
    if started.saving is not None and (started.saving.folder / LATEST).exists():
        lines.append(f"go on from the last checkpoint with: moebench run --resume {started.saving.folder}")
    typer.echo("\n".join(lines), err=True)


def _shower(head: str, steps: int) -> "Callable[[StepRecord], None]":
    """A function that prints one line a step, and `head` before the first."""
    heads = [head]

    def show(record: "StepRecord") -> None:
        if heads:
            typer.echo(heads.pop())
        typer.echo(
            f"step {record.step + 1:>{len(str(steps))}}/{steps}  loss {record.loss:.4f}  "
            f"{record.tokens_per_s:,.0f} tokens/s  grad norm {record.grad_norm:.3f}"
        )

    return show


def _recorded(case: "CaseSpec", done: "list[StepRecord]") -> str:
    """The text of a file of recorded routing."""
    from bench.recorded import RecordedRun
    from bench.trial import content_id

    counts = [(record.step, record.routing.tolist()) for record in done if record.routing is not None]
    return RecordedRun.of(case.model.name, content_id(case), case.workload.global_batch_tokens, counts).to_text()


def trial_fields(trial: "Trial") -> dict[str, Any]:
    samples = trial.samples
    return {
        "kind": "measured",
        "status": trial.status,
        "message": trial.message,
        "last_actions": trial.last_actions,
        "system": trial.case.system,
        "trainer": trial.provenance["execution"]["trainer"],
        "layout": trial.layout,
        "traits": list(trial.traits),
        "losses": samples.get("loss", []),
        "grad_norms": samples.get("grad_norm", []),
        "tokens_per_s": trial.metrics.get("tokens_per_s"),
        "load_imbalance": trial.metrics.get("load_imbalance"),
        "execution": trial.provenance.get("execution"),
        "case_id": trial.case_id,
        "trial": trial.name,
        "command": trial.command,
    }


def _show_end(trial: "Trial") -> None:
    from bench.cli.output import print_facts

    losses = trial.samples.get("loss", [])
    print_facts(
        f"measured: {trial.status}",
        {
            "loss": f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else None,
            "tokens/s (median of the steady window)": trial.metrics.get("tokens_per_s"),
            "load imbalance (fullest rank over mean)": trial.metrics.get("load_imbalance"),
            "transport": _execution(trial),
        },
    )


def _execution(trial: "Trial") -> str:
    facts = trial.provenance.get("execution", {})
    where = f", {facts['ranks']} ranks on {facts['gpus']} GPUs" if "gpus" in facts else ""
    return f"{facts.get('transport')}{where}"


def require_torch() -> None:
    """Raises BadInput that says how to install what executing needs."""
    from bench.errors import BadInput

    for package, module in (("torch", "torch"), ("megatron-core", "megatron")):
        if importlib.util.find_spec(module) is None:
            how = "pip install 'disagmoe-bench[train]', or make setup-train"
            raise BadInput(package, "not installed", f"an environment that has it: {how}")
