"""A directory of trials: one immutable JSON record a trial, its series in Parquet beside it; written whole or not at
all, never overwritten, by any number of writers. What is no whole trial is read around, and named.
"""

from pathlib import Path

from bench.results.files import ResultsWarning, write_once
from bench.results.store import Store, read_trial, read_trials
from bench.results.table import frame, load

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published"
"""Trials that come with the code."""

LOCAL = Path("results") / "local"
"""Where trials of this machine go, below the current directory."""

__all__ = [
    "LOCAL",
    "PUBLISHED",
    "ResultsWarning",
    "Store",
    "frame",
    "load",
    "read_trial",
    "read_trials",
    "write_once",
]
