"""Versions of a trial's record: the newest, and how a record of an older one becomes one of the next.

A record is the JSON document of a `Trial`. Version 2 keeps series in Parquet files beside the record, and knows
telemetry and steady state; series inside the record, as version 1 had them, are still read.
"""

import json
from collections.abc import Callable
from typing import Any

from bench.errors import BadInput

SCHEMA_VERSION = 2

Document = dict[str, Any]


def _from_1(document: Document) -> Document:
    """Every new field has a default; nothing changed its meaning."""
    return {**document, "schema_version": 2}


MIGRATIONS: dict[int, Callable[[Document], Document]] = {1: _from_1}
"""Version -> what makes a record of the next one."""


def current(text: str | bytes) -> str | bytes:
    """A record's text in the newest version; the same text where it is of that one.

    Raises BadInput for what is no whole JSON object, has no version, or is of a newer one.
    """
    version = _version(text)
    if version == SCHEMA_VERSION:
        return text
    document = json.loads(text)
    while version < SCHEMA_VERSION:
        document = MIGRATIONS[version](document)
        version += 1
    return json.dumps(document)


def _version(text: str | bytes) -> int:
    import msgspec

    class Head(msgspec.Struct):
        schema_version: int | None = None

    try:
        version = msgspec.json.decode(text, type=Head).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput("trial", _start(text), f"the whole JSON record of a trial ({error})") from None
    allowed = f"{min(MIGRATIONS)} to {SCHEMA_VERSION}"
    if version is None:
        raise BadInput("schema_version", None, f"{allowed}: not a record of a trial")
    if not min(MIGRATIONS) <= version <= SCHEMA_VERSION:
        newer = "; written by a newer version of this software" if version > SCHEMA_VERSION else ""
        raise BadInput("schema_version", version, allowed + newer)
    return version


def _start(text: str | bytes) -> str:
    return text[:40].decode(errors="replace") if isinstance(text, bytes) else text[:40]
