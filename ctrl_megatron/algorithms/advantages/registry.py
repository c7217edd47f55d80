"""Advantage estimators by configuration name (``algorithm.adv_estimator``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ctrl_megatron.algorithms.registry import (
    Registry,
    key_of,
    named_inputs,
    required_inputs,
    takes_anything,
)

AdvEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Named (B, R) tensors and options -> (advantages, returns), both (B, R)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScale:
    """A last step that needs numbers of the whole batch, such as whitening.

    Both functions take the estimator's own named inputs besides what stands here.
    """

    sums: Callable[..., torch.Tensor]
    """(advantages, **inputs) -> (K,) float64; the sums of a batch's pieces add up."""
    apply: Callable[..., torch.Tensor]
    """(advantages, sums of the whole batch, **inputs) -> advantages."""
    whitens: bool = False
    """Whether the step is ``whiten_with`` by the moments of all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageStages:
    """An estimator for callers that hold a piece of the batch, with whole groups."""

    raw: AdvEstimator
    """Same inputs as the estimator; advantages before ``scale``, and the final returns."""
    scale: BatchScale | None = None
    """None where ``raw`` is all there is."""

    @property
    def whitened(self) -> bool:
        """Whether the estimator whitens what ``raw`` gives."""
        return self.scale is not None and self.scale.whitens


ADV_ESTIMATOR_REGISTRY: Registry[AdvEstimator] = Registry("advantage estimator")
_STAGES: Registry[AdvantageStages] = Registry("advantage estimator with stages")
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator = ADV_ESTIMATOR_REGISTRY.get


def register_adv_stages(name: str | Enum, raw: AdvEstimator, scale: BatchScale) -> None:
    """Say how the estimator ``name`` works on a piece of a batch.

    An estimator without such an entry needs nothing but whole groups. Raises ValueError if another
    entry exists.
    """
    _STAGES.add(name, AdvantageStages(raw=raw, scale=scale))


def advantage_stages(name: str | Enum) -> AdvantageStages:
    """The stages of a registered estimator; ValueError listing the known names otherwise."""
    whole = get_adv_estimator(name)
    return _STAGES.get(name) if name in _STAGES else AdvantageStages(raw=whole)


def estimator_inputs(name: str | Enum) -> frozenset[str]:
    """Names of the tensors and options that the estimator reads.

    One with ``**options`` may read more. Raises ValueError for an unknown estimator.
    """
    return named_inputs(get_adv_estimator(name))


def estimate_advantages(
    name: str | Enum,
    inputs: Mapping[str, Any],
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of a piece of a batch, as the estimator gives them for the whole.

    ``inputs`` may hold more than the estimator reads; the rest is left out, unless it takes
    ``**options``. Groups must be whole. ``reduce`` adds a (K,) float64 tensor over the holders of
    the pieces; every holder calls it equally often. Raises ValueError naming a missing input.
    """
    estimator = get_adv_estimator(name)
    if missing := required_inputs(estimator) - inputs.keys():
        raise ValueError(
            f"advantage estimator {key_of(name)!r} needs {', '.join(sorted(missing))}, which this "
            "pipeline does not provide"
        )
    if not takes_anything(estimator):
        inputs = {key: inputs[key] for key in named_inputs(estimator) & inputs.keys()}
    stages = advantage_stages(name)
    advantages, returns = stages.raw(**inputs)
    if stages.scale is not None:
        sums = reduce(stages.scale.sums(advantages, **inputs))
        advantages = stages.scale.apply(advantages, sums, **inputs)
    return advantages, returns
