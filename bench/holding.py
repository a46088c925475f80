"""What ranks hold because of an action: activations, messages, and what is there only while it runs."""

from dataclasses import dataclass, replace

import numpy as np

from bench.action import Action, Kind, Pass
from bench.family import Floats
from bench.memory import retained_bytes
from bench.program import Held
from bench.sequence import passing_bytes
from bench.transfers import TransferCosts


@dataclass(frozen=True, eq=False)
class Holding(TransferCosts):
    """Bytes of the values that actions make and use."""

    def held_bytes(self, held: Held, action: Action) -> Floats:
        """[ranks]: bytes held for a reason. `action` is F (FORWARD), B (BACKWARD), or the transfer (SENT, RECEIVED)."""
        return self._cached(("held", held, *self._likeness(action)), lambda: self._held_bytes(held, action))

    def _held_bytes(self, held: Held, action: Action) -> Floats:
        if held in (Held.SENT, Held.RECEIVED):
            return self.message(action).num_bytes.sum(axis=1 if held is Held.SENT else 0)
        retained = self._retained(held, action)
        return retained - self.offloaded_bytes(action) if held is Held.FORWARD else retained

    def _retained(self, held: Held, action: Action) -> Floats:
        """The same of values that are no messages, wherever they are."""
        total = np.zeros(self._size(action))
        rows = self._load.rows(action.layer) if action.kind is Kind.EXPERT else None
        if rows is not None and held is Held.FORWARD and self.recompute == "redispatch":
            rows = np.zeros_like(rows)  # they come once more
        if held is Held.AGAIN:
            forward = action._replace(pass_=Pass.F)
            return replace(self, recompute="none").held_bytes(Held.FORWARD, forward) - self.held_bytes(
                Held.FORWARD, forward
            )
        parts = self._parts(action)
        same = (rows is None or np.ptp(rows) == 0) and all(np.ptp(amount) == 0 for _, amount in parts)
        for part, amount in parts:
            for i in range(1 if same else len(total)):
                kept = retained_bytes(
                    self.case.model,
                    part,
                    0 if part == "head" else action.layer,
                    tokens=_at(amount, i),
                    assignments=_at(amount, i) if part == "expert" else None,
                    rows=None if rows is None else _at(rows, i),
                    dtype_bytes=self._load.element_bytes,
                    recompute="none" if self.recompute == "none" else "full",
                )
                total[i] += kept.after_forward if held is Held.FORWARD else kept.after_backward
        if same:
            total = np.full(len(total), total[0])
        if action.kind is Kind.ATTENTION and held is Held.BACKWARD:
            # The gathered gradient of the output stays for the weight gradients.
            others = self.case.layout.tp - 1
            total += others * self._tokens * self.case.model.hidden_size * self._load.element_bytes
        return total

    def offloaded_bytes(self, action: Action) -> Floats:
        """[ranks]: bytes that a compute action sends to the host (F) or fetches from there (B).

        What attention and experts keep from F until B; the few bytes of a token's choice of experts included, which
        an execution leaves where they are.
        """
        moved = self.case.layout.offloads_activations and action.pass_ in (Pass.F, Pass.B)
        if not moved or action.kind not in (Kind.ATTENTION, Kind.EXPERT):
            return np.zeros(self._size(action))
        return self._retained(Held.FORWARD, action._replace(pass_=Pass.F))

    def working_bytes(self, action: Action) -> Floats:
        """[ranks]: bytes held while a compute action runs and no longer.

        What a backward computes again, what ranks that share sequences have of each other, and of activations with the
        host the action's own, and as much of the one before or after it, which is on its way.
        """
        working = 2 * self.offloaded_bytes(action)
        if action.kind is Kind.ATTENTION:
            model, layout = self.case.model, self.case.layout
            working += passing_bytes(model, layout, action.pass_, self._tokens, self._load.element_bytes)
        if not self.computes_again(action):
            return working
        forward = action._replace(pass_=Pass.F)
        whole = replace(self, recompute="none").held_bytes(Held.FORWARD, forward)
        return working + (whole - self.held_bytes(Held.FORWARD, forward))

    @property
    def has_working_bytes(self) -> bool:
        """Whether `working_bytes` of any action may be more than 0."""
        layout = self.case.layout
        return self.recompute != "none" or layout.sequence_ranks > 1 or layout.offloads_activations


def _at(amount: Floats | float, i: int) -> float:
    return float(amount[i]) if isinstance(amount, np.ndarray) else float(amount)
