"""Protocols of a library that splits and computes a model for ``models.parallel_model``.

``models.megatron`` and ``models.fsdp`` implement it; nothing above this room distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ctrl_megatron.models.build import BuildOptions
from ctrl_megatron.models.micro_batch import MicroBatch
from ctrl_megatron.models.offload import OffloadedTensors
from ctrl_megatron.models.optimizer import OptimizerOptions, OwnedRange
from ctrl_megatron.models.router import RouterOptions
from ctrl_megatron.models.shards import ShardParam
from ctrl_megatron.parallel.divergence import OutputLayer

ForwardStep = Callable[..., tuple[torch.Tensor, Any]]
"""A function of ``models.forward_step``, with all arguments but micro-batches and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model computes."""

    build: BuildOptions = field(default_factory=BuildOptions)
    token_budget: int = 16384
    """Most tokens of one packed micro-batch."""
    shared_prefix: bool = True
    """Compute a prompt once for the rows of a micro-batch that begin with it."""
    canvas: int = 0
    """Tokens behind every prompt in passes of a masked-diffusion model, which fill the response up
    as the sampler did; 0 for the response's own."""
    logprob_chunk: int = 1024
    """Tokens whose logits are computed together; a value model has none."""
    router: RouterOptions = field(default_factory=RouterOptions)
    """How optimizer steps train the routers of a model with experts."""
    optimizer: OptimizerOptions | None = None
    """None builds a frozen model."""


class Optimizer(Protocol):
    """Optimizer and schedule of one model."""

    @property
    def update_count(self) -> int:
        """Optimizer steps that have changed the weights, those before a resume included; the same
        on every rank."""
        ...

    @property
    def learning_rate_setting(self) -> str:
        """``KEY=VALUE`` of the configuration, for messages."""
        ...

    def forget_gradients(self) -> None:
        """Free the gradients that belong to no buffer of the model."""
        ...

    def grad_norm(self) -> float:
        """The global norm of the gradients, which ``step`` needs; it may be infinite or NaN.
        Collective."""
        ...

    def step(self, norm: float) -> dict[str, float]:
        """Clip by ``norm``, the finite result of ``grad_norm``, update the weights, advance the
        schedule. Returns ``grad_norm`` and ``lr``. Collective.

        UserError if the updated weights are not finite: they could only be saved and sent to the
        engines. Weights above 1e19 count as infinite, because their squares are.
        """
        ...

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Master weights and moments, without the step counts."""
        ...

    @property
    def offloaded_state(self) -> Sequence[OffloadedTensors]:
        """The memory of ``state_tensors`` that rests on the host between steps and visits the
        device during one; none where the state stays on the device."""
        ...

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """The ranges of this rank's parameters whose optimizer state is on this rank."""
        ...

    def adam_and_schedule_steps(self) -> dict[str, int]:
        """The steps that ``adam`` and ``schedule`` have counted on this rank; ``adam`` is 0 on a
        rank without optimizer state."""
        ...

    def set_adam_and_schedule_steps(self, *, adam: int, schedule: int) -> None:
        """Continue after so many steps; the caller fills the tensors of ``owned_ranges``."""
        ...


class Strategy(Protocol):
    """This rank's part of a model: its modules, its passes, its optimizer."""

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The modules of this rank's virtual stages, on the device, weights uninitialised."""
        ...

    @property
    def packs_rows(self) -> bool:
        """Whether a micro-batch may have several rows; without it each row is passed by itself."""
        ...

    def choose_row_packing(self) -> None:
        """Compare ways of computing the model, where there are several, when it has its first
        weights. Collective. UserError if they differ."""
        ...

    def rank_part(self, chunk: int, param: ShardParam) -> torch.Tensor:
        """This rank's part of a parameter or buffer of virtual stage ``chunk``, in the shape and
        dtype that it has on the device; the same tensor object in every call."""
        ...

    def engine_part(self, chunk: int, param: str) -> torch.Tensor:
        """This rank's part of what engines get for the parameter or buffer ``param`` of virtual
        stage ``chunk``, with adapters merged."""
        ...

    def weights(self) -> Iterator[torch.Tensor]:
        """The tensors whose memory all parameters have."""
        ...

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        """The buffers of gradients that live as long as the model; empty where gradients are freed
        after every step."""
        ...

    def make_trainable_or_frozen(self, places: Iterable[tuple[ShardParam, torch.Tensor]]) -> None:
        """Make the parameters learn that are trained, with gradients that are summed over the data
        ranks, or freeze the model; ``places`` has each parameter with its ``rank_part``."""
        ...

    def start_optimizer(self) -> Optimizer:
        """The optimizer of the weights as they are now (it copies them in float32)."""
        ...

    def padded_micro_batch_count(self, own: int) -> int:
        """The number of micro-batches of a pass, of which ``own`` have rows of this rank and the
        others are empty. Collective."""
        ...

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        ...

    def run_passes(
        self, step: ForwardStep, micro_batches: Sequence[MicroBatch], *, backward: bool
    ) -> list[Any]:
        """Pass all micro-batches through all stages, and back; what ``step`` reports on the last
        stage. Collective."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        ...

    def output_layer(self, module: Any, micro: MicroBatch, output: torch.Tensor) -> OutputLayer:
        """The output layer over the vectors that predict the micro-batch's N response tokens, from
        ``output`` of the last stage."""
        ...

    def output_weight(self) -> torch.Tensor | None:
        """A copy of this rank's rows of the output layer's weight; None on ranks without the last
        stage. Collective."""
        ...

    def values(self, module: Any, micro: MicroBatch, output: torch.Tensor) -> torch.Tensor:
        """(N,) float32 values, each read before a response token, from ``output`` of the last
        stage."""
        ...
