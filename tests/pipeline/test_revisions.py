"""Greedy revisions of the same dialogue are written once, and those that do not fit not at all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrl_megatron.config import load_config
from ctrl_megatron.pipeline import chain
from ctrl_megatron.pipeline.batch import columns
from ctrl_megatron.pipeline.chain import Critique, judge, revise
from ctrl_megatron.pipeline.critique_report import revision_metrics
from ctrl_megatron.prompts import revision_messages
from ctrl_megatron.rewards import Scores
from ctrl_megatron.types import Attempt, Completion, Problem

CRITIQUES = ["the sign", "the sign", "no judgment", "the loop", "the sign"]


def row(number: int) -> Any:
    problem = Problem(
        id=str(number),
        statement=f"problem {number}",
        prompter_type="code_contests",
        selected_uts="[]",
    )
    return SimpleNamespace(
        solution="```python\npass\n```",
        attempt=lambda: Attempt(id="0", problem=problem, solution="pass", pass_rate=0.0),
    )


def critiques(rows: list[Any], texts: list[str], valid: list[bool]) -> list[Critique]:
    return [
        Critique(row=row, text=text, judgment=False if ok else None, tokens=1)
        for row, text, ok in zip(rows, texts, valid, strict=True)
    ]


def left_out(revised: list[Critique]) -> list[float]:
    valid = torch.tensor([critique.judgment is not None for critique in revised])
    fields = columns([critique.revised for critique in revised])
    return revision_metrics(fields, valid)["revision/left_out_rate"].tolist()


def test_equal_critiques_of_one_solution_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def generate(worker: Any, role: str, prompts: Any, params: Any) -> Any:
        assert role == "proxy" and params.temperature == 0.0
        first = len(asked)
        asked.extend("".join(map(chr, prompt)) for prompt in prompts)
        return [
            [Completion(token_ids=(first + i,), log_probs=(), finish_reason="stop", spans=())]
            for i in range(len(prompts))
        ]

    monkeypatch.setattr(chain, "generate", generate)
    codec = SimpleNamespace(
        encode_chat=lambda messages, add_generation_prompt: [ord(c) for c in str(messages)],
        decode=lambda tokens: f"revision {tokens[0]}",
        eos_token_ids=(0,),
    )
    worker: Any = SimpleNamespace(
        config=load_config(None, [], "none"), codec=codec, max_model_len=10_000
    )
    rows = [row(0), row(0), row(0), row(0), row(1)]
    valid = [True, True, False, True, True]
    revised = revise(worker, critiques(rows, CRITIQUES, valid))
    # The last critique is the first one's text, about another problem.
    assert [c.revision for c in revised] == [
        *("revision 0", "revision 0", "", "revision 1", "revision 2")
    ]
    assert [c.revision_tokens for c in revised] == [1, 1, None, 1, 1]
    assert all(critique.fits for critique in revised)
    assert len(asked) == 3 and "problem 1" in asked[2]
    assert left_out(revised) == [0.0] * 4
    # An evaluation revises what contains no judgment too.
    every = revise(worker, critiques(rows, CRITIQUES, valid), without_judgment=True)
    assert len(asked) == 7 and all(critique.revision for critique in every)


def test_a_critique_that_leaves_no_room_for_a_revision_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine gets only the prompts that fit, and the rest causes no message."""

    def generate(worker: Any, role: str, prompts: Any, params: Any) -> Any:
        assert max(map(len, prompts), default=0) + params.max_tokens <= worker.max_model_len
        done = Completion(token_ids=(1,), log_probs=(), finish_reason="stop", spans=())
        return [[done] for _ in prompts]

    scored: list[str] = []

    async def score(items: Any) -> Scores:
        scored.extend(item.critique for item in items)
        rewards: Any = [1.0] * len(items)
        return Scores(parts={"critic": rewards}, totals=rewards, outcomes=[None] * len(items))

    monkeypatch.setattr(chain, "generate", generate)
    config = load_config(None, ["actor_rollout_ref.rollout.revision_max_tokens=50"], "none")
    codec = SimpleNamespace(
        encode_chat=lambda messages, add_generation_prompt: [ord(c) for c in str(messages)],
        decode=lambda tokens: "revision",
        eos_token_ids=(0,),
    )
    short, long = "the sign", "the sign" * 40
    rows, valid = [row(0)] * 4, [True, True, False, True]
    exact = len(str(revision_messages(row(0).attempt().problem, row(0).solution, short))) + 50
    worker: Any = SimpleNamespace(config=config, codec=codec, max_model_len=exact)
    worker.score, worker.reward_weights = score, {"critic": 1.0}
    texts = [short, long, long, short]
    revised = revise(worker, critiques(rows, texts, valid))
    assert [critique.revision for critique in revised] == ["revision", "", "", "revision"]
    assert [critique.fits for critique in revised] == [True, False, True, True]
    assert left_out(revised) == [0.0, 1.0, 0.0]
    fields = asyncio.run(judge(worker, revised))
    assert scored == [short, long, short]  # an invalid critique earns its zero
    assert [f["score"] for f in fields] == [1.0, None, 1.0, 1.0]
    assert fields[1]["reward/critic"] is None and "too long" in str(fields[1]["detail"])
    worker.max_model_len = 60
    assert not any(c.fits for c in revise(worker, critiques(rows, texts, [True] * 4)))
