"""The rotary position embedding that a ``config.json`` describes: frequencies and attention factor.

A scaling stretches the plain frequencies, so that positions beyond the context of the first
training look familiar. The formulas are those of transformers (``modeling_rope_utils``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ctrl_megatron.engine_kinds import ENGINES, EngineName, RopeTrait
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_keys import positive_number

_THETA = 10000.0
_CONTEXT = "original_max_position_embeddings"


class RopeScaling(Protocol):
    """A change of the plain frequencies."""

    @property
    def attention_factor(self) -> float:
        """The factor of rotated queries and of rotated keys."""
        ...

    def scale_frequencies(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        """The scaled of the plain inverse frequencies (D / 2,) float32 of base ``theta``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every position divided by ``factor`` (arXiv 2306.15595)."""

    factor: float
    """An int where the file has one, which vLLM does not read."""
    attention_factor: float = 1.0

    def scale_frequencies(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        return inverse / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """Plain frequencies up to ``max_position_embeddings``, beyond which transformers changes them
    with the length of the longest sequence of a batch. A run refuses such sequences."""

    attention_factor: float = 1.0

    def scale_frequencies(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        return inverse


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequencies whose wavelength exceeds the original context are divided by ``factor``, those of
    short wavelengths stay, and those between are interpolated (Llama 3.1 model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def scale_frequencies(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        context = self.original_max_position_embeddings
        wavelength = 2 * math.pi / inverse
        blend = (context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * inverse / self.factor + blend * inverse
        long = wavelength > context / self.low_freq_factor
        short = wavelength < context / self.high_freq_factor
        return torch.where(long, inverse / self.factor, torch.where(short, inverse, blended))


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Dimensions that turn ``beta_fast`` times or more within the original context stay, those that
    turn ``beta_slow`` times or less are divided by ``factor``, with a ramp between (arXiv
    2309.00071). ``truncate`` rounds the ends of the ramp outwards to whole dimensions."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    sets_attention_factor: bool = False
    """Whether the file has ``attention_factor`` itself."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0

    def scale_frequencies(self, inverse: torch.Tensor, theta: float) -> torch.Tensor:
        pairs = len(inverse)

        def dimension(turns: float) -> float:
            wavelengths = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return pairs * math.log(wavelengths) / math.log(theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        span = high - low or 0.001
        ramp = ((torch.arange(pairs, dtype=torch.float32) - low) / span).clamp(0, 1)
        return inverse / self.factor * ramp + inverse * (1 - ramp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding with base ``theta``; without ``scaling`` the plain one."""

    theta: float
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        """The factor of rotated queries and of rotated keys."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def rope_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Inverse frequencies (head_dim / 2,) float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    return inverse if rope.scaling is None else rope.scaling.scale_frequencies(inverse, rope.theta)


def parse_rope(config: dict[str, Any], where: str, *, partial: bool = False) -> Rope:
    """The embedding of a ``config.json`` mapping, whose ``max_position_embeddings`` is set.
    ``partial`` is for a family that reads ``partial_rotary_factor``.

    transformers 5 writes ``rope_parameters``; 4 wrote ``rope_theta`` and ``rope_scaling``, which
    vLLM and SGLang read too. UserError for a type or key that is not supported.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{where}: {key}={value!r} must be an object")
    if new and old and new != old:
        raise UserError(f"{where}: rope_parameters and rope_scaling differ; remove one of them")
    # transformers takes a null for a missing key.
    scaling = {key: value for key, value in (new or old or {}).items() if value is not None}
    theta = positive_number({"rope_theta": _THETA, **config, **scaling}, "rope_theta", where)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UserError(f"{where}: rope type {kind!r} is not supported; known: {', '.join(_KINDS)}")
    if not partial and scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor is not supported")
    keys, build = _KINDS[kind]
    common = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if partial:
        # Text has one position where pictures have three, so that the sections are rotated alike.
        common |= {"mrope_section", "mrope_interleaved"}
    for key in sorted(scaling.keys() - common - keys):
        raise UserError(f"{where}: {key}={scaling[key]!r} is not supported by rope type {kind!r}")
    given = {_CONTEXT: positive_number(config, "max_position_embeddings", where), **scaling}
    return Rope(theta=float(theta), scaling=build(given, where))


def engine_rope_mismatch(rope: Rope, engine: EngineName, context: int) -> str | None:
    """Why ``engine`` would rotate sequences of up to ``context`` tokens otherwise than the trainer,
    with a remedy; None if it rotates them alike."""
    traits: list[RopeTrait] = []
    facts: dict[str, object] = {"context": context}
    match rope.scaling:
        case LinearScaling(factor=factor) if isinstance(factor, int):
            traits = ["whole factor"]
            facts |= {"factor": factor, "decimal": float(factor)}
        case DynamicScaling():
            traits = ["dynamic"]
        case YarnScaling(factor=factor, original_max_position_embeddings=original) as yarn:
            if original * factor < context:
                traits.append("short yarn")
            if yarn.sets_attention_factor:
                traits.append("attention factor")
            facts |= {"factor": factor, "original": original}
    told = ENGINES[engine].rotates_otherwise
    return next((told[trait].format_map(facts) for trait in traits if trait in told), None)


def _plain(given: Mapping[str, Any], where: str) -> None:
    return None


def _linear(given: Mapping[str, Any], where: str) -> LinearScaling:
    return LinearScaling(factor=_factor(given, where))


def _dynamic(given: Mapping[str, Any], where: str) -> DynamicScaling:
    _factor(given, where)
    return DynamicScaling()


def _llama3(given: Mapping[str, Any], where: str) -> Llama3Scaling:
    low, high = (float(_need(given, f"{end}_freq_factor", where)) for end in ("low", "high"))
    if not low < high:
        raise UserError(f"{where}: low_freq_factor={low} must be less than high_freq_factor={high}")
    return Llama3Scaling(
        factor=float(_factor(given, where)),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(_need(given, _CONTEXT, where)),
    )


def _yarn(given: Mapping[str, Any], where: str) -> YarnScaling:
    # transformers takes 0 for a missing key, of these two.
    given = {k: v for k, v in given.items() if v or k not in ("mscale", "mscale_all_dim")}
    factor = float(_factor(given, where))
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{where}: truncate={truncate!r} must be true or false")
    fast, slow = (
        float(_need({key: number, **given}, key, where))
        for key, number in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow:
        raise UserError(f"{where}: beta_fast={fast} must not be less than beta_slow={slow}")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(_need(given, _CONTEXT, where)),
        attention_factor=_yarn_attention(given, factor, where),
        sets_attention_factor="attention_factor" in given,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        mscale_all_dim=float(given.get("mscale_all_dim", 0.0)),
    )


def _yarn_attention(given: Mapping[str, Any], factor: float, where: str) -> float:
    """0.1 m ln(factor) + 1 with m = 1, or the ratio of two of them (DeepSeek's keys)."""
    for key in ("mscale", "mscale_all_dim"):
        _need({key: 1.0, **given}, key, where)
    if "attention_factor" in given:
        return float(_need(given, "attention_factor", where))
    if "mscale" in given and "mscale_all_dim" in given:
        return _grown(factor, given["mscale"]) / _grown(factor, given["mscale_all_dim"])
    return _grown(factor, 1.0)


def _grown(factor: float, times: float) -> float:
    return 0.1 * times * math.log(factor) + 1.0


def _factor(given: Mapping[str, Any], where: str) -> float:
    factor = _need(given, "factor", where)
    if factor < 1:
        raise UserError(f"{where}: factor={factor} of the rope scaling must be 1 or more")
    return factor


def _need(given: Mapping[str, Any], key: str, where: str) -> Any:
    return positive_number(given, key, f"{where}: rope scaling")


_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", _CONTEXT}
_YARN_KEYS = {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
_KINDS: dict[str, tuple[set[str], Callable[[Mapping[str, Any], str], RopeScaling | None]]] = {
    "default": (set(), _plain),
    "linear": ({"factor"}, _linear),
    "dynamic": ({"factor"}, _dynamic),
    "llama3": (_LLAMA3_KEYS, _llama3),
    "yarn": ({"factor", _CONTEXT} | _YARN_KEYS, _yarn),
}
"""Rope type -> the keys that it reads, and its scaling."""
