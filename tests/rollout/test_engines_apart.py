"""Engines on ranks without a model: where they are, who sends them weights, what a configuration
must say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.config import Config, check_world_size, load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.hosts import Hosts, hosts_from_identities
from ctrl_megatron.parallel.layout import world_of_role, worlds_of
from ctrl_megatron.parallel.placement import EnginePlace
from ctrl_megatron.rollout.engine import EngineDied
from ctrl_megatron.rollout.engine_specs import engine_placement
from ctrl_megatron.rollout.kept_engine import LedEngine

_R, _P = "actor_rollout_ref.rollout.", "actor_rollout_ref.proxy."
_DEDICATED = (f"{_R}placement=dedicated", f"{_R}weight_transport=nccl", f"{_P}kind=engine")
_OWN_PROXY = (f"{_P}engine.n_gpus_per_node=2", f"{_P}engine.name=vllm")


def configured(*overrides: str) -> Config:
    given = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=/model")
    sizes = ("trainer.nnodes=3", "trainer.n_gpus_per_node=4", f"{_R}name=vllm")
    return load_config(None, [*given, *sizes, *_OWN_PROXY, *_DEDICATED, *overrides], "rl")


def hosts_of(each: int, count: int) -> Hosts:
    return hosts_from_identities([(str(rank // each), None) for rank in range(each * count)])


def test_engines_have_the_devices_of_their_ranks_and_the_trainers_hosts_lead_them() -> None:
    config = configured("placement.rollout={hosts: [2]}", "placement.sandbox={hosts: [2]}")
    check_world_size(config, 12)
    worlds = worlds_of(12, config)
    assert [(w.roles, w.ranks) for w in worlds] == [
        (("actor",), tuple(range(8))),
        (("rollout", "sandbox"), (8, 9, 10, 11)),
    ]
    assert worlds[1].serves and not worlds[0].serves
    assert world_of_role(worlds, "sandbox") is worlds[1]
    found = engine_placement(config, hosts_of(4, 3), worlds, visible=4)
    # The proxy's two GPUs come behind those of the actor's engines, which have the others.
    told = [(e.role, e.host, e.devices) for e in found.engines]
    assert told == [
        *(("rollout", 0, (0,)), ("rollout", 0, (1,))),
        *(("proxy", 0, (2,)), ("proxy", 0, (3,))),
    ]
    assert [e.host for e in found.of_role("rollout").led_from(2).engines] == [0, 1]


def test_a_share_of_a_host_has_its_last_devices() -> None:
    config = configured("trainer.nnodes=1", "placement.rollout={share: 0.5}")
    one = configured(
        *("trainer.nnodes=1", "placement.rollout={share: 0.5}"), f"{_P}engine.n_gpus_per_node=1"
    )
    worlds = worlds_of(4, config)
    found = engine_placement(one, hosts_of(4, 1), worlds, visible=4)
    told = [(e.role, e.devices) for e in found.engines]
    assert told == [("rollout", (2,)), ("proxy", (3,))]
    with pytest.raises(UserError, match=r"placement\.rollout: the proxy's engines leave"):
        engine_placement(config, hosts_of(4, 1), worlds, visible=4)
    # Without GPUs an engine needs no device.
    assert len(engine_placement(config, hosts_of(4, 1), worlds, visible=None).engines) == 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((f"{_R}placement=colocated", f"{_R}weight_transport=shards"), "placement=dedicated"),
        ((f"{_R}weight_transport=shared_memory",), "starts no engine; set it to nccl"),
        ((f"{_P}kind=shared",), r"engines of its own \(kind=engine\)"),
    ],
)
def test_what_engines_apart_need_is_said(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        configured("placement.rollout={hosts: [2]}", *overrides)


def test_engines_share_their_ranks_with_no_model() -> None:
    ppo = ("algorithm.adv_estimator=gae", "placement.critic={hosts: [2]}")
    with pytest.raises(UserError, match="share their devices with the model of critic"):
        check_world_size(configured("placement.rollout={hosts: [2]}", *ppo), 12)


def test_a_led_engine_that_is_another_process_has_no_weights() -> None:
    answers: list[Any] = ["a", "a", EngineDied("gone"), "b", "b"]

    class Client:
        address = SimpleNamespace(name="engine 0")

        async def process_identity(self) -> str:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def close(self) -> None: ...

    client: Any = Client()

    async def look() -> None:
        engine = LedEngine(client)
        assert await engine.is_up(1.0) and await engine.is_up(1.0) and not engine.fresh
        assert not await engine.is_up(1.0)
        assert await engine.is_up(1.0) and engine.fresh and engine.restarts == 1
        assert await engine.wait_until_up(1.0) and not engine.fresh

    asyncio.run(look())


def test_a_further_policys_dedicated_engines_have_the_next_devices() -> None:
    own = "policies.agent1.actor_rollout_ref."
    given = (
        *("actor_rollout_ref.model.path=m", "data.train_files=d", "trainer.n_gpus_per_node=2"),
        *("dag.custom_pipeline_fn=mine:build", f"{own}model.path=solver"),
        *(f"{_R}placement=dedicated", f"{_R}n_gpus_per_node=2", f"{own}rollout.name=hf"),
        *(f"{_P}kind=engine", f"{_P}engine.n_gpus_per_node=1", f"{own}rollout.n_gpus_per_node=1"),
    )
    config = load_config(None, given)
    assert config.engine_gpus_per_node == 4
    worlds, hosts, beside = worlds_of(2, config), hosts_of(2, 1), list[EnginePlace]()
    found = list[tuple[str, tuple[int, ...]]]()
    for own_config in (config, config.agents[1]):
        placed = engine_placement(own_config, hosts, worlds, visible=6, beside=beside)
        beside += placed.engines
        found += [(engine.role, engine.devices) for engine in placed.engines]
    assert found == [("rollout", (2,)), ("rollout", (3,)), ("proxy", (4,)), ("rollout", (5,))]
