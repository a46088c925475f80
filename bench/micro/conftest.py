"""Where the benchmarks of torch code run: on the CPU, and on CUDA where there is a device."""

import importlib.util

import pytest


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Name of a device that is there."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
        pytest.skip("needs torch and megatron-core")
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu":
        torch.set_num_threads(1)
    return str(request.param)
