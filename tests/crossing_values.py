"""Random values of builtin data types, for tests of what crosses between processes."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import strategies as st

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**300), max_value=2**300)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
)
hashable = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
values = st.recursive(
    atoms | st.sets(hashable, max_size=4) | st.frozensets(hashable, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(hashable, inner, max_size=4)
    ),
    max_leaves=15,
)


def shape(value: Any) -> Any:
    """The exact types of a value, all the way down."""
    if isinstance(value, dict):
        return type(value), [(shape(k), shape(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [shape(item) for item in value]
    return type(value)
