"""One rank on which megatron-core trains a case: parallel state, GPTModel, DDP, optimizer, schedule."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch import Tensor

from bench.action import Kind
from bench.execute.job import Job
from bench.execute.rank import rank_device, when_over
from bench.execute.record import NativeTrace
from bench.execute.shards import Shard
from bench.execute.sync import OptimizerSettings
from bench.execute.trainer import NativeStep
from bench.program import Op
from systems.megatron_core.cpu import running_on
from systems.megatron_core.model import build_chunks, full_config, global_views, initialise
from systems.megatron_core.parts import Choices, Experts, Router
from systems.megatron_core.record import Recorder
from systems.megatron_core.state import after_loading, state_shards

OnTurn = Callable[[str, int, int], None]
"""Called with (F or B, chunk, micro-batch) when its computation begins."""


class MegatronTrainer:
    """See `bench.execute.trainer.Trainer`. Ranks are numbered within the plan; megatron-core orders them otherwise.

    Args:
        on_turn: hears in which order the schedule goes through chunks and micro-batches.
    """

    overlaps = False

    def __init__(
        self,
        job: Job,
        settings: OptimizerSettings,
        *,
        on_summed: Callable[[], None] | None = None,
        norm_jitter: float = 0.0,
        on_turn: OnTurn | None = None,
    ) -> None:
        self.job, self.settings, self.device = job, settings, rank_device()
        self._on_summed, self._on_turn = on_summed, on_turn
        self._corpus = job.corpus()
        self._norm = 0.0
        self._recorder: Recorder | None = None
        self._forced = cache(self._forced_ids)  # the same in every step, and slower to draw than to train on
        with running_on(self.device):
            self._open(norm_jitter)

    def _open(self, norm_jitter: float) -> None:
        case, job = self.job.case, self.job
        model, layout = case.model, case.layout
        _leave_groups()  # of the trainer before, in this process
        when_over(self._leave)
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            expert_model_parallel_size=layout.ep,
            create_gloo_process_groups=False,
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.index = parallel_state.get_expert_model_parallel_rank()
        self.replica = parallel_state.get_expert_data_parallel_rank()
        self.rank = (self.replica * layout.pp + stage) * layout.ep + self.index
        self._first_expert = self.index * (model.num_experts // layout.ep)
        config = full_config(
            model,
            layout,
            job.dtype,
            finalize_model_grads_func=self._finalise,
            overlap_moe_expert_parallel_comm=self.overlaps,
        )
        whole = build_chunks(model, layout, config, stage=stage, max_seq_len=case.workload.seq_len, device=self.device)
        initialise(
            whole,
            self._first_expert,
            seed=case.workload.seed,
            num_layers=model.num_layers,
            norm_jitter=norm_jitter,
            drawn_on=job.weights,
        )
        self.modules = [module for chunk in whole for module in chunk.modules()]
        self.routers = [module for module in self.modules if isinstance(module, Router)]
        sharded = layout.shard_state
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        self.chunks = [DistributedDataParallel(config, reduction, chunk) for chunk in whole]
        self._whole = whole
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(self.settings, job.dtype, sharded), self.chunks, use_gloo_process_groups=False
        )
        self._run = get_forward_backward_func()

    def _leave(self) -> None:
        """Lets go of what would keep the trainer's tensors and megatron-core's process groups for ever.

        These are rings through autograd's C++, which no collector sees: hooks of gradients that refer to their chunk,
        and graphs that hold weights, of a dispatcher's last scores and of an optimizer's shards of weights.
        """
        dispatchers = [getattr(module, "token_dispatcher", None) for module in self.modules]
        weights = [param for chunk in self.chunks for param in chunk.parameters()]
        for one in (*weights, *self.chunks, *filter(None, dispatchers)):
            vars(one).clear()
        _leave_groups()

    def step(self, number: int, *, keep_expert_ids: bool = False, traced: bool = False) -> NativeStep:
        """One optimizer step on the global batch of that number."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with running_on(self.device):
            if not traced:
                return self._step(number, keep_expert_ids)
            recomputes = self.job.case.layout.recompute != "none"
            self._recorder = Recorder(self._whole, self.device, recomputes=recomputes)
            try:
                with self._recorder.recording():
                    done = self._step(number, keep_expert_ids)
                trace = NativeTrace(self.rank, self._recorder.spans(), self._recorder.base_s)
            finally:
                self._recorder = None
            return dataclasses.replace(done, trace=trace)

    def _noted(self, op: Op, kind: Kind) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._recorder is None else self._recorder.span(op, kind)

    def _step(self, number: int, keep: bool) -> NativeStep:
        layout, batch = self.job.case.layout, self.job.batch
        experts = [module for module in self.modules if isinstance(module, Experts)]
        forced = self._forced if self.job.forces_routing else None
        for router in self.routers:
            router.router_replay = Choices(router.layer_number - 1, forced, keep=keep)
        for one in experts:
            one.load = [0] * len(one.load)
        get_moe_layer_wise_logging_tracker().clear()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._batches = [self._microbatch(number, m) for m in range(batch.num_microbatches)]
        microbatches = [iter(range(batch.num_microbatches)) for _ in self.chunks]
        losses = self._run(
            forward_step_func=self._forward,
            data_iterator=microbatches if layout.vpp > 1 else microbatches[0],
            model=self.chunks if layout.vpp > 1 else self.chunks[0],
            num_microbatches=batch.num_microbatches,
            seq_length=self.job.case.workload.seq_len,
            micro_batch_size=batch.mbs,
            forward_only=False,
        )
        self._set_rate(number)
        with self._noted(Op.UPDATE, Kind.UPDATE):
            succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        self._norm = float(norm)
        return NativeStep(
            rank=self.rank,
            loss=self._loss(losses),
            load={router.layer_number - 1: one.load for router, one in zip(self.routers, experts, strict=True)},
            expert_ids=dict(self._chosen()) if keep else {},
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
        )

    def grad_norm(self) -> float:
        """Of all gradients of the last step, before clipping."""
        return self._norm

    def first_sequence(self, microbatch: int) -> int:
        """See `bench.execute.home.Home.first_sequence`."""
        batch = self.job.batch
        return ((self.replica * batch.num_microbatches + microbatch) * batch.num_ranks + self.index) * batch.mbs

    def held_shards(self) -> list[Shard]:
        """See `bench.execute.trainer.Trainer`."""
        return list(state_shards(self._whole, self._first_expert, self.optimizer, share_out=False))

    def saved_shards(self) -> list[Shard]:
        """See `bench.execute.trainer.Trainer`."""
        return list(state_shards(self._whole, self._first_expert, self.optimizer, share_out=True))

    def after_loading(self, num_steps: int) -> None:
        """See `bench.execute.trainer.Trainer`."""
        with running_on(self.device):
            after_loading(self.chunks, self.optimizer, num_steps)

    def named_parameters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(global name, parameter, gradient buffer) of everything on this rank."""
        for name, param, expert in global_views(self._whole, self._first_expert):
            value, grad = param.detach(), param.main_grad  # type: ignore[attr-defined]
            yield (name, value, grad) if expert is None else (name, value[expert], grad[expert])

    def _microbatch(self, step: int, microbatch: int) -> Tensor:
        first = self.first_sequence(microbatch)
        return self.job.sequences(self._corpus, step, range(first, first + self.job.batch.mbs)).to(self.device)

    def _forward(
        self, microbatches: Iterator[int], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[Tensor], Any]]:
        """A chunk's forward of its next micro-batch, and what makes a loss of it where it is the last chunk.

        With `return_schedule_plan`, as combined 1F1B asks for: its nodes, which the schedule runs.
        """
        m = next(microbatches)
        sequences = self._batches[m]
        inputs, labels = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        if return_schedule_plan:
            return chunk.build_schedule_plan(inputs, None, None, labels=labels), _mean_loss
        out = chunk(inputs, None, None, labels=labels)
        if self._on_turn is not None:
            self._on_turn("F", self.chunks.index(chunk), m)
            out.register_hook(lambda _: self._on_turn("B", self.chunks.index(chunk), m))
        return out, _mean_loss

    def _finalise(self, *args: Any, **options: Any) -> None:
        """megatron-core's end of a backward: gradients summed over ranks."""
        with self._noted(Op.SYNC, Kind.SYNC):
            finalize_model_grads(*args, **options)
        if self._on_summed is not None:
            if self.job.case.layout.shard_state:
                self._gather_gradients()
            self._on_summed()

    def _gather_gradients(self) -> None:
        """After a reduce-scatter: the whole sum on every rank, to be looked at."""
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    size = bucket.grad_data.numel() // ranks.size()
                    own = bucket.grad_data[ranks.rank() * size : (ranks.rank() + 1) * size].clone()
                    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                    gather(bucket.grad_data, own, group=ranks)

    def _set_rate(self, step: int) -> None:
        """What megatron-core's schedule of learning rate and weight decay does before a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(step) * group["lr_mult"]
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]

    def _loss(self, losses: list[dict[str, Tensor]]) -> float:
        """This rank's terms of the global mean: of its tokens, and of its routers' losses, which megatron-core logs."""
        model = self.job.case.model
        total = sum((one["loss"] for one in losses), torch.zeros((), device=self.device))
        coefficients = {"seq_load_balancing_loss": model.aux_loss_coeff, "z_loss": model.z_loss_coeff}
        for name, logged in get_moe_layer_wise_logging_tracker().items():
            total = total + coefficients[name] * logged["values"].sum()
        data_ranks = self.job.batch.num_replicas * self.job.batch.num_ranks
        return total.item() / (self.job.batch.num_microbatches * data_ranks)

    def _chosen(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """(layer, micro-batch) -> int64 [T, k], sequence after sequence, on the CPU."""
        for router in self.routers:
            for microbatch, ids in router.router_replay.chosen.items():
                by_sequence = ids.view(-1, self.job.batch.mbs, ids.shape[-1]).transpose(0, 1)
                yield (router.layer_number - 1, microbatch), by_sequence.flatten(0, 1).cpu()

    def _forced_ids(self, layer: int, microbatch: int) -> Tensor:
        first = self.first_sequence(microbatch)
        ids = self.job.expert_ids(layer, range(first, first + self.job.batch.mbs))
        return ids.transpose(0, 1).flatten(0, 1).to(self.device)


class OverlapTrainer(MegatronTrainer):
    """megatron-core's combined 1F1B: all-to-alls of one micro-batch beside another's computation, on two streams."""

    overlaps = True


def _leave_groups() -> None:
    """Ends megatron-core's process groups; it forgets them only, and on the CPU each keeps three threads awake."""
    dist.barrier()  # a rank that ends a group closes the connections in which another's last message may be
    for group in (parallel_state._global_process_group_list or [None])[1:]:  # the first stands for the default group
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _mean_loss(by_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = by_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _optimizer_config(settings: OptimizerSettings, dtype: torch.dtype, sharded: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.max_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
    )
