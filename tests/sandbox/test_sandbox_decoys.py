"""Data that a program cannot distinguish from a test's own."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.sandbox.jail.decoys import FAMILY, family_of

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_a_family_holds_the_data_once_and_others_beside_it(data: Any) -> None:
    family = family_of(data)
    assert 2 <= len(family) <= FAMILY
    assert sum(member is data for member in family) >= 1
    assert len({repr(member) for member in family}) == len(family)


@pytest.mark.parametrize("data", [math.inf, -math.inf, math.nan, 1e300, 2**70, 0, b"", (), "é"])
def test_odd_data_has_a_family_too(data: Any) -> None:
    assert len(family_of(data)) > 5


GUESSES = {
    "the first": lambda family: family[0],
    "the last": lambda family: family[-1],
    "the smallest": lambda family: min(family, key=order),
    "the largest": lambda family: max(family, key=order),
    "the middle": lambda family: sorted(family, key=order)[len(family) // 2],
    "the shortest": lambda family: min(family, key=lambda member: len(str(member))),
    "the one with most relatives": lambda family: max(
        family, key=lambda one: sum(near(one, other) for other in family)
    ),
}


def order(member: Any) -> Any:
    return member if isinstance(member, int) else str(member)


def near(one: Any, other: Any) -> bool:
    if isinstance(one, int):
        return abs(one - other) <= 3
    length = abs(len(one) - len(other))
    return length + sum(a != b for a, b in zip(one, other, strict=False)) <= 1


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("data", [7, "hello world", [3, 1, 2]], ids=["number", "text", "list"])
def test_no_guess_finds_it_often(data: Any, guess: str) -> None:
    """A program may say yes once; a family of ten leaves an uninformed guess a tenth."""
    found = Counter(GUESSES[guess](family_of(data)) == data for _ in range(400))
    assert found[True] < 0.4 * 400
