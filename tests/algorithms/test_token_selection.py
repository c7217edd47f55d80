"""Which tokens clip_cov and kl_cov take, and that a mini-batch in pieces takes the same ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    POLICY_LOSS_REGISTRY,
    log_prob_and_advantage_sums,
    scatter_selection,
)
from ctrl_megatron.algorithms.covariance import (
    select_clip_cov_tokens,
    select_kl_cov_tokens,
    token_covariances,
    token_random_numbers,
)

TENSORS = ("old_log_prob", "log_prob", "advantages", "response_mask")
CONFIG = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=None,
    clip_ratio_high=None,
    clip_cov_ratio=0.15,
    clip_cov_lb=0.0,
    clip_cov_ub=4.0,
    kl_cov_ratio=0.2,
    ppo_kl_coef=1.0,
)


def batch(seed: int, rows: int = 8, width: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = normal(generator, rows, width) - 2.0
    return {
        "old_log_prob": old,
        "log_prob": old + normal(generator, rows, width, 0.3),
        "advantages": normal(generator, rows, width),
        "response_mask": ragged_mask(generator, rows, width),
    }


def covariance_oracle(data: dict[str, torch.Tensor]) -> dict[tuple[int, int], float]:
    mask = data["response_mask"]
    places = [(i, t) for i in range(len(mask)) for t in tokens(mask, i)]
    logs = [float(data["log_prob"][p]) for p in places]
    gains = [float(data["advantages"][p]) for p in places]
    log_mean, gain_mean = sum(logs) / len(logs), sum(gains) / len(gains)
    return {
        p: (x - log_mean) * (a - gain_mean) for p, x, a in zip(places, logs, gains, strict=True)
    }


def selected_by(name: str, data: dict[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
    """(B, R) bool: the choice among all tokens of ``data``, whose rows are named by number."""
    selection, mask = POLICY_LOSS_REGISTRY.get(name).selection, data["response_mask"]
    assert selection is not None
    sums = log_prob_and_advantage_sums(data["log_prob"], data["advantages"], mask)
    covariances = selection.covariances(*(data[k] for k in TENSORS), CONFIG, sums)[mask]
    lots = token_random_numbers(names_of(len(mask), seed), mask)[mask]
    return scatter_selection(selection.choose(covariances, CONFIG, lots), mask)


def names_of(rows: int, seed: int) -> list[str]:
    return [f"{seed}/{row}" for row in range(rows)]


def clip_cov_config(ratio: float, lowest: float, highest: float) -> Any:
    return SimpleNamespace(clip_cov_ratio=ratio, clip_cov_lb=lowest, clip_cov_ub=highest)


@given(seeds)
def test_covariances_equal_plain_python(seed: int) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    want = torch.zeros(mask.shape, dtype=torch.float64)
    for place, value in covariance_oracle(data).items():
        want[place] = value
    dirty = (spoil(data["log_prob"], mask), spoil(data["advantages"], mask), mask)
    got = token_covariances(*dirty, log_prob_and_advantage_sums(*dirty))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
    covariance = float(want.sum() / mask.sum())
    logs, gains = data["log_prob"][mask], data["advantages"][mask]
    by_torch = float(torch.cov(torch.stack([logs, gains]), correction=0)[0, 1])
    assert covariance == pytest.approx(by_torch, rel=1e-6, abs=1e-9)


@given(seeds)
def test_kl_cov_takes_the_largest(seed: int) -> None:
    data = batch(seed)
    found = covariance_oracle(data)
    count = max(1, int(CONFIG.kl_cov_ratio * len(found)))
    best = sorted(found, key=found.__getitem__, reverse=True)[:count]
    chosen = selected_by("kl_cov", data)
    assert {tuple(p) for p in chosen.nonzero().tolist()} == set(best)


@given(seeds)
def test_clip_cov_draws_between_the_bounds(seed: int) -> None:
    data = batch(seed)
    found = covariance_oracle(data)
    candidates = set()
    for (i, t), value in found.items():
        ratio = float((data["log_prob"] - data["old_log_prob"]).exp()[i, t])
        gain = float(data["advantages"][i, t])
        free = not ((gain > 0 and ratio > 1.2) or (gain < 0 and ratio < 0.8))
        if free and CONFIG.clip_cov_lb <= value <= CONFIG.clip_cov_ub:
            candidates.add((i, t))
    count = min(len(candidates), max(1, int(CONFIG.clip_cov_ratio * len(found))))
    picked = selected_by("clip_cov", data, seed)
    chosen = {tuple(p) for p in picked.nonzero().tolist()}
    assert len(chosen) == count
    assert chosen <= candidates


def test_the_draw_is_uniform_and_follows_the_lots() -> None:
    covariances = torch.tensor([2.0, 0.5, 3.0, 9.0, 4.0, float("-inf"), 2.0, 1.0])
    counts, config = torch.zeros(8), clip_cov_config(0.25, 1.0, 5.0)
    for seed in range(400):
        lots = token_random_numbers([str(seed)], torch.ones(1, 8, dtype=torch.bool))[0]
        a, b = (select_clip_cov_tokens(covariances, config, lots) for _ in range(2))
        assert torch.equal(a, b)
        assert int(a.sum()) == 2
        counts += a
    assert counts[[1, 3, 5]].tolist() == [0, 0, 0]
    # 2 of 5 candidates: 160 times each, give or take four standard deviations.
    assert torch.all((counts[[0, 2, 4, 6, 7]] - 160).abs() < 40)


def test_how_many_tokens() -> None:
    values = torch.arange(10.0)

    def largest(covariances: torch.Tensor, ratio: float) -> list[int]:
        config: Any = SimpleNamespace(kl_cov_ratio=ratio)
        lots = torch.arange(len(covariances), dtype=torch.float64)
        return select_kl_cov_tokens(covariances, config, lots).nonzero().squeeze(-1).tolist()

    assert largest(values, 0.3) == [7, 8, 9]
    assert largest(values, 0.0002) == [9]
    assert largest(values, 0.0) == largest(values[:0], 0.5) == []
    assert largest(torch.ones(4), 0.5) == [0, 1]
    with pytest.raises(ValueError, match=r"kl_cov_ratio must lie in \[0, 1\], got 1.5"):
        largest(values, 1.5)
    with pytest.raises(ValueError, match=r"clip_cov_lb=2.0 is above clip_cov_ub=1.0"):
        select_clip_cov_tokens(values, clip_cov_config(0.1, 2.0, 1.0), values)


@given(seeds, st.sampled_from(["clip_cov", "kl_cov"]), st.integers(1, 5))
def test_pieces_select_like_the_whole(seed: int, name: str, size: int) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    selection = POLICY_LOSS_REGISTRY.get(name).selection
    assert selection is not None
    cuts = pieces(8, [size])
    shares = [{k: v[rows] for k, v in data.items()} for rows in cuts]
    sums = sum(
        (
            log_prob_and_advantage_sums(s["log_prob"], s["advantages"], s["response_mask"])
            for s in shares
        ),
        torch.zeros(3, dtype=torch.float64),
    )
    found = [selection.covariances(*(s[k] for k in TENSORS), CONFIG, sums) for s in shares]
    gathered = torch.cat([c[s["response_mask"]] for c, s in zip(found, shares, strict=True)])
    names = names_of(len(mask), seed)
    lots = torch.cat(
        [
            token_random_numbers(names[rows], s["response_mask"])[s["response_mask"]]
            for rows, s in zip(cuts, shares, strict=True)
        ]
    )
    chosen = selection.choose(gathered, CONFIG, lots)
    parts = chosen.split([int(s["response_mask"].sum()) for s in shares])
    selected = torch.cat(
        [scatter_selection(p, s["response_mask"]) for p, s in zip(parts, shares, strict=True)]
    )
    assert not bool((selected & ~mask).any())
    of_whole = selected_by(name, data, seed)
    assert torch.equal(selected, of_whole)
    terms = POLICY_LOSS_REGISTRY.get(name).function
    whole = terms(**data, config=CONFIG, selected=of_whole).loss
    joined = torch.cat(
        [
            terms(**s, config=CONFIG, selected=selected[rows]).loss
            for s, rows in zip(shares, cuts, strict=True)
        ]
    )
    torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-14)


@given(seeds, st.sampled_from(["clip_cov", "kl_cov"]), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(seed: int, name: str, random: Any) -> None:
    """Nor how wide a rank's batch is. Equal covariances are dealt with by lot too."""
    data = {key: value.clone() for key, value in batch(seed).items()}
    data["advantages"][::2] = 0.25
    mask, order = data["response_mask"], list(range(8))
    random.shuffle(order)
    selection = POLICY_LOSS_REGISTRY.get(name).selection
    assert selection is not None
    sums = log_prob_and_advantage_sums(data["log_prob"], data["advantages"], mask)
    covariances = selection.covariances(*(data[k] for k in TENSORS), CONFIG, sums)
    names, wider = names_of(8, seed), torch.nn.functional.pad(mask, (0, 40))
    lots = token_random_numbers([names[row] for row in order], wider[order])[:, : mask.shape[1]]
    chosen = selection.choose(covariances[order][mask[order]], CONFIG, lots[mask[order]])
    found = scatter_selection(chosen, mask[order])
    assert torch.equal(found, selected_by(name, data, seed)[order])


def test_lots_depend_on_the_name_alone() -> None:
    lots = token_random_numbers(["a", "b", "a"], torch.ones(3, 50, dtype=torch.bool))
    assert torch.equal(lots[0], lots[2]) and not torch.equal(lots[0], lots[1])
    assert torch.equal(
        token_random_numbers(["b"], torch.ones(1, 3, dtype=torch.bool))[0], lots[1, :3]
    )
    assert token_random_numbers([], torch.ones(0, 3, dtype=torch.bool)).shape == (0, 3)
    assert ((lots >= 0) & (lots < 1)).all()
