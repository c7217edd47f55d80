"""Pairs in JudgeBench's format: those of the checkout, and lines that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.pairwise import read_response_pairs
from ctrl_megatron.prompts import choice_messages, extract_code, parse_choice

OWN = Path(__file__).parents[2] / "examples/pairs/own.jsonl"
CHECKS = {
    "own/largest": "largest([-3, -1, -2]) == -1",
    "own/vowels": "vowels('An Owl') == 2",
    "own/leap": "leap(2000) and not leap(1900)",
    "own/rotate": "rotate([1, 2, 3], 4) == [2, 3, 1]",
    "own/median": "median([4, 1, 3, 2]) == 2.5",
    "own/unique": "unique([3, 1, 3, 2]) == [3, 1, 2]",
    "own/power": "is_power_of_two(8) and not is_power_of_two(0)",
    "own/chunks": "chunks([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]",
}


def holds(response: str, check: str) -> bool:
    names: dict[str, object] = {}
    exec(extract_code(response), names)
    return bool(eval(check, names))


def test_our_pairs_have_the_better_answer_where_their_label_says() -> None:
    pairs = read_response_pairs(OWN)
    assert {pair.pair_id for pair in pairs} == CHECKS.keys()
    for pair in pairs:
        right = [holds(text, CHECKS[pair.pair_id]) for text in (pair.response_a, pair.response_b)]
        assert right == ([True, False] if pair.label == "A>B" else [False, True]), pair.pair_id
    assert {pair.label for pair in pairs} == {"A>B", "B>A"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "A=B"}, "line 2: 'label' must be A>B or B>A"),
        ({"response_B": None}, "line 2: 'response_B' must be a text"),
        ({"question": ""}, "line 2: 'question' must be a text"),
        ({"pair_id": "own/largest"}, "line 2: 'pair_id' repeats 'own/largest'"),
    ],
)
def test_a_line_that_is_no_pair_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    lines = [json.loads(line) for line in OWN.read_text().splitlines()[:2]]
    lines[1] |= change
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        read_response_pairs(file)
    file.write_text("")
    with pytest.raises(UserError, match="contains no pair"):
        read_response_pairs(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Both are short.\nBetter answer: first", "first"),
        ("Better answer: **Second**.", "second"),
        ("Better answer: first, no: Better answer: second", "second"),
        ("The first answer is better.", None),
        ("Better answer: firstly", None),
        ("", None),
    ],
)
def test_the_last_named_answer_counts(text: str, expected: str | None) -> None:
    assert parse_choice(text) == expected


def test_the_question_names_no_answer_itself() -> None:
    (message,) = choice_messages("?", "a", "b")
    assert parse_choice(message["content"]) is None
