"""Memory in sentences: what the programme takes to fit, what its split's plan needs, and what was cut off."""

from collections.abc import Sequence

from bench.errors import BadInput
from bench.predict import GIB, QuickStep
from systems.disagmoe.planner.allocation import Allocation, Cut
from systems.disagmoe.planner.words import short_of


def cuts_in_words(cuts: Sequence[Cut], chosen: Allocation, refused: BadInput | None) -> str | None:
    """What the programme put first and what was cut off, as its plans do not fit; None for nothing."""
    if not cuts:
        return None
    which = f"{short_of(cuts[0].layout)} with rounds of {cuts[0].layout.round_length}"
    needs = f"needs {_told_apart(cuts[0].peak_memory_bytes, chosen.memory_of_gpu)} GiB a GPU"
    if refused is not None:
        return f"no split was found whose plan fits: {len(cuts)} were simulated, and the fastest, {which}, {needs}."
    if len(cuts) == 1:
        said = (
            "a plan that it would have put first was cut off, as it does not fit when its order is made and simulated"
        )
        return f"{said}: {which}, {needs}."
    said = f"{len(cuts)} plans that it would have put first were cut off, as they do not fit when their order is made"
    return f"{said} and simulated: the first, {which}, {needs}."


def _told_apart(needed: float, have: float) -> str:
    """``79.74 of 79.65``: GiB, with as many digits as tell that they are too many."""
    digits = next((d for d in range(1, 4) if round(needed / GIB, d) > round(have / GIB, d)), 4)
    return f"{needed / GIB:.{digits}f} of {have / GIB:.{digits}f}"


def memory_in_words(chosen: Allocation, step: QuickStep | None) -> str:
    """What the programme takes memory to hold, and what its split's plan needs."""
    have = chosen.memory_of_gpu / GIB
    left = [have - held / GIB for held in chosen.memory_bytes]
    count = chosen.layout.round_length
    said = (
        f"on its split, one micro-batch in flight leaves, by its estimates, {left[0]:.1f} GiB of an attention "
        f"GPU and {left[1]:.1f} GiB of an expert GPU, of {have:.1f}; it takes rounds of {count}."
    )
    if step is not None and step.step_time_s is not None:
        free = have - step.peak_memory_bytes / GIB
        left_over = f"{free:.1f} GiB are left" if free >= 0 else f"{-free:.2f} GiB are missing"
        said += f" With its order made and simulated, {left_over} on the fullest."
    return said
