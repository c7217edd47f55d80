"""Co-training: which programs are criticised, which critiques are followed, and what each earns,
however the ranks of either policy share the problems."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row, row_of_attempt
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards import JudgeCounts, RewardOutcome, Scores
from ctrl_megatron.steps import co_train
from ctrl_megatron.steps.rounds import names_of_samples
from ctrl_megatron.steps.sample import Sample
from ctrl_megatron.types import Attempt, Completion, Problem, SamplingParams, VersionSpan

GIVEN = (
    *("actor_rollout_ref.model.path=critic", "data.train_files=rows"),
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:co_train_pipeline",
    *("agent1.model.path=solver", "agent1.rollout.n=3", "actor_rollout_ref.rollout.n=2"),
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    "data.max_prompt_length=2000",
)
ROWS = 4


def row(number: int) -> Row:
    problem = Problem(
        id=f"p{number}",
        statement=f"Print {number}.",
        prompter_type="code_contests",
        selected_uts="[]",
    )
    attempt = Attempt(id=f"row{number}", problem=problem, solution="print(0)", pass_rate=0.0)
    return row_of_attempt(attempt)


def answer(tokens: Sequence[int]) -> Completion:
    span = (VersionSpan("agent1@0", 0, len(tokens)),)
    return Completion(
        token_ids=tuple(tokens), log_probs=(0.0,) * len(tokens), finish_reason="stop", spans=span
    )


class Codec:
    """Texts as code points."""

    def encode_chat(self, messages: Any, *, add_generation_prompt: bool) -> list[int]:
        return [ord(c) for message in messages for c in message["content"]]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    eos_token_ids = (0,)


class Judge:
    """A program passes the share of its tests that its text ends with, in tenths."""

    def __init__(self) -> None:
        self.judging = JudgeCounts()

    async def judge_solutions(
        self, texts: Sequence[str], rows: Sequence[Row]
    ) -> list[RewardOutcome]:
        return [RewardOutcome(reward=share(text)) for text in texts]

    async def score(self, items: Sequence[Any]) -> Scores:
        rates = [share(one.text) if one.judgment is not None else 0.0 for one in items]
        parts = {"critic": rates, "format": [1.0] * len(items)}
        return Scores(
            totals=rates, parts=parts, outcomes=[RewardOutcome(reward=rate) for rate in rates]
        )


def share(text: str) -> float | None:
    return None if text.endswith("?") else int(text[-1]) / 10


def worker(policy: int, rank: int = 0, ranks: int = 1, **data: int) -> Any:
    """One data rank's worker of a policy, without engines."""
    settings = (*GIVEN, *(f"data.{name}={value}" for name, value in data.items()))
    rows, judge = [row(number) for number in range(ROWS)], Judge()
    table = SimpleNamespace(
        rows=rows,
        prompts=[(number,) for number in range(ROWS)],
        row=lambda name: rows[int(name.removeprefix("row"))],
        row_number_by_id={one.id: number for number, one in enumerate(rows)},
    )
    groups = SimpleNamespace(
        layout=SimpleNamespace(data=ranks), place=SimpleNamespace(dp=rank), is_leader=True
    )
    return SimpleNamespace(
        config=load_config(None, settings).agents[policy],
        role="agent1" if policy else "actor",
        groups=groups,
        train=table,
        codec=Codec(),
        rewards=judge,
        score=judge.score,
        reward_weights={"critic": 1.0, "format": 0.5},
        step=0,
        run_on_leader=lambda work, what: asyncio.run(work()),
    )


