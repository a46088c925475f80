"""Measured trials: a training run on this machine as a record, also where it failed."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench import provenance
from bench.case import Case, batch_of
from bench.flops import step_flops
from bench.hiding import broken_claim, work
from bench.lower import lower
from bench.metrics import metrics as metrics_of
from bench.metrics import mfu
from bench.steady import Steady, steady
from bench.system import get_system, plan_of, trainer_of, trainers_of
from bench.telemetry import RankTelemetry, Summary, summarise
from bench.telemetry.session import DEFAULT_HZ
from bench.telemetry.verdict import disturbances
from bench.trial import Status, Trial, command_for

if TYPE_CHECKING:
    from bench.execute.checkpoint import Saving
    from bench.execute.pool import Ranks
    from bench.execute.train import StepRecord
    from bench.timeline import Timeline
    from bench.transports import Carrier

Device = Literal["cpu", "cuda"]


class Measured(NamedTuple):
    """A trial, and the timeline of its last step where it was asked for and came."""

    trial: Trial
    timeline: "Timeline | None"


def measure(
    case: Case,
    *,
    steps: int,
    device: Device = "cpu",
    transport: str = "auto",
    data: str = "text",
    weights: str = "host",
    serial: bool = False,
    pool: "Ranks | None" = None,
    on_step: "Callable[[StepRecord], None] | None" = None,
    keep_timeline: bool = False,
    telemetry_hz: float | None = DEFAULT_HZ,
    trainer: str | None = None,
    saving: "Saving | None" = None,
    resume: Path | None = None,
    on_saved: Callable[[Path], None] | None = None,
    timeout_s: float | None = None,
    keep_routing: bool = False,
) -> Measured:
    """Trains and gives the trial. What goes wrong on a rank is a trial too, with the steps that were done.

    Times are the medians of the steady state, see `bench.steady`; every step is in the samples.

    Args:
        transport: see `bench.transports`; ``auto`` is the pool's own.
        weights: where they are drawn, ``host`` or ``device``; see `bench.execute.job.Job`.
        serial: runs the plan without overlap, see `bench.serial`: what it takes longer, the plan hides.
        telemetry_hz: samples a second of devices, links and host; None for none.
        trainer: see `bench.system.TRAINERS`; what the system takes unless told where not given. Kept in provenance.
        saving, resume, on_saved, timeout_s, keep_routing: see `bench.execute.train.train`.
    Raises:
        BadInput: the case cannot be executed on this machine.
    """
    from bench.execute.pool import RankPool

    trainer = trainer_of(case, trainer)
    run = _Run(case, trainer, serial, on_step)
    num_ranks = ranks_of(case)
    with contextlib.ExitStack() as stack:
        ranks: Ranks = pool or stack.enter_context(RankPool(num_ranks, device, transport=transport))
        carrier = ranks.carrier_of(transport)
        run.train(
            ranks,
            steps=steps,
            data=data,
            weights=weights,
            transport=transport,
            telemetry_hz=telemetry_hz,
            saving=saving,
            resume=resume,
            on_saved=on_saved,
            timeout_s=timeout_s,
            keep_routing=keep_routing,
        )
    run.judge(carrier.gpus(num_ranks))
    if resume is not None and run.done:
        run.metrics["first_step"] = run.done[0].step
    options = {
        "ranks": case.cluster.num_gpus,
        "device": ranks.device,
        "steps": steps,
        "data": data,
        "trainer": trainer if len(trainers_of(get_system(case.system))) > 1 else None,
        "save": saving and saving.folder,
        "save-every": (saving and saving.every) or None,
        "resume": resume,
        "transport": ranks.transport if transport == "auto" else transport,
        "weights": weights,
    }
    words = _command_words(options, serial=serial)
    trial = run.trial(carrier.gpus(num_ranks), words, _execution(carrier, num_ranks, trainer) | {"serial": serial})
    return Measured(trial, run.timeline if keep_timeline else None)


@dataclass
class _Run:
    """A run as it goes: the steps that were done, what the ranks told, and how it ended."""

    case: Case
    trainer: str
    serial: bool
    on_step: "Callable[[StepRecord], None] | None"
    done: "list[StepRecord]" = field(default_factory=list)
    told: list[RankTelemetry] = field(default_factory=list)
    status: Status = "ok"
    message: str = ""
    timeline: "Timeline | None" = None
    last_actions: tuple[str, ...] = ()
    metrics: dict[str, float | None] = field(default_factory=dict)

    def train(self, ranks: "Ranks", **options: Any) -> None:
        """`bench.execute.train.train`; what goes wrong on a rank is the status."""
        from bench.execute.pool import RankError
        from bench.execute.train import train

        try:
            result = train(
                self.case,
                pool=ranks,
                serial=self.serial,
                trainer=self.trainer,
                on_step=self._keep,
                on_telemetry=self.told.append,
                timeline_step=None if self.case.system == "reference" else -1,
                **options,
            )
        except RankError as error:
            self._end(status_of(error.cause), str(error))
            self.last_actions = error.last_actions
            return
        self.timeline, self.last_actions = result.timeline, result.last_actions
        self.metrics["clock_error_s"] = result.clock_error_s
        self.metrics["peak_memory_bytes"] = result.peak_memory_bytes or None

    def _keep(self, record: "StepRecord") -> None:
        self.done.append(record)
        if self.on_step is not None:
            self.on_step(record)

    def _end(self, status: Status, message: str) -> None:
        """The first thing that is wrong is what the trial says."""
        if self.status == "ok":
            self.status, self.message = status, message

    def judge(self, num_gpus: int) -> None:
        """Whether the numbers are finite, and the timeline kept what the plan claims."""
        broken = [r.step for r in self.done if not (math.isfinite(r.loss) and math.isfinite(r.grad_norm))]
        if broken:
            self._end("diverged", f"loss or gradient norm is not finite from step {broken[0]} on")
        if self.timeline is None:
            return
        self.metrics |= _step_metrics(self.timeline, self.case, num_gpus)
        # On CPUs megatron-core goes through its streams in order: nothing there is to be hidden.
        in_order = self.trainer == "native" and not num_gpus
        if not self.serial and not in_order:
            unkept = broken_claim(lower(plan_of(self.case), self.case.model), self.timeline)
            if unkept:
                self._end("error", unkept)

    def trial(self, num_gpus: int, words: tuple[str, ...], execution: dict[str, object]) -> Trial:
        """The record; `words` are the command's, beside those of the case."""
        case, settled, seen = self.case, _settled(self.case, self.done, self.told), None
        if self.told:
            window = (settled.first, settled.last) if settled is not None else (0, 0)
            seen = summarise(self.told, *window, case.workload.global_batch_tokens)
        if self.trainer == "native" and settled is not None:
            self.metrics["mfu"] = _mfu(case, settled.step_time_s.median, num_gpus)
        return Trial.make(
            case=case,
            source="measured",
            status=self.status,
            message=self.message,
            traits=plan_of(case).traits,
            last_actions=list(self.last_actions),
            metrics=self.metrics | _metrics(case, self.done, settled, num_gpus) | (seen.metrics if seen else {}),
            samples=_samples(case, self.done, settled, seen),
            steady=settled.as_json() if settled is not None else {},
            telemetry=seen.facts if seen else {},
            telemetry_samples=seen.samples if seen else {},
            command=command_for("run", case, words),
            provenance=provenance.collect() | {"execution": execution},
        )


