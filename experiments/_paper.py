"""The paper's claims, read from their file and checked."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.errors import BadInput, from_pydantic
from results.paper import CLAIMS

Factor = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class Claim(BaseModel):
    """A claim with its source, and how ours is computed; a speed-up goes from `low` (None: "up to") to `high`.

    `over` names the systems here that stand for the paper's `baseline`; of several, the fastest of a cell counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]
    says: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    measure: Literal["speedup", "attention share", "virtual stages"]
    over: Annotated[tuple[str, ...], Field(strict=False)] = ()
    baseline: str = ""
    low: Factor | None = None
    high: Factor | None = None


def read_claims(path: Path) -> tuple[Claim, ...]:
    """The claims of a file. Raises BadInput for one that is missing, no TOML, or has fields that are not a claim's."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("claim", [])
        claims = tuple(Claim(**fields) for fields in found)
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise BadInput("claims", str(path), f"a TOML file of [[claim]] tables ({error})") from None
    except ValidationError as error:
        raise from_pydantic(error, "claim", Claim) from None
    for claim in claims:
        if (claim.measure == "speedup") != (claim.high is not None and bool(claim.over)):
            raise BadInput(f"claim {claim.name}", claim.measure, "a speedup with `over` and `high`, others without")
    names = [claim.name for claim in claims]
    if not names or len(set(names)) < len(names):
        raise BadInput("claims", names, "one or more, each with a name of its own")
    return claims


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim that is judged, in the order of the file."""
    return read_claims(CLAIMS)
