"""What compute actions cost: seconds of their kernels, and FLOPs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.action import Action, Kind, Pass
from bench.errors import BadInput
from bench.family import Floats
from bench.flops import Pass as PassWord
from bench.flops import part_flops
from bench.holding import Holding
from bench.roofline import (
    GRAD_BYTES,
    Kernel,
    Machine,
    Work,
    attention_core,
    attention_elements,
    gemms,
    head_bytes,
    inner_width,
    swiglu_elements,
)
from bench.sequence import Exchange, ring_exchange, ring_rows, tensor_exchange

PASS_WORDS: dict[Pass, PassWord] = {Pass.F: "F", Pass.B: "B", Pass.W: "W"}


@dataclass(frozen=True, eq=False)
class ComputationCosts(Holding):
    """Seconds and FLOPs of compute actions; activations that go to the host and back are beside them."""

    def seconds(self, action: Action) -> Floats:
        """[ranks of its group]: seconds of a compute action.

        With offloaded activations it takes no less than their way over the host's link, which runs beside it.
        """
        # What is kept decides what goes to the host; otherwise it matters only whether the forward runs once more.
        again = self.recompute if self.case.layout.offloads_activations else self.computes_again(action)
        sends = action.pass_ is Pass.R and self.recompute == "redispatch"
        key = ("seconds", again, sends, self.case.layout.offloads_activations, *self._likeness(action))
        return self._once(key, lambda: self._with_offload(action, self._seconds(action)))

    def flops(self, action: Action) -> Floats:
        """[ranks of its group]: model FLOPs of a compute action; what is computed again does not count."""
        return self._cached(("flops", *self._likeness(action)), lambda: self._flops(action))

    def _seconds(self, action: Action) -> Floats:
        total = np.zeros(self._size(action))
        for pass_ in [Pass.R] * self.computes_again(action) + [action.pass_]:
            for seconds in self._kernel_seconds(action._replace(pass_=pass_)):
                total = total + seconds
            if action.kind is Kind.ATTENTION and self.case.layout.sequence_ranks > 1:
                total = total + self._exchange_s(action._replace(pass_=Pass.F if pass_ is Pass.R else pass_))
        return total

    def _with_offload(self, action: Action, seconds: Floats) -> Floats:
        if not self.case.layout.offloads_activations:
            return seconds
        link = self.case.cluster.gpu.host_bytes_per_s * self.assumed.host_link
        return np.maximum(seconds, self.offloaded_bytes(action) / link)

    def _exchange_s(self, attention: Action) -> float:
        """Seconds by which the exchanges of ranks that share sequences make an attention action longer."""
        if self.free_communication:
            return 0.0
        cluster, assumed = self.case.cluster, self.assumed
        tensor, ring = self.sequence_exchanges(attention)
        rate, latency = cluster.gpu.nvlink_bytes_per_s * assumed.nvlink, cluster.nvlink_latency_s + assumed.transfer_s
        tensor_s, ring_s = (each.num_bytes / rate + each.num_messages * latency for each in (tensor, ring))
        core_s = float(self._machine.seconds(self._core(attention))) if ring.num_bytes else 0.0
        return tensor_s * assumed.tensor_exposed + max(ring_s * assumed.ring_exposed, ring_s - core_s)

    def sequence_exchanges(self, attention: Action) -> tuple[Exchange, Exchange]:
        """What an attention action moves between the ranks that share its heads, and those that share its sequences."""
        model, layout, e = self.case.model, self.case.layout, self._load.element_bytes
        pass_ = Pass.F if attention.pass_ is Pass.R else attention.pass_
        return (
            tensor_exchange(model, layout, pass_, self._tokens, e),
            ring_exchange(model, layout, attention.layer, pass_, self._tokens, self._seq_len, e),
        )

    def _flops(self, action: Action) -> Floats:
        total = np.zeros(self._size(action))
        if action.pass_ is Pass.R:
            return total
        for part, rows in self._parts(action):
            layer = action.layer if part not in ("embed", "head") else 0
            # Linear in the rows.
            of_one = part_flops(
                self.case.model,
                part,
                layer,
                PASS_WORDS[action.pass_],
                tokens=1.0,
                seq_len=self._seq_len,
                assignments=1.0,
            )
            total = total + rows * of_one
        return total

    def _kernel_seconds(self, action: Action) -> list[Floats | float]:
        """Seconds of each kernel of one pass; what is computed again counts as pass R."""
        sends = action.pass_ is Pass.R and self.recompute == "redispatch"
        key = ("kernels", sends, *self._likeness(action))
        known = self._passes if action.kind is Kind.EXPERT else self._passes_apart
        if key not in known:
            known[key] = [self._machine.seconds(kernel) for kernel in self._kernels(action)]
        found: list[Floats | float] = known[key]
        return found

    def _kernels(self, action: Action) -> list[Kernel]:
        model, layer, e = self.case.model, action.layer, self._load.element_bytes
        pass_ = Pass.F if action.pass_ is Pass.R else action.pass_
        found: list[Kernel] = []
        for part, rows in self._parts(action):
            local = model.num_experts / self._load.num_expert_ranks(layer) if part == "expert" else 1.0
            work = Work(rows, local, self.case.layout.tp)
            found += gemms(model, part, layer if part != "head" else 0, pass_, work, e, self.assumed)
            if part in ("dense_ffn", "shared", "expert"):
                found.append(self._moves(rows * swiglu_elements(inner_width(model, part), pass_)))
        match action.kind:
            case Kind.ATTENTION:
                if pass_ is not Pass.W:
                    found.append(self._core(action._replace(pass_=pass_)))
                found.append(self._moves(self._tokens * attention_elements(model, pass_)))
            case Kind.HEAD:
                found.append(Kernel(0.0, self._tokens * head_bytes(model, pass_, e), 1.0))
            case Kind.EMBED:
                # Backward adds rows into an fp32 gradient.
                moved = e + (e if pass_ is Pass.F else 2 * GRAD_BYTES)
                found.append(Kernel(0.0, self._tokens * model.hidden_size * moved, 1.0))
        if pass_ is not Pass.W:
            # Packed and added up chunk by chunk.
            pieces = 1 if action.kind is Kind.EXPERT else self.chunks
            found += [self._moves(self._gathered_rows(action) / pieces * model.hidden_size)] * pieces
        return found

    def _core(self, attention: Action) -> Kernel:
        model, layout, tokens, seq_len = self.case.model, self.case.layout, self._tokens, self._seq_len
        layer, e = attention.layer, self._load.element_bytes
        received = ring_rows(model, layout, layer, tokens, seq_len)
        return attention_core(model, layer, attention.pass_, tokens, seq_len, e, self.assumed, received)

    def _gathered_rows(self, action: Action) -> Floats | float:
        """Rows read and written to pack, unpack and add up what is exchanged, on the ranks of the action."""
        model, layer = self.case.model, action.layer
        if action.pass_ is Pass.R:
            sends = self.recompute == "redispatch" and action.kind is Kind.ATTENTION and not model.is_dense(layer)
            return self._tokens * (float(self._load.copies_per_token(layer).sum()) + 1) if sends else 0.0
        if action.kind is Kind.EXPERT:
            # Rows to assignments and back, with the weighted sum.
            return 2 * self._load.assignments(layer) + self._load.rows(layer) + self._load.assignments(layer)
        rows = 0.0
        if action.kind is Kind.ATTENTION and not model.is_dense(layer):
            rows += float(self._load.copies_per_token(layer).sum()) + 1
        joined = self._joins(action)
        if joined is not None:
            rows += float(self._load.copies_per_token(joined).sum()) + 2
        return rows * self._tokens

    def _moves(self, elements: Floats | float) -> Kernel:
        return Kernel(0.0, self._load.element_bytes * elements, 1.0)

    @cached_property
    def _machine(self) -> Machine:
        gpu, assumed = self.case.cluster.gpu, self.assumed
        if assumed.communication_sms >= gpu.num_sms:
            raise BadInput("assumptions.communication_sms", assumed.communication_sms, f"less than {gpu.num_sms} SMs")
        left = 1 - assumed.communication_sms / gpu.num_sms * self.taxed_share
        return Machine(
            gpu.peak_flops(self.case.workload.dtype) * left, gpu.hbm_bytes_per_s * assumed.hbm, assumed.kernel_s
        )
