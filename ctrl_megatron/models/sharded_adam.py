"""AdamW over this rank's shards: float32 weights that are their own master copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ctrl_megatron.models.optimizer import (
    MOMENTS,
    OptimizerOptions,
    OwnedRange,
    make_schedule,
    require_finite,
)
from ctrl_megatron.parallel.groups import ProcessGroups


class ShardedAdam:
    """A ``models.strategy.Optimizer`` of parameters whose rows the ranks of a copy share."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        shards: Mapping[int, torch.Tensor],
        options: OptimizerOptions,
        groups: ProcessGroups,
    ) -> None:
        """``shards`` has this rank's part of every parameter, by the parameter's ``id``."""
        self._options, self._groups = options, groups
        self._pairs = [(p, shards[id(p)]) for p in parameters if shards[id(p)].numel()]
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
        for _, shard in self._pairs:
            state = self.adam.state[shard]
            # The fused kernel counts steps where the weights are.
            state["step"] = torch.zeros((), device=shard.device)
            state |= {name: torch.zeros_like(shard) for name in MOMENTS}
        self._schedule: OptimizerParamScheduler
        self._schedule, self._ahead = make_schedule(self.adam, options)

    @property
    def updates(self) -> int:
        """As in ``Optimizer``."""
        return self._schedule.num_steps - self._ahead

    @property
    def learning_rate(self) -> str:
        """As in ``Optimizer``."""
        return self._options.learning_rate

    def forget_gradients(self) -> None:
        """As in ``Optimizer``."""
        for parameter, shard in self._pairs:
            parameter.grad = shard.grad = None

    @torch.no_grad()
    def grad_norm(self) -> float:
        """As in ``Optimizer``."""
        for parameter, shard in self._pairs:
            given: Any = parameter.grad
            shard.grad = torch.zeros_like(shard) if given is None else given.to_local()
        return self._norm(shard.grad for _, shard in self._pairs)

    def _norm(self, tensors: Iterator[torch.Tensor | None]) -> float:
        """The norm over all ranks. Collective."""
        norms = [tensor.norm() for tensor in tensors if tensor is not None]
        squares = torch.stack(norms).double().square().sum() if norms else torch.zeros(())
        # All copies have the same.
        squares = squares / self._groups.layout.copies
        return math.sqrt(float(self._groups.sum_over_data(squares)))

    @torch.no_grad()
    def step(self, norm: float) -> dict[str, float]:
        """As in ``Optimizer``."""
        lr = float(self.adam.param_groups[0]["lr"])
        most = self._options.clip_grad
        if most > 0 and (factor := most / (norm + 1e-6)) < 1.0:
            for _, shard in self._pairs:
                assert shard.grad is not None
                shard.grad.mul_(factor)
        self.adam.step()
        self.forget_gradients()
        weights = self._norm(shard for _, shard in self._pairs)
        require_finite(weights, update=self.updates + 1, learning_rate=self.learning_rate)
        self._schedule.step(increment=1)
        return {"grad_norm": norm, "lr": lr}

    def tensors(self) -> Iterator[torch.Tensor]:
        """As in ``Optimizer``."""
        for _, shard in self._pairs:
            yield from (self.adam.state[shard][name] for name in MOMENTS)

    def owned(self) -> Iterator[OwnedRange]:
        """As in ``Optimizer``."""
        for _, shard in self._pairs:
            state = self.adam.state[shard]
            flat = {name: state[name].view(-1) for name in MOMENTS}
            yield OwnedRange(weight=shard, start=0, tensors=flat)

    def steps(self) -> dict[str, int]:
        """As in ``Optimizer``."""
        counts = [int(self.adam.state[shard]["step"]) for _, shard in self._pairs]
        return {"adam": max(counts, default=0), "schedule": self.updates}

    def set_steps(self, *, adam: int, schedule: int) -> None:
        """As in ``Optimizer``."""
        for _, shard in self._pairs:
            self.adam.state[shard]["step"].fill_(adam)
        self._schedule.num_steps = schedule + self._ahead
        self._schedule.step(increment=0)
