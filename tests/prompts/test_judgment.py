from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.prompts import JUDGED_CORRECT, JUDGED_INCORRECT, parse_judgment


@pytest.mark.parametrize(
    ("critique", "expected"),
    [
        ("Analysis: fine.\nOverall judgment: Correct", True),
        ("Analysis: bad.\nOverall judgment: Incorrect\n", False),
        ("in the middle Overall judgment: Correct, I think", True),
        ("Overall judgment: Correct\n...\nOverall judgment: Incorrect", False),
        ("Overall judgment: Incorrect\n...\nOverall judgment: Correct", True),
        ("**Overall judgment:** Correct", None),
        ("Overall judgment: correct", None),
        ("overall judgment: Correct", None),
        ("Overall Judgment: Incorrect", None),
        ("Overall judgment:Correct", None),
        ("Overall judgment:  Correct", None),
        ("Overall judgment: (Correct or Incorrect)", None),
        ("Correct", None),
        ("", None),
    ],
)
def test_only_the_exact_strings_count(critique: str, expected: bool | None) -> None:
    assert parse_judgment(critique) is expected


@given(st.text(), st.text())
def test_valid_exactly_when_a_judgment_string_occurs(before: str, after: str) -> None:
    assert parse_judgment(f"{before}{JUDGED_INCORRECT}{after}") is not None
    text = before + after
    assert (parse_judgment(text) is not None) == (
        JUDGED_CORRECT in text or JUDGED_INCORRECT in text
    )
