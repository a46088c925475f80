"""Options that take several ``key=value`` pairs at once."""

import re
from typing import Any

from typer.core import TyperCommand

_PAIR = re.compile(r"[A-Za-z_][\w.]*=.*")
_REPEATED = ("--layout", "--set")


class PairsCommand(TyperCommand):
    """Lets `--layout` and `--set` take several pairs at once: ``--layout ep=16 pp=8``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_pairs(args))


def spread_pairs(args: list[str]) -> list[str]:
    """`args` with the option put before every further pair that follows one of its pairs."""
    spread: list[str] = []
    option: str | None = None
    for word in args:
        if option is not None and spread[-1] != option and _PAIR.fullmatch(word):
            spread.append(option)
        elif word in _REPEATED:
            option = word
        elif option is not None and spread[-1] != option:
            option = None
        spread.append(word)
    return spread
