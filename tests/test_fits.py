"""A run that cannot fit on this machine is refused before anything starts."""

import pytest

from bench.errors import BadInput
from bench.fits import require_fits_here
from bench.models import get_model
from tests.cases import make_case


@pytest.mark.parametrize("with_reference", [False, True])
def test_what_fits_is_let_through(with_reference: bool) -> None:
    require_fits_here(make_case("ep", cluster="cpu", ep=2), with_reference=with_reference)


@pytest.mark.parametrize(("system", "layout"), [("ep", {"ep": 2}), ("disagmoe", {"attention_ranks": 1})])
def test_a_model_of_hundreds_of_gigabytes_is_refused(system: str, layout: dict[str, int]) -> None:
    case = make_case(system, "deepseek-v3", cluster="cpu", **layout)
    with pytest.raises(BadInput, match=r"memory: .*deepseek-v3.* this needs [0-9.]+ GiB or more"):
        require_fits_here(case, with_reference=False)


def test_a_gpus_memory_counts_where_there_is_a_gpu() -> None:
    case = make_case("ep", get_model("mixtral-8x22b"), cluster="h200x1", ep=1)
    with pytest.raises(BadInput, match="of a GPU"):
        require_fits_here(case, with_reference=False)
