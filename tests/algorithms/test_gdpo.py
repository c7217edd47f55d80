"""GDPO beside the formula in plain Python, and beside the numbers of other implementations."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import ragged_mask, seeds

from ctrl_megatron.algorithms import estimate_advantages, get_adv_estimator

GROUPS = ["a", ("b", 1), 3]
# Two groups of four with two rewards, from the formulas of TRL, verl and NeMo-RL as they were read
# in their code; the numbers were computed from the formulas, not by running the frameworks.
PARTS = [[1, 0.5], [0, 0.5], [0, 0], [1, 1], [0, 1], [0, 0], [0, 1], [0, 1]]
LENGTHS = [2, 4, 4, 2, 8, 2, 2, 2]
TRL = [0.890374, -0.890374, -1.519919, 1.519919, 0.257022, -0.771066, 0.257022, 0.257022]
NEMO = [0.890446, -0.890446, -1.520085, 1.520085, 0.257049, -0.771148, 0.257049, 0.257049]
VERL = [1.131177, -0.850525, -1.551162, 1.831814, 0.426360, -0.717776, 0.426360, 0.426360]


def batch(seed: int, rows: int = 9, width: int = 5) -> dict[str, Any]:
    """Few distinct rewards, so that there are ties and groups of equal ones; some are unknown."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(GROUPS), (rows,), generator=generator).tolist()
    parts = torch.randint(0, 3, (rows, 2), generator=generator).double() / 2
    parts[torch.rand(rows, 2, generator=generator) < 0.2] = math.nan
    return {
        "reward_parts": parts,
        "reward_weights": torch.tensor([1.0, 0.5], dtype=torch.float64),
        "response_mask": ragged_mask(generator, rows, width),
        "index": [GROUPS[pick] for pick in picks],
    }


