"""The `moebench` command and what all verbs share: how errors are said, and the exit codes.

Exit codes: 0 done; 1 the command ran and found a failure (a missed tolerance, a diverged run); 2 bad
input; 130 stopped.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import typer

from bench.cli import (
    EXIT_STOPPED,
    choosing,
    claims,
    comparing,
    doctor,
    explaining,
    figures,
    listing,
    planning,
    results_cmd,
    roofline,
    simulating,
    sweep,
    tracing,
    training,
    verifying,
)
from bench.cli.groups import KnownVerbs
from bench.errors import BadInput, unknown

# typer's own name for it: click is vendored in some versions and a package in others.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

EXIT_BAD_INPUT = 2


class OneLineErrors(KnownVerbs):
    """Says every kind of bad input in one line on stderr and exits with 2, without a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        call = partial(super().main, *args, **extra)
        if not standalone_mode:
            return call(standalone_mode=False)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = call(standalone_mode=False)
            except BadInput as error:
                words = args[0] if args else extra.get("args")
                _refuse(_as_typed(error, self, sys.argv[1:] if words is None else words), getattr(error, "grid", ""))
            except UsageError as error:
                _refuse(_usage_line(error))
            except OSError as error:
                why = error.strerror or str(error)
                _refuse(str(BadInput("file", error.filename, f"a path that can be read, or written to ({why})")))
            except typer.Abort:
                _say("stopped")
                sys.exit(EXIT_STOPPED)
        sys.exit(code if isinstance(code, int) else 0)


def _as_typed(error: BadInput, command: Any, words: Sequence[str]) -> str:
    """The error with its field as the option that the command has for it: ``--seq-len`` of ``workload.seq_len``."""
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    verbs = (command, *getattr(command, "commands", {}).values())  # a group may have a verb that needs no name
    options = {name for verb in verbs for each in verb.params for name in each.opts}
    plain = error.field.removeprefix("workload.")
    for field in (plain, plain.removesuffix("_s")):
        option = "--" + field.replace("_", "-")
        if option in options:
            return f"{option}{str(error).removeprefix(' '.join(error.field.split()))}"
    return str(error)


def _usage_line(error: Any) -> str:
    """What typer has to say, in the form of a `BadInput` where it names no value."""
    match type(error).__name__:
        case "NoArgsIsHelpError":  # the help has been printed
            return ""
        case "NoSuchOption":
            known = [name for option in error.ctx.command.params for name in option.opts if name.startswith("--")]
            return str(unknown("option", error.option_name, known))
        case "MissingParameter" if error.param is not None:
            return str(BadInput(_option_of(error), None, "a value (it is required)"))
        case "BadParameter" if error.param is not None:
            return f"{_option_of(error)}: {error.message.removeprefix('Value error, ')}"
    return " ".join(error.format_message().split())


def _option_of(error: Any) -> str:
    return str(next((name for name in error.param.opts if name.startswith("--")), error.param.name))


def _refuse(line: str, grid: str = "") -> NoReturn:
    if line:
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
for group in (
    listing,
    planning,
    simulating,
    choosing,
    roofline,
    training,
    verifying,
    comparing,
    explaining,
    figures,
    claims,
    tracing,
    sweep,
    results_cmd,
    doctor,
):
    group.add_verbs(app)
