"""Checks of a request, and drawing tokens: one random stream per completion. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from ctrl_megatron.types import SamplingParams


def stream_seed(seed: int, row: int, sample: int) -> int:
    """63-bit seed of completion ``sample`` of prompt ``row``; streams do not depend on batching."""
    digest = blake2b(f"{seed}:{row}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniform(generator: torch.Generator) -> float:
    """A number in [0, 1) from the generator's stream, without a kernel where that is a GPU's.

    A GPU's generator is moved on by the four steps of its counter that a kernel's draw takes.
    """
    if generator.device.type == "cpu":
        return torch.rand(1, generator=generator, dtype=torch.float64).item()
    place = generator.get_offset()
    generator.set_offset(place + 4)
    return (stream_seed(generator.initial_seed(), place, 0) >> 10) / 2**53


def check_request(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """ValueError naming the field or the row that no engine could serve, with the remedy."""
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
    if params.n < 1:
        raise ValueError(f"n must be at least 1, got {params.n}")
    if params.temperature < 0:
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {params.top_p}")
    if params.top_k < 1 and params.top_k != -1:
        raise ValueError(f"top_k must be positive, or -1 to keep all, got {params.top_k}")
    for row, prompt in enumerate(prompts, params.first_row):
        if not prompt:
            raise ValueError(f"prompt in row {row} is empty")
        if len(prompt) + params.max_tokens > max_model_len:
            raise ValueError(
                f"prompt in row {row} has {len(prompt)} tokens; with max_tokens="
                f"{params.max_tokens} it exceeds max_model_len={max_model_len}: shorten it, or "
                "launch the engine with a larger max_model_len"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(f"prompt in row {row} has token ids outside [0, {vocab_size})")


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
    numbers = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
    return pick(truncate(log_probs, params.top_p, params.top_k), torch.cat(numbers))


def pick(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """(B,) int64 tokens: where ``numbers`` (B,) float64 in [0, 1) fall among the (B, V) weights,
    which need not add up to 1. A few kernels, however many rows there are.
    """
    mass = weights.double().cumsum(-1)
    target = numbers[:, None].to(mass.device) * mass[:, -1:]
    # ``right`` never lands on a token of zero mass; the clamp covers target == total by rounding.
    tokens = torch.searchsorted(mass, target, right=True).squeeze(-1)
    last = (mass < mass[:, -1:]).sum(-1)
    return torch.minimum(tokens, last)
