from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.models.micro_batch import MicroBatch, split_into_micro_batches

P, R = 6, 4
CPU = torch.device("cpu")


def ragged(seed: int, rows: int, *, holes: float = 0.2) -> dict[str, torch.Tensor]:
    """Some rows have an answer that takes no part in the loss, some have none. ``holes`` is the
    share of tokens in the others that take none, such as an environment's observations."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, P + 1, (rows, 1), generator=generator)
    answers = torch.randint(0, R + 1, (rows, 1), generator=generator)
    column = torch.arange(P + R)
    attended = (column >= P - prompts) & (column < P + answers)
    kept = torch.rand(rows, 1, generator=generator) < 0.8
    kept = kept & (torch.rand(rows, R, generator=generator) >= holes)
    return {
        "input_ids": torch.randint(1, 99, (rows, P + R), generator=generator),
        "attention_mask": attended.long(),
        "response_mask": attended[:, P:] & kept,
    }


def split(batch: dict[str, torch.Tensor], **options: Any) -> list[MicroBatch]:
    defaults = {"token_budget": 20, "multiple": 1, "count": int, "shared_prefix": True}
    return split_into_micro_batches(batch, **(defaults | options), device=CPU)


@settings(deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 7),
    st.integers(P + R, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_rows_are_packed_once_and_every_response_token_finds_its_place(
    seed: int, rows: int, budget: int, multiple: int, count: int, shared: bool
) -> None:
    """Among prompts that all differ it is no matter whether rows may share them."""
    batch = ragged(seed, rows)
    batch["input_ids"][:, P - 1] = torch.arange(rows)
    options = {"token_budget": budget, "multiple": multiple, "shared_prefix": shared}
    micros = split(batch, **options, count=lambda own: own + count)
    assert [len(m.rows) for m in micros[-count:]] == [0] * count
    assert all(len(m.rows) for m in micros[:-count])
    assert sorted(r for m in micros for r in m.rows.tolist()) == list(range(rows))
    for micro in micros:
        want_tokens: list[int] = []
        want_places: list[int] = []
        bounds, found = [0], {}
        for local, row in enumerate(micro.rows.tolist()):
            places = [c for c in range(P + R) if batch["attention_mask"][row, c]]
            for place, column in enumerate(places):
                if column >= P and batch["response_mask"][row, column - P]:
                    # The state one place earlier predicts this token.
                    found[local, column - P] = len(want_tokens) - 1
                want_tokens.append(int(batch["input_ids"][row, column]))
                want_places.append(place)
            bounds.append(len(want_tokens))
        total = len(want_tokens)
        tokens, places = micro.tokens[0].tolist(), micro.positions[0].tolist()
        assert tokens[:total] == want_tokens
        assert places[:total] == want_places
        assert len(tokens) == len(places) == max(1, -(-total // multiple)) * multiple
        assert total <= budget
        assert micro.packed.attention.cu_seqlens_q.tolist()[: len(bounds)] == bounds
        assert micro.packed.attention.cu_seqlens_q[-1] == len(tokens)
        assert micro.packed.key_index is None
        keys = list(zip(micro.row_of.tolist(), micro.column_of.tolist(), strict=True))
        assert dict(zip(keys, micro.predictors.tolist(), strict=True)) == found
        assert len(keys) == len(found)
        assert micro.targets.tolist() == [tokens[i + 1] for i in micro.predictors.tolist()]


def grouped(seed: int, groups: int, size: int) -> dict[str, torch.Tensor]:
    """``ragged`` rows of which ``size`` each begin with the same prompt, in mixed order."""
    batch = ragged(seed, groups * size)
    of = torch.randperm(groups * size, generator=torch.Generator().manual_seed(seed)) % groups
    batch["input_ids"][:, :P] = batch["input_ids"][of, :P]
    batch["attention_mask"][:, :P] = batch["attention_mask"][of, :P]
    return batch


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 3), st.integers(1, 5), st.integers(P + R, 40))
def test_a_prompt_occurs_once_before_the_responses_that_follow_it(
    seed: int, groups: int, size: int, budget: int
) -> None:
    batch = grouped(seed, groups, size)
    micros = split(batch, token_budget=budget)
    alone = split(batch, token_budget=budget, shared_prefix=False)
    assert sorted(r for m in micros for r in m.rows.tolist()) == list(range(groups * size))
    assert sum(m.tokens.numel() for m in micros) <= sum(m.tokens.numel() for m in alone)
    assert len(micros) <= len(alone) + groups
    seen = batch["attention_mask"].bool()
    for micro in micros:
        assert micro.tokens.numel() <= budget
        tokens, keys = micro.tokens[0], list[bytes]()
        for row, place in zip(micro.rows.tolist(), micro.packed.layout.rows, strict=True):
            prompt = batch["input_ids"][row, :P][seen[row, :P]]
            start = place.prompt_end - len(prompt)
            assert torch.equal(tokens[start : place.prompt_end], prompt)
            response = batch["input_ids"][row, P:][seen[row, P:]]
            assert torch.equal(tokens[place.start : place.end], response)
            keys.append(prompt.numpy().tobytes())
        distinct = {place.prompt_end for place in micro.packed.layout.rows}
        if budget == 40 and groups == 1:
            assert len(distinct) == len(set(keys))
        # Every response token is predicted by the tokens before it in its row.
        for local, column, before, target in zip(
            *(x.tolist() for x in (micro.row_of, micro.column_of, micro.predictors, micro.targets)),
            strict=True,
        ):
            row, end = int(micro.rows[local]), P + column
            assert target == int(batch["input_ids"][row, end])
            assert int(tokens[before]) == int(batch["input_ids"][row, end - 1])
            assert int(micro.positions[0, before]) == int(seen[row, :end].sum()) - 1


def test_a_group_above_the_budget_is_cut_and_repeats_its_prompt() -> None:
    batch = ragged(1, 4)
    batch["input_ids"][:, :P] = batch["input_ids"][0, :P]
    batch["attention_mask"][:] = 1
    batch["response_mask"] = torch.ones(4, R, dtype=torch.bool)
    sizes = {22: [22], 14: [14, 14], 13: [10, 10, 10, 10], 10: [10] * 4}
    for budget, wanted in sizes.items():
        found = [m.tokens.numel() for m in split(batch, token_budget=budget)]
        assert found == wanted
    with pytest.raises(ValueError, match="10 tokens, more than the token budget of 9"):
        split(batch, token_budget=9)


def test_values_return_to_their_rows_with_their_gradients() -> None:
    batch = ragged(3, 5)
    for micro in split(batch):
        values = torch.arange(1.0, len(micro.targets) + 1, requires_grad=True)
        back = micro.to_rows(values)
        mask = batch["response_mask"][micro.rows]
        assert torch.equal(back != 0, mask)
        back.square().sum().backward()
        torch.testing.assert_close(values.grad, 2 * values.detach())


def test_wrong_rows_are_named() -> None:
    batch = ragged(4, 3)
    batch["attention_mask"][:] = 1
    batch["response_mask"] = torch.ones(3, R, dtype=torch.bool)
    with pytest.raises(ValueError, match="10 tokens, more than the token budget of 9"):
        split(batch, token_budget=9)
    assert len(split(batch)) == 2
    no_prompt = {**batch, "attention_mask": batch["attention_mask"].clone()}
    no_prompt["attention_mask"][1, :P] = 0
    with pytest.raises(ValueError, match="row 1 has response tokens to predict but no"):
        split(no_prompt)


def test_a_mask_of_tokens_that_nobody_attends_is_refused() -> None:
    batch = ragged(5, 3)
    batch["attention_mask"][2] = torch.tensor([1] * P + [1, 1, 1, 0])
    batch["response_mask"][2] = torch.tensor([0, 1, 0, 1]).bool()
    with pytest.raises(ValueError, match="row 2: response_mask selects tokens that are not"):
        split(batch)
