"""The spec that an engine's process receives, and the names of engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctrl_megatron.config.environment import set_device_variables
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.rollout.engine import EnginePart, EngineSpec, available_engines, require_engine
from ctrl_megatron.rollout.launch import engine_environment


def test_an_engine_does_not_take_itself_for_a_trainer_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    made = engine_environment(EngineSpec(name="vllm", model_path="m", threads=3))
    assert not {"RANK", "MASTER_PORT"} & made.keys()
    assert made["SOMETHING_ELSE"] == "kept" and made["OMP_NUM_THREADS"] == "3"
    assert made["HF_HUB_OFFLINE"] == "1"
    other = engine_environment(EngineSpec(name="hf", model_path="m"))
    assert "OMP_NUM_THREADS" not in other
    assert not any(name.startswith("VLLM_USE") for name in other)


def test_the_parts_of_an_engine_talk_over_the_interface_of_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    part = EnginePart(number=1, of=2, first="10.7.7.7", group_port=1, watch_port=2, token="t")
    spec = EngineSpec(name="vllm", model_path="m", host="127.0.0.1", part=part)
    assert engine_environment(spec)["GLOO_SOCKET_IFNAME"] == "lo"
    with pytest.raises(ValueError, match=r"no network interface .* 203\.0\.113\.9; set GLOO"):
        engine_environment(replace(spec, host="203.0.113.9"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert engine_environment(spec)["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")]
)
def test_threads_of_an_engine_wait_as_the_user_says(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    spec = EngineSpec(name="hf", model_path="m")
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    assert engine_environment(spec)["GOMP_SPINCOUNT"] == "8000"
    monkeypatch.setenv(name, value)
    made = engine_environment(spec)
    assert made[name] == value and {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & made.keys() == {name}


def test_engines_that_cannot_be_started_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="unknown engine 'vlm'"):
        require_engine("vlm")
    assert "hf" in available_engines()
    for name in ("vllm", "sglang"):
        absent = replace(ENGINES[name], library="no_such_module_anywhere")
        monkeypatch.setitem(ENGINES, name, absent)  # type: ignore[arg-type]
    assert available_engines() == ("hf", "diffusion")
    for name in ("vllm", "sglang"):
        with pytest.raises(ValueError, match=f"'{name}' is not installed here; install the extra"):
            require_engine(name)


def test_an_engine_gets_none_of_a_ranks_device_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    order, memory = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"
    set_device_variables(1, environ := {})
    assert environ == {memory: "expandable_segments:True"}
    set_device_variables(2, environ)
    assert environ == {memory: "expandable_segments:True", order: "1"}
    given = {order: "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    set_device_variables(2, kept := dict(given))
    assert kept == given
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert not environ.keys() & engine_environment(EngineSpec(name="vllm", model_path="m")).keys()
    # The user's settings are the engine's, too.
    monkeypatch.setenv(memory, "max_split_size_mb:64")
    engines = engine_environment(EngineSpec(name="vllm", model_path="m"))
    assert engines[memory] == "max_split_size_mb:64"
