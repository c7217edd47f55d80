"""The line in which a critic commits itself."""

from __future__ import annotations

JUDGED_CORRECT = "Overall judgment: Correct"
JUDGED_INCORRECT = "Overall judgment: Incorrect"


def parse_judgment(critique: str) -> bool | None:
    """What a critique says about the answer: True correct, False incorrect, None where it does not
    say.

    The two judgment strings count anywhere and case-sensitively, as in CTRL; anything else (a bold
    label, another case) is no judgment. Where a critique contains both, the last one holds.
    """
    correct = critique.rfind(JUDGED_CORRECT)
    incorrect = critique.rfind(JUDGED_INCORRECT)
    return None if correct == incorrect else correct > incorrect
