"""Trainer and engine disagree by construction; the correction and the metrics say how much."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    RolloutMismatchSums,
    compute_rollout_correction,
    rollout_mismatch_metrics,
    rollout_mismatch_sums,
)
from ctrl_megatron.algorithms.rollout_correction import ROLLOUT_IS, ROLLOUT_RS

ratios = st.sampled_from(["token", "sequence", "geometric"])


def pair(seed: int, scale: float = 0.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(old_log_probs, rollout_log_probs, mask) of ragged rows."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, 6, 5)
    rollout = normal(generator, 6, 5) - 3.0
    return rollout + normal(generator, 6, 5, scale), rollout, mask


def ratio_oracle(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, kind: str
) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for i in range(len(mask)):
        each = {t: math.exp(float(old[i, t]) - float(rollout[i, t])) for t in tokens(mask, i)}
        if not each:
            continue
        row = math.prod(each.values())
        if kind == "geometric":
            row = row ** (1 / len(each))
        found |= {(i, t): value if kind == "token" else row for t, value in each.items()}
    return found


@given(seeds, st.sampled_from(["token", "sequence"]), st.sampled_from([1.0, 1.7, 50.0]))
def test_weights_equal_plain_python(seed: int, kind: str, threshold: float) -> None:
    old, rollout, mask = pair(seed)
    want = torch.zeros(mask.shape, dtype=torch.float64)
    for place, ratio in ratio_oracle(old, rollout, mask, kind).items():
        want[place] = min(ratio, threshold)
    found = compute_rollout_correction(
        spoil(old, mask),
        spoil(rollout, mask),
        mask,
        rollout_is=kind,
        rollout_is_threshold=threshold,
    )
    assert found.weights is not None
    torch.testing.assert_close(found.weights, want, rtol=1e-6, atol=1e-12)
    assert torch.equal(found.response_mask, mask)
    assert not found.weights.requires_grad


@given(seeds, ratios, st.sampled_from([(1.3, None), (1.5, 0.9), (1e9, 0.0)]))
def test_rejection_equals_plain_python(
    seed: int, kind: str, bounds: tuple[float, float | None]
) -> None:
    old, rollout, mask = pair(seed)
    upper, lower = bounds
    floor = 1 / upper if lower is None else lower
    want = torch.zeros_like(mask)
    for place, ratio in ratio_oracle(old, rollout, mask, kind).items():
        want[place] = floor <= ratio <= upper
    found = compute_rollout_correction(
        spoil(old, mask),
        spoil(rollout, mask),
        mask.float(),
        rollout_rs=kind,
        rollout_rs_threshold=upper,
        rollout_rs_threshold_lower=lower,
    )
    assert found.weights is None
    assert torch.equal(found.response_mask, want)


def test_constructed_mismatches() -> None:
    """Four tokens: agreement, twice as likely, half as likely, and a row that is off as a whole."""
    rollout = torch.log(torch.tensor([[0.5, 0.3, 0.4], [0.2, 0.2, 0.2]], dtype=torch.float64))
    factor = torch.tensor([[1.0, 2.0, 0.5], [1.5, 1.5, 1.5]], dtype=torch.float64)
    old, mask = rollout + factor.log(), torch.ones(2, 3)

    def weights(**options: object) -> list:
        found = compute_rollout_correction(old, rollout, mask, **options).weights  # type: ignore[arg-type]
        assert found is not None
        return found.tolist()

    off = compute_rollout_correction(old, rollout, mask)
    assert off.weights is None
    assert off.response_mask.all()
    assert weights(rollout_is="token", rollout_is_threshold=1.6)[0] == pytest.approx([1, 1.6, 0.5])
    by_row = weights(rollout_is="sequence", rollout_is_threshold=3.0)
    assert by_row[0] == pytest.approx([1.0] * 3)
    assert by_row[1] == pytest.approx([3.0] * 3)

    def kept(kind: str) -> list:
        return compute_rollout_correction(
            old, rollout, mask, rollout_rs=kind, rollout_rs_threshold=1.6
        ).response_mask.tolist()

    assert kept("token") == [[True, False, False], [True, True, True]]
    assert kept("sequence") == [[True] * 3, [False] * 3]
    assert kept("geometric") == [[True] * 3, [True] * 3]


@given(seeds, st.integers(1, 6), st.sampled_from(["none", "token", "sequence"]))
def test_metrics_of_added_sums_equal_plain_python(seed: int, size: int, kind: str) -> None:
    old, rollout, mask = pair(seed)
    options = {
        "rollout_is": kind,
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token",
        "rollout_rs_threshold": 2.0,
    }
    sums, largest = torch.zeros(7, dtype=torch.float64), torch.zeros(())
    for rows in pieces(6, [size]):
        dirty = spoil(old, mask)[rows], spoil(rollout, mask)[rows], mask[rows]
        share = rollout_mismatch_sums(*dirty, compute_rollout_correction(*dirty, **options), 1.5)
        sums, largest = sums + share.sums, torch.maximum(largest, share.largest)
    got = rollout_mismatch_metrics(RolloutMismatchSums(sums, largest))
    each = ratio_oracle(old, rollout, mask, "token")
    gaps = [abs(math.exp(float(old[p])) - math.exp(float(rollout[p]))) for p in each]
    raw = ratio_oracle(old, rollout, mask, "sequence" if kind == "sequence" else "token")
    weights = [w if kind == "none" else min(w, 1.5) for w in raw.values()]
    n = len(each)
    want = {
        "rollout/probs_diff_mean": sum(gaps) / n,
        "rollout/probs_diff_max": max(gaps),
        "rollout/kl": sum(r - 1 - math.log(r) for r in each.values()) / n,
        "rollout/ess": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
        "rollout/is_mean": sum(weights) / n,
        "rollout/is_truncated": 0.0 if kind == "none" else sum(w == 1.5 for w in weights) / n,
        "rollout/rejected": sum(not 0.5 <= r <= 2.0 for r in each.values()) / n,
    }
    assert got == {k: pytest.approx(v, rel=1e-6, abs=1e-12) for k, v in want.items()}
    assert 0 < got["rollout/ess"] <= 1 + 1e-12


def test_agreement_is_perfect() -> None:
    log_probs, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
    got = rollout_mismatch_metrics(rollout_mismatch_sums(log_probs, log_probs, mask))
    assert got == {
        **dict.fromkeys(("rollout/probs_diff_mean", "rollout/probs_diff_max", "rollout/kl"), 0.0),
        **{"rollout/ess": 1.0, "rollout/is_mean": 1.0},
        **{"rollout/is_truncated": 0.0, "rollout/rejected": 0.0},
    }


def test_small_mismatches_are_measured_in_float32() -> None:
    rollout, mask = torch.full((1, 1000), -1.0), torch.ones(1, 1000)
    got = rollout_mismatch_metrics(rollout_mismatch_sums(rollout + 1e-3, rollout, mask))
    assert got["rollout/kl"] == pytest.approx(5e-7, rel=1e-3)


def test_impossible_log_probs_stay_finite() -> None:
    old, rollout = torch.tensor([[-1.0, -900.0]]), torch.tensor([[-900.0, -1.0]])
    mask = torch.ones(1, 2)
    for kind in ("token", "sequence"):
        weights = compute_rollout_correction(old, rollout, mask, rollout_is=kind).weights
        assert weights is not None
        assert torch.isfinite(weights).all()
    assert math.isfinite(
        rollout_mismatch_metrics(rollout_mismatch_sums(old, rollout, mask))["rollout/kl"]
    )


def test_wrong_options_are_named() -> None:
    log_probs, mask = torch.zeros(1, 2), torch.ones(1, 2)

    def refused(message: str, **options: object) -> None:
        with pytest.raises(ValueError, match=message):
            compute_rollout_correction(log_probs, log_probs, mask, **options)  # type: ignore[arg-type]

    refused("unknown rollout_is 'geometric'; known: none, token, seq", rollout_is="geometric")
    refused("unknown rollout_rs 'row'; known: none, token, seq", rollout_rs="row")
    refused("rollout_is_threshold must be", rollout_is="token", rollout_is_threshold=0.0)
    refused("rollout_rs_threshold must be", rollout_rs="token", rollout_rs_threshold=-1.0)
    refused("below the lower threshold 2.0", rollout_rs="token", rollout_rs_threshold=0.5)
    assert set(ROLLOUT_IS) < set(ROLLOUT_RS)
    with pytest.raises(ValueError, match="no response token"):
        rollout_mismatch_metrics(rollout_mismatch_sums(log_probs, log_probs, torch.zeros(1, 2)))
