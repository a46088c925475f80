"""The command line, `moebench`: one file a group of verbs. Heavy imports wait until a verb needs them."""

from bench.cli.main import app, main

__all__ = ["app", "main"]
