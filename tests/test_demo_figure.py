"""The training demo's figure: losses, their differences, and a step of every run."""

from pathlib import Path
from typing import Any

import pytest
from timelines import PLACEMENT, TWO_STAGES, hops, one_layer

from bench.errors import BadInput
from paper_figs import train_demo
from paper_figs.style import save

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [found.get_text() for found in figure.findobj(Text) if found.get_text()]


LOSSES = {
    "reference": [4.0, 3.0, 2.5],
    "ep": [4.0, 3.0 * (1 + 1e-6), 2.5],
    "disagmoe": [4.0, 3.0, 2.5 * (1 - 1e-5)],
}
STEPS = [
    ("disagmoe", one_layer("measured", scale=2e-3), PLACEMENT),
    ("disagmoe", one_layer(), PLACEMENT),
    ("ep", hops(), TWO_STAGES),
]


def test_the_demo_shows_losses_and_their_differences(tmp_path: Path) -> None:
    figure = train_demo.draw(LOSSES, STEPS)
    upper, lower = figure.axes[:2]
    assert {line.get_label(): list(line.get_ydata()) for line in upper.lines} == LOSSES
    ep, disagmoe = (list(line.get_ydata()) for line in lower.lines)
    floor = lower.get_yticks()[0]
    assert lower.get_yticklabels()[0].get_text() == "equal"
    assert ep == pytest.approx([floor, 1e-6, floor])
    assert disagmoe == pytest.approx([floor, floor, 1e-5])
    assert lower.get_yscale() == "log"
    assert lower.get_ylim()[0] < floor < 1e-6
    assert lower.get_ylim()[1] > 1e-5
    # Marks of different shape at different steps.
    assert upper.lines[1].get_marker() != upper.lines[2].get_marker()
    one, other = (save(train_demo.draw(LOSSES, STEPS), tmp_path / name, "demo")[1] for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_the_demo_says_of_every_panel_what_it_is() -> None:
    figure = train_demo.draw(LOSSES, STEPS)
    shown = texts(figure)
    assert shown.count("simulated") == 2
    assert shown.count("measured") == 1  # the losses
    assert shown.count("measured, clocks within 5 µs") == 1
    # Every step is shown whole, over shares of its own length; how long it took stands in its title.
    panels = figure.axes[2:5]
    for ax, (_, step, _) in zip(panels, STEPS, strict=True):
        scale = ax.get_xlim()[1] / step.step_time_s
        assert ax.get_xlim() == pytest.approx((0, scale * step.step_time_s))
        assert list(ax.get_xticks()) == pytest.approx([ax.get_xlim()[1] * n / 4 for n in range(5)])
    assert [bool(ax.get_xlabel()) for ax in panels] == [False, False, True]
    assert "share of the step" in panels[-1].get_xlabel()
    assert sum(text.startswith("step ") for text in shown) == 3


def test_the_demo_without_a_reference_compares_to_the_first() -> None:
    lines = train_demo.draw({"a": [2.0], "b": [2.2]}, STEPS[:1]).axes[1].lines
    assert [line.get_ydata()[0] for line in lines] == pytest.approx([0.1])


@pytest.mark.parametrize("losses", [{}, {"a": [1.0], "b": [1.0, 2.0]}, {"a": []}])
def test_the_demo_refuses_runs_that_do_not_compare(losses: Any) -> None:
    with pytest.raises(BadInput):
        train_demo.draw(losses, STEPS)
