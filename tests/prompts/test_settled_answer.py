"""Answers with odd fences: corrected, left alone or reported as unreadable."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.prompts import extract_code, normalise_answer

SHIPPED = Path(__file__).parents[2] / "examples/solutions/smollm2.jsonl"
DEF = "def f(n):\n    return n * 3"
PROSE = "This defines a function `f` that triples its argument."
BLOCK = f"```python\n{DEF}\n```"
CASES = {
    "canonical": (BLOCK, "as written", DEF),
    "prose around": (f"Here:\n{BLOCK}\n{PROSE}", "as written", DEF),
    "cut off": (f"```python\n{DEF}", "as written", DEF),
    "cut off in a line": ("```python\ndef f(n):\n    return n *", "as written", None),
    "wrong syntax in a fence": ("```\ndef f(n:\n    return 1\n```\nDone.", "as written", None),
    "no fence": (DEF, "normalised", DEF),
    "opening fence missing": (f"{DEF}\n```\n\n{PROSE}", "normalised", DEF),
    "opening fence missing, another block": (
        f"{DEF}\n```\n\nExample usage:\n```python\nprint(f(1))\n```",
        "normalised",
        DEF,
    ),
    "opening fence missing, an empty block": (
        f"{DEF}\n```\n```\nassert f(1) == 3\n```",
        "normalised",
        DEF,
    ),
    "doubled opening fence": (f"```\n{BLOCK}\n\n{PROSE}", "as written", DEF),
    "doubled with a blank line": (f"```\n\n{BLOCK}", "as written", DEF),
    "doubled, wrong syntax": ("```\n```python\ndef f(n:\n```", "as written", None),
    "doubled, two blocks": (f"```\n{BLOCK}\n```python\nprint(f(1))\n```", "as written", DEF),
    "wrong syntax, then another block": (
        f"```python\ndef f(n:\n```\n\n{BLOCK}",
        "as written",
        "def f(n:",
    ),
    "tildes": (f"~~~\n{DEF}\n~~~", "normalised", DEF),
    "reasoning first": (f"<think>\n```\nx\n```\n</think>\n{BLOCK}", "as written", DEF),
    "reasoning, no fence": (f"<think>\n```\nx\n```\n</think>\n{DEF}", "normalised", DEF),
    "prose": (PROSE, "unreadable", None),
    "one word": ("Triple", "unreadable", None),
    "prose in a fence": ("```\nMultiply it by three.\n```", "unreadable", None),
    "code and prose": (f"{DEF}\n\n{PROSE}\n```\n9\n```", "unreadable", None),
    "only a comment": ("```python\n# Your solution here\n```", "unreadable", None),
    "empty": ("", "unreadable", None),
}


@pytest.mark.parametrize(("text", "kind", "program"), CASES.values(), ids=CASES)
def test_an_answer_settles_to_the_expected_program(
    text: str, kind: str, program: str | None
) -> None:
    settled = normalise_answer(text)
    assert settled.kind == kind
    if kind != "normalised":
        assert settled.text == text
    if program is not None:
        assert extract_code(settled.text) == program
    if kind != "unreadable":
        assert normalise_answer(settled.text) == (settled.text, "as written")
        assert "```" not in extract_code(settled.text) and PROSE not in extract_code(settled.text)


@given(
    st.lists(st.sampled_from([DEF, PROSE, "```", "```python", "\n", "x = 1", " "]), max_size=9).map(
        "\n".join
    )
)
def test_a_settled_answer_stays(text: str) -> None:
    settled = normalise_answer(text)
    if settled.kind == "unreadable":
        assert settled.text == text
    else:
        assert normalise_answer(settled.text) == (settled.text, "as written")
        assert "```" not in extract_code(settled.text)


def test_no_shipped_solution_is_read_as_prose() -> None:
    lines = [json.loads(line) for line in SHIPPED.read_text().split("\n") if line]
    assert len(lines) > 400
    kinds = Counter(normalise_answer(line["solution"]).kind for line in lines)
    assert kinds == {"as written": len(lines)}
