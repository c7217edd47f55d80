"""The probability that a critic gives to its judgment, from the tokens that it has drawn."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from ctrl_megatron.prompts.messages import find_judgment_word
from ctrl_megatron.types import Completion


class Decoder(Protocol):
    """Makes a text of tokens."""

    def decode(self, ids: Sequence[int], /) -> str: ...


def judgment_confidence(decoder: Decoder, completion: Completion, text: str) -> float | None:
    """Probability of "Correct" at the place of the judgment in ``text``, which is the decoded
    completion: exp of the summed log-probs of the tokens of that word, or one minus that where the
    word is "Incorrect".

    None where the text has no judgment, and for a completion without log-probs. The log-probs are
    those at the sampling temperature (``Completion.log_probs``).
    """
    found = find_judgment_word(text)
    if found is None or not completion.log_probs:
        return None
    start, end, correct = found
    ids = completion.token_ids

    def decoded(count: int) -> int:
        return len(decoder.decode(ids[:count]))

    counts = range(len(ids) + 1)
    # The token before the first prefix that is longer than ``start`` characters has the word's
    # first one.
    first = bisect_left(counts, start + 1, key=decoded) - 1
    last = bisect_left(counts, end, key=decoded)
    chosen = math.exp(min(0.0, sum(completion.log_probs[first:last])))
    return chosen if correct else 1.0 - chosen
