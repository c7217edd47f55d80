"""Data between judge and program: equal after a round trip, with its identities, and nothing
malformed gets in.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from crossing_values import shape, values
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.sandbox.jail import data


def there_and_back(value: Any) -> Any:
    """What a message carries: a value, and the contents of the containers in it."""
    numbers, met = dict[int, int](), list[Any]()

    def refer(container: Any) -> Any:
        if type(container) not in data.MUTABLE:
            raise data.DataError("no data")
        if id(container) not in numbers:
            numbers[id(container)] = len(met)
            met.append(container)
        return ["ref", numbers[id(container)]]

    told = [data.encode_value(value, refer)]
    contents = []
    for container in met:  # grows while it is read
        contents.append(
            data.encode_contents(container, lambda part: data.encode_value(part, refer))
        )
    (top,), contents = json.loads(json.dumps([told, contents]))
    made = [data.empty_container(content) for content in contents]

    def decode(encoded: Any) -> Any:
        return data.decode_value(encoded, lambda reference: made[reference[1]])

    for container, content in zip(made, contents, strict=True):
        data.fill_container(container, content, decode)
    return decode(top)


@given(values)
def test_round_trip_keeps_value_and_types(value: Any) -> None:
    assert there_and_back(value) == value
    assert shape(there_and_back(value)) == shape(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter("aab"),
        OrderedDict([("b", 1), ("a", 2)]),
        defaultdict(list, {1: [2]}),
        deque([1, 2], maxlen=2),
        SimpleNamespace(a=1),
        bytearray(b"x"),
        {1: 2}.keys(),
        list[int],
        int | None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_kinds_cross_too(value: Any) -> None:
    got = there_and_back(value)
    assert type(got) is type(value) and got == value


def test_identities_and_cycles_are_kept() -> None:
    row: list[Any] = [0]
    grid = [row, row, {"row": row}]
    grid.append(grid)
    got = there_and_back(grid)
    assert got[0] is got[1] is got[2]["row"] and got[3] is got


@given(values, values)
def test_a_change_is_noticed(before: Any, after: Any) -> None:
    held = [before]
    seen = data.container_state(held)
    assert not data.is_changed(held, seen)
    held.append(after)
    assert data.is_changed(held, seen)


def refuse(_: Any) -> NoReturn:
    raise data.DataError("no data")


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
        st.sampled_from(sorted(data._DECODERS)),
        st.lists(inner | st.lists(inner, max_size=3), max_size=3),
    ),
    max_leaves=8,
)


@given(tagged)
def test_whatever_arrives_is_a_value_or_an_error(encoded: Any) -> None:
    try:
        data.decode_value(encoded, refuse)
    except data.DataError:
        return


@given(st.lists(json_values, max_size=4))
def test_whatever_content_arrives_fills_a_container_or_is_an_error(content: Any) -> None:
    try:
        data.fill_container(
            data.empty_container(content), content, lambda part: data.decode_value(part, refuse)
        )
    except data.DataError:
        return


def test_too_deep_tuples_are_refused() -> None:
    value: Any = ()
    for _ in range(1000):
        value = (value,)
    with pytest.raises(data.DataError, match="deeper"):
        data.encode_value(value, refuse)
