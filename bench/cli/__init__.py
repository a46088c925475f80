"""The command line, `moebench`: one file a group of verbs. Heavy imports wait until a verb needs them."""

import sys
from typing import Any

EXIT_STOPPED = 130


def main() -> None:
    """The entry point of the installed command. Ctrl-C ends it in one line, from the first import on."""
    try:
        from bench.cli.application import app

        app(prog_name="moebench")
    except KeyboardInterrupt:
        sys.stderr.write("moebench: stopped\n")
        sys.exit(EXIT_STOPPED)


def __getattr__(name: str) -> Any:
    """The command as an object, which imports every verb: `app`."""
    if name == "app":
        from bench.cli.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
