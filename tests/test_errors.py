import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from bench.errors import BadInput, from_pydantic, unknown


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    width: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    layers: int
    inner: Inner = Inner()
    parts: tuple[Inner, ...] = ()

    @model_validator(mode="after")
    def _even(self) -> "Outer":
        if self.layers % 2:
            raise BadInput("layers", self.layers, "an even number")
        return self


def refusal(fields: dict) -> BadInput:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(fields)
    return from_pydantic(caught.value, "outer", Outer)


def test_is_one_line_that_names_field_value_and_allowed():
    error = BadInput("a.b", "x\ny", "one\nor two")
    assert str(error) == r"a.b: 'x\ny' is not valid; allowed: one or two"
    assert (error.field, error.value, error.allowed) == ("a.b", "x\ny", "one or two")
    assert isinstance(error, ValueError)


def test_long_values_are_cut():
    assert len(str(BadInput("a", "x" * 10_000, "y"))) < 200


def test_unknown_lists_the_known_and_suggests_the_nearest():
    assert str(unknown("model", "qwen", ["qwen3", "tiny"])) == (
        "model: 'qwen' is not valid; allowed: qwen3, tiny (did you mean 'qwen3'?)"
    )
    assert "did you mean" not in str(unknown("model", "zzz", ["qwen3", "tiny"]))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"layerz": 2},  # also lacks "layers": the misspelt name is the message
            "outer.layerz: 2 is not valid; allowed: the fields layers, inner, parts (did you mean 'layers'?)",
        ),
        ({"layers": 2, "inner": {"wide": 3}}, "outer.inner.wide: 3 is not valid; allowed: the fields width"),
        (
            {"layers": 2, "parts": ({"wide": 3},)},
            "outer.parts.0.wide: 3 is not valid; allowed: the fields width",
        ),
        ({"inner": {}}, "outer.layers: None is not valid; allowed: a value (the field is required)"),
        ({"layers": "2"}, "outer.layers: '2' is not valid; allowed: a valid integer"),
        ({"layers": 3}, "outer.layers: 3 is not valid; allowed: an even number"),
    ],
)
def test_pydantic_errors_become_one_line(fields, line):
    assert str(refusal(fields)).startswith(line)


def test_without_the_class_an_unknown_field_is_still_named():
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"layers": 2, "depth": 1})
    assert str(from_pydantic(caught.value)) == "depth: 1 is not valid; allowed: no such field"
