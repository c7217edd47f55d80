"""Megatron's optimizer and schedule behind one small class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ctrl_megatron.models.build import DTYPES, BuildOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """AdamW with float32 master weights, its learning-rate schedule and gradient clipping."""

    lr: float
    total_steps: int
    """Optimizer steps of the whole run; the cosine schedule ends there."""
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    clip_grad: float = 1.0
    distributed: bool = True
    """Shard the optimizer state over the data-parallel ranks."""


class Optimization:
    """Owns the optimizer state and the schedule of a policy."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], options: OptimizerOptions, build: BuildOptions
    ) -> None:
        dtype = DTYPES[build.dtype]
        self.options = options
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=options.lr * options.min_lr_ratio,
                weight_decay=options.weight_decay,
                adam_beta1=options.betas[0],
                adam_beta2=options.betas[1],
                adam_eps=options.eps,
                clip_grad=options.clip_grad,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=options.distributed,
            ),
            list(chunks),  # type: ignore[arg-type]
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.lr * options.min_lr_ratio,
            lr_warmup_steps=options.warmup_steps,
            lr_decay_steps=max(options.total_steps, options.warmup_steps + 1),
            lr_decay_style=options.schedule,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        if options.warmup_steps:
            # Megatron's schedule starts at lr 0; the first step would change nothing.
            self.scheduler.step(increment=1)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self.optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """Clip, update the weights, advance the schedule."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        _, grad_norm, _ = self.optimizer.step()
        norm = math.nan if grad_norm is None else float(grad_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}; lower actor.optim.lr or look for bad rows"
            )
        self.scheduler.step(increment=1)
        return {"grad_norm": norm, "lr": lr}

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position (the optimizer state itself is saved sharded)."""
        return self.scheduler.state_dict()
