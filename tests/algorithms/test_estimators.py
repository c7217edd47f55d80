"""Each estimator beside the formula of its paper in plain Python, row by row, token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import estimator_inputs, normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    Reduce,
    compute_grpo_passk_outcome_advantage,
    estimate_advantages,
    get_adv_estimator,
    register_adv_est,
)
from ctrl_megatron.errors import UserError

Rows = list[list[float]]
Oracle = Callable[..., Rows]
GROUPS = ["a", ("b", 1), 3]


def batch(seed: int, rows: int = 9, width: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(GROUPS), (rows,), generator=generator).tolist()
    # Few distinct scores on the last token, so that ties and groups of equal scores occur.
    rewards = torch.zeros(rows, width, dtype=torch.float64)
    mask = ragged_mask(generator, rows, width)
    coarse = torch.randint(0, 3, (rows,), generator=generator).double() / 2
    for i in range(rows):
        places = list(tokens(mask, i))
        if places:
            rewards[i, places[-1]] = coarse[i]
    if seed % 2:
        rewards = normal(generator, rows, width)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": [GROUPS[p] for p in picks],
        "values": normal(generator, rows, width),
        "reward_baselines": normal(generator, rows, 1).squeeze(-1),
        "gamma": 0.9,
        "lam": 0.8,
    }


def scores_of(data: dict[str, Any]) -> dict[int, float]:
    """Row -> score, of rows that have tokens."""
    mask = data["response_mask"]
    rows = {i: list(tokens(mask, i)) for i in range(len(mask))}
    rewards = data["token_level_rewards"]
    return {i: sum(float(rewards[i, t]) for t in ts) for i, ts in rows.items() if ts}


def mates_of(data: dict[str, Any], score: dict[int, float], row: int) -> list[int]:
    return [j for j in score if data["index"][j] == data["index"][row]]


def spread(data: dict[str, Any], rows: dict[int, float]) -> Rows:
    mask = data["response_mask"]
    return [
        [rows[i] if bool(mask[i, t]) else 0.0 for t in range(mask.shape[1])]
        for i in range(len(mask))
    ]


def whitened(data: dict[str, Any], raw: Rows) -> Rows:
    mask = data["response_mask"]
    chosen = [raw[i][t] for i in range(len(raw)) for t in tokens(mask, i)]
    centre, scale = mean(chosen), math.sqrt(stdev(chosen) ** 2 + 1e-8)
    return [
        [(raw[i][t] - centre) / scale if bool(mask[i, t]) else 0.0 for t in range(len(raw[i]))]
        for i in range(len(raw))
    ]


def by_group(data: dict[str, Any], rule: Callable[[float, list[float]], float]) -> Rows:
    """A row's advantage from its score and the scores of its group; alone it has none."""
    score = scores_of(data)
    found = dict.fromkeys(range(len(data["index"])), 0.0)
    for i in score:
        group = [score[j] for j in mates_of(data, score, i)]
        found[i] = rule(score[i], group) if len(group) > 1 else 0.0
    return spread(data, found)


def rloo(data: dict[str, Any], by_std: bool = False) -> Rows:
    def rule(r: float, group: list[float]) -> float:
        advantage = r - (sum(group) - r) / (len(group) - 1)
        return advantage / (stdev(group) + 1e-4) if by_std else advantage

    return by_group(data, rule)


def centred(data: dict[str, Any]) -> Rows:
    return by_group(data, lambda r, group: r - mean(group))


def to_go(data: dict[str, Any], gamma: float) -> Rows:
    mask, rewards = data["response_mask"], data["token_level_rewards"]
    result = [[0.0] * mask.shape[1] for _ in range(len(mask))]
    for i in range(len(mask)):
        places = list(tokens(mask, i))
        for k, t in enumerate(places):
            result[i][t] = sum(
                gamma**n * float(rewards[i, later]) for n, later in enumerate(places[k:])
            )
    return result


def remax(data: dict[str, Any]) -> Rows:
    mask, after = data["response_mask"], to_go(data, 1.0)
    for i in range(len(mask)):
        for t in tokens(mask, i):
            after[i][t] -= float(data["reward_baselines"][i])
    return after


def opo(data: dict[str, Any]) -> Rows:
    score, found = scores_of(data), dict.fromkeys(range(len(data["index"])), 0.0)
    length = {i: len(list(tokens(data["response_mask"], i))) for i in score}
    for i in score:
        mates = mates_of(data, score, i)
        weighted = sum(length[j] * score[j] for j in mates) / sum(length[j] for j in mates)
        found[i] = score[i] - weighted if len(mates) > 1 else 0.0
    return spread(data, found)


