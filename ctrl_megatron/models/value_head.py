"""The linear map from a hidden state to one number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(MegatronModule):
    """Stands where the last stage of a language model has its vocabulary projection.

    Every tensor rank holds it whole. Under sequence parallelism each of them sees other tokens, so
    weight and bias are marked for Megatron to sum their gradients over the tensor ranks; without
    the mark the ranks' heads would drift apart.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        dtype = config.params_dtype
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        for param in (self.weight, self.bias):
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden (..., H) in any float dtype -> ((..., 1) float32, None), as Megatron's layers."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None