USUAL = {"transport": "auto", "weights": "host"}
"""Options of `moebench run` that a command leaves out, and their values then."""


def _command_words(options: Mapping[str, object], *, serial: bool) -> tuple[str, ...]:
    """Of the command that makes the trial again, those beside the case's; what is None or usual is left out."""
    said = {name: value for name, value in options.items() if value is not None and value != USUAL.get(name)}
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    return (*words, "--serial") if serial else tuple(words)


def _execution(carrier: "Carrier", num_ranks: int, trainer: str) -> dict[str, object]:
    """For provenance: what trained, and what carried its payload; a system's own code knows nothing of our blocks."""
    facts = carrier.facts(num_ranks) | {"trainer": trainer}
    if trainer == "native":
        facts.pop("nccl_blocks", None)
    return facts


def _mfu(case: Case, step_time_s: float, num_gpus: int) -> float | None:
    """Of a run without a timeline; None on CPUs, and on GPUs whose peak is not known."""
    peak = case.cluster.gpu.peak_tflops.get(case.workload.dtype)
    if not num_gpus or peak is None:
        return None
    flops = step_flops(case.model, case.workload.seq_len, case.workload.global_batch_tokens)
    return mfu(flops, step_time_s, num_gpus, peak * 1e12)


def ranks_of(case: Case) -> int:
    """Ranks of all replicas of a case; 1 for `reference`. Raises BadInput."""
    placement = get_system(case.system).placement(case)
    return 1 if case.system == "reference" else batch_of(case, placement).num_replicas * placement.size


