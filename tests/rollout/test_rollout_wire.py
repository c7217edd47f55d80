"""Records and errors survive the way between processes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensor_specs import names, specs

from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.engine import EngineBroken, EngineError, EngineSpec
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec, VersionSpan

completions = st.builds(
    Completion,
    token_ids=st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    log_probs=st.lists(st.floats(max_value=0.0, allow_nan=False), max_size=5).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    spans=st.lists(
        st.builds(VersionSpan, names, st.integers(0, 9), st.integers(0, 9)), max_size=3
    ).map(tuple),
    order=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 2**62),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@given(completions, params, st.lists(specs, max_size=4).map(tuple))
def test_records_survive_the_wire(
    made: Completion, asked: SamplingParams, tensors: tuple[TensorSpec, ...]
) -> None:
    def travel(data: object) -> Any:
        return json.loads(json.dumps(data))

    assert wire.completion_from_json(travel(wire.completion_to_json(made))) == made
    assert wire.params_from_json(travel(asdict(asked))) == asked
    assert wire.specs_from_json(travel([asdict(spec) for spec in tensors])) == tensors


@pytest.mark.parametrize("error", [ValueError("x"), EngineBroken("y")])
def test_errors_keep_their_type(error: Exception) -> None:
    arrived = wire.error_from_json(wire.error_to_json(error))
    assert type(arrived) is type(error) and str(arrived) == str(error)


def test_an_engine_that_may_not_sleep_says_so_on_the_other_side() -> None:
    with pytest.raises(ValueError) as caught:
        EngineSpec(name="hf", model_path="x", max_model_len=8).require_sleep_allowed()
    with pytest.raises(ValueError, match="started without may_sleep"):
        raise wire.error_from_json(wire.error_to_json(caught.value))


def test_other_errors_arrive_as_engine_errors_with_their_name() -> None:
    arrived = wire.error_from_json(wire.error_to_json(KeyError("w")))
    assert type(arrived) is EngineError and str(arrived) == "KeyError: 'w'"
