"""The placement of engines: their hosts and devices. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ctrl_megatron.errors import UserError

EnginePlacement = Literal["colocated", "dedicated"]
"""``colocated`` engines share the trainer's devices; ``dedicated`` ones have other devices of the
same hosts."""
EngineRole = Literal["rollout", "proxy"]
"""Engines of the actor (and of a proxy that shares them), or the proxy's own."""
_KEYS: dict[EngineRole, str] = {
    "rollout": "actor_rollout_ref.rollout.",
    "proxy": "actor_rollout_ref.proxy.engine.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One engine's host and devices."""

    number: int
    """The engine's number in the run, counted host by host."""
    host: int
    """The host that serves it, the first of those that it spans."""
    spans: int = 1
    """Number of neighbouring hosts with its workers, equally many on each."""
    role: EngineRole = "rollout"
    devices: tuple[int, ...]
    """One for each worker: numbers among the devices that the processes of the worker's host see;
    on a CPU they mean nothing."""

    @property
    def hosts(self) -> range:
        return range(self.host, self.host + self.spans)

    @property
    def host_of_worker(self) -> tuple[int, ...]:
        each = len(self.devices) // self.spans
        return tuple(self.host + worker // each for worker in range(len(self.devices)))

    def devices_on(self, host: int) -> tuple[int, ...]:
        pairs = zip(self.devices, self.host_of_worker, strict=True)
        return tuple(device for device, of in pairs if of == host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Every engine of a run."""

    engines: tuple[EnginePlace, ...]

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts that have workers of engines, ascending."""
        return tuple(sorted({host for engine in self.engines for host in engine.hosts}))

    def led_from(self, hosts: int) -> Placement:
        """The same engines where each of so many hosts without engines leads some of them: it
        sends their weights and notices their restarts."""
        return Placement(
            engines=tuple(replace(e, host=e.number % hosts, spans=1) for e in self.engines)
        )

    def of_role(self, role: EngineRole) -> Placement:
        return Placement(engines=tuple(e for e in self.engines if e.role == role))

    def engines_on(self, host: int) -> tuple[EnginePlace, ...]:
        return tuple(engine for engine in self.engines if host in engine.hosts)

    def engines_served_by(self, host: int) -> tuple[EnginePlace, ...]:
        return tuple(engine for engine in self.engines if engine.host == host)


def engine_devices(
    taken: int,
    *,
    placement: EnginePlacement,
    engine_gpus: int | None,
    tensor: int,
    visible: int | None,
    role: EngineRole = "rollout",
) -> range:
    """The devices that belong to a role's engines on a host whose first ``taken`` devices are those
    of the trainer's ranks and, for ``proxy``, of dedicated engines of the actor.

    Rank i of a host computes on device i of the ``visible`` GPUs that its processes see.
    ``engine_gpus`` is the number of GPUs for dedicated engines; colocated ones use the trainer's.
    On a machine without GPUs (``visible`` is None) it is the number of engine processes, and
    without it a host has one engine of ``tensor`` processes. ValueError for a count that leaves a
    rank's GPU without an engine, or engines without a GPU.
    """
    key = f"{_KEYS[role]}n_gpus_per_node"
    if visible is None:
        return range(tensor if engine_gpus is None else engine_gpus)
    if placement == "dedicated":
        if engine_gpus is None:
            setting = "placement=dedicated" if role == "rollout" else "proxy.kind=engine"
            raise UserError(f"{setting} needs {key}, the GPUs of a host for them; set it")
        if engine_gpus < 1:
            raise UserError(
                "the proxy's engines leave the actor's none of a host's GPUs",
                key="placement.rollout",
                remedy="name more ranks of a host, or lower actor_rollout_ref.proxy.engine."
                "n_gpus_per_node",
            )
        if taken + engine_gpus > visible:
            raise UserError(
                f"{key}={engine_gpus} GPUs for dedicated engines beside {taken} "
                f"{'ranks' if role == 'rollout' else 'GPUs of ranks and actor engines'} make "
                f"{taken + engine_gpus}, but a rank sees {visible}; lower one, or let every "
                "rank see all GPUs of its host"
            )
        return range(taken, taken + engine_gpus)
    if engine_gpus not in (None, taken):
        raise UserError(
            f"{key}={engine_gpus} is not possible with actor_rollout_ref.rollout.placement="
            f"colocated on a host of {taken} ranks, whose GPUs all belong to engines; leave it out"
        )
    return range(taken)


def place_engines(
    devices: Sequence[range], *, tensor: int, role: EngineRole = "rollout", first: int = 0
) -> Placement:
    """Engines of ``tensor`` neighbouring devices each, numbered from ``first``; ``devices`` are
    those of every host. An engine with more devices than a host has spans neighbouring hosts.

    ValueError if engines would use a part of a host beside another host.
    """
    engines: list[EnginePlace] = []
    host = 0
    while host < len(devices):
        spans = _hosts_of_an_engine(devices[host:], tensor)
        if not spans:
            raise UserError(
                f"{_KEYS[role]}tensor_model_parallel_size={tensor} does not divide "
                f"the {len(devices[host])} devices of host {host} that belong to engines, nor do "
                "engines of so many devices use it and the hosts behind it as a whole; choose a "
                "size that divides them, or a multiple of them and hosts for whole engines"
            )
        there = [device for own in devices[host : host + spans] for device in own]
        for start in range(0, len(there), tensor):
            own, number = tuple(there[start : start + tensor]), first + len(engines)
            engines.append(
                EnginePlace(number=number, host=host, spans=spans, role=role, devices=own)
            )
        host += spans
    return Placement(engines=tuple(engines))


def _hosts_of_an_engine(devices: Sequence[range], tensor: int) -> int:
    """The number of hosts that an engine at the first of these hosts spans; 0 if it cannot be."""
    each = len(devices[0])
    if each % tensor == 0:
        return 1
    spans, rest = divmod(tensor, each)
    whole = [len(own) for own in devices[:spans]] == [each] * spans
    return spans if whole and not rest else 0


def default_sandbox_workers(cores: int, ranks: int) -> int:
    """Number of programs that a host judges at the same time: one per core that the process may
    use, minus one for each of the host's ranks, which compute meanwhile; at least one."""
    return max(1, cores - ranks)
