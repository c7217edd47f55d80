"""Checks of a generation request, and the random stream of each completion. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ctrl_megatron.types import SamplingParams


def stream_seed(seed: int, row: int, sample: int) -> int:
    """63-bit seed of completion ``sample`` of prompt ``row``; streams do not depend on batching."""
    digest = blake2b(f"{seed}:{row}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_request(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """ValueError naming the field or the row that no engine could serve, with the remedy."""
    _check_params(params)
    for row, prompt in enumerate(prompts):
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


def _check_params(params: SamplingParams) -> None:
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
