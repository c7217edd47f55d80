"""Which adapters (LoRA, arXiv 2106.09685) a model has, what they begin with, and the weights beside
which they are trained. ``models.adapters`` computes them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ctrl_megatron.config import Config
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rules import LORA_A, linear_layer_names, param_rules
from ctrl_megatron.models.shape import AnyShape, SomeShape
from ctrl_megatron.types import Lora

ALL_LINEAR = "all-linear"
"""The target that names every linear layer of a decoder layer."""


def lora_of_config(config: Config, *, value: bool = False) -> Lora | None:
    """The adapters of the actor or of the value model; None if all weights are trained."""
    model, own = config.actor_rollout_ref.model, config.critic.model.lora_rank
    rank = own if value and own is not None else model.lora_rank
    if rank == 0:
        return None
    return Lora(
        rank=rank,
        alpha=model.lora_alpha,
        targets=model.target_modules,
        seed=config.trainer.seed,
        shared_outer=model.experts_shared_outer_loras,
    )


def shape_with_adapters(shape: SomeShape, lora: Lora | None) -> SomeShape:
    """``shape`` with adapters, whose targets are the names of linear layers.

    UserError for a layer that the model does not have.
    """
    if lora is None:
        return shape
    known = linear_layer_names(shape)
    named = known if ALL_LINEAR in lora.targets else lora.targets
    if unknown := [name for name in named if name not in known]:
        raise UserError(
            f"{shape.family} has no linear layer {', '.join(unknown)}",
            key="actor_rollout_ref.model.target_modules",
            remedy=f"choose from {', '.join(known)}, or {ALL_LINEAR}",
        )
    targets = tuple(name for name in known if name in named)
    return replace(shape, lora=replace(lora, targets=targets))


def adapts_experts(shape: AnyShape) -> bool:
    """Whether layers of experts have adapters, those that every token passes aside."""
    own = param_rules(shape) if shape.lora is not None else ()
    return any(rule.mesh == "expert" and rule.trained for rule in own)


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The float32 value with which training begins of a tensor that no directory has: the same in
    every layout.

    A is uniform in +-1/sqrt(in), as in PEFT; B and a value head are zero.
    """
    if not name.endswith(LORA_A):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBaseWeights:
    """The weights beside which adapters are trained."""

    path: str
    """The HF directory."""
    hashes: Mapping[str, str]
    """BLAKE3 of its files of weights, by name."""
