"""Answers with a known verdict: their files, their measures, the rules of other scorers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluated import chain

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.labelled import OTHER_RULES, read_labelled_answers
from ctrl_megatron.eval.results import evaluate_turns
from ctrl_megatron.eval.tables import report_tables

CODE = {
    "question": "Read n and print n.",
    "answer": "n = int(input())\nprint(n + 1)",
    "public_test": {"input": ["assert f(1) == 1"]},
    "private_test": {"input": []},
    "checklist_dimensions": ["Correctness Verification"],
    "checklist_scores": [2],
    "checklists": ["Does it print n?"],
    "score": 3,
    "correctness": "Error",
    "source": "debug",
    "difficulty": "Easy",
}
MATHS = {
    "idx": 7,
    "question": "How many legs have three cats?",
    "gt_cot": "3 * 4 = 12",
    "gt": "12",
    "pred": "12",
    "reasoning": "Each cat has four legs, so 12.",
    "model": "some-model",
    "previous_score": [True],
}


def file_of(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_both_published_forms_are_read(tmp_path: Path) -> None:
    wrong, right = read_labelled_answers(file_of(tmp_path, CODE, MATHS))
    assert (wrong.id, wrong.right, wrong.answer) == ("answers/1", False, CODE["answer"])
    assert (right.id, right.right, right.answer) == ("answers/7", True, MATHS["reasoning"])
    assert right.verdict.accepted and not wrong.verdict.accepted


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({**CODE, "correctness": "incorrect"}, r"line 1: 'correctness' must be Correct or Error"),
        ({**CODE, "answer": " "}, r"line 1: 'answer' must be a text"),
        ({**MATHS, "previous_score": [True, False]}, "'previous_score' must be true or false"),
        ({**MATHS, "previous_score": 1}, "'previous_score' must be true or false"),
        ({"question": "x"}, "neither CodeCriticBench's field correctness nor"),
    ],
)
def test_a_wrong_line_is_named(record: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        read_labelled_answers(file_of(tmp_path, record))


def test_an_empty_file_and_a_repeated_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no answer"):
        read_labelled_answers(file_of(tmp_path))
    with pytest.raises(UserError, match="two lines have one 'idx'"):
        read_labelled_answers(file_of(tmp_path, MATHS, MATHS))


def test_rules_of_other_scorers_stand_beside_ours() -> None:
    turns = [
        # A right answer: two of three say so.
        *chain("a", "C", (4, 4)),
        *chain("a", "C", (4, 4), sample=1),
        *chain("a", "I", (4, 4), sample=2),
        # A wrong one: one is true, one false, one says nothing.
        *chain("b", "I", (0, 0)),
        *chain("b", "C", (0, 0), sample=1),
        *chain("b", "-", (0, 0), sample=2),
        # A wrong one that nobody finds.
        *chain("c", "C", (0, 0)),
        *chain("c", "C", (0, 0), sample=1),
        *chain("c", "C", (0, 0), sample=2),
    ]
    (result,) = evaluate_turns(turns)
    found = {name: rate.value for name, rate in result.other_rules.items()}
    assert found == pytest.approx(
        {
            "majority_accuracy": (1 + 0.5 + 0) / 3,
            "any_accuracy": 2 / 3,
            # Every judgment contains the letters "correct": only the silent one is "Error".
            "substring_accuracy": (1 + 1 / 3 + 0) / 3,
        }
    )
    assert result.last_turn_rates["judgment_accuracy"].value == pytest.approx(3 / 9)
    tables = {table.title: table for table in report_tables([result], [result])}
    assert "Labelled answers" in tables and "Labelled answers" not in {
        table.title for table in report_tables([result])
    }
    for name in OTHER_RULES:
        assert name.replace("_", " ") in tables["Labelled answers"].head