def programs(texts: Sequence[Sequence[str]]) -> list[Sample]:
    """The solver's judged programs, those of each problem."""
    samples = [
        Sample(
            uid=f"uid{number}",
            row_id=f"row{number}",
            mini_batch=number // 2,
            completion=answer([ord(c) for c in text]),
        )
        for number, of_problem in enumerate(texts)
        for text in of_problem
    ]
    return co_train._judged_programs(worker(co_train.SOLVER), samples)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Critiques name the draw that they are from, every third without a judgment; revisions pass a
    share of the tests that depends on their draw. The names of all draws are noted."""
    names = list[str]()

    def criticise(
        worker: Any, rows: Any, prompts: Any, params: SamplingParams, then: Any
    ) -> list[list[Sample]]:
        names.extend(map(str, params.rows))
        return [
            [
                Sample(
                    row_id=one.id,
                    completion=answer([1]),
                    text=f"{name}/{number}",
                    judgment=None if sum(map(ord, name)) % 3 == number else False,
                )
                for number in range(params.n)
            ]
            for one, name in zip(rows, params.rows, strict=True)
        ]

    def generate(worker: Any, role: str, prompts: Any, params: SamplingParams) -> Any:
        names.extend(map(str, params.rows))
        return [
            [
                answer([*map(ord, name), 48 + (sum(map(ord, name)) + number) % 11 % 10])
                for number in range(params.n)
            ]
            for name in params.rows
        ]

    monkeypatch.setattr(co_train, "criticise", criticise)
    monkeypatch.setattr(co_train, "generate", generate)
    return names


TEXTS = st.lists(
    st.lists(st.sampled_from(["a3", "b0", "c9", "d?"]), min_size=3, max_size=3),
    min_size=ROWS,
    max_size=ROWS,
)


def step(texts: Sequence[Sequence[str]], asked: int, critics: int, solvers: int) -> Any:
    """(critiques with their rewards, revisions) of a step on so many data ranks of either."""
    written = programs(texts)
    critiques = [
        sample
        for rank in range(critics)
        for sample in co_train.draw_critiques_of(worker(0, rank, critics), written, asked)
    ]
    half = ROWS // solvers
    revisions = [
        sample
        for rank in range(solvers)
        for sample in co_train.draw_revisions_of(
            worker(1, rank, solvers),
            [s for s in written if int(s.row_id[-1]) // half == rank],
            critiques,
            2,
        )
    ]
    return co_train._with_mean_rewards(worker(0), critiques, [*written, *revisions]), revisions


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, asked=st.integers(1, 3))
def test_what_is_criticised_revised_and_earned(texts: list[list[str]], asked: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        names = drawn.__wrapped__(patch)  # type: ignore[attr-defined]
        critiques, revisions = step(texts, asked, 1, 1)
        assert len(set(names)) == len(names)
    for number, of_problem in enumerate(texts):
        here = [one for one in critiques if one.row_id == f"row{number}"]
        known = [text for text in dict.fromkeys(of_problem) if share(text) is not None]
        about = [one.program.text if one.program else None for one in here]
        # Twice each, the first different ones whose judge did not fail; else the data's.
        assert about == [text for text in (known[:asked] or [None]) for _ in range(2)]
        assert {one.mini_batch for one in here} == {number // 2}
    followed = dict(zip(names_of_samples(critiques), critiques, strict=True))
    for name, one in followed.items():
        own = [share(revised.text) for revised in revisions if revised.parent == name]
        assert len(own) == (0 if one.judgment is None else 2)
        earned = mean(own) if own else 0.0  # type: ignore[type-var]
        assert one.outcome.rewards["critic"] == one.outcome.total == pytest.approx(earned)
    assert {one.uid for one in revisions} == {
        name for name, one in followed.items() if one.judgment is not None
    }


def test_ranks_share_the_same_step(drawn: list[str]) -> None:
    texts = [["a3", "b0", "a3"], ["d?", "d?", "d?"], ["c9", "b0", "a3"], ["b0", "b0", "b0"]]
    whole = step(texts, 2, 1, 1)
    for critics, solvers in ((2, 1), (1, 2), (2, 2), (2, 4)):
        critiques, revisions = step(texts, 2, critics, solvers)
        key = lambda one: (one.uid, one.text)  # noqa: E731
        assert sorted(critiques, key=key) == sorted(whole[0], key=key)
        assert sorted(revisions, key=key) == sorted(whole[1], key=key)


def test_what_does_not_fit_is_left_out(drawn: list[str]) -> None:
    written = programs([["a3" * 1500, "b0", "c9"]] * ROWS)
    critiques = co_train.draw_critiques_of(worker(0), written, 2)
    # The long one is passed over.
    assert {one.program.text for one in critiques if one.program} == {"b0", "c9"}
    long = [dataclasses.replace(one, text="x" * 2001, judgment=False) for one in critiques]
    assert co_train.draw_revisions_of(worker(1), written, long, 2) == []
    rewarded = co_train._with_mean_rewards(worker(0), long, written)
    assert all(one.outcome is not None and one.outcome.total is None for one in rewarded)


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("policies={}", "policies.agent1.actor_rollout_ref.model.path"),
        ("dag.options.programs=0", "dag.options.programs: is 0"),
        ("dag.options.revisions=1", "dag.options.revisions: is 1; give 2 or more"),
    ],
)
def test_options_that_no_step_can_have_are_refused(override: str, fragment: str) -> None:
    config = load_config(None, (*GIVEN, override))
    with pytest.raises(UserError, match=fragment.replace(".", r"\.")):
        co_train.co_train_pipeline(config, **config.dag.options)
