"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Check:
    """One thing.

    state: ``absent`` is not there, ``broken`` is there and fails. advice: what to do, where it is not ok.
    """

    name: str
    state: State
    found: str
    advice: str = ""
