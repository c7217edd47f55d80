"""The probability of the judgment, from tokens of any cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.prompts import (
    JUDGED_CORRECT,
    JUDGED_INCORRECT,
    find_judgment_word,
    parse_judgment,
)
from ctrl_megatron.prompts.confidence import judgment_confidence
from ctrl_megatron.types import Completion


class Pieces:
    """A decoder whose token n is the n-th piece of a text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(self.pieces[number] for number in ids)


def completion(pieces: Sequence[str], log_probs: Sequence[float]) -> Completion:
    return Completion(
        token_ids=tuple(range(len(pieces))),
        log_probs=tuple(log_probs),
        finish_reason="stop",
        spans=(),
    )


def confidence(pieces: Sequence[str], log_probs: Sequence[float]) -> float | None:
    text = "".join(pieces)
    return judgment_confidence(Pieces(pieces), completion(pieces, log_probs), text)


def test_it_is_the_probability_of_the_word() -> None:
    halves = [-0.1, -0.2, math.log(0.5), math.log(0.8), -3.0]
    wrong = ["Analysis.\n", "Overall judgment:", " In", "correct", "\n"]
    assert confidence(wrong, halves) == pytest.approx(1 - 0.4)
    right = ["Analysis.\n", "Overall judgment: ", "Cor", "rect", "\n"]
    assert confidence(right, halves) == pytest.approx(0.4)
    assert confidence(["no judgment"], [-0.1]) is None
    assert confidence(right, ()) is None


@given(st.data(), st.sampled_from([JUDGED_CORRECT, JUDGED_INCORRECT]), st.text(max_size=8))
def test_wherever_the_text_is_cut_the_tokens_of_the_word_count(
    data: st.DataObject, line: str, before: str
) -> None:
    text = f"{before}{line}\nbye"
    places = data.draw(st.sets(st.integers(1, len(text) - 1)))
    edges = [0, *sorted(places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    found = find_judgment_word(text)
    assert found is not None and text[found[0] : found[1]] == line.split()[-1]
    assert found[2] is parse_judgment(text)
    logs = [-0.01 * (number + 1) for number in range(len(pieces))]
    touched = [
        log
        for log, a, b in zip(logs, edges, edges[1:], strict=False)
        if a < found[1] and b > found[0]
    ]
    chosen = math.exp(sum(touched))
    assert confidence(pieces, logs) == pytest.approx(chosen if found[2] else 1 - chosen)
