"""Rounds: which critiques are compared, and which rewards of a chain each of them gets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.algorithms import estimate_advantages
from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.models.micro_batch import split_into_micro_batches
from ctrl_megatron.rewards import JudgeCounts, RewardOutcome, Scores
from ctrl_megatron.steps.batch import make_batch, tensor_fields
from ctrl_megatron.steps.draws import LeftoverGroups
from ctrl_megatron.steps.rounds import (
    Rounds,
    ctrl_rounds_pipeline,
    judge_turns,
    names_of_samples,
    rounds_rates,
    turn_metrics,
)
from ctrl_megatron.steps.sample import (
    CriticisedProgram,
    Revision,
    Sample,
    SampleRewards,
    SampleSize,
)
from ctrl_megatron.steps.sampling import deal_rows
from ctrl_megatron.types import Completion, Verdict

WORDS = {"R": True, "W": False, "-": None}
"""A critique that says Correct, Incorrect, or neither."""


def options(**given: Any) -> Rounds:
    values = {"turns": 3, "stop": True, "compare": "chain", "credit": "own", "discount": 1.0}
    return Rounds(**(values | given))


def critique(uid: str, word: str, reward: float | None = None, **fields: Any) -> Sample:
    drawn = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", spans=())
    outcome = SampleRewards(total=reward, rewards={"critic": reward}, pass_rate=reward)
    revision = None if word == "-" else Revision(text=f"{uid} {word}")
    values = {"row_id": "row", "judgment": WORDS[word], "revision": revision, "outcome": outcome}
    return Sample(uid=uid, completion=drawn, **(values | fields))


def chains_of(words: Sequence[str], rewards: Sequence[Sequence[float | None]]) -> list[Sample]:
    """The samples of chains of one row, turn by turn. ``words`` has a letter for every turn."""
    samples, names = list[Sample](), [f"u/{number}" for number in range(len(words))]
    for turn in range(1, max(map(len, words)) + 1):
        uid = "u" if turn == 1 else f"u/{turn}"
        here = [number for number, said in enumerate(words) if len(said) >= turn]
        parents = {number: names[number] if turn > 1 else "" for number in here}
        for place, number in enumerate(here):
            word, reward = words[number][turn - 1], rewards[number][turn - 1]
            sample = critique(uid, word, reward, turn=turn, parent=parents[number])
            samples.append(sample)
            names[number] = f"{uid}/{place}"
    return samples


@st.composite
def scripted_chains(draw: st.DrawFn) -> tuple[list[str], list[list[float | None]], int]:
    """Chains of up to four turns that end where a critique ends them, or where a prompt is too
    long."""
    turns = draw(st.integers(1, 4))
    words, rewards = [], []
    for _ in range(draw(st.integers(1, 5))):
        said = ""
        while len(said) < turns:
            said += draw(st.sampled_from("WWWR-"))
            if said[-1] != "W" or draw(st.integers(0, 9)) == 0:
                break
        words.append(said)
        reward = st.one_of(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.none())
        rewards.append([draw(reward) for _ in said])
    return words, rewards, turns


@given(scripted_chains(), st.sampled_from(["own", "to_go", "final"]), st.floats(0, 1))
@settings(max_examples=300)
def test_the_credit_of_every_turn(
    chains: tuple[list[str], list[list[float | None]], int], credit: str, discount: float
) -> None:
    words, rewards, turns = chains
    rounds = options(turns=turns, credit=credit, discount=discount)
    samples = rounds.with_credit(chains_of(words, rewards))
    expected = list[float | None]()
    for turn in range(max(map(len, words))):
        for said, earned in zip(words, rewards, strict=True):
            if turn >= len(said):
                continue
            # A critique that ends its chain counts in each of the turns that remain.
            whole = [*earned]
            if said[-1] in "R-":
                whole += [earned[-1]] * (turns - len(said))
            later = {"own": whole[turn : turn + 1], "to_go": whole[turn:], "final": whole[-1:]}
            counted = later[credit]
            known = [value for value in counted if value is not None]
            complete = len(known) == len(counted)
            expected.append(sum(v * discount**n for n, v in enumerate(known)) if complete else None)
    for sample, value in zip(samples, expected, strict=True):
        assert sample.outcome is not None
        assert sample.outcome.rewards["critic"] == sample.outcome.total
        assert sample.outcome.total == (None if value is None else pytest.approx(value))


def test_a_chain_without_stops_goes_on_after_correct() -> None:
    samples = chains_of(["RW"], [[1.0, 0.5]])
    credited = options(turns=2, stop=False, credit="to_go").with_credit(samples)
    assert [s.outcome.total for s in credited if s.outcome] == [1.5, 0.5]


def test_another_task_has_its_own_reward_alone() -> None:
    (sample,) = options(credit="to_go").with_credit([critique("u", "-", 0.5, task="code")])
    assert sample.outcome is not None and sample.outcome.total == 0.5


@given(st.lists(st.text("RW-", min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_each_program_of_the_next_turn_has_one_parent(groups: list[str], stop: bool) -> None:
    samples = [
        critique(f"u{number}", word) for number, words in enumerate(groups) for word in words
    ]
    names = names_of_samples(samples)
    going = {n for n, s in zip(names, samples, strict=True) if s.judgment is False}
    if not stop:
        going |= {n for n, s in zip(names, samples, strict=True) if s.judgment}
    every = options(stop=stop).choose_parents(samples, seed=1, step=0)
    assert [name for _, name, _ in every] == [name for name in names if name in going]
    assert all(uid == f"{name.partition('/')[0]}/2" for uid, name, _ in every)
    state = options(stop=stop, compare="state")
    chosen = state.choose_parents(samples, seed=1, step=0)
    assert chosen == state.choose_parents(samples, seed=1, step=0)
    # One of every group that goes on, whose critiques are a group of their own.
    assert [name.partition("/")[0] for _, name, _ in chosen] == list(
        dict.fromkeys(name.partition("/")[0] for name in names if name in going)
    )
    assert all(uid == name and name in going for uid, name, _ in chosen)


def test_every_revision_is_chosen_some_time() -> None:
    samples = [critique("u", word) for word in "WRWW"]
    state = options(compare="state")
    chosen = [state.choose_parents(samples, seed=1, step=step)[0][1] for step in range(60)]
    counts = {name: chosen.count(name) for name in ("u/0", "u/2", "u/3")}
    assert sum(counts.values()) == 60 and min(counts.values()) >= 8
    # Draws do not depend on the name of the run, which the uid has.
    other = [critique("v", word) for word in "WRWW"]
    again = [state.choose_parents(other, seed=1, step=step)[0][1] for step in range(60)]
    assert [name.replace("v", "u") for name in again] == chosen


@pytest.mark.parametrize("compare", ["state", "chain"])
def test_advantages_are_those_of_siblings_or_of_one_turn(compare: str) -> None:
    """GRPO's advantages against plain means and deviations over sets of critiques that are named
    by what they are about."""
    rounds = options(turns=3, compare=compare, stop=False)
    draws = torch.Generator().manual_seed(3)
    samples = list[Sample]()
    latest = [critique(f"row{row}", "W", row_id=f"row{row}") for row in range(3) for _ in range(4)]
    for turn in range(1, 4):
        latest = [
            critique(
                s.uid,
                "W",
                float(torch.rand((), generator=draws, dtype=torch.float64)),
                row_id=s.row_id,
                turn=turn,
                parent=s.parent,
                revision=Revision(text=f"{s.row_id} {turn} {number}"),
                program=s.program,
            )
            for number, s in enumerate(latest)
        ]
        samples += latest
        latest = [
            critique(
                uid,
                "W",
                row_id=parent.row_id,
                parent=name,
                program=CriticisedProgram(text=parent.revision.text if parent.revision else ""),
            )
            for uid, name, parent in rounds.choose_parents(latest, seed=2, step=5)
            for _ in range(4 if compare == "state" else 1)
        ]
    assert len(samples) == 36
    rewards = torch.tensor([[s.outcome.total] for s in samples if s.outcome], dtype=torch.float64)
    found, _ = estimate_advantages(
        "grpo",
        {
            "token_level_rewards": rewards,
            "response_mask": torch.ones(36, 1),
            "index": [s.uid for s in samples],
            "norm_adv_by_std_in_grpo": True,
        },
    )
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, s in enumerate(samples):
        about = s.program.text if s.program else ""
        groups[(s.row_id, about) if compare == "state" else (s.row_id, s.turn)].append(number)
    assert {len(members) for members in groups.values()} == {4}
    for members in groups.values():
        values = [float(rewards[n]) for n in members]
        spread = pstdev(values) * (4 / 3) ** 0.5
        for n in members:
            wanted = (float(rewards[n]) - mean(values)) / (spread + 1e-6)
            assert float(found[n, 0]) == pytest.approx(wanted, rel=1e-9)


@given(scripted_chains(), st.data())
@settings(max_examples=40, deadline=None)
def test_chains_of_unequal_length_are_packed_without_padding(
    chains: tuple[list[str], list[list[float | None]], int], data: st.DataObject
) -> None:
    """What a step computes are the tokens of its critiques, each prompt that they share once."""
    tokens = st.lists(st.integers(2, 9), min_size=1, max_size=9).map(tuple)
    samples = [
        dataclasses.replace(
            sample,
            prompt=(sample.turn,) * (3 + sample.turn),
            completion=dataclasses.replace(sample.completion, token_ids=data.draw(tokens)),
        )
        for sample in chains_of(*chains[:2])
    ]
    batch = make_batch(samples, pad_token_id=0)
    (micro,) = split_into_micro_batches(
        tensor_fields(batch),
        token_budget=10_000,
        shared_prefix=True,
        multiple=1,
        count=lambda number: number,
        device=torch.device("cpu"),
    )
    responses = sum(len(sample.completion.token_ids) for sample in samples)
    prompts = sum(3 + turn for turn in {sample.turn for sample in samples})
    assert micro.packed.layout.num_tokens == responses + prompts
    assert sorted(micro.rows.tolist()) == list(range(len(samples)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_groups_that_ranks_cannot_share_equally(sizes: list[int], ranks: int) -> None:
    """Every group is whole on one rank, and no rank has two groups more than another."""
    uids = [number for number, size in enumerate(sizes) for _ in range(size)]
    rows = [SampleSize(uid=f"{uid}", mini_batch=0, prompt=3, response=5) for uid in uids]
    parts = deal_rows(rows, ranks, shared_prefix=True)
    assert sorted(i for part in parts for i in part) == list(range(len(uids)))
    owned = [{uids[i] for i in part} for part in parts]
    assert sum(map(len, owned)) == len(sizes)
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


# Judging


class ScriptedRewards:
    """Programs pass as many of ten tests as they are long; the judge fails for those in
    ``failing``. The rewards are the pass rate, and that less the one of the criticised program.
    """

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing, self.judging = failing, JudgeCounts()
        self.asked = list[str]()

    async def judge_solutions(self, texts: Any, rows: Any) -> list[RewardOutcome]:
        self.asked += texts
        return [
            RewardOutcome(reward=None, verdict=None if t in self.failing else verdict(len(t)))
            for t in texts
        ]

    async def score(self, items: Any) -> Scores:
        after = [len(item.text) / 10 for item in items]
        delta = [a - item.row.pass_rate for a, item in zip(after, items, strict=True)]
        outcomes = [RewardOutcome(reward=a, verdict=verdict(round(a * 10))) for a in after]
        return Scores(parts={"delta": [*delta]}, totals=[*delta], outcomes=[*outcomes])


def verdict(passed: int) -> Verdict:
    return Verdict(passed=(True,) * passed + (False,) * (10 - passed), total=10)


ROW = Row(
    id="row",
    problem="Add.",
    solution="a" * 2,
    prompter_type="code_contests",
    selected_uts='[{"input": {"stdin": ""}, "output": {"stdout": ""}}]',
    problem_id="p",
    pass_rate=0.2,
)


def judged(samples: list[Sample], rounds: Rounds, failing: tuple[str, ...] = ()) -> list[Sample]:
    rewards = ScriptedRewards(failing)
    worker: Any = SimpleNamespace(rewards=rewards, reward_weights={"delta": 1.0})
    worker.score = rewards.score
    rows = [sample.row_with_program(ROW) for sample in samples]
    return asyncio.run(judge_turns(worker, samples, rows, rounds))


def two_turns() -> list[Sample]:
    """A chain from 2 to 5 to 9 of ten tests."""
    return [
        critique("u", "W", revision=Revision(text="a" * 5)),
        critique(
            *("u/2", "W"),
            turn=2,
            parent="u/0",
            program=CriticisedProgram(text="a" * 5),
            revision=Revision(text="a" * 9),
        ),
    ]


def test_a_gain_is_measured_from_the_program_that_the_critique_is_about() -> None:
    chain = [
        *two_turns(),
        # It stops, so its program is its revision.
        critique(
            *("u/3", "R"),
            turn=3,
            parent="u/2/0",
            program=CriticisedProgram(text="a" * 9),
            revision=Revision(text="a" * 9),
        ),
    ]
    found = judged(chain, options())
    assert [s.outcome.total for s in found if s.outcome] == pytest.approx([0.3, 0.4, 0.0])
    assert [s.program and s.program.pass_rate for s in found] == [None, 0.5, 0.9]
    # Gains of a chain add up to the whole gain.
    summed = judged(chain, options(credit="to_go"))
    assert [s.outcome.total for s in summed if s.outcome] == pytest.approx([0.7, 0.4, 0.0])
    metrics = turn_metrics(found, [s.row_with_program(ROW) for s in found], 3)
    assert metrics["turn/2/pass_rate_before"].tolist() == pytest.approx([0.5])
    assert metrics["turn/2/pass_rate_after"].tolist() == pytest.approx([0.9])
    assert metrics["turn/3/called_right_wrongly"].tolist() == [1.0]


def test_a_critique_of_a_program_that_nobody_judged_has_no_reward() -> None:
    chain = two_turns()
    found = judged(chain, options(), failing=("a" * 5,))
    assert [s.outcome.total for s in found if s.outcome] == [pytest.approx(0.3), None]
    assert found[1].outcome and "could not" not in found[1].outcome.detail
    unknown = judged(chain, options(credit="to_go"), failing=("a" * 5,))
    assert [s.outcome.total for s in unknown if s.outcome] == [None, None]


def test_leftover_critiques_of_later_turns_are_saved_whole() -> None:
    sample = critique(
        "u/0", "W", 0.5, turn=2, parent="u/0", program=CriticisedProgram(text="x", pass_rate=0.5)
    )
    kept, read = LeftoverGroups(), LeftoverGroups()
    kept.add_groups([[sample]])
    read.load_state_dict(kept.state_dict())
    assert read.take_all() == [[sample]]


# The pipeline and its validation


@pytest.mark.parametrize(
    ("given", "keys", "message"),
    [
        ({"turns": 0}, [], "dag.options.turns: is 0"),
        ({"discount": 2}, [], "dag.options.discount: is 2"),
        ({"credit": "to_go"}, [], "dag.options.credit=to_go"),
        ({"credit": "final", "compare": "chain"}, ["reward.judge.gate=-1"], "reward.judge.gate"),
        ({}, ["algorithm.adv_estimator=remax"], "algorithm.adv_estimator=remax"),
    ],
)
def test_what_excludes_each_other(given: dict[str, Any], keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        ctrl_rounds_pipeline(load_config(None, keys, "none"), **given)


def test_rates_of_rounds_with_and_without_stops() -> None:
    def turn(sample: int, number: int, word: str, before: bool, after: bool) -> Turn:
        right, wrong = verdict(10), verdict(0)
        return Turn(
            critic="",
            seed=0,
            problem_id="p",
            attempt="a",
            difficulty=0,
            sample=sample,
            turn=number,
            solution="",
            critique="",
            judgment=WORDS[word],
            revision="",
            before=right if before else wrong,
            after=right if after else wrong,
        )

    chains = [
        [(False, "W", True), (True, "R", False), (False, "W", True)],
        [(False, "R", True), (True, "W", True), (True, "W", False)],
    ]
    turns = [
        turn(sample, number, word, before, after)
        for sample, chain in enumerate(chains)
        for number, (before, word, after) in enumerate(chain, 1)
    ]
    rates = rounds_rates(turns)
    assert [rates[f"turn/{n}/solved"] for n in (1, 2, 3)] == [1.0, 0.5, 0.5]
    # The first chain keeps what its second critique calls correct, the second its wrong start.
    assert [rates[f"turn/{n}/stopped_solved"] for n in (1, 2, 3)] == [0.5, 0.5, 0.5]
    assert rates["solved_after"] == 1.0 and rates["rounds"] == 2.0
