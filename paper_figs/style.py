"""What all figures share: sizes, type, colours by name, and files that are the same bytes for the same data."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 7.0  # text width of a two-column page
DPI = 200
INK, MUTED, FAINT = "#1a1a1a", "#5f5f5f", "#d9d9d9"
SMALL_PT, BODY_PT = 6.0, 7.0

# Okabe and Ito's palette: told apart under the common kinds of colour blindness.
SYSTEM_COLOURS = {
    "reference": "#000000",
    "megatron": "#5f5f5f",
    "ep": "#c4c4c4",
    "tutel": "#f0e442",
    "comet": "#009e73",
    "megatron-overlap": "#56b4e9",
    "dualpipe": "#e69f00",
    "dualpipe-v": "#cc79a7",
    "disagmoe": "#d55e00",
}
_OTHER_COLOURS = ("#8c6bb1", "#7f4f24", "#4d9221", "#c51b7d")
_MARKERS = {
    "reference": "o",
    "ep": "s",
    "tutel": "v",
    "comet": "P",
    "megatron": "p",
    "megatron-overlap": "D",
    "dualpipe": "h",
    "dualpipe-v": "X",
    "disagmoe": "^",
}

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same letters
    "font.size": BODY_PT,
    "axes.titlesize": BODY_PT + 1,
    "axes.titleweight": "bold",
    "axes.labelsize": BODY_PT,
    "xtick.labelsize": BODY_PT,
    "ytick.labelsize": BODY_PT,
    "legend.fontsize": BODY_PT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.0,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "savefig.facecolor": "white",
    "pdf.fonttype": 42,  # TrueType: text stays text, as publishers ask
    "path.simplify": True,
}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for a figure; what the user's own matplotlibrc says is left out."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)  # type: ignore[arg-type]  # the stubs spell out every key
        yield


def new_figure(width_in: float, height_in: float) -> "Figure":
    """An empty figure that belongs to no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in))


def add_axes(figure: "Figure", box_in: tuple[float, float, float, float]) -> "Axes":
    """Axes at (left, bottom, width, height) in inches."""
    width, height = figure.get_size_inches()
    left, bottom, wide, high = box_in
    return figure.add_axes((left / width, bottom / height, wide / width, high / height))


def axes_width_pt(ax: "Axes") -> float:
    """Width of a panel in typographic points."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise BadInput("ax", None, "axes of a figure")
    return float(ax.get_position().width * figure.get_size_inches()[0] * 72)


def system_colours(systems: Iterable[str]) -> dict[str, str]:
    """A colour for each system: fixed for known names, for others by their place in the alphabet among those given."""
    names = list(dict.fromkeys(systems))
    others = sorted(name for name in names if name not in SYSTEM_COLOURS)
    spare = {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(others)}
    return {name: SYSTEM_COLOURS.get(name) or spare[name] for name in names}


def marker(system: str, position: int) -> str:
    """The system's own marker, or one by position."""
    return _MARKERS.get(system) or "odsv^<>"[position % 7]


def system_order(systems: Iterable[str]) -> list[str]:
    """Known systems in the palette's order (ours last), others between them in order of appearance."""
    known = list(SYSTEM_COLOURS)
    names = list(dict.fromkeys(systems))

    def place(name: str) -> tuple[int, int]:
        if name == known[-1]:
            return (2, 0)
        return (0, known.index(name)) if name in known else (1, names.index(name))

    return sorted(names, key=place)


def one_source(field: str, sources: Iterable[str]) -> str:
    """The single word, simulated or measured, that describes a panel. Raises BadInput where there are two."""
    found = sorted(set(sources))
    if len(found) != 1 or found[0] not in ("simulated", "measured"):
        raise BadInput(field, found, "one source a panel: simulated or measured")
    return found[0]


def stamp(ax: "Axes", source: str, x: float = 1.0, y: float = 1.0) -> None:
    """Prints 'simulated' or 'measured' just above a panel, on the right."""
    ax.annotate(
        source,
        xy=(x, y),
        xycoords="axes fraction",
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=SMALL_PT,
        style="italic",
        color=MUTED,
        annotation_clip=False,
    )


def caption(figure: "Figure", lines: Sequence[str]) -> None:
    """Prints lines of small type at the foot of a figure."""
    figure.text(0.01, 0.01, "\n".join(lines), fontsize=SMALL_PT, color=MUTED, va="bottom")


def width_pt(text: str, size_pt: float, weight: str = "normal") -> float:
    """Width of a line of text in typographic points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family=_RC["font.family"], weight=weight)
    return float(TextPath((0, 0), text, size=size_pt, prop=font).get_extents().width)


def save(figure: "Figure", out_dir: Path | str, stem: str) -> tuple[Path, Path]:
    """Writes ``stem.pdf`` and ``stem.png`` (200 dpi), each whole or not at all.

    No date or version is in them: the same figure gives the same bytes.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    # matplotlib's own metadata: None leaves an entry out.
    metadata: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
        "png": {"Software": None},
    }
    paths = []
    with style():
        for suffix, entries in metadata.items():
            path = out / f"{stem}.{suffix}"
            part = out / f"{stem}.{suffix}.part"
            try:
                figure.savefig(part, format=suffix, metadata=entries, dpi=DPI)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
            paths.append(path)
    return paths[0], paths[1]
