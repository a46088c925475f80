"""What tells two trials apart, field by field."""

from typing import Any, NamedTuple

from bench.trial import Trial

IGNORED = ("created", "command", "series", "samples", "telemetry_samples", "case_id")


class Difference(NamedTuple):
    """A field by its dotted name, its value on both sides (None: there is none), and right over left of numbers."""

    field: str
    left: object
    right: object
    ratio: float | None


def differences(left: Trial, right: Trial) -> list[Difference]:
    """Fields that differ, in the order of the record: what was run, what came out, on what. Series are not compared."""
    sides = [_flat(trial.model_dump(mode="json", exclude=set(IGNORED))) for trial in (left, right)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    found = []
    for name in names:
        a, b = (side.get(name) for side in sides)
        if a != b:
            found.append(Difference(name, a, b, _ratio(a, b)))
    return found


def _ratio(a: object, b: object) -> float | None:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return float(b) / float(a) if numbers and a else None  # type: ignore[arg-type]


def _flat(value: Any, name: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {
            key: leaf
            for field, inner in value.items()
            for key, leaf in _flat(inner, f"{name}.{field}" if name else field).items()
        }
    return {name: value}
