"""`moebench run` and `moebench verify`: systems on real processes, measured and compared with the reference."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.cli.options import PairsCommand

if TYPE_CHECKING:
    from bench.case import CaseSpec
    from bench.execute.report import VerifyReport
    from bench.execute.train import StepRecord
    from bench.trial import Trial

SHOWN_PARAMETERS = 10


def add_verbs(app: typer.Typer) -> None:
    example = "moebench run disagmoe --model tiny --ranks 4 --steps 20 --layout attention_ranks=2 expert_ranks=2"
    app.command("run", cls=PairsCommand, epilog=f"Example: {example}")(run)
    example = "moebench verify ep --model tiny --ranks 4 --layout ep=2 pp=2"
    app.command("verify", cls=PairsCommand, epilog=f"Example: {example}")(verify)


def run(
    ctx: typer.Context,
    system: options.SystemOrNone = None,
    model: options.ModelOrNone = None,
    ranks: options.Ranks = 4,
    device: options.Device = "cpu",
    steps: Annotated[
        int, typer.Option("--steps", metavar="NUMBER", parser=options.whole_number, help="Optimizer steps.")
    ] = 20,
    layout: options.Layout_ = None,
    seq_len: options.SeqLen = 64,
    global_batch_tokens: options.Batch = None,
    dtype: options.Dtype = "fp32",
    transport: options.Transport = "auto",
    serial: options.Serial = False,
    weights: options.Weights = "host",
    data: options.Data = "text",
    routing: options.Routing_ = "learned",
    seed: options.Seed = 0,
    cluster: options.RunCluster = None,
    trainer: options.Trainer_ = None,
    results: options.Results = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Keep checkpoints there, one after the last step."),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option("--save-every", metavar="STEPS", parser=options.whole_number, help="And one every so many steps."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            help="Go on from the last checkpoint there, as the run that saved it, but for the system, layout, ranks, "
            "device, steps and folders that are named.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", parser=options.seconds, help="A step or a save that takes longer is a hang."
        ),
    ] = 300.0,
    record_routing: Annotated[
        Path | None,
        typer.Option(
            "--record-routing",
            metavar="FILE",
            help="Write there how many tokens every expert got in every step; --routing recorded:FILE replays it.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Train on processes of this machine and keep the trial: loss, speed and gradient norm of every step.

    Without a layout, disagmoe takes half of the ranks for attention, ep as many as divide the experts. Exit code 1
    where the run fails or diverges.
    """
    require_torch()
    from bench.cli.output import print_json, require_folder, require_new_file
    from bench.cli.resuming import resumed, saving_of
    from bench.execute.manifest import LATEST
    from bench.measured import measure
    from bench.results import LOCAL, Store
    from bench.system import plan_of, trainer_of

    if resume is not None:
        case, device, data, steps, saving = resumed(ctx, resume)
    else:
        saving = saving_of(save, save_every)
        case = options.run_case(
            options.required("system", system),
            options.required("--model", model),
            *(ranks, device, seq_len, global_batch_tokens, dtype, routing, seed, layout, cluster),
            transport=transport,
        )
    kept = LOCAL if results is None else results
    require_folder("results", kept)
    if record_routing is not None:
        require_new_file("record-routing", record_routing)
    ranks = case.cluster.num_gpus
    by = trainer_of(case, trainer)
    named = ", ".join([by, *plan_of(case).traits])
    head = f"{case.system} ({named}) for {case.model.name}, layout {case.layout}, {ranks} x {device}, case {case.id}"
    show = (lambda _: None) if json else _shower(head, steps)
    done: list[StepRecord] = []

    def on_step(record: "StepRecord") -> None:
        done.append(record)
        show(record)

    trial = measure(
        case,
        steps=steps,
        device=options.device_of(device),
        transport=transport,
        serial=serial,
        weights=weights,
        data=options.corpus_of(data),
        on_step=on_step,
        trainer=by,
        saving=saving,
        resume=resume,
        on_saved=None if json else lambda folder: typer.echo(f"saved {folder}"),
        timeout_s=timeout,
        keep_routing=record_routing is not None,
    ).trial
    path = Store(kept).write(trial)
    if record_routing is not None and done:
        record_routing.write_text(_recorded(trial.case, done), encoding="utf-8")
    if json:
        print_json(_described(trial))
    else:
        _show_end(trial)
        typer.echo(f"wrote {path}")
    if trial.status != "ok":
        lines = [f"moebench: {trial.status}: {trial.message}", *trial.last_actions]
        if saving is not None and (saving.folder / LATEST).exists():
            lines.append(f"go on from the last checkpoint with: moebench run --resume {saving.folder}")
        typer.echo("\n".join(lines), err=True)
        raise typer.Exit(1)


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


