"""Ranks on the machines of a Ray cluster: ``--launcher ray``.

An actor on each machine, which a placement group spreads, starts that machine's ranks as its own
processes and passes on what they print. Ray places and watches; what the ranks compute and send to
each other does not pass through it. Ranks end with their actor, and actors with the command.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctrl_megatron.commands.launcher import (
    SHUTDOWN_SECONDS,
    LaunchResult,
    RestartLimit,
    own_command,
    run_with_restarts,
)
from ctrl_megatron.config.environment import (
    environment_for_other_machines,
    machine_local_environment,
    make_run_key,
    read_ray_address,
)
from ctrl_megatron.errors import FAILED, STOPPED, UserError, user_code_running_in

_PLACED_SECONDS = 60.0
"""Seconds in which the cluster must have room for all actors."""
_OTHERS_SECONDS = 15.0
"""Seconds in which the ranks of the other machines find out by themselves that a machine is lost,
and say so."""
_POLL_SECONDS = 0.1
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
_LIBC = ctypes.CDLL(None)
Said = str | LaunchResult
"""A line that a rank has printed, or how the ranks of a machine have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRanks:
    """The ranks of one machine."""

    first: int
    count: int
    world_size: int
    address: str
    """Where rank 0 serves the store, with ``port``."""
    port: int

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """The variables from which a rank reads its place, as torchrun sets them."""
        return {
            "RANK": str(self.first + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def __str__(self) -> str:
        return f"ranks {self.first} to {self.first + self.count - 1}"


class MachineActor:
    """The Ray actor of one machine: starts the ranks of that machine and reports what they print
    and how they end."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[str]] = []

    def rendezvous_endpoint(self) -> tuple[str, int]:
        """The machine's address in the cluster, and a free port there for the ranks to meet."""
        address = _ray().util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            return address, server.getsockname()[1]

    def run(
        self, words: Sequence[str], folder: str, environ: Mapping[str, str], group: MachineRanks
    ) -> Iterator[Said]:
        """Start the ranks; yield what they print, and at last how they ended. After the first one
        that fails, the others of the machine are asked to stop, as torchrun does.
        """
        own = machine_local_environment()
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        readers = []
        for local_rank in range(group.count):
            process = subprocess.Popen(
                words,
                cwd=folder,
                env={**environ, **own, **group.rank_environment(local_rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                preexec_fn=_end_with_parent,
            )
            self._ranks.append(process)
            readers.append(threading.Thread(target=_read, args=(process, lines), daemon=True))
            readers[-1].start()
        end, open_ranks = LaunchResult(rank=group.first), list(range(group.count))
        deadline = float("inf")
        while open_ranks:
            yield from _waiting(lines)
            for local_rank in [one for one in open_ranks if self._ranks[one].poll() is not None]:
                open_ranks.remove(local_rank)
                process = self._ranks[local_rank]
                if process.returncode and not end.code:
                    rank, ran = group.first + local_rank, user_code_running_in(process.pid)
                    end, deadline = (
                        LaunchResult(process.returncode, rank, ran),
                        time.monotonic() + 30.0,
                    )
                    self.stop(signal.SIGTERM)
            if time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
        for reader in readers:
            reader.join(1.0)
        yield from _waiting(lines)
        yield end

    def stop(self, number: int) -> None:
        """Send a signal to the ranks that run."""
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(number)


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)


def _waiting(lines: queue.SimpleQueue[str]) -> Iterator[str]:
    """The lines that are there, together, after a moment."""
    time.sleep(_POLL_SECONDS)
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(lines.get_nowait())
    if found:
        yield "".join(found)


def _end_with_parent() -> None:
    """In a rank before its program begins: it is killed when the actor ends."""
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def start_on_ray(
    name: str,
    hosts: int,
    ranks: int,
    arguments: Sequence[str],
    *,
    gpus: int,
    restarts: RestartLimit | None = None,
) -> int:
    """As ``launcher.start_ranks``, with ``ranks`` on each of ``hosts`` machines of the cluster of
    ``RAY_ADDRESS``, or of a cluster on this machine that ends with the command. An actor asks for
    ``gpus`` GPUs where the cluster has some. UserError without Ray, and without room for all.
    """
    with _cluster():

        def start() -> LaunchResult:
            return _start_once(name, hosts, ranks, gpus, arguments)

        return run_with_restarts(name, start, restarts)


@contextmanager
def _cluster() -> Iterator[None]:
    ray = _ray()
    package = {"py_modules": [str(Path(__file__).resolve().parents[1])]}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A cluster that is started here would give the ranks the least of the processor (nice 15).
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = read_ray_address()
    alone = {} if address else {"include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", runtime_env=package, **alone)
        signal.signal(signal.SIGTERM, before)  # Ray's own would end this process at once
    except ConnectionError as error:
        raise UserError(
            f"there is no Ray cluster at RAY_ADDRESS={address}: {error}",
            key="--launcher ray",
            remedy="start one, or unset RAY_ADDRESS for one on this machine",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _start_once(
    name: str, hosts: int, ranks: int, gpus: int, arguments: Sequence[str]
) -> LaunchResult:
    actors, group = _actors(hosts, gpus)
    ray = _ray()
    try:
        places = ray.get([actor.rendezvous_endpoint.remote() for actor in actors])
        address, port = places[0]
        words = [sys.executable, *own_command(), *arguments]
        environ = environment_for_other_machines()
        make_run_key(environ)
        if ranks > 1:
            environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun
        first = MachineRanks(
            first=0, count=ranks, world_size=hosts * ranks, address=address, port=port
        )
        groups = [replace(first, first=host * ranks) for host in range(hosts)]
        said: queue.SimpleQueue[tuple[int, Said]] = queue.SimpleQueue()
        for host, actor in enumerate(actors):
            run = actor.run.options(num_returns="streaming")
            stream = run.remote(words, os.getcwd(), environ, groups[host])
            where = f"the Ray actor of host {host} ({places[host][0]}, {groups[host]})"
            listener = threading.Thread(
                target=_listen, args=(name, where, host, groups[host], stream, said), daemon=True
            )
            listener.start()
        return _heard(actors, said)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _actors(hosts: int, gpus: int) -> tuple[list[Any], Any]:
    """An actor on each of so many machines, and their placement group."""
    ray = _ray()
    each = {"CPU": 1.0} | ({"GPU": float(gpus)} if ray.cluster_resources().get("GPU") else {})
    group = ray.util.placement_group([each] * hosts, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=_PLACED_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.util.remove_placement_group(group)
        needs = " and ".join(f"{count:g} {kind}" for kind, count in each.items())
        raise UserError(
            f"trainer.nnodes={hosts} machines with {needs} each are not free in the Ray cluster, "
            f"which has {alive}",
            key="--launcher ray",
            remedy="wait for other jobs, add machines, or lower trainer.nnodes",
        ) from error
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    remote = ray.remote(MachineActor)
    actors = []
    for bundle in range(hosts):
        placed = strategy(placement_group=group, placement_group_bundle_index=bundle)
        options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0.0), "max_concurrency": 2}
        actors.append(remote.options(scheduling_strategy=placed, **options).remote())
    return actors, group


def _listen(
    name: str,
    where: str,
    host: int,
    group: MachineRanks,
    stream: Any,
    said: queue.SimpleQueue[tuple[int, Said]],
) -> None:
    """Pass on what the actor of a machine says, and its death."""
    ray = _ray()
    try:
        for reference in stream:
            said.put((host, ray.get(reference)))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        said.put((host, f"{name}: {where} has died: {reason}\n"))
        said.put((host, LaunchResult(FAILED, group.first)))


def _heard(actors: Sequence[Any], said: queue.SimpleQueue[tuple[int, Said]]) -> LaunchResult:
    """Print what the ranks print, until all have ended; the end of those that failed first.

    A Ctrl-C, SIGTERM or SIGHUP of the command becomes a SIGTERM of the ranks, which save.
    """
    left, first, stopped, deadline = set(range(len(actors))), LaunchResult(), False, float("inf")

    def stop() -> None:
        for one in left:
            actors[one].stop.remote(signal.SIGTERM)

    while left and time.monotonic() < deadline:
        try:
            host, what = said.get(timeout=_POLL_SECONDS)
            if isinstance(what, str):
                print(what, end="", flush=True)
                continue
        except queue.Empty:
            continue
        except KeyboardInterrupt:
            stopped, deadline = True, time.monotonic() + SHUTDOWN_SECONDS
            stop()
            continue
        left.discard(host)
        if what.code and not first.code:
            first, deadline = what, time.monotonic() + _OTHERS_SECONDS
            if what.code not in (FAILED, -signal.SIGKILL):
                # After a lost rank the others end by themselves, and say why.
                stop()
    return LaunchResult(STOPPED) if stopped and not first.code else first


def _ray() -> Any:
    try:
        for part in ("ray.exceptions", "ray.util.scheduling_strategies"):
            importlib.import_module(part)
        return importlib.import_module("ray")
    except ImportError as error:
        raise UserError(
            "Ray is not installed",
            key="--launcher ray",
            remedy="pip install 'ctrl_megatron[ray]', or use torchrun or srun",
        ) from error
