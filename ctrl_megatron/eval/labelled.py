"""Answers whose verdict is known from their file: a critic judges them, and nothing is run or
revised.

Two published forms are read, told apart by their fields: CodeCriticBench (``question``, ``answer``,
``correctness``; arXiv 2502.16614) and RealCritic (``question``, ``reasoning``, ``previous_score``;
arXiv 2501.14492), one JSON object per line. A judged answer is a ``Turn`` without a revision, so
that every measure of judgments applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.resampling import Estimate, Resampling, ratio_of_columns, sum_into_cells
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.metrics.json_lines import read_json_lines
from ctrl_megatron.types import Verdict

_CORRECTNESS = {"Correct": True, "Error": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswer:
    """An answer to a question, and whether it is right."""

    id: str
    question: str
    answer: str
    right: bool

    @property
    def verdict(self) -> Verdict:
        """The label as the verdict on one test."""
        return Verdict(passed=(self.right,), total=1)


def read_labelled_answers(path: Path) -> list[LabelledAnswer]:
    """The answers of a file of JSON lines. Raises UserError that names file and line of a line in
    neither form, and of a wrong value.
    """
    found = []
    for number, record in enumerate(read_json_lines(path), start=1):
        place = f"{path} line {number}"
        if "correctness" in record:
            answer, right = "answer", _correctness(record["correctness"], place)
        elif "previous_score" in record:
            answer, right = "reasoning", _previous_score(record["previous_score"], place)
        else:
            raise UserError(
                f"{place}: neither CodeCriticBench's field correctness nor RealCritic's "
                "previous_score is there"
            )
        for name in ("question", answer):
            if not isinstance(record.get(name), str) or not record[name].strip():
                raise UserError(f"{place}: {name!r} must be a text; it is {record.get(name)!r}")
        found.append(
            LabelledAnswer(
                id=f"{path.stem}/{record.get('idx', number)}",
                question=record["question"],
                answer=record[answer],
                right=right,
            )
        )
    if not found:
        raise UserError(f"{path} contains no answer")
    if len({one.id for one in found}) < len(found):
        raise UserError(f"{path}: two lines have one 'idx'")
    return found


def _correctness(value: Any, place: str) -> bool:
    if not isinstance(value, str) or value not in _CORRECTNESS:
        raise UserError(f"{place}: 'correctness' must be Correct or Error; it is {value!r}")
    return _CORRECTNESS[value]


def _previous_score(value: Any, place: str) -> bool:
    scores = value if isinstance(value, list) else [value]
    if len(scores) != 1 or type(scores[0]) is not bool:
        raise UserError(f"{place}: 'previous_score' must be true or false; it is {value!r}")
    return scores[0]


OTHER_RULES: Mapping[str, str] = {
    "majority_accuracy": "the majority of an answer's judgments is true; a tie counts half "
    "(Aletheia's self-consistency)",
    "any_accuracy": "one of an answer's judgments is true (Aletheia's BoN, pass@K of the judge)",
    "substring_accuracy": "true by CodeCriticBench's scorer, which takes every verdict that "
    'contains the letters "correct" for Correct, "incorrect" too',
}
"""Measures of published sets that differ from ours -> their meaning."""


def other_rules(
    turns: Sequence[Turn], plan: Callable[[int, int], Resampling]
) -> dict[str, Estimate]:
    """The rates of ``OTHER_RULES`` over judged answers of one critic. ``plan(answers, seeds)``
    gives the resampling.
    """
    drawn: dict[tuple[int, str], list[Turn]] = {}
    for turn in turns:
        drawn.setdefault((turn.seed, turn.attempt), []).append(turn)
    seeds = sorted({seed for seed, _ in drawn})
    names = sorted({name for _, name in drawn})
    found: dict[str, Estimate] = {}
    for rule, rate in _RULES.items():
        parts = [
            (seeds.index(seed), names.index(name), [rate(part), 1.0])
            for (seed, name), part in drawn.items()
        ]
        cells = sum_into_cells(parts, len(seeds), len(names))
        value = plan(len(names), len(seeds)).estimate(cells, ratio_of_columns)
        found |= {} if value is None else {rule: value}
    return found


def _is_right(turn: Turn) -> bool:
    assert turn.before is not None
    return turn.before.accepted


def _majority(judged: Sequence[Turn]) -> float:
    lead = sum({True: 1, False: -1, None: 0}[turn.judgment] for turn in judged)
    return 0.5 if lead == 0 else float((lead > 0) is _is_right(judged[0]))


def _any(judged: Sequence[Turn]) -> float:
    return float(any(turn.judgment is _is_right(turn) for turn in judged))


def _substring(judged: Sequence[Turn]) -> float:
    said = [(turn.judgment is not None) is _is_right(turn) for turn in judged]
    return sum(said) / len(said)


_RULES: Mapping[str, Callable[[Sequence[Turn]], float]] = {
    "majority_accuracy": _majority,
    "any_accuracy": _any,
    "substring_accuracy": _substring,
}
