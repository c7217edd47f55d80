"""Megatron's optimizer and learning-rate schedule as one small class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.nn.utils import get_total_norm

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.build import DTYPES, BuildOptions
from ctrl_megatron.models.host_state import HostAdamState
from ctrl_megatron.models.offload import OffloadedTensors
from ctrl_megatron.parallel.groups import ProcessGroups, as_default_group

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN_PARAM = "main_param"
"""The float32 copy of a parameter of another dtype, which Adam updates."""


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
    on_host: bool = False
    """Keep master weights and moments in host memory, also during a step (``HostState``)."""
    lr_key: str = "lr"
    """The configuration key of ``lr``, for messages."""

    @property
    def min_lr(self) -> float:
        """The end of the cosine schedule."""
        return self.lr * self.min_lr_ratio

    @property
    def learning_rate_setting(self) -> str:
        """``KEY=VALUE`` of the configuration, for messages."""
        return f"{self.lr_key}={self.lr:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRange:
    """Optimizer state of consecutive elements of one parameter; (n,) float32 tensors that share the
    optimizer's memory, on the device where it is now."""

    weight: torch.Tensor
    """As ParallelModel.shards_without_onload has it."""
    start: int
    """Index of the first element in the flattened parameter."""
    tensors: dict[str, torch.Tensor]
    """``exp_avg``, ``exp_avg_sq`` and, unless the parameter itself is float32, ``main_param``."""


def make_schedule(optimizer: Any, options: OptimizerOptions) -> tuple[OptimizerParamScheduler, int]:
    """(the schedule of the optimizer's learning rate, steps that it is ahead of the updates)."""
    # Megatron's schedule starts its warm-up at lr 0; the first step would change nothing.
    ahead = 1 if options.warmup_steps else 0
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.warmup_steps,
        lr_decay_steps=max(options.total_steps + ahead, options.warmup_steps + 1),
        lr_decay_style=options.schedule,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run uses its own configuration; only the step comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    schedule.step(increment=ahead)
    return schedule, ahead


def _make_moments(adam: Any, main: torch.Tensor) -> None:
    """Create the moments of ``main`` as zeros."""
    state = adam.state[main]
    # torch's AdamW counts steps per parameter, Transformer Engine's and Apex's FusedAdam in the
    # group and only there.
    if isinstance(adam, torch.optim.AdamW):
        state["step"] = torch.zeros(())
    state |= {name: torch.zeros_like(main) for name in MOMENTS}


def require_finite_weight_norm(norm: float, *, update: int, learning_rate: str) -> None:
    """UserError if ``norm``, that of all weights after update number ``update``, is not finite;
    ``learning_rate`` is ``KEY=VALUE``.
    """
    if not math.isfinite(norm):
        raise UserError(
            f"the norm of the updated weights is {norm} in update {update}",
            key=learning_rate,
            remedy="lower it, or look for rows whose rewards or log-probs are extreme",
        )


