"""Which steps a run does, and what it does beside them: saves, goes on from a checkpoint, keeps a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from bench.errors import BadInput
from bench.execute.checkpoint import Saving, require_free, require_loadable, save
from bench.execute.flight import Phase
from bench.execute.job import Job
from bench.execute.manifest import Manifest, Saved, find_saved, settings_json
from bench.execute.rank import flight, report
from bench.execute.shards import Shard
from bench.execute.sync import OptimizerSettings
from bench.execute.transport import DEFAULT_TIMEOUT_S
from bench.telemetry import Session


@dataclass(frozen=True)
class Loop:
    """What ranks need to know of a run beside its job.

    Attributes:
        steps: of the whole run; `first` is the number of the one to begin with.
        traced: number of the step whose timeline is kept; -1 for none.
        saved: the checkpoint to begin from.
        timeout_s: how long a step may take.
        keep_routing: whether every step's routing is summed over the ranks and reported.
    """

    steps: int
    settings: OptimizerSettings
    traced: int = -1
    telemetry_hz: float | None = None
    saving: Saving | None = None
    saved: Saved | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    keep_routing: bool = False

    @property
    def first(self) -> int:
        return 0 if self.saved is None else self.saved.step

    @property
    def numbers(self) -> range:
        """Of the steps to do."""
        return range(self.first, self.steps)

    def save_if_due(self, job: Job, step: int, shards: Callable[[], Sequence[Shard]], session: Session | None) -> None:
        """Saves after a step where it is due; called by all ranks together."""
        saving = self.saving
        if saving is None or not saving.is_due(step + 1, self.steps):
            return
        flight().phase(Phase.SAVING, step)
        start = time.perf_counter()
        manifest = Manifest(
            step=step + 1,
            steps=self.steps,
            save_every=saving.every,
            case=job.case,
            data=job.data,
            corpus=job.corpus().provenance(),
            optimizer=settings_json(self.settings),
            files={},
        )
        folder = save(saving.folder, shards(), manifest)
        if session is not None:
            session.pause("checkpoint", start, time.perf_counter())
        if dist.get_rank() == 0:
            report(folder)


def loop_of(
    job: Job,
    steps: int,
    timeline_step: int | None = None,
    settings: OptimizerSettings | None = None,
    telemetry_hz: float | None = None,
    saving: Saving | None = None,
    resume: Path | None = None,
    timeout_s: float | None = None,
    keep_routing: bool = False,
) -> Loop:
    """The loop of a run; the arguments are those of `train`. Raises BadInput for what is impossible."""
    if steps < 1:
        raise BadInput("steps", steps, "at least 1")
    if timeout_s is not None and not timeout_s > 0:
        raise BadInput("timeout", timeout_s, "more than 0 seconds")
    saved = None if resume is None else _saved(job, resume, steps)
    if saved is not None and settings is None:
        settings = OptimizerSettings.from_json(saved.manifest.optimizer)
    first = 0 if saved is None else saved.step
    if timeline_step is not None and not first - steps <= timeline_step < steps:
        raise BadInput("timeline_step", timeline_step, f"{first - steps} to {steps - 1}")
    if saving is not None:
        require_free(saving.folder, saved)
        saving = replace(saving, folder=saving.folder.absolute())
    traced = -1 if timeline_step is None else timeline_step % steps
    settings = settings or OptimizerSettings()
    return Loop(steps, settings, traced, telemetry_hz, saving, saved, timeout_s or DEFAULT_TIMEOUT_S, keep_routing)


def _saved(job: Job, resume: Path, steps: int) -> Saved:
    saved = find_saved(resume)
    saved = saved._replace(folder=saved.folder.absolute())
    saved.require_same_run(job.case, job.corpus().provenance())
    require_loadable(saved)
    if saved.step >= steps:
        raise BadInput("steps", steps, f"more than the {saved.step} steps that the checkpoint has done")
    return saved