def gpg(data: dict[str, Any], f_norm: float = 1.0) -> Rows:
    raw, score = centred(data), scores_of(data)
    mask = data["response_mask"]
    telling = sum(abs(raw[i][next(tokens(mask, i))]) > 1e-9 for i in score)
    alpha = len(score) / max(telling, 1)
    return [[alpha * a / f_norm for a in row] for row in raw]


def cpgd(data: dict[str, Any], weight: str) -> Rows:
    if weight == "STD_weight":
        return by_group(data, lambda r, group: (r - mean(group)) / (stdev(group) + 1e-6))
    raw, score = centred(data), scores_of(data)
    if weight == "naive":
        return [[a if len(row) else 0.0 for a in row] for row in raw]
    groups = {data["index"][i]: {score[j] for j in mates_of(data, score, i)} for i in score}
    telling = sum(len(values) > 1 for values in groups.values())
    scale = min(len(groups) / max(telling, 1), 3.0)
    return [[scale * a for a in row] for row in raw]


def passk(data: dict[str, Any], by_std: bool) -> Rows:
    def lead(r: float, group: list[float]) -> float:
        best, second = sorted(group, reverse=True)[:2]
        if r != best or best == second:
            return 0.0
        return (best - second) / (stdev(group) + 1e-6 if by_std else 1.0)

    return by_group(data, lead)


CASES: list[tuple[str, dict[str, Any], Oracle]] = [
    ("rloo", {}, rloo),
    ("rloo", {"norm_by_std": True}, lambda d: rloo(d, True)),
    ("reinforce_plus_plus", {}, lambda d: whitened(d, to_go(d, d["gamma"]))),
    ("reinforce_plus_plus_baseline", {}, lambda d: whitened(d, centred(d))),
    ("remax", {}, remax),
    ("opo", {}, opo),
    ("gpg", {}, gpg),
    ("gpg", {"f_norm": 2.5}, lambda d: gpg(d, 2.5)),
    ("cpgd", {}, lambda d: cpgd(d, "STD_weight")),
    (
        "cpgd",
        {"weight_factor_in_cpgd": "clip_filter_like_weight"},
        lambda d: cpgd(d, "clip_filter_like_weight"),
    ),
    ("cpgd", {"weight_factor_in_cpgd": "naive"}, lambda d: cpgd(d, "naive")),
    ("grpo_passk", {}, lambda d: passk(d, True)),
    ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, lambda d: passk(d, False)),
]
cases = st.sampled_from(CASES)
every = st.sampled_from([*CASES, ("grpo", {}, None), ("gae", {}, None)])
GROUP_RELATIVE = ("grpo", "rloo", "opo", "gpg", "cpgd", "grpo_passk")
relative = st.sampled_from(
    [c for c in CASES if c[0] in (*GROUP_RELATIVE, "reinforce_plus_plus_baseline")]
)


def call(name: str, data: dict[str, Any], options: dict[str, Any]) -> Any:
    wanted = {k: v for k, v in data.items() if k in estimator_inputs(name)}
    return get_adv_estimator(name)(**{**wanted, **options})


def rows_of(data: dict[str, Any], rows: Any) -> dict[str, Any]:
    """The rows of a slice or a list of numbers."""
    numbers = range(len(data["index"]))[rows] if isinstance(rows, slice) else rows
    return {
        k: v[rows]
        if isinstance(v, torch.Tensor)
        else [v[i] for i in numbers]
        if isinstance(v, list)
        else v
        for k, v in data.items()
    }


def test_every_estimator_has_a_case() -> None:
    own = {"gae", "grpo", "gdpo"}  # in test_advantages, test_gdpo
    assert {name for name, _, _ in CASES} | own == set(ADV_ESTIMATOR_REGISTRY)


@given(seeds, cases)
def test_estimators_equal_plain_python(seed: int, case: tuple) -> None:
    name, options, oracle = case
    data = batch(seed)
    want = torch.tensor(oracle(data), dtype=torch.float64)
    dirty = dict(data)
    dirty["token_level_rewards"] = spoil(data["token_level_rewards"], data["response_mask"])
    before = dirty["token_level_rewards"].clone()
    advantages, returns = call(name, dirty, options)
    torch.testing.assert_close(advantages, want, rtol=1e-6, atol=1e-9)
    assert returns.shape == want.shape
    assert torch.isfinite(returns).all()
    assert torch.equal(before.nan_to_num(), dirty["token_level_rewards"].nan_to_num())


