"""Adapters (LoRA, arXiv 2106.09685) of torch's linear layers, for models of transformers.

Every rank has all of ``down``, which is small: so a rank merges its rows of ``up`` into its rows of
the layer's weight without the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rules import adapted_module
from ctrl_megatron.types import Lora


class LinearAdapter(torch.nn.Module):
    """The addition to a linear layer's output: scale B A x."""

    def __init__(self, lora: Lora, linear: torch.nn.Linear) -> None:
        """The parameters have no memory yet."""
        super().__init__()
        down, up = (lora.rank, linear.in_features), (linear.out_features, lora.rank)
        self.down = torch.nn.Parameter(torch.empty(down, device="meta"))
        self.up = torch.nn.Parameter(torch.empty(up, device="meta"))
        self.scale, self.on = lora.scale, True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to the linear layer's output: (..., in) -> (..., out), without that output.
        ``down`` is stored in float32 and cast to the dtype of ``hidden``."""
        return F.linear(F.linear(hidden, self.down.to(hidden.dtype)) * self.scale, self.up)


def add_linear_adapters(model: torch.nn.Module, lora: Lora, params: Iterable[str]) -> None:
    """Give the linear layers of ``model`` their adapters, which have parameters of these names.

    UserError for a layer of another kind.
    """
    names = {module for name in params if (module := adapted_module(name)) is not None}
    for name in sorted(names):
        linear: Any = model.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            raise UserError(
                f"{name} is a {type(linear).__name__} and no linear layer",
                key="actor_rollout_ref.model.target_modules",
                remedy="leave it out",
            )
        linear.adapter = LinearAdapter(lora, linear)
        linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
    return output + linear.adapter(inputs[0]) if linear.adapter.on else None
