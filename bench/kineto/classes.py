"""What a kernel does, by its name: the table `kernels.toml`, which a user's file can extend."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.errors import BadInput, from_pydantic, unknown
from bench.files import read_mapping

Kind = Literal["compute", "communication", "both", "host"]
Phase = Literal["forward", "recompute", "backward", "input_gradient", "weight_gradient", "optimizer", "unknown"]

PHASES: tuple[Phase, ...] = (
    "forward", "recompute", "backward", "input_gradient", "weight_gradient", "optimizer", "unknown",
)  # fmt: skip
SPLIT_WORD = "backward_unless_split"
PHASE_WORDS = ("forward", "backward", "input_gradient", "weight_gradient", "optimizer", SPLIT_WORD)
UNKNOWN = "unknown"
"""The class of kernels that no pattern fits; it counts as compute."""
OTHER_COMMUNICATION = "other_communication"
_LENGTH = re.compile(r"[1-9]\d{0,3}")
_LITERAL = re.compile(r"L[a-z]n?\d+E")
BUILT_IN = Path(__file__).with_name("kernels.toml")


class _Class(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Kind | None = None
    names: list[str] = []


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    classes: dict[str, _Class] = {}
    collectives: dict[str, list[str]] = {}
    phases: dict[str, list[str]] = {}


Patterns = tuple[tuple[str, re.Pattern[str]], ...]


@dataclass(frozen=True)
class KernelTable:
    """Patterns in the order in which they are tried.

    names, collectives: (class, pattern). phases: (word of `PHASE_WORDS`, pattern). kinds: kind of every class, in the
    order of the tables, `unknown` last.
    """

    names: Patterns
    collectives: Patterns
    phases: Patterns
    kinds: Mapping[str, Kind]

    def classify(self, name: str, collective: str | None = None) -> str:
        """The class of a kernel, a copy or a memset.

        Args:
            name: as the trace has it; the argument list is ignored.
            collective: the profiler's "Collective name", where there is one. It is looked up first; a kernel that has
                one communicates, whatever its name.
        """
        if collective is not None:
            found = _first(self.collectives, collective)
            if found is not None:
                return found
        found = _first(self.names, without_arguments(name))
        if collective is not None and (found is None or self.kinds[found] in ("compute", "host")):
            return OTHER_COMMUNICATION
        return found or UNKNOWN

    def phase_word(self, annotation: str) -> str | None:
        """The one word of `PHASE_WORDS` that an annotation's name fits, None where it fits none or several."""
        found = {word for word, pattern in self.phases if pattern.search(annotation)}
        return found.pop() if len(found) == 1 else None


def read_table(extra: Path | str | None = None) -> KernelTable:
    """The built-in table, preceded by the user's `extra` file of the same form.

    Raises BadInput where the file is not of that form, a pattern is no regular expression, a class that the built-in
    table does not know has no kind, or a phase is another word.
    """
    built_in = _read(BUILT_IN)
    files = [built_in] if extra is None else [_read(Path(extra)), built_in]
    kinds: dict[str, Kind] = {}
    for file in reversed(files):
        for name, entry in file.classes.items():
            kind = entry.kind or kinds.get(name)
            if kind is None:
                raise BadInput(f"kernels.classes.{name}.kind", None, "compute, communication, both or host")
            kinds[name] = kind
    kinds[UNKNOWN] = "compute"
    for file in files:
        for name in file.collectives:
            if name not in kinds:
                raise unknown("kernels.collectives", name, kinds)
        for word in file.phases:
            if word not in PHASE_WORDS:
                raise unknown("kernels.phases", word, PHASE_WORDS)
    return KernelTable(
        names=_compiled("classes", ((name, entry.names) for file in files for name, entry in file.classes.items())),
        collectives=_compiled("collectives", (item for file in files for item in file.collectives.items())),
        phases=_compiled("phases", (item for file in files for item in file.phases.items())),
        kinds=kinds,
    )


def without_arguments(name: str) -> str:
    """A kernel's name without its argument list; template arguments stay. A mangled name gives its identifiers."""
    if name.startswith("_Z"):
        return "::".join(_identifiers(_LITERAL.sub("", name)))
    depth = 0
    for i, letter in enumerate(name):
        if letter == "<":
            depth += 1
        elif letter == ">" and name[i - 1 : i] != "-":
            depth -= 1
        elif letter == "(" and depth <= 0 and i and not name.startswith("(anonymous", i):
            return name[:i] or name
    return name


def _identifiers(mangled: str) -> Iterator[str]:
    """What stands behind its own length in a mangled name."""
    at = 0
    while found := _LENGTH.search(mangled, at):
        at = found.end() + int(found.group())
        if at <= len(mangled):
            yield mangled[found.end() : at]


def _first(patterns: Patterns, name: str) -> str | None:
    return next((label for label, pattern in patterns if pattern.search(name)), None)


def _read(path: Path) -> _File:
    if path.suffix != ".toml":
        raise BadInput("kernels", str(path), "a .toml file")
    try:
        return _File.model_validate(read_mapping(path, "kernels"))
    except ValidationError as error:
        raise from_pydantic(error, "kernels", _File) from None


def _compiled(section: str, entries: Iterable[tuple[str, list[str]]]) -> Patterns:
    """One pattern a list, so that a name is searched once a class."""
    compiled = []
    for label, patterns in entries:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"kernels.{section}.{label}", pattern, f"a regular expression ({error})") from None
        if patterns:
            compiled.append((label, re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE)))
    return tuple(compiled)
