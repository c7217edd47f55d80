"""Which engines the configuration asks for: their placement and their specifications."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from ctrl_megatron.config import Config
from ctrl_megatron.config.actor_rollout_ref import EngineConfig
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.lora import lora_of_config, shape_with_adapters
from ctrl_megatron.models.shape import AnyShape
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.hosts import Hosts, free_ports
from ctrl_megatron.parallel.layout import World, world_of_role
from ctrl_megatron.parallel.placement import (
    EnginePlace,
    EnginePlacement,
    EngineRole,
    Placement,
    engine_devices,
    place_engines,
)
from ctrl_megatron.rollout.engine import EnginePart, EngineSpec
from ctrl_megatron.sandbox.cores import usable_cores


def engine_config(config: Config, role: EngineRole) -> EngineConfig:
    """The configuration of the engines that play ``role``."""
    family = config.actor_rollout_ref
    return family.rollout if role == "rollout" else family.proxy.engine


def engine_placement(
    config: Config,
    hosts: Hosts,
    worlds: Sequence[World],
    *,
    visible: int | None,
    beside: Sequence[EnginePlace] = (),
) -> Placement:
    """The placement of the configured engines on the hosts of their world's ranks: first the
    actor's, then the proxy's own. ``hosts`` are those of all ranks, which see ``visible`` GPUs
    each; None where there are none. The devices of the dedicated engines ``beside`` are taken.
    Pure.
    """
    rollout, world = config.actor_rollout_ref.rollout, world_of_role(worlds, "rollout")
    apart, own = world is not worlds[0], hosts.restricted_to_ranks(world.ranks)
    ranks = [own.ranks_on(host) for host in range(len(own.names))]
    firsts = [world.ranks[own.first_rank(host)] for host in range(len(own.names))]
    # Other engines than colocated ones follow the GPUs of a host's ranks, or have those of theirs.
    taken = [
        hosts.of_rank[:first].count(hosts.of_rank[first])
        if apart
        else hosts.ranks_on(hosts.of_rank[first])
        for first in firsts
    ]
    taken = [
        count + sum(len(engine.devices_on(host)) for engine in beside if host in engine.hosts)
        for host, count in enumerate(taken)
    ]
    proxy = config.actor_rollout_ref.proxy.engine
    proxies = proxy.n_gpus_per_node or 0 if config.has_proxy_engines else 0

    def placed(
        role: EngineRole, taken: Sequence[int], placement: EnginePlacement, first: int
    ) -> Placement:
        keys = engine_config(config, role)
        tensor, gpus = keys.tensor_model_parallel_size, keys.n_gpus_per_node
        whole = apart and role == "rollout" and gpus is None and visible is not None
        devices = [
            engine_devices(
                count,
                placement=placement,
                engine_gpus=ranks[host] - proxies if whole else gpus,
                tensor=tensor,
                visible=visible,
                role=role,
            )
            for host, count in enumerate(taken)
        ]
        return place_engines(devices, tensor=tensor, role=role, first=first)

    colocated = rollout.placement == "colocated"
    actors = placed("rollout", ranks if colocated else taken, rollout.placement, 0)
    if not config.has_proxy_engines:
        return actors
    if not colocated:
        taken = [
            count + sum(len(e.devices_on(host)) for e in actors.engines_on(host))
            for host, count in enumerate(taken)
        ]
    others = placed("proxy", taken, "dedicated", len(actors.engines))
    return Placement(engines=actors.engines + others.engines)


def led_placement(placement: Placement, hosts: Hosts, worlds: Sequence[World]) -> Placement:
    """The engines of ``engine_placement`` on the hosts of the actor's world, which send them
    weights. Pure."""
    if world_of_role(worlds, "rollout") is worlds[0]:
        return placement
    return placement.led_from(len(hosts.restricted_to_ranks(worlds[0].ranks).names))


def allocate_engine_rendezvous(
    placement: Placement, groups: ProcessGroups
) -> dict[int, EnginePart]:
    """The first part of every engine that spans hosts, by the engine's number: where its parts
    meet. Collective."""
    spanning = [engine for engine in placement.engines if engine.spans > 1]
    if not spanning:
        return {}
    address = groups.hosts.addresses[groups.host_index]
    parts: dict[int, EnginePart] = {}
    for engine in spanning if groups.is_first_of_host else ():
        if engine.host == groups.host_index:
            group, watch = free_ports(address, 2)
            parts[engine.number] = EnginePart(
                number=0,
                of=engine.spans,
                first=address,
                group_port=group,
                watch_port=watch,
                token=secrets.token_urlsafe(32),
            )
    return {number: part for found in groups.all_gather(parts) for number, part in found.items()}


def engine_spec(
    config: Config,
    groups: ProcessGroups,
    placement: Placement,
    place: EnginePlace,
    max_model_len: int,
    part: EnginePart | None = None,
) -> EngineSpec:
    """The configured engine at one of its places, or its ``part`` there: with the proxy's weights,
    or waiting for those of the policy whose configuration this is."""
    family, keys = config.actor_rollout_ref, engine_config(config, place.role)
    hosts, host = groups.hosts, place.host + (part.number if part else 0)
    together = len(placement.engines_on(host))
    same = placement.of_role(place.role).engines
    number = place.number - same[0].number
    on_gpus, is_actor = groups.device.type == "cuda", place.role == "rollout"
    policy = f"agent{config.number}" if config.number else ""
    whose = policy if is_actor else "proxy"
    file = (f"{policy}_engine" if policy else "engine") if is_actor else "proxy"
    name = f"{whose} ({keys.name})" if whose else keys.name
    log = f"{file}.{number}" if number else file
    if part and part.number:
        log += f".part{part.number}"
    adapters_alone = pushes_adapters(config)
    # Otherwise each engine of a host would compute with all its cores.
    share = None if on_gpus or together == 1 else max(1, usable_cores() // together)
    return EngineSpec(
        name=keys.name,
        python=keys.python,
        title=name if len(same) == place.spans == 1 else f"{name} {number} on {hosts.names[host]}",
        host=hosts.addresses[host],
        devices=place.devices_on(host) if on_gpus else (),
        model_path=family.model.path if is_actor else proxy_path(config),
        dtype=family.engine_dtype(keys),
        max_model_len=max_model_len,
        tensor_parallel_size=keys.tensor_model_parallel_size,
        part=part,
        gpu_memory_utilization=keys.gpu_memory_utilization,
        kv_cache_gib=keys.kv_cache_gib,
        max_num_seqs=max_sequences(keys, groups.device),
        enforce_eager=keys.enforce_eager,
        # The proxy's own engines keep the weights of their directory, and so do those that get
        # adapters.
        awaits_weights=is_actor and not adapters_alone,
        lora=actor_shape(config).lora if is_actor and adapters_alone else None,
        quantised=is_actor and family.rollout.quantization is not None,
        returns_routes=is_actor and family.rollout.router_replay == "engine",
        may_sleep=is_actor and family.rollout.engine_sleeps,
        # Draws without a request's seed differ between engines.
        seed=family.rollout.seed + number,
        threads=keys.threads or share,
        startup_timeout=config.trainer.distributed_timeout,
        log_path=str(Path(config.trainer.run_dir) / f"{log}.log"),
        extra=dict(keys.engine_kwargs),
    )


def max_sequences(keys: EngineConfig, device: torch.device) -> int:
    """How many sequences an engine on such a device decodes at the same time."""
    if keys.max_num_seqs is not None:
        return keys.max_num_seqs
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
    return ENGINES[keys.name].default_max_sequences(memory)


def actor_shape(config: Config) -> AnyShape:
    """The actor, with its adapters if it has any."""
    path = config.actor_rollout_ref.model.path
    return shape_with_adapters(
        read_shape(path, config.actor_rollout_ref.actor.strategy), lora_of_config(config)
    )


def proxy_path(config: Config) -> str:
    """The directory of the proxy's weights."""
    family = config.actor_rollout_ref
    return family.proxy.model.path or family.model.path
