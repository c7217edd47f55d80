"""Checks of a request, and the drawing of tokens: one random stream per completion. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F

from ctrl_megatron.types import SamplingParams

_BLOCK = 256
DRAWN_ROWS = 64
"""Rows the sampler handles in one chunk. Bounded, because the engine does not count this memory
when it starts."""
# The increment and the two multipliers of SplitMix64, as signed numbers.
_GOLDEN, _MIX_1, _MIX_2 = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def stream_seed(seed: int, row: str | int, sample: int) -> int:
    """63-bit seed of completion ``sample`` of the prompt called ``row``; streams do not depend on
    batching.
    """
    digest = blake2b(f"{seed}:{row}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def next_random_numbers(
    generators: Mapping[int, torch.Generator], rows: int, device: torch.device
) -> torch.Tensor:
    """(rows,) float64 in [0, 1) on ``device``: a row's number is the next one of its generator's
    stream; without a generator it is any.

    A GPU's generator gives only its seed and its place, from which the device computes the numbers
    of all rows together (``random_numbers_at``): a kernel for each row would take longer than a
    decoding step. It advances by four steps of its counter, as for a draw by a kernel.
    """
    if all(generator.device.type == "cpu" for generator in generators.values()):
        numbers = torch.rand(rows, dtype=torch.float64)
        for row, generator in generators.items():
            numbers[row] = torch.rand(1, generator=generator, dtype=torch.float64)
        return numbers.to(device)
    streams = torch.randint(2**62, (2, rows), pin_memory=device.type == "cuda")
    seeds, places = [], []
    for generator in generators.values():
        place = generator.get_offset()
        generator.set_offset(place + 4)
        seeds.append(generator.initial_seed())
        places.append(place)
    streams[:, list(generators)] = torch.tensor((seeds, places))
    return random_numbers_at(*streams.to(device, non_blocking=True))


def random_numbers_at(seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(B,) float64 in [0, 1): the number at ``places`` (B,) of the streams ``seeds`` (B,), int64.

    A stream is SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"),
    whose numbers can be computed in any order and are equal on all devices.
    """
    mixed = seeds + (places + 1) * _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return _shifted(mixed ^ _shifted(mixed, 31), 11).double() / 2**53


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def check_request(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """ValueError that names the field or the row that no engine can serve, with the remedy."""
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
    names = params.prompt_names(len(prompts))
    if len(names) != len(prompts):
        raise ValueError(f"{len(names)} rows name {len(prompts)} prompts; give each prompt a name")
    for row, prompt in zip(names, prompts, strict=True):
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


def tempered_log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """(B, V) logits -> (B, V) fp32 log-probabilities at the temperature (at 1 when greedy)."""
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def truncate_probabilities(log_probs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """(B, V) probabilities, not renormalised, zero outside top-k and then outside top-p."""
    if top_p >= 1.0 and top_k == -1:
        return log_probs.exp()
    rows, tokens = log_probs.shape
    kept = torch.full((rows,), tokens if top_k == -1 else top_k, device=log_probs.device)
    shares = torch.full((rows,), top_p, dtype=log_probs.dtype, device=log_probs.device)
    return truncate_rows(log_probs.exp(), shares, kept)


def truncate_rows(
    probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """(B, V) probabilities -> the same, not renormalised, zero outside each row's ``top_k`` (B,)
    likeliest and then outside its ``top_p`` (B,).

    Top-p keeps the fewest likeliest tokens with at least ``top_p`` of the probability that top-k
    left (Holtzman et al. 2020, section 3.1).
    """
    ordered, tokens = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered[ranks >= top_k[:, None]] = 0.0
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p[:, None] * ordered.sum(-1, keepdim=True)] = 0.0
    return torch.zeros_like(ordered).scatter(-1, tokens, ordered)


def sample_tokens(
    log_probs: torch.Tensor, params: SamplingParams, streams: Sequence[torch.Generator]
) -> torch.Tensor:
    """(B,) int64 tokens; row b uses one number of ``streams[b]`` and no other randomness."""
    if params.temperature == 0:
        return log_probs.argmax(-1)
    numbers = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
    return inverse_sample(
        truncate_probabilities(log_probs, params.top_p, params.top_k), torch.cat(numbers)
    )


def inverse_sample(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """(B,) int64 tokens by inversion: the token at whose cumulated (B, V) weight ``numbers`` (B,)
    float64 in [0, 1) lie; the weights need not add up to 1.

    It uses a few kernels for any number of rows: first it finds the block of tokens by the blocks'
    sums, then the token in it.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    mass = blocks.sum(-1).double().cumsum(-1)
    target = numbers[:, None].to(mass.device) * mass[:, -1:]
    block = _place(mass, target)
    before = F.pad(mass, (1, 0)).gather(1, block)
    own = blocks.take_along_dim(block.unsqueeze(-1), dim=1).squeeze(1)
    inside = _place(own.double().cumsum(-1), target - before)
    return (block * _BLOCK + inside).squeeze(-1)


def _place(mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(B, 1) int64: the index of the first cumulated sum (B, N) above ``target`` (B, 1)."""
    # ``right`` never selects an entry without mass; the minimum covers a target that rounding has
    # raised to the total or above.
    places = torch.searchsorted(mass, target, right=True)
    return torch.minimum(places, (mass < mass[:, -1:]).sum(-1, keepdim=True))
