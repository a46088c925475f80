"""A `Trial` is one run of one case, kept as one JSON record: what was run, how it ended, what came out, on what."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from bench.case import Case, CaseSpec, Workload
from bench.errors import BadInput, from_pydantic
from bench.migrations import current

Source = Literal["simulated", "measured"]
Status = Literal["ok", "oom", "diverged", "died", "hang", "timeout", "error", "infeasible"]

# Not strict: a diverged run's nan and inf are words in JSON.
Number = Annotated[float, Field(strict=False)]

FINISHED: frozenset[str] = frozenset({"ok", "oom", "infeasible", "diverged"})
"""Statuses that would come out again; a sweep repeats the others."""

MAX_MESSAGE_CHARS = 5800
MAX_LAST_ACTIONS_CHARS = 4000


class Series(BaseModel):
    """Columns of a trial that lie in a Parquet file beside its record.

    Attributes:
        file: its name. rows: length of the columns. digest: of their values, see `series_digest`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: Annotated[str, Field(pattern=r"^[\w-]+\.parquet$")]
    rows: int
    digest: str


SeriesName = Literal["samples", "telemetry_samples"]
SERIES: tuple[SeriesName, ...] = ("samples", "telemetry_samples")


class Trial(BaseModel):
    """One run of one case.

    Attributes:
        case: what was run, with its layout; only a spec where no layout was found (``infeasible``).
        case_id: hash of `case`'s content.
        message: for people, why the status is not ``ok``; for ``infeasible`` it states the missing GiB.
        last_actions: of a run that ended early, what every rank did last, a line a rank.
        traits: what sets the plan apart, see `bench.plan.TRAITS`.
        metrics: one number a name, with its unit in the name; None where it is not defined (MFU of an unknown GPU).
        samples: raw series, one value a step; nothing dropped.
        telemetry: what devices, links and the host said during a run, in sums, with the verdict; see
            `bench.telemetry.summary`. What could not be read is absent, with the reason.
        telemetry_samples: columns of all telemetry samples, one entry a sample of a rank; None where nothing was read.
        steady: the window that the medians are of, and how it was found; see `bench.steady`.
        series: in a record on disk, where `samples` and `telemetry_samples` lie; empty once they are read in.
        assumptions, assumption_values: name and values of the cost model of a simulated trial.
        code_digest: of the sources that made a simulated trial, see `bench.provenance.code_digest`.
        search: how the layout was chosen, for a tuned one: what was fixed, how many candidates ended how, what came
            second, and of every kind that was rejected one, with the reason.
        command: gives the result again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")

    schema_version: Literal[2] = 2
    case: Case | CaseSpec
    case_id: str
    source: Source
    status: Status
    message: str = ""
    last_actions: list[str] = []
    layout: str | None = None
    traits: tuple[str, ...] = ()
    metrics: dict[str, Number | None] = {}
    samples: dict[str, list[Number]] = {}
    telemetry: dict[str, Any] = {}
    telemetry_samples: dict[str, list[Number | None]] = {}
    steady: dict[str, Any] = {}
    series: dict[SeriesName, Series] = {}
    assumptions: str | None = None
    assumption_values: dict[str, Any] = {}
    code_digest: str | None = None
    search: dict[str, Any] = {}
    command: str
    provenance: dict[str, Any]
    created: Annotated[AwareDatetime, Field(strict=False)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.case_id != content_id(self.case):
            raise BadInput("case_id", self.case_id, f"the hash of the case's content, {content_id(self.case)}")
        simulated = self.source == "simulated"
        if simulated != (self.code_digest is not None) or simulated != (self.assumptions is not None):
            raise BadInput("source", self.source, "simulated with assumptions and code_digest, or measured without")
        if self.status != "ok" and not self.message:
            raise BadInput("message", self.message, f"a reason for status {self.status}")
        return self

    @classmethod
    def make(
        cls, *, case: CaseSpec, source: Source, status: Status = "ok", provenance: Mapping[str, Any], **rest: Any
    ) -> Self:
        """A trial made now; id, layout and time are filled in. Raises BadInput."""
        layout = str(case.layout) if isinstance(case, Case) else None
        if isinstance(rest.get("message"), str):
            rest["message"] = _shortened(rest["message"])
        rest["last_actions"] = _cut(rest.get("last_actions", []))
        try:
            return cls(
                case=case,
                case_id=content_id(case),
                source=source,
                status=status,
                layout=layout,
                provenance=dict(provenance),
                created=datetime.now(UTC),
                **rest,
            )
        except ValidationError as error:
            raise from_pydantic(error, "trial", cls) from None

    @property
    def spec(self) -> CaseSpec:
        """The case without its layout."""
        case = self.case
        return CaseSpec(model=case.model, cluster=case.cluster, workload=case.workload, system=case.system)

    @property
    def name(self) -> str:
        """File name without ending: case id, source, and a digest of what else tells this trial from others.

        A simulated trial is told by its code and assumptions, so the same one made twice has one name; one that failed
        has another than the success that may follow. A measured one is told by its whole content, so that a second
        measurement does not hide the first.
        """
        told_by: list[Any]
        if self.source == "simulated":
            told_by = [self.code_digest, self.assumption_values, self.search]
            if self.status not in FINISHED:
                told_by += [self.status, self.message]
        else:
            # Without what has come since, so that records keep their names.
            new = {name for name in ("traits", "last_actions") if not getattr(self, name)}
            record = self.model_dump(mode="json", exclude={"samples", "telemetry_samples", "series"} | new)
            told_by = [record, {kind: self.digest_of(kind) for kind in SERIES}]
        digest = hashlib.sha256(json.dumps(told_by, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.case_id}-{self.source}-{digest}"

    def digest_of(self, kind: "SeriesName") -> str | None:
        """Digest of a series, in memory or on disk; None where there is none."""
        if kind in self.series:
            return self.series[kind].digest
        columns: dict[str, Any] = getattr(self, kind)
        return series_digest(columns) if columns else None

    def to_text(self) -> str:
        """JSON with sorted keys; `parse` is its inverse."""
        return json.dumps(json.loads(self.model_dump_json()), sort_keys=True, indent=1, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """The trial that `to_text` wrote, also that of an older version. Raises BadInput."""
        try:
            return cls.model_validate_json(current(text))
        except ValidationError as error:
            raise from_pydantic(error, "trial", cls) from None


def series_digest(columns: Mapping[str, Any]) -> str:
    """16 hex digits of the SHA-256 of named columns of numbers; whole numbers count as floats."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        values = [None if value is None else float(value) for value in columns[name]]
        digest.update(json.dumps([name, values]).encode())
    return digest.hexdigest()[:16]


