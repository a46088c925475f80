"""One task of a sweep: a case to be simulated, or to be run once; told by everything that its result depends on."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from bench.case import Case, CaseSpec
from bench.evaluate import CostModel, failed_trial, simulate_trial
from bench.provenance import code_digest, collect
from bench.trial import Status, Trial, command_for, content_id

if TYPE_CHECKING:
    from bench.execute.pool import Ranks

Backend = Literal["simulate", "run"]
BACKENDS: tuple[Backend, ...] = ("simulate", "run")


@dataclass(frozen=True)
class Settings:
    """How the tasks of a sweep are done. budget, fixed: of the search for a layout. steps, data: of a run."""

    backend: Backend = "simulate"
    assumptions: str | None = None
    overrides: tuple[str, ...] = ()
    budget: int | None = None
    fixed: tuple[str, ...] = ()
    steps: int = 20
    data: str = "text"

    @cached_property
    def costs(self) -> CostModel:
        return CostModel.named(self.assumptions, self.overrides)


@dataclass(frozen=True)
class Task:
    """A spec (simulated with a layout that is searched for) or a case, and which repeat of it."""

    spec: CaseSpec
    settings: Settings
    repeat: int = 0

    @cached_property
    def key(self) -> str:
        """16 hex digits. A simulated task has another key when code or assumptions change."""
        settings = self.settings
        told_by: list[Any] = [content_id(self.spec), settings.backend, self.repeat]
        if settings.backend == "simulate":
            told_by += [code_digest(self.spec.system), settings.costs.values.model_dump(mode="json"), settings.budget]
            told_by += settings.fixed
        else:
            told_by += [settings.steps, settings.data]
        return hashlib.sha256(json.dumps(told_by, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """System, model, cluster, sequences of a step by tokens of a sequence; seed and repeat but for the first."""
        spec, work = self.spec, self.spec.workload
        repeat = f" #{self.repeat + 1}" if self.repeat else ""
        seed = f" seed {spec.workload.seed}" if spec.workload.seed else ""
        return f"{spec.system} {spec.model.name} {spec.cluster.name} {work.num_sequences}x{work.seq_len}{seed}{repeat}"

    def to_text(self) -> str:
        """One line of JSON; `parse` is its inverse."""
        fields = {"spec": self.spec.model_dump(mode="json"), "settings": asdict(self.settings), "repeat": self.repeat}
        return json.dumps({**fields, "has_layout": isinstance(self.spec, Case)}, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> "Task":
        fields = json.loads(text)
        kind = Case if fields["has_layout"] else CaseSpec
        settings = fields["settings"]
        settings |= {name: tuple(settings.get(name, ())) for name in ("overrides", "fixed")}
        return cls(kind.parse(json.dumps(fields["spec"])), Settings(**settings), fields["repeat"])

    def run(self, ranks: "Ranks | None" = None) -> Trial:
        """Does it. `ranks`: what a run trains on; processes of this host where not given."""
        settings = self.settings
        if settings.backend == "simulate":
            return simulate_trial(self.spec, settings.costs, fixed=settings.fixed, budget=settings.budget)
        return self._measure(ranks)

    def _measure(self, ranks: "Ranks | None") -> Trial:
        from bench.measured import measure

        settings, case = self.settings, self._case
        found = measure(case, steps=settings.steps, device=device_of(case), data=settings.data, pool=ranks).trial
        return found.model_copy(update={"provenance": {**found.provenance, "repeat": self.repeat}})

    @property
    def _case(self) -> Case:
        assert isinstance(self.spec, Case), "a run has a layout"
        return self.spec

    def failed(self, status: Status, message: str, last_actions: Sequence[str] = ()) -> Trial:
        """The record of a task that came to nothing; last_actions: of a run, what its ranks did last, a line each."""
        line = " ".join(message.split())
        settings, case = self.settings, self.spec
        if settings.backend == "simulate":
            trial = failed_trial(case, settings.costs, RuntimeError(line))
            return trial.model_copy(update={"status": status, "message": line})
        extra = ("--ranks", str(case.cluster.num_gpus), "--device", device_of(case), "--steps", str(settings.steps))
        return Trial.make(
            case=case,
            source="measured",
            status=status,
            message=line,
            last_actions=list(last_actions),
            command=command_for("run", case, (*extra, "--data", settings.data)),
            provenance={**collect(), "repeat": self.repeat},
        )


def device_of(spec: CaseSpec) -> Literal["cpu", "cuda"]:
    """What the ranks of a case compute on."""
    return "cpu" if spec.cluster.gpu.name == "cpu" else "cuda"


def status_of(error: BaseException) -> Status:
    """The status of a task that ended in an exception."""
    cause = getattr(error, "cause", type(error).__name__)
    if isinstance(error, MemoryError):
        return "oom"
    from bench.measured import status_of as status_of_cause

    return status_of_cause(cause)
