"""What would broadcast is refused, by the argument's name, and so is what has no rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ragged_batches import estimator_inputs

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    KL_ESTIMATORS,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    compute_rollout_correction,
    compute_value_loss,
    explained_variance_sums,
    get_adv_estimator,
    get_policy_loss,
    kl_penalty,
    log_prob_and_advantage_sums,
    rollout_mismatch_sums,
    subtract_kl_penalty,
)

# The number of rows equals that of columns, so that (4,) would broadcast with (4, 4).
SIDE = 4
WRONG = {"(B,)": (SIDE,), "(B, 1)": (SIDE, 1), "(B, R + 1)": (SIDE, SIDE + 1), "()": ()}
shapes = pytest.mark.parametrize("shape", WRONG.values(), ids=WRONG.keys())
CONFIG = SimpleNamespace(
    **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0},
    **{"clip_cov_ratio": 0.5, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0},
    **{"kl_cov_ratio": 0.5, "ppo_kl_coef": 1.0},
)
Call = Callable[..., Any]


def estimators() -> list[tuple[str, str]]:
    return [
        (name, argument)
        for name in ADV_ESTIMATOR_REGISTRY
        for argument in ("token_level_rewards", "response_mask", "values")
        if argument in estimator_inputs(name) and "token_level_rewards" in estimator_inputs(name)
    ]


def matrix() -> torch.Tensor:
    return torch.rand(SIDE, SIDE)


def refused(call: Call, argument: str, shape: tuple[int, ...], first: str, **given: Any) -> None:
    """The message names ``argument``, or one beside it where the reference itself is wrong."""
    given[argument] = torch.ones(shape)
    # Beside a wrong reference of two dimensions the others look wrong.
    blamed = r"\w+" if argument == first and len(shape) == 2 else argument
    told = (SIDE, SIDE) if blamed == r"\w+" else shape
    with pytest.raises(ValueError, match=rf"{blamed} has shape {re.escape(str(told))}; expected"):
        call(**given)


@shapes
@pytest.mark.parametrize(("name", "argument"), estimators())
def test_estimators_refuse_other_shapes(name: str, argument: str, shape: tuple[int, ...]) -> None:
    given = {
        **{"token_level_rewards": matrix(), "values": matrix(), "response_mask": matrix()},
        **{"index": [0, 0, 1, 1], "reward_baselines": torch.rand(SIDE), "gamma": 1.0, "lam": 1.0},
    }
    given = {k: v for k, v in given.items() if k in estimator_inputs(name)}
    refused(get_adv_estimator(name), argument, shape, "response_mask", **given)


@shapes
@pytest.mark.parametrize("name", [*POLICY_LOSS_REGISTRY])
@pytest.mark.parametrize(
    "argument",
    ["old_log_prob", "log_prob", "advantages", "response_mask", "rollout_is_weights", "selected"],
)
def test_policy_losses_refuse_other_shapes(
    name: str, argument: str, shape: tuple[int, ...]
) -> None:
    tensors = ("old_log_prob", "log_prob", "advantages", "response_mask")
    given = {tensor: matrix() for tensor in tensors}
    if argument == "selected" and not name.endswith("_cov"):
        return
    refused(get_policy_loss(name), argument, shape, "response_mask", **given, config=CONFIG)


OTHERS: dict[str, tuple[Call, str, tuple[str, ...]]] = {
    "value loss": (
        lambda **given: compute_value_loss(**given, cliprange_value=0.5),
        "response_mask",
        ("vpreds", "returns", "values"),
    ),
    "explained variance": (explained_variance_sums, "response_mask", ("values", "returns")),
    "aggregation": (
        lambda **given: agg_loss(**given, loss_agg_mode="token-mean"),
        "loss_mask",
        ("loss_mat",),
    ),
    "penalty": (
        lambda **given: subtract_kl_penalty(**given, beta=0.1),
        "response_mask",
        ("token_level_scores", "old_log_probs", "ref_log_prob"),
    ),
    "correction": (
        compute_rollout_correction,
        "response_mask",
        ("old_log_probs", "rollout_log_probs"),
    ),
    "mismatch": (rollout_mismatch_sums, "response_mask", ("old_log_probs", "rollout_log_probs")),
    "covariance sums": (log_prob_and_advantage_sums, "response_mask", ("log_prob", "advantages")),
}


@shapes
@pytest.mark.parametrize(
    ("case", "argument"),
    [(case, x) for case, (_, first, rest) in OTHERS.items() for x in (first, *rest)],
)
def test_the_others_refuse_other_shapes(case: str, argument: str, shape: tuple[int, ...]) -> None:
    call, first, rest = OTHERS[case]
    refused(call, argument, shape, first, **{name: matrix() for name in (first, *rest)})


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimates_take_any_shape_that_all_share(name: str) -> None:
    for shape in ((), (3,), (2, 3), (2, 3, 4)):
        x = torch.rand(shape)
        assert kl_penalty(x, x, name, torch.ones(shape)).shape == shape
    with pytest.raises(ValueError, match=r"ref_logprob has shape \(3,\); expected \(3, 3\)"):
        kl_penalty(torch.rand(3, 3), torch.rand(3), name)
    with pytest.raises(ValueError, match=r"response_mask has shape \(3, 1\); expected \(3, 3\)"):
        kl_penalty(torch.rand(3, 3), torch.rand(3, 3), name, torch.ones(3, 1))
