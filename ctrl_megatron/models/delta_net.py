"""Gated delta nets as a part of Megatron's layers (Yang et al., arXiv 2412.06464; Qwen3-Next and
Qwen3.5).

T tokens, G key and A value heads of this tensor rank with D and V numbers each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from ctrl_megatron.models.context_parallel import (
    all_tokens_of_own_heads,
    own_tokens_of_all_heads,
)
from ctrl_megatron.models.delta_rule import causal_convolution, gated_delta_rule
from ctrl_megatron.models.layers import rms_norm
from ctrl_megatron.models.packed_layout import PackedLayout, PackedLayoutParams
from ctrl_megatron.models.shape import GatedDeltaNet


@dataclass
class DeltaNetSubmodules:
    """The linear layers at both ends."""

    in_proj: Any
    out_proj: Any


class DeltaNetMixer(MegatronModule):
    """A gated delta net in the place of a layer's attention; the heads are cut over the tensor
    ranks.

    A rank's projected rows are, by ``GatedDeltaNet.by_head``, either its queries, keys, values,
    gates, rates and decays, each of all its heads, or the first four of one key head after the
    other and then the last two in the same way.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        net: GatedDeltaNet,
        pg_collection: Any,
        layer_number: int = 1,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.net, self.tp_group = net, pg_collection.tp
        ranks = self.tp_group.size()
        self.key_heads, self.value_heads = net.key_heads // ranks, net.value_heads // ranks
        self.sections = [width // ranks for width in net.sections]
        linear = {"config": config, "init_method": config.init_method, "bias": False}
        linear |= {"skip_bias_add": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj: Any = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(net.sections) + net.value_width + 2 * net.value_heads,
            gather_output=False,
            **linear,
        )
        self.out_proj: Any = build_module(
            submodules.out_proj,
            net.value_width,
            config.hidden_size,
            input_is_parallel=True,
            **linear,
        )
        channels, dtype = sum(self.sections), config.params_dtype
        self.conv1d = torch.nn.Conv1d(
            channels, channels, net.kernel, groups=channels, bias=False, dtype=dtype
        )
        self.dt_bias = torch.nn.Parameter(torch.ones(self.value_heads, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(self.value_heads, dtype=dtype))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.ones(net.value_dim, dtype=dtype))

    def forward(
        self, hidden: torch.Tensor, *_: Any, packed_seq_params: PackedLayoutParams, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """(T / sequence ranks, 1, H) -> the same, and no bias."""
        projected = self.in_proj(hidden)[0].squeeze(1)
        query, key, value, gate, rate, step = self._heads(projected)
        shared = packed_seq_params.shared
        if shared is None:
            read = self._read(query, key, value, rate, step, packed_seq_params.layout)
        else:
            parts = all_tokens_of_own_heads([query, key, value, rate, step], shared)
            query, key, value, rate, step = parts
            read = self._read(query, key, value, rate, step, shared.packed.layout, shared.group)
            read = own_tokens_of_all_heads(read, shared)
        # Every tensor rank has the weight whole and uses it for its own heads.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self.tp_group)
        normed = rms_norm(read, weight, self.config.layernorm_epsilon)
        out = (normed * F.silu(gate.float())).to(hidden.dtype)
        return self.out_proj(out.view(len(out), 1, -1))

    def _heads(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(T, rows) -> query and key (T, G, D), value and gate (T, A, V), what rate and decay are
        computed from (T, A)."""
        net, width = self.net, self.value_heads * self.net.value_dim
        sizes = [*self.sections, width, self.value_heads, self.value_heads]
        if net.by_head:
            four = sum(self.sections) + width
            grouped = [
                part.unflatten(1, (self.key_heads, -1))
                for part in projected.split([four, 2 * self.value_heads], dim=1)
            ]
            sizes = [size // self.key_heads for size in sizes]
            parts = [
                *grouped[0].split(sizes[:4], dim=2),
                *grouped[1].split(sizes[4:], dim=2),
            ]
            parts = [part.flatten(1) for part in parts]
        else:
            parts = list(projected.split(sizes, dim=1))
        heads = [self.key_heads] * 2 + [self.value_heads] * 2
        return *(x.unflatten(1, (n, -1)) for x, n in zip(parts, heads, strict=False)), *parts[4:]

    def _read(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rate: torch.Tensor,
        step: torch.Tensor,
        layout: PackedLayout,
        group: Any = None,
    ) -> torch.Tensor:
        """What the tokens of ``layout`` read (T, A, V). ``group``: the context ranks, of which each
        computes its part of the heads of these arguments' ranks."""

        def own(x: torch.Tensor) -> torch.Tensor:
            return x if group is None else x.chunk(group.size())[group.rank()]

        kernel = self.conv1d.weight.squeeze(1).split(self.sections)
        mixed = causal_convolution(
            torch.cat([x.flatten(1) for x in (query, key, value)], dim=1),
            torch.cat([own(part) for part in kernel]),
            layout,
        )
        parts = mixed.split([x[0].numel() for x in (query, key, value)], dim=1)
        query, key, value = (
            part.unflatten(1, x.shape[1:])
            for part, x in zip(parts, (query, key, value), strict=True)
        )
        wide = F.softplus(step.float() + own(self.dt_bias).float())
        decay = -own(self.A_log).float().exp() * wide
        return gated_delta_rule(query, key, value, decay, rate.sigmoid(), layout)
