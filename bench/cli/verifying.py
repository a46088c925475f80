"""`moebench verify`: a step of a system on real processes, compared with the reference."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import executed, options
from bench.cli.pairs import PairsCommand
from bench.cli.training import require_torch

if TYPE_CHECKING:
    from bench.execute.report import VerifyReport

SHOWN_PARAMETERS = 10


def add_verbs(app: typer.Typer) -> None:
    example = "moebench verify ep --model tiny --ranks 4 --layout ep=2 pp=2"
    app.command("verify", cls=PairsCommand, epilog=f"Example: {example}")(verify)


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

    case = executed.run_case(
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
    corpus, allowed = executed.corpus_of(data), _gradient_tolerance(tolerance)
    with RankPool(ranks, options.device_of(device), transport=transport) as pool:
        report = verify_case(case, pool, data=corpus, trainer=trainer)
    if allowed is not None:
        report = replace(report, tolerance=replace(report.tolerance, gradient=allowed))
    if json:
        print_json(report_fields(report))
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


def report_fields(report: "VerifyReport") -> dict[str, Any]:
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
