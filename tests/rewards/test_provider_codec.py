"""Results of a provider's machine: equal after a round trip, and nothing malformed gets in."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from crossing_values import shape, values
from hypothesis import example, given
from hypothesis import strategies as st

from ctrl_megatron.rewards.providers import codec


def there_and_back(value: Any) -> Any:
    return codec.decode(json.loads(json.dumps(codec.encode(value))))


@given(values)
def test_round_trip_keeps_value_and_types(value: Any) -> None:
    assert there_and_back(value) == value
    assert shape(there_and_back(value)) == shape(value)


@given(values)
def test_equal_values_have_equal_codes(value: Any) -> None:
    assert codec.encode(there_and_back(value)) == codec.encode(value)


class Colour(IntEnum):
    RED = 3


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, 3),
        (Liar(5), 5),
        (Counter("aab"), Counter("aab")),
        (defaultdict(list, {1: [2]}), defaultdict(list, {1: [2]})),
        (slice(1, None, 2), slice(1, None, 2)),
        (int, int),
        (OrderedDict(a=1), OrderedDict(a=1)),
        (range(2, 9, 3), range(2, 9, 3)),
        (float("inf"), float("inf")),
        (bytearray(b"x"), bytearray(b"x")),
        ("\ud800", "\ud800"),
        ({1: 2}.keys(), {1: 2}.keys()),
    ],
)
def test_subclasses_are_encoded_as_their_plain_value(value: Any, plain: Any) -> None:
    got = there_and_back(value)
    assert type(got) is type(plain)
    assert plain == got


def test_a_named_tuple_keeps_its_names_and_brings_no_method() -> None:
    got = there_and_back(namedtuple("Point", "x count")(1, 2))
    assert got == (1, 2) and got.x == 1 and got.count == 2 and type(got).__name__ == "Point"

    class Sum(namedtuple("Pair", "x y")):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert type(there_and_back(Sum(1, 2))) is tuple
    code = ["named", "P", ["startswith"], [["object", 0]]]
    with pytest.raises(codec.CodecError, match="has the name of a method"):
        codec.decode(code, lambda _: print)


def test_a_default_that_is_no_type_is_left_out() -> None:
    got = there_and_back(defaultdict(lambda: 3, a=1))
    assert type(got) is defaultdict and got == {"a": 1} and got.default_factory is None


def test_not_a_number_and_iterators() -> None:
    nan = there_and_back(float("nan"))
    assert nan != nan
    assert list(there_and_back(i * i for i in range(3))) == [0, 1, 4]
    assert list(there_and_back(zip("ab", [1, 2], strict=True))) == [("a", 1), ("b", 2)]


def test_each_side_decides_about_other_objects() -> None:
    kept: list[Any] = []

    def hold(value: Any) -> Any:
        kept.append(value)
        return ["object", len(kept) - 1]

    data = json.loads(json.dumps(codec.encode([1, {"f": len}, (object,)], hold)))
    assert codec.decode(data, lambda rest: kept[rest[0]]) == [1, {"f": len}, (object,)]
    for refused in (lambda: codec.encode(len), lambda: codec.decode(["object", 0])):
        with pytest.raises(codec.CodecError, match="cannot be passed"):
            refused()


def test_too_deep_values_are_refused() -> None:
    value: list[Any] = []
    for _ in range(1000):
        value = [value]
    with pytest.raises(codec.CodecError):
        codec.encode(value)
    data: list[Any] = ["list", []]
    for _ in range(400):
        data = ["list", [data]]
    with pytest.raises(codec.CodecError):
        codec.decode(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)
tagged = st.recursive(
    json_values,
    lambda inner: st.builds(
        lambda tag, rest: [tag, *rest],
        st.sampled_from(sorted(codec._DECODERS)),
        st.lists(inner | st.lists(inner, max_size=3), max_size=3),
    ),
    max_leaves=8,
)


@given(tagged)
@example(["items", [[None, None], {}]])
def test_whatever_arrives_is_a_value_or_an_error(data: Any) -> None:
    try:
        codec.decode(data)
    except codec.CodecError:
        return


def test_all_dates_cross() -> None:
    for value in (
        date(2024, 2, 29),
        datetime(2024, 1, 1, 3),
        time(3, 4, 5),
        timedelta(days=-1),
        Fraction(1, 3),
    ):
        assert there_and_back(value) == value
    assert str(there_and_back(Decimal("1.50"))) == "1.50"
