from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    compute_policy_loss_vanilla,
    get_policy_loss,
    register_policy_loss,
)
from ctrl_megatron.algorithms.policy_losses import vanilla_terms


def clip(
    both: float = 0.2, low: float | None = None, high: float | None = None, c: float | None = 3.0
) -> SimpleNamespace:
    return SimpleNamespace(
        clip_ratio=both, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c
    )


ranges = st.sampled_from([clip(), clip(0.2, 0.1, 0.28), clip(0.3, 0.0, None), clip(0.1, c=1.05)])
unbounded = st.sampled_from([clip(c=None), clip(0.2, 0.1, 0.28, None)])


def batch(seed: int, rows: int = 6, width: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    old = normal(generator, rows, width) - 2.0
    return {
        "old_log_prob": old,
        "log_prob": old + normal(generator, rows, width, 0.6),
        "advantages": normal(generator, rows, width),
        "response_mask": mask,
    }


def token_oracle(old: float, new: float, gain: float, config: SimpleNamespace) -> tuple:
    """(loss, clipped, kl, clipped_lower) of one token, by cases instead of by min and max."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    ratio = math.exp(new - old)
    clipped, lower = False, False
    if gain > 0:
        clipped = ratio > 1 + high
        used = 1 + high if clipped else ratio
    elif gain < 0:
        clipped = ratio < 1 - low
        used = 1 - low if clipped else ratio
        lower = config.clip_ratio_c is not None and used > config.clip_ratio_c
        used = config.clip_ratio_c if lower else used
    else:
        used = 0.0
    return -gain * used, float(clipped), old - new, float(lower)


@given(seeds, ranges | unbounded, st.sampled_from(LOSS_AGG_MODES), st.booleans())
def test_vanilla_equals_plain_python(
    seed: int, config: SimpleNamespace, mode: str, weighted: bool
) -> None:
    fields = batch(seed)
    mask = fields["response_mask"]
    weights = torch.rand(mask.shape, dtype=torch.float64) * 2 if weighted else None
    losses = torch.zeros(mask.shape, dtype=torch.float64)
    found: list[tuple[float, float, float]] = []
    for i in range(mask.shape[0]):
        for t in tokens(mask, i):
            old, new, gain = (
                float(fields[k][i, t]) for k in ("old_log_prob", "log_prob", "advantages")
            )
            loss, *rest = token_oracle(old, new, gain, config)
            losses[i, t] = loss * (1.0 if weights is None else float(weights[i, t]))
            found.append(tuple(rest))
    result = compute_policy_loss_vanilla(
        **fields, loss_agg_mode=mode, config=config, rollout_is_weights=weights
    )
    # The aggregation has its own oracle in test_aggregation.
    want = [float(agg_loss(losses, mask, mode))]
    want += [sum(column) / len(found) for column in zip(*found, strict=True)]
    assert [float(r) for r in result] == pytest.approx(want, rel=1e-6, abs=1e-12)


@given(seeds, ranges)
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(
    seed: int, config: SimpleNamespace
) -> None:
    fields = batch(seed)
    mask = fields["response_mask"]
    results, grads = [], []
    for spoilt in (False, True):
        given_fields = {
            k: spoil(v, mask) if spoilt and k != "response_mask" else v for k, v in fields.items()
        }
        given_fields["log_prob"] = given_fields["log_prob"].clone().requires_grad_()
        weights = spoil(torch.ones_like(fields["log_prob"]), mask) if spoilt else None
        result = compute_policy_loss_vanilla(
            **given_fields, config=config, rollout_is_weights=weights
        )
        result[0].backward()
        results.append(torch.stack([r.detach() for r in result]))
        grads.append(given_fields["log_prob"].grad)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert torch.all(grads[0][~mask] == 0)


@given(seeds, ranges)
def test_every_term_is_zero_off_the_mask(seed: int, config: SimpleNamespace) -> None:
    fields = batch(seed)
    mask = fields.pop("response_mask")
    dirty = {name: spoil(value, mask) for name, value in fields.items()}
    weights = spoil(torch.ones_like(dirty["log_prob"]), mask)
    terms = vanilla_terms(**dirty, response_mask=mask, config=config, rollout_is_weights=weights)
    for values in (terms.loss, terms.clipped, terms.approx_kl, terms.clipped_lower):
        assert torch.isfinite(values).all()
        assert torch.all(values[~mask] == 0)


@given(seeds, ranges, st.sampled_from(LOSS_AGG_MODES), st.integers(1, 4))
def test_micro_batches_add_up_in_loss_and_gradient(
    seed: int, config: SimpleNamespace, mode: str, size: int
) -> None:
    fields = batch(seed, rows=7)
    mask = fields["response_mask"]
    whole_input = fields.pop("log_prob").requires_grad_()
    whole = compute_policy_loss_vanilla(
        **fields, log_prob=whole_input, loss_agg_mode=mode, config=config
    )[0]
    whole.backward()
    part_input = whole_input.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in pieces(7, [size]):
        terms = vanilla_terms(
            **{k: v[rows] for k, v in fields.items()}, log_prob=part_input[rows], config=config
        )
        part = agg_loss(
            terms.loss,
            mask[rows],
            mode,
            batch_num_tokens=mask.sum(),
            global_batch_size=mask.any(dim=1).sum(),
        )
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, whole.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(part_input.grad, whole_input.grad, rtol=1e-9, atol=1e-12)


@given(seeds, ranges)
def test_bounds_of_the_clipped_loss(seed: int, config: SimpleNamespace) -> None:
    fields = batch(seed)
    fields["log_prob"] = fields["log_prob"] + 4 * (fields["log_prob"] - fields["old_log_prob"])
    loss = vanilla_terms(**fields, config=config).loss
    gain = torch.where(fields["response_mask"], fields["advantages"], 0.0)
    # A negative advantage costs at most c times its size, a positive one earns at most 1 + high.
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    assert torch.all(loss[gain < 0] <= -gain[gain < 0] * config.clip_ratio_c + 1e-12)
    assert torch.all(loss[gain > 0] >= -gain[gain > 0] * (1 + high) - 1e-12)


@given(seeds, ranges, st.sampled_from(LOSS_AGG_MODES))
def test_gradient(seed: int, config: SimpleNamespace, mode: str) -> None:
    fields = batch(seed, rows=3, width=3)
    ratio = (fields["log_prob"] - fields["old_log_prob"]).exp()
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    for corner in (1 - low, 1 + high, config.clip_ratio_c):
        # Finite differences must not step over a corner.
        near = (ratio - corner).abs() < 1e-3
        fields["log_prob"] = torch.where(near, fields["log_prob"] + 0.01, fields["log_prob"])
    log_prob = fields.pop("log_prob").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: compute_policy_loss_vanilla(
            **fields, log_prob=x, loss_agg_mode=mode, config=config
        )[0],
        (log_prob,),
    )


def test_at_the_old_policy_the_gradient_is_the_policy_gradient() -> None:
    fields = batch(1)
    log_prob = fields["old_log_prob"].clone().requires_grad_()
    for config in (clip(), clip(0.2, 0.0, 0.0)):
        log_prob.grad = None
        loss, clipped, kl, lower = compute_policy_loss_vanilla(
            **{**fields, "log_prob": log_prob}, config=config
        )
        loss.backward()
        mask = fields["response_mask"]
        want = torch.where(mask, -fields["advantages"], 0.0) / mask.sum()
        torch.testing.assert_close(log_prob.grad, want)
        assert float(clipped) == float(kl) == float(lower) == 0.0


def test_only_the_loss_has_a_gradient() -> None:
    fields = batch(2)
    fields["log_prob"].requires_grad_()
    loss, *metrics = compute_policy_loss_vanilla(**fields, config=clip())
    assert loss.requires_grad
    assert not any(m.requires_grad for m in metrics)


def test_a_zero_side_is_respected() -> None:
    fields = {
        "old_log_prob": torch.zeros(1, 1),
        "log_prob": torch.full((1, 1), math.log(1.15)),
        "advantages": torch.ones(1, 1),
        "response_mask": torch.ones(1, 1),
    }
    kept = compute_policy_loss_vanilla(**fields, config=clip(0.2))
    cut = compute_policy_loss_vanilla(**fields, config=clip(0.2, high=0.0))
    assert [float(kept[0]), float(kept[1])] == pytest.approx([-1.15, 0.0])
    assert [float(cut[0]), float(cut[1])] == pytest.approx([-1.0, 1.0])


def test_impossible_log_probs_stay_finite() -> None:
    fields = {
        "old_log_prob": torch.tensor([[-500.0, -1.0]]),
        "log_prob": torch.tensor([[-1.0, -500.0]], requires_grad=True),
        "advantages": torch.tensor([[0.0, -1.0]]),
        "response_mask": torch.ones(1, 2),
    }
    loss = compute_policy_loss_vanilla(**fields, config=clip())[0]
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(fields["log_prob"].grad).all()  # type: ignore[union-attr]


def test_a_batch_without_tokens_is_zero() -> None:
    fields = batch(3)
    fields["response_mask"] = torch.zeros_like(fields["response_mask"])
    assert [float(x) for x in compute_policy_loss_vanilla(**fields, config=clip())] == [0.0] * 4


def test_wrong_options_are_named() -> None:
    fields = batch(4)
    with pytest.raises(ValueError, match="needs config"):
        compute_policy_loss_vanilla(**fields)
    with pytest.raises(ValueError, match=r"clip_ratio_c must be greater than 1, got 1\.0"):
        compute_policy_loss_vanilla(**fields, config=clip(c=1.0))
    with pytest.raises(ValueError, match=r"low=-0\.1"):
        compute_policy_loss_vanilla(**fields, config=clip(low=-0.1))


def test_registry() -> None:
    assert get_policy_loss("vanilla") is compute_policy_loss_vanilla
    assert POLICY_LOSS_REGISTRY.get("vanilla").function is vanilla_terms
    with pytest.raises(ValueError, match=r"unknown policy loss 'ppo'; known: cispo, .*vanilla"):
        get_policy_loss("ppo")
    with pytest.raises(ValueError, match="'vanilla' is registered already"):
        register_policy_loss("vanilla")(lambda: None)  # type: ignore[arg-type,return-value]


def test_a_loss_of_a_whole_batch_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of siiRL's guide (section 11.4), with an option of its own."""
    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_entries", dict(POLICY_LOSS_REGISTRY._entries))

    @register_policy_loss("test_whole")
    def whole(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: object = None,
        rollout_is_weights: torch.Tensor | None = None,
        temper: float = 1.0,
    ) -> tuple:
        loss = agg_loss(-temper * advantages * log_prob, response_mask, loss_agg_mode)
        return (loss, *(torch.zeros(()),) * 3)

    data, found = batch(5), get_policy_loss("test_whole")
    mask = data["response_mask"]
    want = agg_loss(-2 * data["advantages"] * data["log_prob"], mask, "seq-mean-token-mean")
    assert float(found(**data, loss_agg_mode="seq-mean-token-mean", temper=2.0)[0]) == float(want)
    with pytest.raises(ValueError, match="log_prob has shape"):
        found(**{**data, "log_prob": torch.ones(1)})
