"""Writes the generated tables of docs/architecture.md and docs/gpus.md: `python tools/doc_tables.py`.

A test checks that they are as made. A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``. Those of
docs/gpus.md are of what is published: `moebench figure h200x2 --out results/published/h200x2` writes it again.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
sys.path.insert(0, str(ROOT))

from bench.action import TRANSFERS, Kind, Pass  # noqa: E402
from bench.edges import edges, ends  # noqa: E402
from bench.models import get_model  # noqa: E402
from bench.placement import Group, Placement  # noqa: E402
from bench.system import System, systems, trainers_of  # noqa: E402


def tables() -> dict[str, str]:
    """Every table by name."""
    return {"systems": systems_table(), "volumes": volumes_table()}


def systems_table() -> str:
    rows = [
        (
            f"`{system.name}`",
            system.summary,
            traits(system),
            ", ".join(trainers_of(system)),
            " ".join(f"`{field}`" for field in sorted(system.fields)),
        )
        for system in systems().values()
    ]
    return table(("system", "what it is", "traits", "trainers", "layout fields"), rows)


def traits(system: System) -> str:
    """What sets its plans apart from those that can be executed and leave the model as it is."""
    return ", ".join(getattr(system, "traits", ())) or "none"


def volumes_table() -> str:
    """Transfers of layer 0 and the hop behind it, on a placement where everything moves on."""
    model = get_model("tiny").model_copy(update={"num_layers": 2})
    groups = tuple(Group(name, i, 1) for i, name in enumerate(("E", "A0", "F0", "A1", "F1")))
    apart = Placement(groups, "E", "A1", ("A0", "A1"), ("F0", "F1"), ("A1", "A1"))
    found = {
        edge.via: edge for edge in edges(model, apart, "redispatch") if edge.via is not None and edge.via.layer == 0
    }
    rows = []
    for via in sorted(found, key=lambda action: (action.kind, "FRBW".index(action.pass_.name))):
        assert via.kind in TRANSFERS
        source, target = ends(apart, via)
        rows.append((f"`{via.word}` {via.pass_.name}", source, target, f"`{found[via].volume}`"))
    assert {Kind.DISPATCH, Kind.HOP} <= {via.kind for via in found} and Pass.R in {via.pass_ for via in found}
    return table(("transfer", "from", "to", "bytes"), rows)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written(page: str) -> str:
    """The page with every table made anew."""
    for name, text in tables().items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        page, number = marked.subn(lambda match, text=text: match[1] + text + match[2], page)
        assert number == 1, f"{PAGE.name} has {number} places for the table {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
