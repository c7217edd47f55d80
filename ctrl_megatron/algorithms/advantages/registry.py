"""Advantage estimators by configuration name (``algorithm.adv_estimator``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

from ctrl_megatron.algorithms.masked import Reduce, nothing_to_add
from ctrl_megatron.algorithms.registry import Registry, key_of

AdvEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Named (B, R) tensors and options -> (advantages, returns), both (B, R).

One that needs numbers of the whole batch names ``reduce`` as an argument, a ``Reduce`` that is
``nothing_to_add`` by default, and calls it on a (K,) float64 tensor of its own rows' sums.
"""

ADV_ESTIMATOR_REGISTRY: Registry[AdvEstimator] = Registry("advantage estimator")
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator = ADV_ESTIMATOR_REGISTRY.get


def estimator_inputs(name: str | Enum) -> frozenset[str]:
    """Names of the tensors and options that the estimator reads.

    One with ``**options`` may read more. Raises ValueError for an unknown estimator.
    """
    return frozenset(_named_arguments(get_adv_estimator(name))) - {"reduce"}


def estimate_advantages(
    name: str | Enum, offered: Mapping[str, Any], reduce: Reduce = nothing_to_add
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of a piece of a batch, as the estimator gives them for the whole.

    ``offered``, ``response_mask`` among it, may hold more than the estimator reads; the rest is
    left out, unless it takes ``**options``. Groups must be whole. ``reduce`` adds sums over the
    holders of the pieces; every holder calls it equally often. Raises ValueError naming a missing
    input, and for an estimator that gives another shape than that of ``response_mask``.
    """
    estimator = get_adv_estimator(name)
    named = _named_arguments(estimator)
    required = {key for key, p in named.items() if p.default is p.empty}
    if missing := required - offered.keys() - {"reduce"}:
        raise ValueError(
            f"advantage estimator {key_of(name)!r} needs {', '.join(sorted(missing))}, which this "
            "pipeline does not provide"
        )
    given = {k: v for k, v in offered.items() if k in named or _takes_anything(estimator)}
    if "reduce" in named:
        given["reduce"] = reduce
    advantages, returns = estimator(**given)
    shape = offered["response_mask"].shape
    for what, tensor in (("advantages", advantages), ("returns", returns)):
        if tensor.shape != shape:
            raise ValueError(
                f"advantage estimator {key_of(name)!r} gives {what} of shape "
                f"{tuple(tensor.shape)}; expected {tuple(shape)}, that of response_mask"
            )
    return advantages, returns


def _named_arguments(function: AdvEstimator) -> dict[str, inspect.Parameter]:
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in loose}


def _takes_anything(function: AdvEstimator) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
