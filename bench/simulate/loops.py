"""Loops over arrays that are interpreted while they have little to do, and compiled from then on.

Loading the compiler takes longer than interpreting a small step. The source is the same, and so is the order of its
arithmetic on 64-bit floats: both ways give the same numbers, to the last bit.
"""

from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar, cast

WORTH_COMPILING = 50_000
"""Items (tasks of a step, say) that a process interprets, over all its loops, before it loads the compiler."""


class Loop:
    """A function and the functions that it calls. All are of one module, and take arrays and numbers."""

    interpreted: ClassVar[int] = 0

    def __init__(self, function: Callable[..., Any], *helpers: Callable[..., Any]) -> None:
        self.function, self.helpers = function, helpers

    def __call__(self, num_items: int, *arguments: Any) -> Any:
        """Calls the function. num_items: how often its body runs, about."""
        Loop.interpreted += num_items
        return (self.function if Loop.interpreted <= WORTH_COMPILING else self.compiled)(*arguments)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The function as machine code, which is kept on disk."""
        from numba import njit

        function, *helpers = (cast(FunctionType, each) for each in (self.function, *self.helpers))
        names = dict(function.__globals__)  # the compiler finds helpers in the globals of who calls them
        for helper in helpers:
            names[helper.__name__] = njit(nogil=True, inline="always")(FunctionType(helper.__code__, names))
        compiled: Callable[..., Any] = njit(cache=True, nogil=True)(FunctionType(function.__code__, names))
        return compiled


def always_compile() -> None:
    """From now on this process compiles every loop that it comes to."""
    Loop.interpreted = WORTH_COMPILING