class ModelOptimizer:
    """Optimizer and schedule of one model; a ``models.strategy.Optimizer``."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        options: OptimizerOptions,
        build: BuildOptions,
        groups: ProcessGroups,
    ) -> None:
        dtype = DTYPES[build.dtype]
        self._options = options
        self._weights = [w for chunk in chunks for w in chunk.parameters() if w.requires_grad]
        with as_default_group(groups.megatron.intra_dist_opt):
            self.optimizer: Any = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=options.lr,
                    min_lr=options.min_lr,
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
                use_gloo_process_groups=False,
                pg_collection=groups.megatron,
            )
        if all(weight.device.type == "cpu" for weight in self._weights):
            for inner in self._inner:
                for group in inner.optimizer.param_groups:
                    # One pass over gradient, moments and weight instead of eight.
                    group["fused"] = True
        self._pairs = {
            id(main): (weight, start)
            for inner in self._inner
            for weight, main, start in self._main_params(inner)
        }
        """``id`` of a tensor that Adam updates -> the weight that it belongs to, and its first
        index there."""
        self._on_host: list[HostAdamState] = []
        for inner in self._inner:
            # Adam would create the moments during its first step, in memory that activations used
            # on a CPU; the second step would then take a tenth longer in new memory.
            make = partial(_make_moments, inner.optimizer)
            if options.on_host:
                state_of = partial(self._state_of, inner.optimizer)
                self._on_host.append(HostAdamState(inner.optimizer, state_of, make))
                continue
            for group in inner.optimizer.param_groups:
                for main in group["params"]:
                    make(main)
        self.scheduler, self._ahead = make_schedule(self.optimizer, options)

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The global norm of the gradients, which ``step`` needs; it may be infinite or NaN."""
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        return math.nan if norm is None else float(norm)

    @torch.no_grad()
    def step(self, norm: float) -> dict[str, float]:
        """Clip by ``norm``, the finite result of ``grad_norm``, update the weights, advance the
        schedule. It is the rest of Megatron's ``ChainedOptimizer.step``.

        UserError if the updated weights are not finite: they could only be saved and sent to the
        engines. Weights above 1e19 count as infinite, because their squares are.
        """
        # The rate of this update: the schedule goes on below.
        lr = float(self.optimizer.param_groups[0]["lr"])
        for inner in self._inner:
            parameters = inner.get_parameters()
            if parameters and self._options.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, self._options.clip_grad, norm)
        if self._on_host:
            for state in self._on_host:
                state.step(self._write_weights)
            self._gather_weights()
        else:
            self.optimizer.step_with_ready_grads()
        weights = float(get_total_norm([weight.detach() for weight in self._weights]))
        require_finite_weight_norm(
            weights, update=self.update_count + 1, learning_rate=self.learning_rate_setting
        )
        self.scheduler.step(increment=1)
        return {"grad_norm": norm, "lr": lr}

    @property
    def learning_rate_setting(self) -> str:
        return self._options.learning_rate_setting

    def state_tensors(self) -> Iterator[torch.Tensor]:
        for inner in self.optimizer.chained_optimizers:
            for group in inner.optimizer.param_groups:
                yield from group["params"]
            for state in inner.optimizer.state.values():
                yield from (state[name] for name in MOMENTS)

    @property
    def offloaded_state(self) -> list[OffloadedTensors]:
        return [memory for state in self._on_host for memory in state.memory]

    def _state_of(self, adam: Any, main: torch.Tensor) -> Iterator[torch.Tensor]:
        weight, _ = self._pairs[id(main)]
        if main.dtype != weight.dtype:
            yield main
        yield from (adam.state[main][name] for name in MOMENTS)

    def _write_weights(self, mains: Sequence[torch.Tensor]) -> None:
        for main in mains:
            weight, start = self._pairs[id(main)]
            if main.dtype != weight.dtype:
                weight.detach().view(-1)[start : start + main.numel()].copy_(main.view(-1))

    def _gather_weights(self) -> None:
        """Give every rank the weights that the others have updated. Collective."""
        chunks: list[Any] = [
            chunk
            for inner in self.optimizer.chained_optimizers
            if isinstance(inner, DistributedOptimizer)
            for chunk in inner.model_chunks
        ]
        for chunk in chunks:
            chunk.start_param_sync()

    def owned_ranges(self) -> Iterator[OwnedRange]:
        for inner in self._inner:
            for weight, main, start in self._main_params(inner):
                tensors = {name: inner.optimizer.state[main][name] for name in MOMENTS}
                if main.dtype != weight.dtype:
                    tensors[MAIN_PARAM] = main
                for name, tensor in tensors.items():
                    if tensor.dtype != torch.float32:
                        raise RuntimeError(
                            f"the optimizer has {name} in {tensor.dtype}; checkpoints support "
                            "float32 only"
                        )
                flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
                yield OwnedRange(weight=weight, start=start, tensors=flat)

    @property
    def update_count(self) -> int:
        return self.scheduler.num_steps - self._ahead

    def adam_and_schedule_steps(self) -> dict[str, int]:
        return {"adam": self._steps_counted(), "schedule": self.update_count}

    def set_adam_and_schedule_steps(self, *, adam: int, schedule: int) -> None:
        for inner in self._inner:
            if not isinstance(inner.optimizer, torch.optim.AdamW):
                for group in inner.optimizer.param_groups:
                    group["step"] = adam
            for state in inner.optimizer.state.values():
                if "step" in state:
                    # Separate tensors: AdamW increments each of them.
                    state["step"] = torch.full_like(state["step"], adam)
        self.scheduler.num_steps = schedule + self._ahead
        # Sets the learning rate of that step.
        self.scheduler.step(increment=0)

    @property
    def _inner(self) -> list[Any]:
        return [o for o in self.optimizer.chained_optimizers if not o.is_stub_optimizer]

    def _steps_counted(self) -> int:
        counts = [0]
        for inner in self._inner:
            counts += [int(group.get("step", 0)) for group in inner.optimizer.param_groups]
            counts += [int(state.get("step", 0)) for state in inner.optimizer.state.values()]
        return max(counts)

    def _main_params(self, inner: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
        """(the model's parameter, the tensor that Adam updates for it on this rank, that tensor's
        first index in the flattened parameter)."""
        if not isinstance(inner, DistributedOptimizer):
            stepped = {id(p) for group in inner.optimizer.param_groups for p in group["params"]}
            for weight in self._weights:
                main = getattr(weight, "main_param", weight)
                if id(main) in stepped:
                    yield weight, main, 0
            return
        for weight, (group, order) in inner.model_param_group_index_map.items():
            local_range = inner._get_model_param_range_map(weight)["param"]
            main = inner.optimizer.param_groups[group]["params"][order]
            if main.numel() != local_range.end - local_range.start:
                raise RuntimeError(
                    f"Megatron's optimizer pairs {main.numel()} elements with the range "
                    f"{local_range.start}:{local_range.end} of a parameter"
                )
            yield weight, main, local_range.start
