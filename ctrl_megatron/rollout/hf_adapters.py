"""Adapters beside the linear layers of a transformers model, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ctrl_megatron.models.rules import ADAPTED, LORA_A, LORA_B


def add_peft_adapters(model: Any, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Let the layers of ``model`` compute with the ``tensors``, by PEFT's names. Their memory may
    be filled again at any time between two passes."""
    for name, down in tensors.items():
        if name.endswith(LORA_A):
            stem = name.removesuffix(LORA_A)
            layer = model.get_submodule(stem.removeprefix(ADAPTED))
            layer.register_forward_hook(partial(_add, down, tensors[stem + LORA_B], scale))


def _add(
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    _: Any,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    """A forward hook of a linear layer: its output plus scale B A x."""
    return output + F.linear(F.linear(inputs[0], down) * scale, up)
