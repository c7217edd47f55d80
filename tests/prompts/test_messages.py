from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.prompts import (
    REVISION_SENTENCE,
    critique_messages,
    generation_messages,
    hint_messages,
    parse_judgment,
    revision_request,
)
from ctrl_megatron.types import Problem


def problem(kind: Any = "mbppplus", statement: str = "Add two numbers.", **fields: Any) -> Problem:
    return Problem(
        id="p/1", statement=statement, prompter_type=kind, selected_uts=("assert True",), **fields
    )


@pytest.mark.parametrize("kind", ["mbppplus", "code_contests", "livecodebench"])
def test_every_kind_asks_about_problem_and_sanitized_answer(kind: str) -> None:
    answer = "I think\n```\nx = 1\n```\nis good"
    (generation,) = generation_messages(problem(kind))
    (critique,) = critique_messages(problem(kind), answer)
    (hinted,) = hint_messages(problem(kind), answer, "IndexError in line 3")
    for message in (generation, critique, hinted):
        assert message["role"] == "user"
        assert "Add two numbers." in message["content"]
        assert parse_judgment(message["content"]) is None
    for message in (critique, hinted):
        assert "```python\nx = 1\n```" in message["content"]
        assert "I think" not in message["content"]
        assert message["content"].count("<format>") == message["content"].count("</format>") == 1
    assert "IndexError in line 3" in hinted["content"]
    assert "hint" not in critique["content"]


def test_generation_names_the_function_and_the_way_of_input() -> None:
    assert "`add`" in generation_messages(problem(entry_point="add"))[0]["content"]
    assert "`add`" in critique_messages(problem(entry_point="add"), "x")[0]["content"]
    assert "standard input" in generation_messages(problem("code_contests"))[0]["content"]


def test_livecodebench_is_asked_verbatim_and_criticised_without_its_headings() -> None:
    statement = (
        "You are an expert.\n### Question:\nSum them.\n\n### Format: read stdin\n### Answer:"
    )
    asked = problem("livecodebench", statement)
    assert generation_messages(asked)[0]["content"] == statement
    critique = critique_messages(asked, "x")[0]["content"]
    assert "<problem>\nSum them.\n</problem>" in critique
    assert "You are an expert" not in critique


@pytest.mark.parametrize("build", [generation_messages, lambda p: critique_messages(p, "x")])
def test_unknown_kind_is_named(build: Any) -> None:
    with pytest.raises(ValueError, match=r"p/1.*'apps'.*mbppplus"):
        build(problem("apps"))


@pytest.mark.parametrize(
    ("critique", "kept"),
    [
        ("  fix it \n", "fix it"),
        ("<format>\nfix it\n</format>", "fix it"),
        ("well <format>fix it</format> more <format>no</format>", "fix it"),
        ("<format>fix it", "<format>fix it"),
        ("fix it</format>", "fix it</format>"),
        ("</format>fix it<format>", ""),
    ],
)
def test_revision_request_carries_the_critique_and_the_sentence(critique: str, kept: str) -> None:
    assert revision_request(critique) == {
        "role": "user",
        "content": f"{kept}\n\n{REVISION_SENTENCE}",
    }


def test_the_sentence_is_ctrls() -> None:
    assert REVISION_SENTENCE == "Please finalize your answer accordingly using the same format."


@given(st.text(max_size=30))
def test_a_prompt_is_never_a_judgment(statement: str) -> None:
    messages = critique_messages(problem(statement=statement), statement)
    assert parse_judgment(messages[0]["content"]) is None


def test_instructions_stay_short() -> None:
    # About 4 characters per token: the frame must leave most of 400 tokens to the problem.
    assert len(critique_messages(problem(statement=""), "")[0]["content"]) < 450
    assert len(generation_messages(problem(statement=""))[0]["content"]) < 250
