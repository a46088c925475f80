"""The `moebench` command and what all verbs share: how errors are said, and the exit codes.

Exit codes: 0 done; 1 the command ran and found a failure (a missed tolerance, a diverged run); 2 bad input.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from bench.cli import figures, listing, planning, tracing, training
from bench.errors import BadInput

# typer's own name for it: click is vendored in some versions and a package in others.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class OneLineErrors(TyperGroup):
    """Says every kind of bad input in one line on stderr and exits with 2, without a traceback."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(args, *rest, standalone_mode=False, **extra)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(args, *rest, standalone_mode=False, **extra)
            except BadInput as error:
                _refuse(str(error), getattr(error, "grid", ""))
            except UsageError as error:
                _refuse(_usage_line(error))
            except typer.Abort:
                _say("stopped")
                sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


def _usage_line(error: Any) -> str:
    if error.__class__.__name__ == "NoArgsIsHelpError":
        return "command: none is not valid; allowed: see `moebench --help`"
    path = error.ctx.command_path if error.ctx is not None else "moebench"
    return f"{' '.join(error.format_message().split())} (see `{path} --help`)"


def _refuse(line: str, grid: str = "") -> NoReturn:
    _say(line)
    if grid:
        sys.stderr.write(grid.rstrip("\n") + "\n")
    sys.exit(EXIT_BAD_INPUT)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    _say(f"warning: {' '.join(str(message).split())}")


def _say(line: str) -> None:
    sys.stderr.write(f"moebench: {line}\n")


app = typer.Typer(
    cls=OneLineErrors,
    name="moebench",
    help="Plan, simulate, train, verify and draw Mixture-of-Experts training systems. "
    "One schedule, checked, simulated and executed.",
    epilog="Example: moebench simulate disagmoe --model qwen3-235b --cluster h800x16 --seq-len 16384",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (listing, planning, training, figures, tracing):
    group.add_verbs(app)


def main() -> None:
    """The entry point of the installed command."""
    app(prog_name="moebench")
