"""Adapters beside the linear layers and the experts of a transformers model, in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ctrl_megatron.models.rules import adapter_names
from ctrl_megatron.types import Lora


class _Adapter(NamedTuple):
    """A (rank, in) and B (out, rank) of one weight, whose memory may be filled again."""

    down: torch.Tensor
    up: torch.Tensor

    def addition(self, hidden: torch.Tensor, scale: float) -> torch.Tensor:
        """(..., in) -> (..., out): scale B A x."""
        return F.linear(F.linear(hidden, self.down) * scale, self.up)


_OfExperts = dict[tuple[str, int], list[_Adapter | None]]
"""(parameter with the weights of all experts, number of one) -> the adapters of its parts in their
order: gate and up projection, or the only one."""


def add_peft_adapters(
    model: Any,
    views: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    lora: Lora,
) -> None:
    """Let the layers of ``model`` compute with the ``tensors`` (``models.rules.adapter_names``).
    Their memory may be filled again at any time between two passes. ``views`` are the weights of
    the model's directory in it (``weight_views_by_name``)."""
    owners = sorted(
        (weight.data_ptr(), number, name)
        for number, module in enumerate(model.modules())
        for name, weight in module.named_parameters(recurse=False)
    )
    modules = list(model.modules())
    experts = defaultdict[Any, _OfExperts](dict)
    for weight, view in views.items():
        down, up = (tensors.get(name) for name in adapter_names(weight, lora))
        if down is None or up is None:
            continue
        adapter = _Adapter(down, up)
        start, owner, parameter = owners[
            bisect_right(owners, view.data_ptr(), key=itemgetter(0)) - 1
        ]
        module, stack = modules[owner], getattr(modules[owner], parameter)
        if stack.dim() == 2:
            module.register_forward_hook(partial(_add, adapter, lora.scale))
            continue
        parts = stack[0].numel() // view.numel()
        number, place = divmod((view.data_ptr() - start) // view.nbytes, parts)
        of_one = experts[module].setdefault((parameter, number), [None] * parts)
        of_one[place] = adapter
    for module, of_experts in experts.items():
        module.forward = partial(_experts, module, of_experts, lora.scale)


def _add(
    adapter: _Adapter,
    scale: float,
    _: Any,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    """A forward hook of a linear layer: its output with the adapter's."""
    return output + adapter.addition(inputs[0], scale)


def _experts(
    module: Any,
    adapters: _OfExperts,
    scale: float,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The pass of a layer's experts, one after the other: (T, H) tokens, numbers and weights
    (T, top_k) of the experts that are chosen for each -> (T, H)."""

    def product(rows: torch.Tensor, parameter: str, number: int) -> torch.Tensor:
        out = F.linear(rows, getattr(module, parameter)[number])
        parts = adapters.get((parameter, number), [])
        for own, adapter in zip(out.chunk(len(parts), dim=-1) if parts else (), parts, strict=True):
            if adapter is not None:
                own += adapter.addition(rows, scale)
        return out

    out = torch.zeros_like(hidden)
    for number in chosen.unique().tolist():
        token, place = torch.where(chosen == number)
        gate, up = product(hidden[token], "gate_up_proj", number).chunk(2, dim=-1)
        own = product(module.act_fn(gate) * up, "down_proj", number)
        out.index_add_(0, token, (own * weights[token, place, None]).to(out.dtype))
    return out
