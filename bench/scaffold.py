"""The file that a new system starts from: the project's own smallest system under another name."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from bench.errors import BadInput

TEMPLATE = "systems.template"
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def write_system(name: str, path: Path | None = None) -> Path:
    """Writes the starting file of a system, by default as NAME.py; returns its path.

    Raises BadInput for a name that is none or is taken, or a file that exists or cannot be written.
    """
    from bench.system import systems

    target = Path(f"{name.replace('-', '_')}.py") if path is None else path
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise BadInput("name", name, "lower-case letters, digits and hyphens, beginning with a letter")
    if name in systems():
        raise BadInput("name", name, f"a name that is not taken; taken are {', '.join(systems())}")
    if target.suffix != ".py":
        raise BadInput("out", str(target), "a name that ends in .py")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(starting_text(name))
    except FileExistsError:
        raise BadInput("out", str(target), "a file that does not exist yet") from None
    except OSError as error:
        raise BadInput("out", str(target), f"a file that can be written ({error.strerror})") from None
    return target


def starting_text(name: str) -> str:
    """The template's source with `name` in place of its own."""
    found = find_spec(TEMPLATE)
    assert found is not None and found.origin is not None
    text = Path(found.origin).read_text(encoding="utf-8")
    words = "".join(word.capitalize() for word in re.split("[-_]", name))
    return (
        text.replace("class Template", f"class {words}")
        .replace('"template"', f'"{name}"')
        .replace("`template`", f"`{name}`")
    )
