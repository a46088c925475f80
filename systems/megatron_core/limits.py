"""What megatron-core 0.16.1 itself cannot do of what this harness's models, workloads and layouts ask: clear errors."""

from bench.case import Case
from bench.errors import BadInput


def require_native(case: Case) -> None:
    """Raises BadInput for the first thing about a case that megatron-core would refuse, or compute otherwise."""
    model, workload = case.model, case.workload
    for field, value in (("mla", model.mla), ("window_pattern", model.window_pattern)):
        if value:
            raise BadInput(f"model.{field}", value, "none to run megatron-core itself")
    if case.layout.offload != "none":
        allowed = "none to run megatron-core itself: its own offload updates on the host"
        raise BadInput("layout.offload", case.layout.offload, allowed)
    if model.router_score == "sigmoid" and model.top_k > 1 and not model.router_normalize:
        allowed = "true to run megatron-core itself: it always normalises several sigmoid scores"
        raise BadInput("model.router_normalize", False, allowed)
    after = model.router_softmax_after_topk or model.router_normalize
    if model.router_score == "softmax" and model.top_k == 1 and after:
        allowed = "2 or more to run megatron-core itself, where weights are normalised over the chosen experts"
        raise BadInput("model.top_k", 1, allowed)
    if model.aux_loss_coeff and workload.routing != "learned":
        allowed = "learned to run megatron-core itself: its load-balancing loss counts the router's own choice"
        raise BadInput("workload.routing", workload.routing, allowed)


def require_native_overlap(case: Case) -> None:
    """The same for its combined 1F1B, whose asserts these are (transformer/transformer_config.py)."""
    require_native(case)
    model, layout = case.model, case.layout
    native = "to run megatron-core's combined 1F1B itself"
    if case.workload.dtype != "bf16":
        raise BadInput("workload.dtype", case.workload.dtype, f"bf16 {native}")
    if layout.ep < 2:
        raise BadInput("layout.ep", layout.ep, f"2 or more {native}")
    if layout.ep == model.num_experts:
        # It frees what came from the all-to-all before the experts' backward, which needs it unless it was sorted.
        raise BadInput("layout.ep", layout.ep, f"half of the {model.num_experts} experts or less {native}")
    if layout.copies != "expert":
        raise BadInput("layout.copies", layout.copies, f"expert {native}: one row per token and expert")
    if layout.recompute != "none":
        raise BadInput("layout.recompute", layout.recompute, f"none {native}")
