"""Drawing tokens from logits: temperature, top-k, top-p, one random stream per row. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctrl_megatron.types import SamplingParams


def temper(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """(B, V) logits -> (B, V) fp32 log-probabilities at the temperature (at 1 when greedy)."""
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def truncate(log_probs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """(B, V) probabilities, not renormalised, zero outside top-k and then outside top-p.

    Top-p keeps the fewest likeliest tokens that hold at least ``top_p`` of what top-k left
    (Holtzman et al. 2020, section 3.1).
    """
    if top_p >= 1.0 and top_k == -1:
        return log_probs.exp()
    ordered, tokens = log_probs.exp().sort(dim=-1, descending=True)
    if top_k != -1:
        ordered[:, top_k:] = 0.0
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p * ordered.sum(-1, keepdim=True)] = 0.0
    return torch.zeros_like(ordered).scatter(-1, tokens, ordered)


def draw(
    log_probs: torch.Tensor, params: SamplingParams, streams: Sequence[torch.Generator]
) -> torch.Tensor:
    """(B,) int64 tokens; row b takes one number from ``streams[b]`` and nothing from elsewhere."""
    if params.temperature == 0:
        return log_probs.argmax(-1)
    mass = truncate(log_probs, params.top_p, params.top_k).double().cumsum(-1)
    numbers = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
    target = torch.stack(numbers).to(mass.device) * mass[:, -1:]
    # ``right`` never lands on a token of zero mass; the clamp covers target == total by rounding.
    tokens = torch.searchsorted(mass, target, right=True).squeeze(-1)
    last = (mass < mass[:, -1:]).sum(-1)
    return torch.minimum(tokens, last)