@given(seeds, cases)
def test_float32_stays_float32_and_close(seed: int, case: tuple) -> None:
    name, options, _ = case
    data = batch(seed)
    data["token_level_rewards"] = data["token_level_rewards"].float()
    advantages, returns = call(name, data, options)
    assert advantages.dtype == returns.dtype == torch.float32
    data["token_level_rewards"] = data["token_level_rewards"].double()
    want, _ = call(name, data, options)
    torch.testing.assert_close(advantages.double(), want, rtol=1e-4, atol=1e-4)


def test_integer_rewards_are_taken() -> None:
    data = batch(2)
    data["token_level_rewards"] = (data["token_level_rewards"] * 2).long()
    data["reward_baselines"] = data["reward_baselines"].float()
    for name, options, oracle in CASES:
        advantages, _ = call(name, data, options)
        assert advantages.dtype == torch.float32
        want = torch.tensor(oracle(data))
        torch.testing.assert_close(advantages, want, rtol=1e-4, atol=1e-5)


@given(seeds, every)
def test_padding_and_the_order_of_rows_never_matter(seed: int, case: tuple) -> None:
    name, options, _ = case
    data = batch(seed)
    data["values"] = spoil(data["values"], data["response_mask"])
    advantages, _ = call(name, data, options)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).tolist()
    permuted, _ = call(name, rows_of(data, order), options)
    torch.testing.assert_close(permuted, advantages[order], rtol=1e-9, atol=1e-11)
    wider = dict(data)
    for key in ("token_level_rewards", "values"):
        wider[key] = torch.nn.functional.pad(data[key], (2, 3), value=float("nan"))
    wider["response_mask"] = torch.nn.functional.pad(data["response_mask"], (2, 3))
    padded, _ = call(name, wider, options)
    torch.testing.assert_close(padded[:, 2:7], advantages, rtol=1e-9, atol=1e-11)
    assert torch.all(padded[~wider["response_mask"]] == 0)


@given(seeds, relative)
def test_a_shift_of_a_group_changes_nothing(seed: int, case: tuple) -> None:
    name, options, _ = case
    data = batch(seed)
    data["response_mask"][:, 0] = True
    data["index"] = ["a"] * 4 + ["b"] * 5
    advantages, _ = call(name, data, options)
    moved = dict(data)
    moved["token_level_rewards"] = data["token_level_rewards"].clone()
    moved["token_level_rewards"][:4, 0] += 3.0
    again, _ = call(name, moved, options)
    torch.testing.assert_close(again, advantages, rtol=1e-6, atol=1e-6)


@given(seeds, st.sampled_from(["rloo", "gpg", "cpgd", "grpo"]))
def test_groups_have_mean_zero(seed: int, name: str) -> None:
    data = batch(seed)
    data["response_mask"][:, 0] = True
    data["index"] = ["a"] * 4 + ["b"] * 5
    advantages, _ = call(name, data, {})
    for rows in (slice(0, 4), slice(4, 9)):
        assert abs(float(advantages[rows, 0].sum())) < 1e-8


@given(seeds)
def test_opo_has_mean_zero_over_the_tokens_of_a_group(seed: int) -> None:
    data = batch(seed)
    data["index"] = ["a"] * 9
    data["response_mask"][1, 0] = True
    advantages, _ = call("opo", data, {})
    assert abs(float(advantages.sum())) < 1e-8


@given(seeds)
def test_rloo_is_the_centred_score_times_k_over_k_minus_one(seed: int) -> None:
    data = batch(seed)
    data["response_mask"][:, 0] = True
    data["index"] = ["a"] * 9
    leave_one_out, _ = call("rloo", data, {})
    plain, _ = call("grpo", data, {"norm_adv_by_std_in_grpo": False})
    torch.testing.assert_close(leave_one_out, plain * 9 / 8, rtol=1e-9, atol=1e-12)


