"""The placement of engines: every GPU is in exactly one engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.parallel.placement import (
    EnginePlacement,
    Placement,
    default_sandbox_workers,
    engine_devices,
    place_engines,
)


def placed(
    nodes: int,
    ranks: int,
    tensor: int,
    *,
    placement: EnginePlacement = "colocated",
    gpus: int | None = None,
    visible: int | None = 64,
) -> Placement:
    there = engine_devices(
        ranks, placement=placement, engine_gpus=gpus, tensor=tensor, visible=visible
    )
    return place_engines([there] * nodes, tensor=tensor)


def held(placement: Placement) -> list[tuple[int, int]]:
    """(host, device) of everything that engines have."""
    return [(engine.host, device) for engine in placement.engines for device in engine.devices]


@given(
    nodes=st.sampled_from([1, 2, 8, 64]),
    tensor=st.integers(1, 8),
    engines=st.integers(1, 8),
    trainer=st.integers(1, 8),
    dedicated=st.booleans(),
)
def test_every_gpu_of_every_host_is_in_exactly_one_engine(
    nodes: int, tensor: int, engines: int, trainer: int, dedicated: bool
) -> None:
    gpus = tensor * engines
    if dedicated:
        plan = placed(nodes, trainer, tensor, placement="dedicated", gpus=gpus, visible=72)
        wanted = {(h, trainer + g) for h in range(nodes) for g in range(gpus)}
    else:
        plan = placed(nodes, gpus, tensor)
        wanted = {(h, g) for h in range(nodes) for g in range(gpus)}
    assert len(held(plan)) == len(wanted) and set(held(plan)) == wanted
    assert len(plan.engines) == nodes * engines
    assert [engine.number for engine in plan.engines] == list(range(nodes * engines))
    assert all(len(engine.devices) == tensor for engine in plan.engines)
    # Neighbours, which share the fastest links.
    assert all(b == a + 1 for engine in plan.engines for a, b in pairwise(engine.devices))
    assert plan.hosts == tuple(range(nodes))
    assert [engine for host in plan.hosts for engine in plan.engines_on(host)] == list(plan.engines)


@given(first=st.integers(1, 4), second=st.integers(1, 4), tensor=st.integers(1, 8))
def test_hosts_may_differ(first: int, second: int, tensor: int) -> None:
    plan = place_engines([range(first * tensor), range(second * tensor)], tensor=tensor)
    assert (len(plan.engines_on(0)), len(plan.engines_on(1))) == (first, second)


@given(nodes=st.integers(1, 6), spans=st.integers(2, 4), each=st.integers(1, 8))
def test_an_engine_with_more_devices_than_a_host_has_whole_hosts(
    nodes: int, spans: int, each: int
) -> None:
    plan = placed(nodes * spans, each, spans * each)
    assert len(plan.engines) == nodes and plan.hosts == tuple(range(nodes * spans))
    for number, engine in enumerate(plan.engines):
        assert list(engine.hosts) == list(range(number * spans, (number + 1) * spans))
        assert plan.engines_served_by(number * spans) == (engine,)
        assert all(plan.engines_on(host) == (engine,) for host in engine.hosts)
        assert all(engine.devices_on(host) == tuple(range(each)) for host in engine.hosts)
    there = [
        (host, device)
        for engine in plan.engines
        for host, device in zip(engine.host_of_worker, engine.devices, strict=True)
    ]
    assert there == [(host, device) for host in range(nodes * spans) for device in range(each)]
    beside = place_engines([range(2 * each), range(each), range(each)], tensor=2 * each)
    assert [engine.spans for engine in beside.engines] == [1, 2]


def test_a_host_on_a_cpu_has_one_engine_by_default() -> None:
    assert len(placed(2, 4, 1, visible=None).engines) == 2
    assert len(placed(2, 4, 3, visible=None).engines) == 2
    assert len(placed(2, 2, 1, gpus=2, visible=None).engines) == 4


def test_what_leaves_a_gpu_without_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="size=3 does not divide the 8 devices of host 0"):
        placed(2, 8, 3)
    with pytest.raises(ValueError, match="size=16 does not divide the 8 devices of host 2"):
        placed(3, 8, 16)
    with pytest.raises(ValueError, match="size=8 does not divide the 4 devices of host 0"):
        place_engines([range(4), range(2), range(2)], tensor=8)
    with pytest.raises(ValueError, match=r"n_gpus_per_node=4 is not possible .* leave it out"):
        placed(1, 8, 2, gpus=4)
    with pytest.raises(ValueError, match=r"dedicated needs actor_rollout_ref\.rollout\.n_gpus"):
        placed(1, 8, 2, placement="dedicated")
    with pytest.raises(ValueError, match=r"8 GPUs .* beside 4 ranks make 12, but a rank sees 8"):
        placed(1, 4, 2, placement="dedicated", gpus=8, visible=8)


@given(
    trainer=st.integers(1, 8),
    actor=st.integers(0, 8),
    proxy=st.integers(1, 8),
    visible=st.integers(1, 24),
)
def test_trainer_actor_and_proxy_have_gpus_of_their_own(
    trainer: int, actor: int, proxy: int, visible: int
) -> None:
    def there() -> range:
        return engine_devices(
            trainer + actor,
            placement="dedicated",
            engine_gpus=proxy,
            tensor=1,
            visible=visible,
            role="proxy",
        )

    if trainer + actor + proxy > visible:
        with pytest.raises(ValueError, match=r"proxy\.engine\.n_gpus_per_node=\d+ GPUs .* sees"):
            there()
        return
    assert there() == range(trainer + actor, trainer + actor + proxy)
    own = place_engines([there()] * 2, tensor=1, role="proxy", first=3)
    assert [engine.number for engine in own.engines] == list(range(3, 3 + 2 * proxy))
    plan = Placement(engines=(*placed(2, trainer, 1).engines, *own.engines))
    assert plan.of_role("proxy") == own and plan.of_role("rollout") == placed(2, trainer, 1)


def test_a_proxy_needs_gpus_where_there_are_gpus() -> None:
    keys: dict[str, Any] = {"placement": "dedicated", "engine_gpus": None, "role": "proxy"}
    with pytest.raises(ValueError, match=r"kind=engine needs .*proxy\.engine\.n_gpus_per_node"):
        engine_devices(4, **keys, tensor=1, visible=8)
    assert engine_devices(4, **keys, tensor=2, visible=None) == range(2)


def test_the_sandbox_leaves_the_ranks_their_cores() -> None:
    assert default_sandbox_workers(96, 8) == 88
    assert default_sandbox_workers(2, 2) == default_sandbox_workers(1, 8) == 1