def gdpo(data: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return get_adv_estimator("gdpo")(**data, **options)


def oracle(data: dict[str, Any], by_std: bool) -> list[float]:
    """One advantage per row: each reward among the rows of its group for which it is known, then
    all rows of the batch."""
    counted = [bool(row.any()) for row in data["response_mask"]]
    rows = {i: 0.0 for i, there in enumerate(counted) if there}
    for column, weight in enumerate(data["reward_weights"].tolist()):
        score = {i: float(data["reward_parts"][i, column]) for i in rows}
        score = {i: value for i, value in score.items() if not math.isnan(value)}
        for i in score:
            group = [score[j] for j in score if data["index"][j] == data["index"][i]]
            if len(group) > 1:
                scale = stdev(group) + 1e-6 if by_std else 1.0
                rows[i] += weight * (score[i] - mean(group)) / scale
    sums = [*rows.values()]
    scale = (stdev(sums) if len(sums) > 1 else 0.0) + 1e-6
    middle = mean(sums) if sums else 0.0
    return [(rows[i] - middle) / scale if there else 0.0 for i, there in enumerate(counted)]


@given(seeds, st.booleans())
def test_it_equals_plain_python(seed: int, by_std: bool) -> None:
    data = batch(seed)
    found, _ = gdpo(data, norm_adv_by_std_in_grpo=by_std)
    want = torch.tensor(oracle(data, by_std), dtype=torch.float64)
    mask = data["response_mask"].bool()
    torch.testing.assert_close(found, torch.where(mask, want[:, None], 0.0), rtol=1e-6, atol=1e-6)
    single = {**data, "reward_parts": data["reward_parts"].float()}
    small, sums = gdpo(single, norm_adv_by_std_in_grpo=by_std)
    assert small.dtype == sums.dtype == torch.float32
    torch.testing.assert_close(small.double(), found, rtol=1e-4, atol=1e-4)


def vector(epsilon: float) -> list[float]:
    advantages, _ = gdpo(
        {
            "reward_parts": torch.tensor(PARTS, dtype=torch.float64),
            "reward_weights": torch.tensor([1.0, 0.5], dtype=torch.float64),
            "response_mask": torch.arange(8) < torch.tensor(LENGTHS)[:, None],
            "index": ["a"] * 4 + ["b"] * 4,
        },
        epsilon=epsilon,
    )
    return advantages[:, 0].tolist()


def test_it_has_trls_numbers_and_nemos_and_not_those_of_whitening_over_tokens() -> None:
    assert vector(1e-4) == pytest.approx(TRL, abs=1e-6)
    assert vector(1e-6) == pytest.approx(NEMO, abs=3e-6)
    assert vector(1e-6) != pytest.approx(VERL, abs=1e-2)


@given(seeds)
def test_of_one_reward_it_is_whitened_grpo(seed: int) -> None:
    data = batch(seed)
    data["response_mask"][:, 0] = True
    score = data["reward_parts"][:, 0].nan_to_num(0.25)
    data |= {"reward_parts": score[:, None], "reward_weights": torch.ones(1)}
    found, sums = gdpo(data)
    rewards = torch.zeros(data["response_mask"].shape, dtype=torch.float64)
    rewards[:, 0] = score
    shared = {"response_mask": data["response_mask"], "index": data["index"]}
    plain, _ = get_adv_estimator("grpo")(token_level_rewards=rewards, **shared)
    torch.testing.assert_close(sums, plain, rtol=1e-9, atol=1e-9)
    rows = plain[:, 0]
    want = (rows - rows.mean()) / (rows.std() + 1e-6)
    torch.testing.assert_close(found[:, 0], want, rtol=1e-6, atol=1e-6)


@given(seeds)
def test_neither_order_nor_padding_nor_the_offset_of_a_reward_matters(seed: int) -> None:
    data = batch(seed)
    found, _ = gdpo(data)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed)).tolist()
    moved = {
        "reward_parts": data["reward_parts"][order] + torch.tensor([3.0, -1.0]),
        "reward_weights": data["reward_weights"],
        "response_mask": torch.nn.functional.pad(data["response_mask"][order], (2, 3)),
        "index": [data["index"][i] for i in order],
    }
    again, _ = gdpo(moved)
    torch.testing.assert_close(again[:, 2:7], found[order], rtol=1e-6, atol=1e-6)
    assert torch.all(again[~moved["response_mask"].bool()] == 0)


@given(seeds)
def test_pieces_with_added_sums_give_the_whole(seed: int) -> None:
    data = batch(seed)
    whole = estimate_advantages("gdpo", data)
    pieces = []
    for group in GROUPS:
        rows = [i for i in range(9) if data["index"][i] == group]
        cut = {
            "reward_parts": data["reward_parts"][rows],
            "reward_weights": data["reward_weights"],
            "response_mask": data["response_mask"][rows],
            "index": [group] * len(rows),
        }
        pieces.append((rows, cut))
    shares: list[torch.Tensor] = []
    for _, cut in pieces:
        estimate_advantages("gdpo", cut, lambda sums: shares.append(sums) or sums)
    total = sum(shares, torch.zeros(1, dtype=torch.float64))
    for rows, cut in pieces:
        for part, found in zip(
            estimate_advantages("gdpo", cut, lambda _: total), whole, strict=True
        ):
            torch.testing.assert_close(part, found[rows], rtol=1e-9, atol=1e-11)


def test_without_a_difference_and_without_rows_nothing_is_learned() -> None:
    flat = {
        "reward_parts": torch.full((4, 2), 0.3),
        "reward_weights": torch.ones(2),
        "response_mask": torch.ones(4, 2),
        "index": [0, 0, 1, 2],
    }
    assert float(gdpo(flat)[0].abs().max()) < 1e-6
    empty = {"reward_parts": torch.zeros(0, 2), "reward_weights": torch.ones(2)}
    assert gdpo({**empty, "response_mask": torch.zeros(0, 3), "index": []})[0].shape == (0, 3)