def _shortened(message: str) -> str:
    """A message that fits a record: stacks of many ranks are long, and their ends say most."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2 - 20
    return f"{message[:half]}\n[... {len(message) - 2 * half} characters ...]\n{message[-half:]}"


def _cut(lines: list[str]) -> list[str]:
    """Lines of many ranks, as long as all of them may be together."""
    width = max(60, MAX_LAST_ACTIONS_CHARS // max(1, len(lines)))
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines]


@lru_cache(maxsize=64)  # a record's making asks for one several times over
def content_id(case: CaseSpec) -> str:
    """16 hex digits of the content's SHA-256; for a `Case` its id."""
    return hashlib.sha256(case.to_text().encode()).hexdigest()[:16]


def command_for(verb: str, case: CaseSpec, extra: tuple[str, ...] = ()) -> str:
    """The command line that gives `case` again. A model or cluster that has no name here is named as a file.

    `extra` stands at the end: options of the verb that a case does not hold.
    """
    from bench.clusters import get_cluster
    from bench.models import get_model

    work = case.workload
    words = ["moebench", verb, case.system, "--model", _name_or_file(case.model, get_model)]
    # Processes on CPUs are found out from their number.
    if verb == "simulate" or case.cluster.gpu.name != "cpu":
        words += ["--cluster", _name_or_file(case.cluster, get_cluster)]
    words += ["--seq-len", str(work.seq_len), "--global-batch-tokens", str(work.global_batch_tokens)]
    words += ["--dtype", work.dtype, "--routing", _routing(work), "--seed", str(work.seed)]
    layout = str(case.layout).split() if isinstance(case, Case) else []
    if layout:
        words += ["--layout", *layout]
    return shlex.join([*words, *extra])


def _routing(work: Workload) -> str:
    """Recorded counts are named as the file that they came from would be, by their digest."""
    return work.routing if work.recorded is None else f"{work.routing}.json"


def _name_or_file(thing: Any, lookup: Any) -> str:
    try:
        known = lookup(thing.name)
    except BadInput:
        known = None
    return thing.name if known == thing else f"{thing.name}.json"
