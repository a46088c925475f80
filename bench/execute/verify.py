"""Does a system compute what the reference computes? One optimizer step of both, compared parameter by parameter.

The system runs on real ranks: forward, backward, gradient sums, clipping (always active: the limit is half of the
norm), AdamW. The reference does the same in one process, in plain torch, in the same dtype, from the same weights and
sequences. Every gradient g by its global name has to satisfy ||g - r|| <= tolerance x (||r|| + atol), where atol is
`ATOL_SCALE` times the root mean square of all parameters' gradient norms: a gradient that is zero in exact arithmetic
(the router's of a top-1 model whose weights are normalised) is rounding noise on both sides and has no relative error.

Choices of experts are discrete: where two scores nearly tie, rounding decides, and one token that goes elsewhere
changes gradients far beyond rounding. So the reference takes the system's experts, and computes their weights itself;
how many it would have chosen otherwise (flips) is counted and limited, and the comparison without replay is reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.case import Case
from bench.errors import unknown
from bench.execute.init import parameter_shapes
from bench.execute.job import DTYPES, Job
from bench.execute.optimizer import clip_scale, square_sum
from bench.execute.pool import RankPool
from bench.execute.reference import LossAndGradients, ReferenceModel
from bench.execute.report import TOLERANCES, FreeRun, ParameterCheck, VerifyReport, relative
from bench.execute.sync import OptimizerSettings, replicated_ranks, shard_ranks
from bench.execute.trainer import open_trainer
from bench.models import Model
from bench.placement import Placement

ATOL_SCALE = 1e-3
NORM_JITTER = 0.1  # so that no norm is the identity at the start
# AdamW's first step moves a weight by lr g / (|g| + eps): with the usual eps, rounding noise would move weights as
# far as gradients do. Here the step is as smooth as the gradients are accurate, and large enough to be seen.
LEARNING_RATE, EPS = 1e-2, 1e-3
TOKENS_PER_CHUNK = 4096  # of the reference, whose activations are held at a time


@dataclass(frozen=True)
class RankOutcome:
    """What one rank has after the step; tensors by global name, on the CPU.

    Attributes:
        loss: this rank's terms of it.
        grads: summed over ranks, before clipping.
        weights: after the update.
        expert_ids: (layer, number of the first sequence) -> int64 [sequences, S, k].
        rank: within the plan.
    """

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    expert_ids: dict[tuple[int, int], Tensor]
    rank: int


def verify(
    case: Case,
    pool: RankPool,
    *,
    dtype: str | None = None,
    replay: bool = True,
    data: str = "synthetic",
    trainer: str | None = None,
) -> VerifyReport:
    """Runs one step of the case's system on the first ranks of a pool, and of the reference, and compares.

    Args:
        dtype: ``fp32`` or ``bf16``, instead of the workload's.
        replay: whether the reference takes the system's experts where it would have chosen others.
        data: see `open_corpus`.
        trainer: see `bench.system.TRAINERS`; what the system takes unless told where not given.
    Raises:
        BadInput: the case cannot be executed on these ranks.
        RankError: something went wrong on a rank.
    """
    if dtype is not None:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        case = case.model_copy(update={"workload": case.workload.model_copy(update={"dtype": dtype})})
    job = Job.of(case, data, trainer=trainer)
    job.require_ranks(pool)
    reference = ReferenceStep(job, pool.device)
    outcomes = pool.run(step_on_rank, job, reference.settings, world_size=job.world_size)
    return reference.compare(outcomes, replay=replay)


def step_on_rank(job: Job, settings: OptimizerSettings) -> RankOutcome:
    """The system's side, on every rank of a pool."""
    grads: dict[str, Tensor] = {}

    def keep() -> None:
        grads.update({name: _host_copy(grad) for name, _, grad in trainer.named_parameters()})

    trainer = open_trainer(job, settings, on_summed=keep, norm_jitter=NORM_JITTER)
    result = trainer.step(0, keep_expert_ids=True)
    top_k = job.case.model.top_k
    return RankOutcome(
        result.loss,
        trainer.grad_norm(),
        grads,
        {name: _host_copy(value) for name, value, _ in trainer.named_parameters()},
        {
            (layer, trainer.first_sequence(m)): ids.view(job.batch.mbs, -1, top_k)
            for (layer, m), ids in result.expert_ids.items()
        },
        trainer.rank,
    )