@given(seeds, every, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_pieces_with_added_sums_give_the_whole(seed: int, case: tuple, sizes: list[int]) -> None:
    name, options, _ = case
    data = {**batch(seed), **options}
    # Groups stay whole: rows sorted by group, cut between groups.
    order = sorted(range(9), key=lambda i: GROUPS.index(data["index"][i]))
    data = rows_of(data, order)
    if name in GROUP_RELATIVE or "baseline" in name:
        edges = [0, *(i for i in range(1, 9) if data["index"][i] != data["index"][i - 1]), 9]
        cuts = [slice(a, b) for a, b in pairwise(edges)]
    else:
        cuts = pieces(9, sizes)
    whole = estimate_advantages(name, data)
    torch.testing.assert_close(whole, call(name, data, options))
    shares: list[torch.Tensor] = []
    for cut in cuts:
        estimate_advantages(name, rows_of(data, cut), lambda s: shares.append(s) or s + 2)
    scaled = "gae" in name or "reinforce" in name or name == "gpg"
    scaled |= options.get("weight_factor_in_cpgd") == "clip_filter_like_weight"
    assert len(shares) == (len(cuts) if scaled else 0)
    total = sum(shares, torch.zeros(1, dtype=torch.float64))
    found = [estimate_advantages(name, rows_of(data, cut), lambda _: total) for cut in cuts]
    for k in range(2):
        joined = torch.cat([piece[k] for piece in found])
        torch.testing.assert_close(joined, whole[k], rtol=1e-9, atol=1e-11)


def test_whitening_survives_a_large_offset() -> None:
    data = batch(6)
    data["token_level_rewards"] = data["token_level_rewards"] + 1e4
    data["gamma"] = 0.0
    got, _ = call("reinforce_plus_plus", data, {})
    chosen = data["token_level_rewards"][data["response_mask"]]
    want = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
    torch.testing.assert_close(got[data["response_mask"]], want, rtol=1e-5, atol=1e-5)


def test_a_row_alone_with_unjudged_mates_learns_nothing() -> None:
    """Unjudged rows come with an empty mask and an id of their own: one is left of the group."""
    data = {
        "token_level_rewards": torch.tensor([[2.0], [9.0], [9.0], [0.1], [0.1], [1.1]]),
        "response_mask": torch.tensor([[1], [0], [0], [1], [1], [1]]),
        "index": ["left", "left", "unjudged", "whole", "whole", "whole"],
    }
    for name in GROUP_RELATIVE:
        advantages, returns = call(name, data, {})
        assert advantages[:3].tolist() == returns[:3].tolist() == [[0.0]] * 3, name
        assert float(advantages[5]) > 0, name
    _, returns = call("reinforce_plus_plus_baseline", data, {})
    assert returns[:3].tolist() == [[0.0]] * 3
    # One of the four rows is judged by its group: it is not one of those that gpg scales up.
    advantages, returns = call("gpg", data, {})
    torch.testing.assert_close(advantages, returns * 4 / 3)


def test_groups_without_spread() -> None:
    data = {
        "token_level_rewards": torch.tensor([[2.0], [1.0], [0.1], [0.1], [0.1], [0.1], [0.1]]),
        "response_mask": torch.ones(7, 1),
        "index": ["two", "two", *["flat"] * 5],
    }
    for name in GROUP_RELATIVE:
        advantages, _ = call(name, data, {})
        assert torch.equal(advantages[2:], torch.zeros(5, 1)), name
    # Two of seven rows have an advantage: they count for all seven.
    advantages, returns = call("gpg", data, {})
    assert advantages[:2, 0].tolist() == [1.75, -1.75]
    assert returns[:2, 0].tolist() == [0.5, -0.5]
    # One of two groups has two different scores.
    advantages, _ = call("cpgd", data, {"weight_factor_in_cpgd": "clip_filter_like_weight"})
    assert advantages[:2, 0].tolist() == [1.0, -1.0]


def test_a_batch_without_any_advantage_stays_zero() -> None:
    flat = {
        "token_level_rewards": torch.full((4, 2), 0.3),
        "response_mask": torch.ones(4, 2),
        "index": [0, 0, 1, 1],
    }
    for name in (*GROUP_RELATIVE, "reinforce_plus_plus_baseline"):
        advantages, _ = call(name, flat, {})
        assert float(advantages.abs().max()) < 1e-6, name


def test_a_shared_best_score_has_no_lead() -> None:
    data = {
        "token_level_rewards": torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.5]]),
        "response_mask": torch.ones(5, 1),
        "index": ["tie"] * 3 + ["lead"] * 2,
    }
    advantages, _ = compute_grpo_passk_outcome_advantage(**data, norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 0.5]


def test_rows_without_tokens_are_in_no_statistics() -> None:
    data = batch(7)
    data["response_mask"][4] = False
    kept = [i for i in range(9) if i != 4]
    for name, options, _ in CASES:
        with_it, _ = call(name, data, options)
        without, _ = call(name, rows_of(data, kept), options)
        torch.testing.assert_close(with_it[kept], without)
        assert torch.all(with_it[4] == 0)


