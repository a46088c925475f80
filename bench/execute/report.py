"""How far a system's step and the reference's are apart, and whether that is near enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Tolerance:
    """Relative errors: of the loss, of gradients, of their norm, of updated weights; flips as a share of choices."""

    loss: float
    gradient: float
    norm: float
    weight: float
    flips: float

    def most_flips(self, num_choices: int) -> int:
        """Of so many choices; one near tie there may always be, unless none is allowed at all."""
        return max(1, int(self.flips * num_choices)) if self.flips else 0


TOLERANCES = {
    # AdamW's first step is lr g / (|g| + eps): where |g| is near eps, a gradient's error is a step's error, so weights
    # are compared with the gradient's tolerance.
    "fp32": Tolerance(loss=1e-6, gradient=1e-5, norm=1e-5, weight=1e-5, flips=1e-3),
    # A rounding to bf16 is an error of up to 2^-9; both sides round after every operator, not always at the same place.
    "bf16": Tolerance(loss=1e-3, gradient=3e-2, norm=1e-2, weight=3e-2, flips=3e-2),
}


@dataclass(frozen=True)
class ParameterCheck:
    """One parameter, by its global name.

    Attributes:
        ranks: that hold it.
        norm: of the reference's gradient.
        gradient_error: ||g - r|| / (||r|| + atol), the largest over the ranks.
        weight_error: ||w - v|| / ||v|| after the update, the largest over the ranks.
        copies_agree: whether gradients and weights are equal to the last bit on all ranks.
    """

    name: str
    ranks: tuple[int, ...]
    norm: float
    gradient_error: float
    weight_error: float
    copies_agree: bool


@dataclass(frozen=True)
class FreeRun:
    """The same comparison where the reference chooses experts itself."""

    loss_error: float
    worst_gradient_error: float


@dataclass(frozen=True)
class VerifyReport:
    """What was compared and how far apart it was. All errors are relative.

    Attributes:
        grad_norm: before clipping.
        flips, num_choices: (token, expert) choices that the reference would have made otherwise, and all of them.
        trainer: what trained, see `bench.system.TRAINERS`.
        traits: of the plan, see `bench.plan.TRAITS`.
        misplaced: parameters that are missing, or held by other ranks than they should be; a line each.
    """

    system: str
    case_id: str
    layout: str
    dtype: str
    trainer: str
    traits: tuple[str, ...]
    num_ranks: int
    tolerance: Tolerance
    atol: float
    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    parameters: tuple[ParameterCheck, ...]
    misplaced: tuple[str, ...]
    flips: int
    num_choices: int
    replayed: bool
    free: FreeRun

    @property
    def loss_error(self) -> float:
        return relative(self.loss, self.reference_loss)

    @property
    def norm_error(self) -> float:
        return relative(self.grad_norm, self.reference_grad_norm)

    @property
    def worst(self) -> ParameterCheck:
        """The parameter with the largest gradient error."""
        return max(self.parameters, key=lambda check: check.gradient_error)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a line each."""
        limit = self.tolerance
        found = list(self.misplaced)
        for what, error, allowed in (
            ("loss", self.loss_error, limit.loss),
            ("gradient norm", self.norm_error, limit.norm),
        ):
            if not error <= allowed:
                found.append(f"{what}: error {error:.2e}, allowed {allowed:.0e}")
        if self.flips > limit.most_flips(self.num_choices):
            found.append(f"{self.flips} expert choices differ, allowed {limit.most_flips(self.num_choices)}")
        for check in self.parameters:
            if not check.gradient_error <= limit.gradient:
                found.append(f"{check.name}: gradient error {check.gradient_error:.2e}, allowed {limit.gradient:.0e}")
            if not check.weight_error <= limit.weight:
                found.append(f"{check.name}: weight error {check.weight_error:.2e}, allowed {limit.weight:.0e}")
            if not check.copies_agree:
                found.append(f"{check.name}: differs between ranks {', '.join(map(str, check.ranks))}")
        return tuple(found)

    @property
    def ok(self) -> bool:
        return not self.problems

    COLUMNS: ClassVar[tuple[str, ...]] = ("parameter", "ranks", "gradient norm", "gradient error", "weight error")

    def table(self, most: int | None = None) -> list[tuple[str, ...]]:
        """Rows under `COLUMNS`, the largest gradient errors first."""
        order = sorted(self.parameters, key=lambda check: -check.gradient_error)[:most]
        return [
            (
                check.name,
                " ".join(map(str, check.ranks)),
                f"{check.norm:.3e}",
                f"{check.gradient_error:.1e}",
                f"{check.weight_error:.1e}",
            )
            for check in order
        ]

    def __str__(self) -> str:
        worst, free = self.worst, self.free
        how = "replayed" if self.replayed else "not replayed"
        what = f"{self.system} ({', '.join([self.trainer, *self.traits])}) {self.layout} {self.dtype}"
        lines = [
            f"{what} on {self.num_ranks} ranks: {'ok' if self.ok else 'FAILED'}",
            f"loss {self.loss:.6f}, error {self.loss_error:.1e} (allowed {self.tolerance.loss:.0e})",
            f"{len(self.parameters)} gradients, worst error {worst.gradient_error:.1e} in {worst.name} "
            f"(allowed {self.tolerance.gradient:.0e}, atol {self.atol:.1e})",
            f"gradient norm {self.grad_norm:.6f}, error {self.norm_error:.1e}",
            f"weights after the update, worst error {max(c.weight_error for c in self.parameters):.1e}",
            f"{self.flips} of {self.num_choices} expert choices differ ({how}); without replay: loss error "
            f"{free.loss_error:.1e}, worst gradient error {free.worst_gradient_error:.1e}",
        ]
        return "\n".join([*lines, *self.problems])


def relative(value: float, expected: float) -> float:
    """|value - expected| / |expected|; 0 where they are equal."""
    return 0.0 if value == expected else abs(value - expected) / max(abs(expected), 1e-300)