class ReferenceStep:
    """The reference's side, and the comparison.

    Attributes:
        free: loss and gradients with the reference's own choice of experts, or the workload's where it forces one.
        settings: of the optimizer step of both sides.
    """

    def __init__(self, job: Job, device: str = "cpu") -> None:
        model, workload = job.case.model, job.case.workload
        self.job = job
        self.model = ReferenceModel(model, workload.seed, dtype=job.dtype, device=device, norm_jitter=NORM_JITTER)
        self.free = self._gradients(job.forced_ids())
        self.settings = OptimizerSettings(lr=LEARNING_RATE, eps=EPS, max_norm=max(_norm(self.free.grads) / 2, 1e-30))

    def compare(self, outcomes: Sequence[RankOutcome], *, replay: bool = True) -> VerifyReport:
        """Compares what every rank has."""
        outcomes = sorted(outcomes, key=lambda outcome: outcome.rank)
        case, free = self.job.case, self.free
        ids = _global_ids(outcomes)
        flips, num_choices = _count_flips(ids, free.expert_ids)
        replayed = replay and flips > 0
        expected = self._gradients(ids) if replayed else free
        comparison, of_free = _Comparison(expected.grads, self._update(expected.grads)), _Comparison(free.grads, {})
        loss, norm = sum(outcome.loss for outcome in outcomes), _norm(expected.grads)
        tolerance = TOLERANCES[case.workload.dtype]
        return VerifyReport(
            system=case.system,
            case_id=case.id,
            layout=str(case.layout),
            dtype=case.workload.dtype,
            trainer=self.job.trainer,
            traits=self.job.program.plan.traits,
            num_ranks=self.job.world_size,
            tolerance=dataclasses.replace(tolerance, flips=0.0) if self.job.forces_routing else tolerance,
            atol=comparison.atol,
            loss=loss,
            reference_loss=expected.loss,
            grad_norm=max((outcome.grad_norm for outcome in outcomes), key=lambda found: relative(found, norm)),
            reference_grad_norm=norm,
            parameters=tuple(comparison.check(name, outcomes) for name in expected.grads),
            misplaced=tuple(_misplaced(self.job, outcomes)),
            flips=flips,
            num_choices=num_choices,
            replayed=replayed,
            free=FreeRun(
                relative(loss, free.loss), max(of_free.check(name, outcomes).gradient_error for name in free.grads)
            ),
        )

    def _gradients(self, replay_ids: Mapping[int, Tensor] | None) -> LossAndGradients:
        job = self.job
        return self.model.loss_and_gradients(
            job.sequences(job.corpus(), 0, range(job.batch.num_sequences)),
            replay_ids=replay_ids,
            collect_ids=True,
            sequences_per_chunk=max(1, TOKENS_PER_CHUNK // job.case.workload.seq_len),
        )

    def _update(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights after the optimizer step."""
        weights = {name: parameter.detach().clone() for name, parameter in self.model.parameters.items()}
        for name, weight in weights.items():
            weight.main_grad = grads[name].clone()  # type: ignore[attr-defined]
        norm = square_sum(list(grads.values()), self.model.device).sqrt()
        self.settings.adamw(weights.values()).step(clip_scale(norm, self.settings.max_norm))
        return {name: weight.cpu() for name, weight in weights.items()}


def holders(model: Model, placement: Placement, num_replicas: int) -> dict[str, tuple[int, ...]]:
    """Global name of every parameter -> the global ranks that are to hold it."""
    found = {}
    for name in parameter_shapes(model):
        words = name.split(".")
        if words[0] != "layers":
            group = placement.embed if words[0] == "embed" else placement.head
        elif words[2] == "experts" or (words[2] == "shared" and placement.shared_on == "expert"):
            group = placement.expert[int(words[1])] or ""
        else:
            group = placement.attention[int(words[1])]
        if words[0] == "layers" and words[2] == "experts":
            per_rank = model.num_experts // placement.by_name[group].size
            found[name] = shard_ranks(placement, num_replicas, group, int(words[3]) // per_rank)
        else:
            found[name] = replicated_ranks(placement, num_replicas, group)
    return found


class _Comparison:
    """Compares parameter by parameter; weights only where there are any."""

    def __init__(self, grads: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        self.grads = {name: grad.cpu() for name, grad in grads.items()}
        self.atol = ATOL_SCALE * _norm(grads) / math.sqrt(len(grads))
        self.weights = weights

    def check(self, name: str, outcomes: Sequence[RankOutcome]) -> ParameterCheck:
        ranks = tuple(rank for rank, outcome in enumerate(outcomes) if name in outcome.grads)
        held = [outcomes[rank] for rank in ranks]
        grad = self.grads[name].double()
        norm = grad.norm().item()
        gradient_error = weight_error = 0.0
        for outcome in held:
            apart = (outcome.grads[name].double() - grad).norm().item()
            gradient_error = max(gradient_error, apart / (norm + self.atol), key=_nan_first)
            if self.weights:
                weight = self.weights[name].double()
                moved = (outcome.weights[name].double() - weight).norm().item()
                weight_error = max(weight_error, moved / weight.norm().item(), key=_nan_first)
        agree = all(
            torch.equal(one.grads[name], held[0].grads[name]) and torch.equal(one.weights[name], held[0].weights[name])
            for one in held[1:]
        )
        return ParameterCheck(name, ranks, norm, gradient_error, weight_error, agree)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _global_ids(outcomes: Sequence[RankOutcome]) -> dict[int, Tensor]:
    """Layer -> int64 [B, S, k], from all ranks that have routers."""
    pieces: dict[int, dict[int, Tensor]] = {}
    for outcome in outcomes:
        for (layer, first), ids in outcome.expert_ids.items():
            assert first not in pieces.setdefault(layer, {}), (layer, first)
            pieces[layer][first] = ids
    return {layer: torch.cat([by_first[first] for first in sorted(by_first)]) for layer, by_first in pieces.items()}


def _count_flips(ids: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> tuple[int, int]:
    """Choices that are not among the expected ones of their token, and all choices."""
    flips = total = 0
    for layer, chosen in ids.items():
        same = chosen.unsqueeze(-1) == expected[layer].cpu().unsqueeze(-2)
        flips += int((~same.any(dim=-1)).sum())
        total += chosen.numel()
    return flips, total


def _misplaced(job: Job, outcomes: Sequence[RankOutcome]) -> Iterator[str]:
    expected = holders(job.case.model, job.program.plan.placement, job.batch.num_replicas)
    for name in sorted({*expected, *(name for outcome in outcomes for name in outcome.grads)}):
        ranks = tuple(rank for rank, outcome in enumerate(outcomes) if name in outcome.grads)
        if ranks != expected.get(name, ()):
            yield f"{name}: on ranks {ranks}, and should be on {expected.get(name, ())}"


def _norm(grads: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))


def _nan_first(error: float) -> float:
    return math.inf if math.isnan(error) else error