def test_empty_batches_are_empty() -> None:
    nothing = {
        "token_level_rewards": torch.zeros(0, 3),
        "response_mask": torch.zeros(0, 3),
        "index": [],
        "reward_baselines": torch.zeros(0),
    }
    for name in (*GROUP_RELATIVE, "remax"):
        assert call(name, nothing, {})[0].shape == (0, 3)


def test_wrong_inputs_are_named() -> None:
    ones = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"reward_baselines has shape \(2, 1\)"):
        get_adv_estimator("remax")(
            token_level_rewards=ones, response_mask=ones, reward_baselines=ones
        )
    data = {"token_level_rewards": ones, "response_mask": ones, "index": [0, 0]}
    with pytest.raises(ValueError, match="unknown weight_factor_in_cpgd 'std'; known: STD_weight"):
        get_adv_estimator("cpgd")(**data, weight_factor_in_cpgd="std")
    with pytest.raises(ValueError, match="f_norm must be positive, got 0"):
        get_adv_estimator("gpg")(**data, f_norm=0.0)
    with pytest.raises(ValueError, match="needs two elements under the mask, got 1"):
        get_adv_estimator("reinforce_plus_plus")(
            token_level_rewards=ones, response_mask=torch.tensor([[1], [0]]), gamma=1.0
        )
    with pytest.raises(ValueError, match="'gae' needs gamma, lam, values, which"):
        estimate_advantages("gae", data)


def test_what_an_estimator_reads() -> None:
    assert estimator_inputs("gae") == {
        *("token_level_rewards", "values", "response_mask", "gamma", "lam", "whiten"),
    }
    assert estimator_inputs("remax") == {
        *("token_level_rewards", "response_mask", "reward_baselines"),
    }
    assert "weight_factor_in_cpgd" in estimator_inputs("cpgd")
    with pytest.raises(ValueError, match="unknown advantage estimator 'ppo'"):
        estimator_inputs("ppo")


@pytest.mark.parametrize("loose", [False, True])
def test_an_estimator_of_ones_own_needs_nothing_else(loose: bool) -> None:
    def plain(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards * response_mask, token_level_rewards

    def takes_all(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert options.keys() == {"index", "values", "reward_baselines", "gamma", "lam"}
        return plain(token_level_rewards, response_mask)

    register_adv_est("test_plain_reward")(takes_all if loose else plain)
    try:
        data = batch(8)
        advantages, _ = estimate_advantages("test_plain_reward", data)
        assert torch.equal(advantages, data["token_level_rewards"] * data["response_mask"])
        assert estimator_inputs("test_plain_reward") == {"token_level_rewards", "response_mask"}
    finally:
        del ADV_ESTIMATOR_REGISTRY._entries["test_plain_reward"]


def test_an_estimator_of_ones_own_may_reduce_and_must_keep_the_shape() -> None:
    def shares(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, reduce: Reduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = reduce(token_level_rewards.sum().double().unsqueeze(0))
        return token_level_rewards / total, token_level_rewards.sum(dim=-1)

    register_adv_est("test_shares")(shares)
    try:
        given = {"token_level_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)}
        assert estimator_inputs("test_shares") == given.keys()
        with pytest.raises(
            ValueError, match=r"'test_shares' returns returns of shape \(2,\); expected \(2, 3\)"
        ):
            estimate_advantages("test_shares", given)
        given = {"token_level_rewards": torch.ones(3), "response_mask": torch.ones(())}
        with pytest.raises(ValueError, match="returns advantages of shape"):
            estimate_advantages("test_shares", given, lambda s: 2 * s)
    finally:
        del ADV_ESTIMATOR_REGISTRY._entries["test_shares"]


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda ones: None, r"returns NoneType, not \(advantages, returns\)"),
        (lambda ones: ones, "returns Tensor, not"),
        (lambda ones: (ones, None), "returns returns of shape None"),
        (lambda ones: (ones, ones / 0), "returns returns that are not finite"),
        (lambda ones: (ones * math.nan, ones), "returns advantages that are not finite"),
        (lambda ones: sys.exit(2), r"failed: it calls sys\.exit\(2\)"),
        (lambda ones: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_an_estimator_of_ones_own_is_named_by_its_fault(
    give: Callable[[torch.Tensor], Any], said: str
) -> None:
    def faulty(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> Any:
        return give(token_level_rewards)

    register_adv_est("test_faulty")(faulty)
    try:
        given = {"token_level_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)}
        with pytest.raises(UserError, match=f"'test_faulty' {said}.*{__file__} line"):
            estimate_advantages("test_faulty", given)
    finally:
        del ADV_ESTIMATOR_REGISTRY._entries["test_faulty"]
