"""Megatron's optimizer and schedule behind one small class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
        dtype, min_lr = DTYPES[build.dtype], options.lr * options.min_lr_ratio
        self.optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=min_lr,
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
            min_lr=min_lr,
            lr_warmup_steps=options.warmup_steps,
            lr_decay_steps=max(options.total_steps, options.warmup_steps + 1),
            lr_decay_style=options.schedule,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            # A resumed run follows its own configuration; the checkpoint gives the step.
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        if options.warmup_steps:
            # Megatron's schedule starts at lr 0; the first step would change nothing.
            self.scheduler.step(increment=1)

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

    def tensors(self) -> Iterator[torch.Tensor]:
        """Master weights and moments, as far as they exist."""
        for inner in self.optimizer.chained_optimizers:
            for group in inner.optimizer.param_groups:
                yield from group["params"]
            for state in inner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def create_state(self) -> None:
        """Make the moments exist, as zeros, for a checkpoint of them or from one.

        torch's AdamW creates its state in the first step; Megatron asks for it before that.
        """
        for inner in self.optimizer.chained_optimizers:
            adam = inner.optimizer
            for group in adam.param_groups:
                for param in group["params"]:
                    if not adam.state[param]:
                        adam.state[param] = {
                            "step": torch.zeros(()),
                            "exp_avg": torch.zeros_like(param),
                            "exp_avg_sq": torch.zeros_like(param),
                        }

    def load_state_dict(self, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
        """Continue from a saved optimizer and schedule; ``create_state`` has been called."""
        for inner in self.optimizer.chained_optimizers:
            if hasattr(inner, "_set_main_param_and_optimizer_states"):
                _keep_step_beside_moments(inner)
        self.optimizer.load_state_dict(optimizer)
        for inner in self.optimizer.chained_optimizers:
            # megatron-core 0.16 hands one step count to all parameters, which torch's AdamW would
            # advance once per parameter in every step.
            for state in inner.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].clone()
        self.scheduler.load_state_dict(scheduler)


def _keep_step_beside_moments(inner: Any) -> None:
    """Close a gap of megatron-core 0.16 with torch's AdamW.

    Its checkpoint holds the step count once, in the parameter groups, and restores it from there;
    then it looks for it again among each parameter's moments, where it never was.
    """
    restore = inner._set_main_param_and_optimizer_states

    def restore_with_step(model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = inner.model_param_group_index_map[model_param]
        state = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
        restore(model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    inner._set_main_param_and_optimizer_states = restore_with_step
