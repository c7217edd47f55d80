"""The rotary position embedding that a ``config.json`` describes, and its frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_keys import need

_ROPE_KEYS: dict[str, dict[str, type]] = {
    "default": {},
    "llama3": {
        **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), float),
        "original_max_position_embeddings": int,
    },
}
_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding, with Llama 3's frequency scaling where ``factor`` is not 1."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def parse_rope(config: dict[str, Any], where: str) -> Rope:
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling.
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise UserError(f"{where}: rope_parameters and rope_scaling differ; remove one of them")
    scaling = new or old or {}
    theta = need({"rope_theta": _THETA, **config, **scaling}, "rope_theta", where)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise UserError(
            f"{where}: rope type {kind!r} is not supported; known: {', '.join(_ROPE_KEYS)}"
        )
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor is not supported")
    common = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    for key in sorted(scaling.keys() - common - _ROPE_KEYS[kind].keys()):
        raise UserError(f"{where}: {key}={scaling[key]!r} is not supported by rope type {kind!r}")
    context = "original_max_position_embeddings"
    filled = {context: config["max_position_embeddings"], **scaling}
    given = {key: number(need(filled, key, where)) for key, number in _ROPE_KEYS[kind].items()}
    return Rope(theta=float(theta), **given)


def rope_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Inverse frequencies (head_dim / 2,) float32, with Llama 3's long-context scaling.

    Frequencies whose wavelength exceeds the original context are divided by ``factor``, those of
    short wavelengths stay, and those between are interpolated (Llama 3.1 model card; megatron-core
    fixes the constants).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.factor == 1.0:
        return inverse
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    blend = (context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    long = wavelength > context / rope.low_freq_factor
    short = wavelength < context / rope.high_freq_factor
    return torch.where(long, inverse / rope.factor, torch.where(short, inverse, blended))
