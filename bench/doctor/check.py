"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "not tried", "absent", "broken"]


@dataclass(frozen=True)
class Check:
    """One thing.

    state: ``not tried`` is there and was left out, ``absent`` is not there, ``broken`` is there and fails. advice: what
    to do, where it is not ok.
    """

    name: str
    state: State
    found: str
    advice: str = ""
