"""Colours of figures: told apart by every kind of sight, and named after what they stand for."""

import itertools
from typing import Any

import numpy as np
import pytest

from bench.action import Kind
from paper_figs.action_colours import ACTION_COLOURS
from paper_figs.style import SYSTEM_COLOURS

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")

# Linear RGB as seen without one of the three cones: Machado, Oliveira and Fernandes 2009, severity 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(colour: str, vision: str) -> Any:
    """CIE L*a*b* (D65) of a colour as seen with `vision`."""
    from matplotlib.colors import to_rgb

    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    xyz /= (0.9505, 1.0, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart_by_every_kind_of_sight(vision: str) -> None:
    actions = {colour for kind, passes in ACTION_COLOURS.items() for colour in passes} | {"#efefef"}
    for colours in (actions, set(SYSTEM_COLOURS.values())):
        for one, other in itertools.combinations(sorted(colours), 2):
            # About two is the least that is seen side by side.
            assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 14, (one, other)


def test_passes_go_from_light_to_dark() -> None:
    for kind in (Kind.ATTENTION, Kind.EXPERT, Kind.HEAD):
        light, middle, dark = (lab(colour, "normal")[0] for colour in ACTION_COLOURS[kind])
        assert light - middle > 14
        assert middle - dark > 14
