"""The one error that bad input raises: a line naming the field, its value and what is allowed."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

MAX_VALUE_CHARS = 120


class BadInput(ValueError):  # noqa: N818 - named for what it says of the input
    """Input that is refused. ``str(error)`` is one line; the command line prints it and exits with 2.

    Args:
        field: dotted name of what was given, such as ``model.top_k``.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    fault = False
    """Whether it is a fault of somebody's own schedule: a search passes over what is refused, never over a fault."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = " ".join(allowed.split())
        super().__init__(field, value, self.allowed)

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > MAX_VALUE_CHARS:
            shown = shown[: MAX_VALUE_CHARS - 3] + "..."
        return f"{' '.join(self.field.split())}: {' '.join(shown.split())} is not valid; allowed: {self.allowed}"


def unknown(field: str, value: object, known: Iterable[str]) -> BadInput:
    """A ``BadInput`` for a name that is not among ``known``, with the nearest known name if there is one."""
    return BadInput(field, value, _listed(str(value), list(known)))


def from_pydantic(exc: "ValidationError", prefix: str = "", model: "type[BaseModel] | None" = None) -> BadInput:
    """The first entry of a pydantic error as a ``BadInput``.

    Args:
        exc: what pydantic raised.
        prefix: dotted name of the thing that was validated, put before the field's own name.
        model: the class that was validated; with it, an unknown field is answered with the known ones.
    """
    # An unknown field is the likeliest cause of the others (a misspelt field is also a missing one).
    entries = sorted(exc.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    entry = entries[0]
    location = [str(part) for part in entry["loc"]]
    field = ".".join([prefix, *location] if prefix else location)
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        owner = _owner(model, location[:-1])
        if owner is None:
            return BadInput(field, entry["input"], "no such field")
        return BadInput(
            field, entry["input"], "the fields " + _listed(location[-1], list(owner.model_fields))
        )
    if kind == "missing":
        return BadInput(field, None, "a value (the field is required)")
    if kind == "value_error" and isinstance(context.get("error"), BadInput):
        inner = context["error"]
        return BadInput(".".join(filter(None, [field, inner.field])), inner.value, inner.allowed)
    return BadInput(field or "input", entry["input"], _allowed(entry["msg"], context))


def _listed(given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    return ", ".join(known) + (f" (did you mean {near[0]!r}?)" if near else "")


def _allowed(message: str, context: Mapping[str, Any]) -> str:
    if "expected" in context:
        return str(context["expected"])
    for lead in ("Input should be ", "Value error, "):
        if message.startswith(lead):
            return message[len(lead) :]
    return message


def _owner(model: "type[BaseModel] | None", path: list[str]) -> "type[BaseModel] | None":
    """The model class at ``path`` below ``model``; None where it cannot be told."""
    from pydantic import BaseModel

    for name in path:
        if model is None:
            return None
        if name not in model.model_fields:
            continue  # an index into a tuple or a key of a mapping
        annotation = model.model_fields[name].annotation
        inside = [annotation, *get_args(annotation)]
        model = next((a for a in inside if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return model
