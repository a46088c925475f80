"""Which variants of a model can be executed, as opposed to planned and simulated."""

from __future__ import annotations

from bench.case import Layout, Workload
from bench.errors import BadInput
from bench.models import Model

ROW_ELEMENTS = 8  # 16 bytes of bf16: rows of a grouped GEMM's operands start at multiples of 16 bytes

_FLAGS = (
    "attention_bias",
    "attention_sinks",
    "expert_bias",
    "router_bias",
    "router_linear_bias",
    "tied_head",
)


def _refused(model: Model) -> list[tuple[str, object, str]]:
    """(field, value, allowed) of everything that the executor has no code for."""
    refused: list[tuple[str, object, str]] = []
    for field in _FLAGS:
        if getattr(model, field):
            refused.append((field, True, "False"))
    if model.activation != "swiglu":
        refused.append(("activation", model.activation, "swiglu"))
    if model.rope_scaling != "none":
        refused.append(("rope_scaling", model.rope_scaling, "none"))
    if model.router_groups != 1:
        refused.append(("router_groups", model.router_groups, "1"))
    for field in ("hidden_size", "expert_hidden_size"):
        if getattr(model, field) % ROW_ELEMENTS:
            refused.append((field, getattr(model, field), f"a multiple of {ROW_ELEMENTS}"))
    return refused


def require_executable(layout: Layout) -> None:
    """Raises BadInput for the first layout field that is modelled only."""
    for field in ("tp", "cp", "ranks_over_nodes"):
        value, only = getattr(layout, field), Layout.model_fields[field].default
        if value != only:
            raise BadInput(f"layout.{field}", value, f"{only} to execute: anything else is simulated only")


def require_replayable(workload: Workload) -> None:
    """Raises BadInput where recorded counts are of another number of tokens than a step of the workload has."""
    recorded = workload.recorded
    if recorded is not None and recorded.tokens != workload.global_batch_tokens:
        allowed = f"{recorded.tokens} to replay {workload.routing}, whose step had as many tokens"
        raise BadInput("workload.global_batch_tokens", workload.global_batch_tokens, allowed)


def unsupported(model: Model) -> list[str]:
    """The model's fields that keep it from being executed, each as one line; empty where it can be."""
    return [
        str(BadInput(f"model.{field}", value, f"{allowed} to execute")) for field, value, allowed in _refused(model)
    ]


def require_supported(model: Model) -> None:
    """Raises BadInput for the first field that keeps the model from being executed."""
    for field, value, allowed in _refused(model):
        raise BadInput(f"model.{field}", value, f"{allowed} to execute")
