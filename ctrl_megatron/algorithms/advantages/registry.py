"""Advantage estimators by configuration name (``algorithm.adv_estimator``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ctrl_megatron.algorithms.registry import Registry

AdvEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Named (B, R) tensors and options -> (advantages, returns), both (B, R)."""

ADV_ESTIMATOR_REGISTRY: Registry[AdvEstimator] = Registry("advantage estimator")
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator = ADV_ESTIMATOR_REGISTRY.get