def _step_metrics(timeline: "Timeline", case: Case, num_gpus: int) -> dict[str, float | None]:
    """What the last step's timeline shows; its own duration is not the steady state's, so only shares are kept."""
    found, seen = work(timeline), metrics_of(timeline, case, num_gpus or None)
    return {
        "mfu": seen.mfu,
        "hfu": seen.hfu,
        "bubble_fraction": seen.bubble_fraction,
        "overlapped_fraction": seen.overlapped_fraction,
        "exposed_comm_s": seen.exposed_comm_s,
        "moving_s": seen.moving_s,
        "compute_s": found.compute_s,
        "send_s": found.send_s,
        "traced_step_s": found.step_s,
        "bound_s": found.bound_s,
        "fraction_of_bound": found.fraction_of_bound,
    }


def _settled(case: Case, done: "list[StepRecord]", told: list[RankTelemetry]) -> Steady | None:
    """Steady state of the steps on rank 0, with what any rank's telemetry says got in between."""
    if not done:
        return None
    told.sort(key=lambda one: one.rank)
    spans = [(span.start_s, span.end_s) for span in told[0].steps] if told and told[0].rank == 0 else []
    return steady([case.workload.global_batch_tokens / r.tokens_per_s for r in done], spans, disturbances(told))


def status_of(cause: str) -> Status:
    """The status of a run that ended in a `RankError` of that cause."""
    statuses: dict[str, Status] = {"hung": "hang", "died": "died", "oom": "oom"}
    return statuses.get(cause, "error")


def _metrics(case: Case, done: "list[StepRecord]", settled: Steady | None, num_gpus: int) -> dict[str, float | None]:
    """Speed by the median step of the steady state, mean imbalance, last loss; nothing where no step was done."""
    if settled is None:
        return {}
    step_s = settled.step_time_s
    rate = case.workload.global_batch_tokens / step_s.median
    return {
        "step_time_s": step_s.median,
        "step_time_low_s": step_s.low,
        "step_time_high_s": step_s.high,
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / (num_gpus or case.cluster.num_gpus),
        "load_imbalance": fmean(r.load_imbalance for r in done),
        "last_loss": done[-1].loss,
    }


def _samples(
    case: Case, done: "list[StepRecord]", settled: Steady | None, seen: Summary | None
) -> dict[str, list[float]]:
    """Columns of one value a step; of each kind of tag, 1 for the steps that have it."""
    columns = {
        "loss": [r.loss for r in done],
        "grad_norm": [r.grad_norm for r in done],
        "tokens_per_s": [r.tokens_per_s for r in done],
        "step_time_s": [case.workload.global_batch_tokens / r.tokens_per_s for r in done],
        "load_imbalance": [r.load_imbalance for r in done],
    }
    for kind, steps in (settled.tags if settled is not None else {}).items():
        columns[f"tag_{kind.replace('-', '_')}"] = [float(step in steps) for step in range(len(done))]
    # A step that broke off after it was timed has no record.
    noted = {name: values[: len(done)] for name, values in (seen.step_samples if seen else {}).items()}
    return columns | noted
