"""Mappings of fields from JSON and TOML text, refused in one line where they are malformed."""

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from bench.errors import BadInput


def parse_mapping(text: str, form: Literal["json", "toml"], field: str) -> dict[str, Any]:
    """The mapping that a JSON or TOML text holds. Raises ``BadInput`` under the name ``field``."""
    try:
        content = tomllib.loads(text) if form == "toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(field, text[:40], f"{form.upper()} text ({error})") from None
    if not isinstance(content, dict):
        raise BadInput(field, text[:40], f"a {form.upper()} mapping of fields")
    return content


def read_mapping(path: Path, field: str) -> dict[str, Any]:
    """The mapping in a ``.json`` or ``.toml`` file. Raises ``BadInput`` under the name ``field``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(field, str(path), f"a readable file ({reason})") from None
    return parse_mapping(text, "toml" if path.suffix == ".toml" else "json", f"{field} file {path.name}")


def looks_like_path(name: str) -> bool:
    """Whether a name given by a user means a file and not one of our names."""
    return "/" in name or name.endswith((".json", ".toml"))