def _described(trial: "Trial") -> dict[str, Any]:
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


def verify(
    system: options.System_,
    model: options.Model_,
    ranks: options.Ranks = 4,
    device: options.Device = "cpu",
    layout: options.Layout_ = None,
    seq_len: options.SeqLen = 16,
    global_batch_tokens: options.Batch = None,
    dtype: options.Dtype = "fp32",
    transport: options.Transport = "auto",
    data: options.Data = "synthetic",
    routing: options.Routing_ = "learned",
    seed: options.Seed = 0,
    cluster: options.RunCluster = None,
    trainer: options.Trainer_ = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            "--tolerance",
            metavar="NUMBER",
            help="Relative error that a gradient may have. Default: 1e-5 in fp32, 3e-2 in bf16.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare loss and every gradient of one step with the reference. Exit code 1 where one is out of tolerance."""
    require_torch()
    from bench.cli.output import print_json, print_table
    from bench.execute.pool import RankPool
    from bench.execute.verify import verify as verify_case

    case = options.run_case(
        system,
        model,
        ranks,
        device,
        seq_len,
        global_batch_tokens,
        dtype,
        routing,
        seed,
        layout,
        cluster,
        transport=transport,
        with_reference=True,
    )
    corpus, allowed = options.corpus_of(data), _gradient_tolerance(tolerance)
    with RankPool(ranks, options.device_of(device), transport=transport) as pool:
        report = verify_case(case, pool, data=corpus, trainer=trainer)
    if allowed is not None:
        report = replace(report, tolerance=replace(report.tolerance, gradient=allowed))
    if json:
        print_json(_verified(report))
    else:
        typer.echo(str(report))
        print_table("largest gradient errors", report.COLUMNS, report.table(SHOWN_PARAMETERS))
    if not report.ok:
        raise typer.Exit(1)


def _gradient_tolerance(number: str | None) -> float | None:
    """Another tolerance for gradients, if one was asked for. Raises BadInput."""
    from bench.errors import BadInput

    if number is None:
        return None
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise BadInput("tolerance", number, "a number above 0 and below 1")
    return value


def _verified(report: "VerifyReport") -> dict[str, Any]:
    return {
        "kind": "verified",
        "ok": report.ok,
        "system": report.system,
        "trainer": report.trainer,
        "traits": list(report.traits),
        "layout": report.layout,
        "dtype": report.dtype,
        "case_id": report.case_id,
        "num_ranks": report.num_ranks,
        "loss": report.loss,
        "reference_loss": report.reference_loss,
        "loss_error": report.loss_error,
        "grad_norm_error": report.norm_error,
        "worst_gradient_error": report.worst.gradient_error,
        "worst_parameter": report.worst.name,
        "atol": report.atol,
        "tolerance": vars(report.tolerance),
        "num_parameters": len(report.parameters),
        "flips": report.flips,
        "num_choices": report.num_choices,
        "replayed": report.replayed,
        "free": vars(report.free),
        "problems": list(report.problems),
    }


def require_torch() -> None:
    """Raises BadInput that says how to install what executing needs."""
    from bench.errors import BadInput

    for package, module in (("torch", "torch"), ("megatron-core", "megatron")):
        if importlib.util.find_spec(module) is None:
            how = "pip install 'disagmoe-bench[train]', or make setup-train"
            raise BadInput(package, "not installed", f"an environment that has it: {how}")
