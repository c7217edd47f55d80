"""From completions to padded rows, and how prompts are dealt to the data-parallel ranks."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.graph.columns import texts
from ctrl_megatron.steps.batch import (
    join_samples,
    make_batch,
    pad_rows,
    sample_sizes,
    tensor_fields,
)
from ctrl_megatron.steps.ctrl import reward_spread_metrics
from ctrl_megatron.steps.sample import Sample, spans_from_versions_text, weight_versions_text
from ctrl_megatron.steps.sampling import share_prompts, share_rows
from ctrl_megatron.types import Completion, VersionSpan

PAD = 0
tokens = st.lists(st.integers(1, 99), min_size=1, max_size=6)
token_rows = st.lists(st.tuples(tokens, st.lists(st.integers(1, 99), max_size=6)), min_size=1)


def completion(token_ids: tuple[int, ...], *versions: str) -> Completion:
    size = len(token_ids)
    spans = tuple(VersionSpan(v, 0, size) for v in versions or ("actor@0",))
    log_probs = tuple(-float(t) for t in token_ids)
    return Completion(token_ids=token_ids, log_probs=log_probs, finish_reason="stop", spans=spans)


def row(uid: str, length: int, mini_batch: int = 0, prompt: int = 1, **fields: Any) -> Sample:
    return Sample(
        uid=uid,
        row_id=f"problem of {uid}",
        mini_batch=mini_batch,
        prompt=(7,) * prompt,
        completion=completion((5,) * length),
        fields=fields,
    )


def ranks_of(parts: list[Any]) -> list[Any]:
    """A stand-in for ``ProcessGroups`` per data-parallel rank; ``parts``: what each would give."""
    return [
        SimpleNamespace(
            layout=SimpleNamespace(data=len(parts)),
            place=SimpleNamespace(dp=dp),
            gather_data_ranks=lambda value: parts,
        )
        for dp in range(len(parts))
    ]


@given(token_rows)
def test_padding_keeps_every_token_in_its_place(rows: list[tuple[list[int], list[int]]]) -> None:
    prompts, responses = zip(*rows, strict=True)
    batch = pad_rows(prompts, responses, pad_token_id=PAD)
    width = batch["prompts"].shape[1]
    assert width == max(map(len, prompts))
    for i, (prompt, response) in enumerate(rows):
        ids, mask = batch["input_ids"][i], batch["attention_mask"][i]
        assert ids[mask.bool()].tolist() == [*prompt, *response]
        assert (ids[~mask.bool()] == PAD).all()
        # Left padding before the prompt only, right padding after the response only.
        assert mask.tolist().index(1) == width - len(prompt)
        assert batch["response_mask"][i].tolist() == mask[width:].bool().tolist()
        assert batch["responses"][i, : len(response)].tolist() == response
        assert batch["position_ids"][i][mask.bool()].tolist() == list(range(len(ids[mask.bool()])))
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))


def test_a_batch_of_empty_responses_has_one_masked_column() -> None:
    batch = pad_rows([[1, 2], [3]], [[], []], pad_token_id=PAD)
    assert batch["responses"].shape == (2, 1) and not batch["response_mask"].any()


def test_a_batch_carries_what_is_known_of_its_critiques() -> None:
    rows = [
        row("a", 3, text="x", valid=True, rate=0.5, count=2),
        row("b", 1, mini_batch=1, prompt=4, text="", valid=False, rate=None, count=0),
    ]
    batch = make_batch(rows, pad_token_id=PAD)
    assert batch["rollout_log_probs"].tolist() == [[-5.0, -5.0, -5.0], [-5.0, 0.0, 0.0]]
    assert batch["mini_batch"].tolist() == [0, 1]
    assert batch["uid"].tolist() == ["a", "b"]
    assert batch["problem_id"].tolist() == ["problem of a", "problem of b"]
    assert batch["version"].tolist() == ["actor@0", "actor@0"]
    assert batch["text"].tolist() == ["x", ""] and batch["valid"].tolist() == [True, False]
    assert batch["rate"][0] == 0.5 and batch["rate"].isnan().tolist() == [False, True]
    assert batch["count"].tolist() == [2.0, 0.0]
    chosen = tensor_fields(batch[torch.tensor([1])])
    assert set(chosen) >= {"input_ids", "response_mask", "rollout_log_probs", "mini_batch"}
    assert all(isinstance(value, torch.Tensor) for value in chosen.values())
    assert chosen["prompts"].tolist() == [[7, 7, 7, 7]]
    assert tensor_fields(batch)["prompts"].shape[0] == 2


@given(st.lists(st.tuples(st.sampled_from(["actor@2", "actor@13"]), st.integers(1, 9)), max_size=4))
def test_versions_of_a_completion_are_named_with_their_tokens(parts: list[tuple[str, int]]) -> None:
    borders = list(accumulate([tokens for _, tokens in parts], initial=0))
    spans = [VersionSpan(v, *b) for (v, _), b in zip(parts, pairwise(borders), strict=True)]
    drawn = Completion(
        token_ids=(7,) * borders[-1], log_probs=(), finish_reason="stop", spans=tuple(spans)
    )
    assert spans_from_versions_text(weight_versions_text(drawn), borders[-1]) == spans
    if len(spans) == 1:
        assert weight_versions_text(drawn) == spans[0].version


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_every_rank_gets_an_equal_part_of_every_mini_batch(
    steps: int, part: int, ranks: int
) -> None:
    mini_batch = part * ranks
    shares = [
        share_prompts(steps * mini_batch, mini_batch, groups) for groups in ranks_of([None] * ranks)
    ]
    assert sorted(prompt for share in shares for prompt, _ in share) == list(
        range(steps * mini_batch)
    )
    for share in shares:
        assert [step for _, step in share] == sorted(s for s in range(steps) for _ in range(part))
        assert all(prompt // mini_batch == step for prompt, step in share)


def shared_over(parts: list[list[Sample]], *, shared_prefix: bool) -> list[list[Sample]]:
    """The samples of every rank's part after they were shared."""
    every = [r for part in parts for r in part]
    sizes = [r.size for r in every]
    return [
        [every[number] for number in share_rows(sizes, g, shared_prefix=shared_prefix)]
        for g in ranks_of(parts)
    ]


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_levelling_moves_whole_groups_within_their_mini_batch(
    data: st.DataObject, ranks: int, groups_per_rank: int, steps: int, n: int
) -> None:
    parts = [
        [
            row(f"{rank}.{step}.{group}", data.draw(st.integers(1, 30)), step)
            for step in range(steps)
            for group in range(groups_per_rank)
            for _ in range(n)
        ]
        for rank in range(ranks)
    ]
    dealt = shared_over(parts, shared_prefix=False)
    assert sorted(id(r) for part in dealt for r in part) == sorted(
        id(r) for part in parts for r in part
    )
    owners: dict[str, set[int]] = {}
    for rank, rows in enumerate(dealt):
        for step in range(steps):
            names = [r.uid for r in rows if r.mini_batch == step]
            assert len(set(names)) == groups_per_rank and len(names) == groups_per_rank * n
        for r in rows:
            owners.setdefault(r.uid, set()).add(rank)
    assert all(len(found) == 1 for found in owners.values())


