"""Whether a run can fit on the machine it is to run on, before any process is started."""

from bench.assumptions import get_assumptions
from bench.case import Case, batch_of
from bench.cost import Costs
from bench.errors import BadInput
from bench.flops import num_parameters
from bench.limits import kept_bytes, least_bytes
from bench.predict import GIB, costs_of
from bench.system import get_system

REFERENCE_BYTES = 16  # a parameter of the reference: weight, gradient and two moments in fp32


def require_fits_here(case: Case, *, with_reference: bool, ranks_per_gpu: int = 1) -> None:
    """Raises BadInput where the ranks of `case` need more than there is: the host's free memory, or a GPU's.

    What is counted is a lower bound: weights, gradients, optimizer state, and what one micro-batch's forward keeps.

    Args:
        with_reference: the whole model in one process as well, to compare with.
        ranks_per_gpu: ranks that share a GPU at the most.
    """
    placement = get_system(case.system).placement(case)
    costs = costs_of(case, placement, get_assumptions())
    if case.cluster.name != "cpu":
        least = least_bytes(case, placement, costs) * ranks_per_gpu
        there, where = float(case.cluster.gpu.memory_bytes), "a GPU"
    else:
        import psutil

        kept = kept_bytes(costs)
        like = costs.tally.like
        of_replica = sum(g.size * (_own_bytes(costs, g.name) + kept[like[g.name]]) for g in placement.groups)
        least = batch_of(case, placement).num_replicas * of_replica
        least += REFERENCE_BYTES * num_parameters(case.model)[0] if with_reference else 0
        there, where = float(psutil.virtual_memory().available), "this machine, free"
    if least > there:
        allowed = f"at most the {there / GIB:.1f} GiB of {where}; this needs {least / GIB:.1f} GiB or more"
        raise BadInput("memory", f"{case.system} for {case.model.name}", allowed)


def _own_bytes(costs: Costs, group: str) -> float:
    """Static bytes of a rank but for what a GPU reserves."""
    return sum(size for name, size in costs.static_parts(group).items() if name != "reserve")
