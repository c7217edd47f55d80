"""Records and errors survive the way between processes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensor_specs import names, specs

from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.engine import (
    Chunk,
    EngineBroken,
    EngineError,
    Slot,
)
from ctrl_megatron.types import Completion, SamplingParams, VersionSpan

completions = st.builds(
    Completion,
    token_ids=st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    log_probs=st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=5).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    spans=st.lists(
        st.builds(VersionSpan, names, st.integers(0, 9), st.integers(0, 9)), max_size=3
    ).map(tuple),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**62),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
chunks_of = st.builds(
    Chunk,
    names,
    st.lists(st.builds(Slot, specs, st.integers(0, 2**40)), max_size=4).map(tuple),
)


@given(completions, params, chunks_of)
def test_records_survive_the_wire(made: Completion, asked: SamplingParams, chunk: Chunk) -> None:
    def travel(data: object) -> dict:
        return json.loads(json.dumps(data))

    assert wire.completion_from_json(travel(wire.completion_to_json(made))) == made
    assert wire.params_from_json(travel(wire.params_to_json(asked))) == asked
    assert wire.chunk_from_json(travel(wire.chunk_to_json(chunk))) == chunk


@pytest.mark.parametrize("error", [ValueError("x"), EngineBroken("y"), NotImplementedError("z")])
def test_errors_keep_their_type(error: Exception) -> None:
    arrived = wire.error_from_json(wire.error_to_json(error))
    assert type(arrived) is type(error) and str(arrived) == str(error)


def test_other_errors_arrive_as_engine_errors_with_their_name() -> None:
    arrived = wire.error_from_json(wire.error_to_json(KeyError("w")))
    assert type(arrived) is EngineError and str(arrived) == "KeyError: 'w'"
