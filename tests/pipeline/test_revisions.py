"""Greedy revisions of the same dialogue are written once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.pipeline import critique_revision
from ctrl_megatron.pipeline.critique_revision import revise_valid
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

    monkeypatch.setattr(critique_revision, "generate", generate)
    codec = SimpleNamespace(
        encode_chat=lambda messages, add_generation_prompt: [ord(c) for c in str(messages)],
        decode=lambda tokens: f"revision {tokens[0]}",
        eos_token_ids=(0,),
    )
    worker: Any = SimpleNamespace(config=load_config(None, [], "none"), codec=codec)
    rows = [row(0), row(0), row(0), row(0), row(1)]
    written, lengths = revise_valid(worker, rows, CRITIQUES, [True, True, False, True, True])
    # The last critique is the first one's text, about another problem.
    assert written == ["revision 0", "revision 0", "", "revision 1", "revision 2"]
    assert lengths == [1, 1, None, 1, 1]
    assert len(asked) == 3 and "problem 1" in asked[2]
