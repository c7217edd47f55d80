"""Which of two responses a critic prefers: pairs in JudgeBench's format (arXiv 2410.12784).

A pair is judged in two ways. *Choice*: the critic sees both responses and names the better one,
once in each order. Two answers for one response decide, and so does one answer beside a missing
one; contradicting answers are a tie, which counts as wrong (JudgeBench's rule). *Critiques*: each
response is criticised separately, and the response that is judged correct more often wins (CTRL's
rule; a tie counts as wrong).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.resampling import Estimate, Resampling, ratio_of_columns, sum_into_cells
from ctrl_megatron.metrics.json_lines import read_json_lines

Label = Literal["A>B", "B>A"]
_LABELS: tuple[Label, Label] = ("A>B", "B>A")
PAIR_RATES = {
    "choice_accuracy": "better response named, asked in both orders; a tie is wrong",
    "choice_consistency": "the same response named in both orders",
    "choice_answered_rate": "questions in either order that are answered",
    "choice_first_rate": "share of answers that name the first response; 0.5 is no bias",
    "critique_accuracy": "better response judged correct more often; a tie is wrong",
}
_TEXTS = ("pair_id", "question", "response_A", "response_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePair:
    """Two responses to one question, of which one is right."""

    pair_id: str
    source: str
    """Data set of the question; empty where the file has none."""
    question: str
    response_a: str
    response_b: str
    label: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """The answers of a critic about a pair."""

    critic: str
    seed: int
    pair_id: str
    source: str
    label: Label
    choices: tuple[str | None, str | None]
    """``first`` or ``second``, with A before B and with B before A; None for no answer."""
    answers: tuple[str, str]
    """The texts that contain the choices."""
    judgments_a: tuple[bool | None, ...]
    """Judgments in the critiques of response A."""
    judgments_b: tuple[bool | None, ...]
    critiques_a: tuple[str, ...]
    critiques_b: tuple[str, ...]

    @staticmethod
    def from_json(record: Mapping[str, Any], place: str) -> JudgedPair:
        """The pair in a line of a file. Raises UserError that names ``place`` for a malformed
        line.
        """
        names = {f.name for f in fields(JudgedPair)}
        if record.keys() != names:
            wrong = ", ".join(sorted(names ^ record.keys()))
            raise UserError(f"{place}: not the fields of a judged pair: {wrong}")
        lists = {k: tuple(v) for k, v in record.items() if isinstance(v, list)}
        return JudgedPair(**{**record, **lists})

    @property
    def decision(self) -> str | None:
        """``A>B``, ``B>A``, or None for a tie or no answer."""
        straight = {"first": 1, "second": -1, None: 0}[self.choices[0]]
        swapped = {"first": -1, "second": 1, None: 0}[self.choices[1]]
        return _sign(straight + swapped)

    @property
    def is_consistent(self) -> bool:
        """True where both orders name the same response."""
        return {*self.choices} == {"first", "second"}

    @property
    def critique_decision(self) -> str | None:
        """``A>B``, ``B>A``, or None for a tie."""
        a, b = self.judgments_a.count(True), self.judgments_b.count(True)
        return _sign(a * len(self.judgments_b) - b * len(self.judgments_a))


def read_response_pairs(path: Path) -> list[ResponsePair]:
    """The pairs of a file of JSON lines with JudgeBench's keys. Raises UserError that names file
    and line of a mistake.
    """
    pairs: dict[str, ResponsePair] = {}
    for number, record in enumerate(read_json_lines(path), start=1):
        place = f"{path} line {number}"
        for key in _TEXTS:
            if not isinstance(record.get(key), str) or not record[key]:
                raise UserError(f"{place}: {key!r} must be a text; it is {record.get(key)!r}")
        label = record.get("label")
        if label not in _LABELS:
            raise UserError(f"{place}: 'label' must be A>B or B>A; it is {label!r}")
        if record["pair_id"] in pairs:
            raise UserError(f"{place}: 'pair_id' repeats {record['pair_id']!r}")
        pairs[record["pair_id"]] = ResponsePair(
            pair_id=record["pair_id"],
            source=str(record.get("source") or ""),
            question=record["question"],
            response_a=record["response_A"],
            response_b=record["response_B"],
            label=label,
        )
    if not pairs:
        raise UserError(f"{path} contains no pair")
    return list(pairs.values())


def _pair_columns(pair: JudgedPair) -> Mapping[str, tuple[float, float]]:
    """Name of a rate -> what the pair adds to its numerator and its denominator."""
    answered = len(pair.choices) - pair.choices.count(None)
    return {
        "choice_accuracy": (pair.decision == pair.label, 1),
        "choice_consistency": (pair.is_consistent, 1),
        "choice_answered_rate": (answered, len(pair.choices)),
        "choice_first_rate": (pair.choices.count("first"), answered),
        "critique_accuracy": (pair.critique_decision == pair.label, 1),
    }


def pair_rates_by_source(
    pairs: Sequence[JudgedPair], plan: Callable[[int, int], Resampling]
) -> dict[str, dict[str, Estimate]]:
    """Source of the questions, first ``all``, -> rates of ``PAIR_RATES``; empty without pairs.
    ``plan(problems, seeds)`` gives the resampling.
    """
    if not pairs:
        return {}
    parts: dict[str, list[JudgedPair]] = {}
    for pair in sorted(pairs, key=lambda p: p.source):
        # JudgeBench's categories; the sources of its knowledge questions also name a field.
        category = "mmlu-pro" if pair.source.startswith("mmlu-pro-") else pair.source
        parts.setdefault(category, []).append(pair)
    parts = {"all": list(pairs), **(parts if len(parts) > 1 else {})}
    return {source: _pair_rates(part, plan) for source, part in parts.items()}


def _pair_rates(
    pairs: Sequence[JudgedPair], plan: Callable[[int, int], Resampling]
) -> dict[str, Estimate]:
    seeds = sorted({pair.seed for pair in pairs})
    names = sorted({pair.pair_id for pair in pairs})
    found: dict[str, Estimate] = {}
    for name in PAIR_RATES:
        parts = [
            (seeds.index(p.seed), names.index(p.pair_id), _pair_columns(p)[name]) for p in pairs
        ]
        value = plan(len(names), len(seeds)).estimate(
            sum_into_cells(parts, len(seeds), len(names)), ratio_of_columns
        )
        found |= {} if value is None else {name: value}
    return found


def _sign(number: int) -> str | None:
    return None if number == 0 else _LABELS[number < 0]
