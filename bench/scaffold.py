"""The file that a new system starts from: the project's own smallest system under another name."""

import ast
import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from bench.errors import BadInput

TEMPLATE = "systems.template"


def write_system(name: str, path: Path | None = None) -> Path:
    """Writes the starting file of a system, by default as NAME.py; returns its path.

    Raises BadInput for a name that is none or is taken, or a file that exists or cannot be written.
    """
    from bench.system import require_name

    target = Path(f"{name.replace('-', '_')}.py") if path is None else path
    require_name("name", name)
    if keyword.iskeyword(name) or _class_word(name) in _imported():
        raise BadInput("name", name, f"another: the file needs the names {', '.join(_imported())}, and Python its own")
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
    return (
        _template()
        .replace("class Template", f"class {_class_word(name)}")
        .replace('"template"', f'"{name}"')
        .replace("`template`", f"`{name}`")
    )


def _class_word(name: str) -> str:
    return "".join(word.capitalize() for word in re.split("[-_]", name))


def _imported() -> list[str]:
    """What the template's module imports."""
    imports = [node for node in ast.parse(_template()).body if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names]


def _template() -> str:
    found = find_spec(TEMPLATE)
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")
