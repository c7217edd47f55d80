"""Specs of tensors, made by hand and by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from ctrl_megatron.types import TensorSpec

names = st.text("abcdef.", min_size=1, max_size=6)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
specs = st.builds(TensorSpec, name=names, dtype=dtypes, shape=shapes)


def spec(name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)
