"""AdamW over this rank's shards: float32 weights that are their own master copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.tensor import DTensor

from ctrl_megatron.models.host_state import HostAdamState
from ctrl_megatron.models.offload import OffloadedTensors
from ctrl_megatron.models.optimizer import (
    MOMENTS,
    OptimizerOptions,
    OwnedRange,
    make_schedule,
    require_finite_weight_norm,
)
from ctrl_megatron.parallel.groups import ProcessGroups


class ShardedAdam:
    """A ``models.strategy.Optimizer`` of parameters whose rows the ranks of a copy share."""

    def __init__(
        self,
        pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
        options: OptimizerOptions,
        groups: ProcessGroups,
    ) -> None:
        """``pairs`` are the parameters that learn, each with this rank's part of it: rows of a
        DTensor, or all of another parameter, which every rank has."""
        self._options, self._groups = options, groups
        self._pairs = [(p, shard) for p, shard in pairs if shard.numel()]
        self._whole = [shard for p, shard in self._pairs if not isinstance(p, DTensor)]
        matrices = [shard for _, shard in self._pairs if shard.dim() > 1]
        vectors = [shard for _, shard in self._pairs if shard.dim() == 1]
        # As in Megatron, only matrices decay.
        kinds = [(matrices, 1.0), (vectors, 0.0)]
        given: list[dict[str, Any]] = [{"params": own, "wd_mult": k} for own, k in kinds if own]
        self.adam = torch.optim.AdamW(
            # A rank may have no row of a very small model.
            given or [{"params": [torch.zeros(0, device=groups.device)], "wd_mult": 0.0}],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._on_host: HostAdamState | None = None
        if options.on_host:
            self._on_host = HostAdamState(self.adam, self._moments_of, self._make_moments)
        else:
            for _, shard in self._pairs:
                self._make_moments(shard)
        self._schedule: OptimizerParamScheduler
        self._schedule, self._ahead = make_schedule(self.adam, options)

    def _make_moments(self, shard: torch.Tensor) -> None:
        # The fused kernel counts steps where the weights are.
        step = torch.zeros((), device=shard.device)
        self.adam.state[shard] |= {
            "step": step,
            **{name: torch.zeros_like(shard) for name in MOMENTS},
        }

    def _moments_of(self, shard: torch.Tensor) -> Iterator[torch.Tensor]:
        return (self.adam.state[shard][name] for name in MOMENTS)

    @property
    def update_count(self) -> int:
        return self._schedule.num_steps - self._ahead

    @property
    def learning_rate_setting(self) -> str:
        return self._options.learning_rate_setting

    def forget_gradients(self) -> None:
        for parameter, shard in self._pairs:
            parameter.grad = shard.grad = None

    @torch.no_grad()
    def grad_norm(self) -> float:
        for parameter, shard in self._pairs:
            grad: Any = parameter.grad
            if grad is None:
                shard.grad = torch.zeros_like(shard)
            else:
                shard.grad = grad.to_local() if isinstance(grad, DTensor) else grad
        self._sum_whole()
        return self._norm([shard.grad for _, shard in self._pairs])

    def _sum_whole(self) -> None:
        """Sum the gradients of what every rank has over the ranks. Collective."""
        grads = [shard.grad for shard in self._whole if shard.grad is not None]
        if grads:
            flat = torch.cat([grad.view(-1) for grad in grads])
            dist.all_reduce(flat, group=self._groups.megatron.dp)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _norm(self, tensors: Sequence[torch.Tensor | None]) -> float:
        """The norm, over all ranks, of what belongs to ``_pairs``. Collective."""
        layout, squares = self._groups.layout, torch.zeros(())
        if tensors:
            norms = torch.stack([tensor.norm() for tensor in tensors if tensor is not None])
            holders = [
                layout.fsdp_replicas if isinstance(parameter, DTensor) else layout.data
                for parameter, _ in self._pairs
            ]
            squares = (norms.cpu().double().square() / torch.tensor(holders)).sum()
        return math.sqrt(float(self._groups.sum_over_data(squares)))

    @torch.no_grad()
    def step(self, norm: float) -> dict[str, float]:
        lr = float(self.adam.param_groups[0]["lr"])
        most = self._options.clip_grad
        if most > 0 and (factor := most / (norm + 1e-6)) < 1.0:
            for _, shard in self._pairs:
                assert shard.grad is not None
                shard.grad.mul_(factor)
        if self._on_host is not None:
            self._on_host.step(lambda _: None)
        else:
            self.adam.step()
        self.forget_gradients()
        weights = self._norm([shard for _, shard in self._pairs])
        require_finite_weight_norm(
            weights, update=self.update_count + 1, learning_rate=self.learning_rate_setting
        )
        self._schedule.step(increment=1)
        return {"grad_norm": norm, "lr": lr}

    def state_tensors(self) -> Iterator[torch.Tensor]:
        for _, shard in self._pairs:
            yield from self._moments_of(shard)

    @property
    def offloaded_state(self) -> Sequence[OffloadedTensors]:
        return () if self._on_host is None else self._on_host.memory

    def owned_ranges(self) -> Iterator[OwnedRange]:
        for _, shard in self._pairs:
            state = self.adam.state[shard]
            flat = {name: state[name].view(-1) for name in MOMENTS}
            yield OwnedRange(weight=shard, start=0, tensors=flat)

    def adam_and_schedule_steps(self) -> dict[str, int]:
        counts = [int(self.adam.state[shard]["step"]) for _, shard in self._pairs]
        return {"adam": max(counts, default=0), "schedule": self.update_count}

    def set_adam_and_schedule_steps(self, *, adam: int, schedule: int) -> None:
        for _, shard in self._pairs:
            self.adam.state[shard]["step"].fill_(adam)
        self._schedule.num_steps = schedule + self._ahead
        self._schedule.step(increment=0)