def test_levelling_evens_out_the_tokens() -> None:
    parts = [[row("a", 90), row("b", 80)], [row("c", 10), row("d", 20)]]
    dealt = shared_over(parts, shared_prefix=True)
    tokens = [sum(r.size.prompt + r.size.response for r in rows) for rows in dealt]
    assert tokens == [102, 102]


def test_a_shared_prompt_weighs_once() -> None:
    def group(uid: str, prompt: int, *lengths: int) -> list[Sample]:
        return [row(uid, length, prompt=prompt) for length in lengths]

    # Shared: 100 + 9, 60 + 50, 61 + 40, 20 + 80; else twice the prompt.
    rows = [*group("a", 100, 4, 5), *group("b", 60, 25, 25), *group("c", 61, 20, 20)]
    rows += group("d", 20, 40, 40)
    ranks = ranks_of([None] * 2)
    for shared, wanted in ((True, [{"a", "c"}, {"b", "d"}]), (False, [{"a", "d"}, {"b", "c"}])):
        sizes = [r.size for r in rows]
        dealt = [share_rows(sizes, g, shared_prefix=shared) for g in ranks]
        assert [{rows[number].uid for number in part} for part in dealt] == wanted


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=12),
    st.integers(1, 3),
    st.randoms(),
)
def test_rows_that_moved_are_those_of_a_batch_made_of_their_samples(
    lengths: list[tuple[int, int]], ranks: int, shuffler: Any
) -> None:
    rows = [
        dataclasses.replace(
            row(f"g{i}", response, i % 2, prompt=prompt),
            fields={"number": i, "text": f"t{i}", "good": i % 2 == 0},
        )
        for i, (prompt, response) in enumerate(lengths)
    ]
    size = -(-len(rows) // ranks)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    chosen = [*range(len(rows))]
    shuffler.shuffle(chosen)
    chosen = chosen[: 1 + len(rows) // 2]
    joined = join_samples(
        [make_batch(part, pad_token_id=PAD) for part in parts], pad_token_id=PAD, rows=chosen
    )
    wanted = make_batch([rows[i] for i in chosen], pad_token_id=PAD)
    assert joined.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(joined[name], value), name
        else:
            assert texts(joined[name]) == texts(value)
    assert sample_sizes(joined) == [rows[i].size for i in chosen]


def test_rows_of_unequal_number_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        pad_rows([[1], [2]], [[3]], pad_token_id=PAD)


@given(
    rewards=st.lists(
        st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0, math.nan]), max_size=12
    ),
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_how_rewards_lie(rewards: list[float], sizes: list[int]) -> None:
    """Shares of a histogram are a whole; a group of equal rewards teaches nothing."""
    uids = [f"u{n}" for n, size in enumerate(sizes) for _ in range(size)][: len(rewards)]
    # A format may be right in all of them; groups are compared by the score that trains.
    found = reward_spread_metrics(torch.tensor(rewards), torch.tensor(rewards) * 2 + 1, uids)
    same = found.pop("advantage/zero_std_rate").tolist()
    known = [(uid, r) for uid, r in zip(uids, rewards, strict=True) if not math.isnan(r)]
    groups: dict[str, set[float]] = {}
    for uid, reward in known:
        groups.setdefault(uid, set()).add(reward)
    assert sorted(same) == sorted(float(len(values) == 1) for values in groups.values())
    assert all(len(share) == len(known) for share in found.values())
    assert sum(share.sum() for share in found.values()) == len(known)
    bins = {-1.0: "elsewhere", 0.0: "zero", 0.25: "up_to_half", 0.5: "up_to_half"}
    bins |= {0.75: "below_one", 1.0: "one", 2.0: "elsewhere"}
    for place, (_, reward) in enumerate(known):
        assert found[f"reward_share/{bins[reward]}"][place] == 1
