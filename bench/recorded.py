"""Routing as a run recorded it: how many tokens of a step every expert of every layer got.

A file holds all steps of one run. A case takes one of them and holds its counts, not the file's name, so that its id
says what was replayed.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bench.errors import BadInput, from_pydantic
from bench.files import read_mapping

FORMAT: Literal["moebench-routing-1"] = "moebench-routing-1"
PREFIX = "recorded:"

Tokens = Annotated[int, Field(ge=0, le=1 << 34)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Recorded(_Strict):
    """One step of a global batch.

    Attributes:
        tokens: of the global batch.
        counts: by layer with experts, in their order, and by expert: tokens that chose it. Those of a layer add up to
            tokens x top_k; none is above tokens, as a token chooses different experts.
    """

    tokens: Annotated[int, Field(ge=1, le=1 << 34)]
    counts: Annotated[tuple[Annotated[tuple[Tokens, ...], Field(min_length=1)], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for layer, counts in enumerate(self.counts):
            if len(counts) != len(self.counts[0]):
                raise BadInput(f"counts[{layer}]", len(counts), f"{len(self.counts[0])} experts, as in the first layer")
            for expert, count in enumerate(counts):
                if count > self.tokens:
                    allowed = f"at most the {self.tokens} tokens: each chooses an expert once"
                    raise BadInput(f"counts[{layer}][{expert}]", count, allowed)
            total, first = sum(counts), sum(self.counts[0])
            if layer == 0 and (total == 0 or total % self.tokens):
                raise BadInput("counts[0]", total, f"a sum of {self.tokens} tokens x top_k")
            if total != first:
                raise BadInput(f"counts[{layer}]", total, f"a sum of {first}, as in the first layer")
        return self

    @cached_property
    def digest(self) -> str:
        """12 hex digits of the content's SHA-256."""
        return hashlib.sha256(json.dumps([self.tokens, self.counts]).encode()).hexdigest()[:12]

    @property
    def top_k(self) -> int:
        return sum(self.counts[0]) // self.tokens

    def __hash__(self) -> int:
        return hash(self.digest)

    def require_fits(self, name: str, num_layers: int, num_experts: int, top_k: int) -> None:
        """Raises BadInput where the counts are not those of a model called `name`, which has `num_layers` with experts.

        Fields are named as in a `bench.case.CaseSpec`.
        """
        for what, found, allowed in (
            ("layers", len(self.counts), (num_layers, f"the layers with experts of {name}")),
            ("experts", len(self.counts[0]), (num_experts, f"the experts of {name}")),
            ("top_k", self.top_k, (top_k, f"the experts that a token of {name} chooses")),
        ):
            if found != allowed[0]:
                raise BadInput(f"workload.recorded.{what}", found, f"{allowed[0]}, {allowed[1]}")


class RecordedStep(_Strict):
    """Counts of one step, as in `Recorded`."""

    step: Annotated[int, Field(ge=0)]
    counts: tuple[tuple[Tokens, ...], ...]


class RecordedRun(_Strict):
    """What a run records: its file is the JSON text of this.

    Attributes:
        model, case_id: what ran.
        tokens: of a step's global batch.
    """

    format: Literal["moebench-routing-1"] = FORMAT
    model: str
    case_id: str
    tokens: int
    steps: Annotated[tuple[RecordedStep, ...], Field(min_length=1)]

    def to_text(self) -> str:
        """JSON, a line a layer; `read` is its inverse."""
        head = {name: getattr(self, name) for name in ("format", "model", "case_id", "tokens")}
        lines = [f"{json.dumps(head)[:-1]}, ", ' "steps": [']
        for i, step in enumerate(self.steps):
            rows = ",\n   ".join(json.dumps(row) for row in step.counts)
            lines.append(f'  {{"step": {step.step}, "counts": [\n   {rows}]}}{"," * (i < len(self.steps) - 1)}')
        return "\n".join([*lines, " ]}", ""])

    @classmethod
    def of(cls, model: str, case_id: str, tokens: int, counts: Sequence[tuple[int, Any]]) -> Self:
        """From (step, [layers, experts]) pairs. Raises BadInput."""
        steps = [{"step": step, "counts": tuple(tuple(row) for row in of_step)} for step, of_step in counts]
        return cls._make({"model": model, "case_id": case_id, "tokens": tokens, "steps": tuple(steps)}, "routing")

    @classmethod
    def _make(cls, fields: dict[str, Any], field: str) -> Self:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise from_pydantic(error, field, cls) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BadInput where it cannot be read, or is something else."""
        return cls._make(read_mapping(path, "routing"), f"routing file {path.name}")


def read_recorded(word: str) -> Recorded:
    """The step that ``FILE`` or ``FILE@STEP`` names; without a number, the last one.

    A trial's record will do as a file: the step that its case replayed. Raises BadInput.
    """
    name, number = re.fullmatch(r"(.*?)(?:@(\d+))?", word, re.DOTALL).groups()  # type: ignore[union-attr]
    path = Path(name)
    fields = read_mapping(path, "routing")
    where = f"routing file {path.name}"
    if "case" in fields:
        found = _inside(fields, "case", "workload", "recorded")
        if found is None:
            raise BadInput(where, "a trial", "one that replayed a recorded step, or a file that a run recorded")
        return _recorded(found, where)
    run = RecordedRun.read(path)
    by_number = {step.step: step for step in run.steps}
    step = int(number) if number else max(by_number)
    if step not in by_number:
        raise BadInput("routing.step", step, f"{min(by_number)} to {max(by_number)}, the steps of {path.name}")
    return _recorded({"tokens": run.tokens, "counts": by_number[step].counts}, f"{where} step {step}")


def routing_fields(routing: str) -> dict[str, Any]:
    """Fields `routing` and `recorded` of a workload, for ``recorded:FILE[@STEP]`` as for the routings with a name."""
    if not routing.startswith(PREFIX):
        return {"routing": routing}
    recorded = read_recorded(routing.removeprefix(PREFIX))
    return {"routing": PREFIX + recorded.digest, "recorded": recorded}


def _recorded(fields: dict[str, Any], where: str) -> Recorded:
    try:
        return Recorded.model_validate(fields)
    except ValidationError as error:
        raise from_pydantic(error, where, Recorded) from None


def _inside(fields: Any, *path: str) -> Any:
    for key in path:
        fields = fields.get(key) if isinstance(fields, dict) else None
    return fields
