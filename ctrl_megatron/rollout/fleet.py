"""The engines and sandboxes of a run: their placement, start, supervision and end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ctrl_megatron.background import AbandonableCall, BackgroundLoop, StallClock, track_wait
from ctrl_megatron.config import Config
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.keeping import Service, ServiceKeeper, SilenceDetector
from ctrl_megatron.metrics import Gauge
from ctrl_megatron.parallel.failure import FailureWatch
from ctrl_megatron.parallel.groups import JoinedGroups
from ctrl_megatron.parallel.layout import World, world_of_role
from ctrl_megatron.parallel.placement import EnginePlace, EngineRole, default_sandbox_workers
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.engine import (
    ENGINE_MEMORY,
    CountedEngine,
    Engine,
    EngineAddress,
    EngineError,
    EngineMemory,
)
from ctrl_megatron.rollout.engine_specs import (
    allocate_engine_rendezvous,
    engine_config,
    engine_placement,
    engine_spec,
    led_placement,
    max_sequences,
)
from ctrl_megatron.rollout.kept_engine import EngineProbe, EngineService, LedEngine
from ctrl_megatron.rollout.launch import EngineProcess
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.cores import usable_cores
from ctrl_megatron.sandbox.kept import SandboxProbe, SandboxService, sandbox_options

_LOOK_SECONDS = 0.1
_GAUGE_SECONDS = 2.0


class Services:
    """The engines of a run, or of a further policy with its own, and the run's sandboxes if it
    judges programs and the configuration names no running one.

    On every host of the world with the engines (``placement.rollout``) the first rank of that world
    starts the host's engines, and so for the sandboxes; all ranks make this object, whatever their
    world is. Leaders of the actor's world call all engines and all sandboxes. With one host
    everything is on loopback.
    """

    def __init__(
        self,
        config: Config,
        joined: JoinedGroups,
        worlds: Sequence[World],
        watch: FailureWatch,
        background: BackgroundLoop,
        stop: StopFlag,
        *,
        max_model_len: int,
        proxy_model_len: int | None = None,
        judges: bool = True,
        beside: Sequence[Services] = (),
    ) -> None:
        """``max_model_len`` and ``proxy_model_len`` are the longest sequences, in tokens, of the
        actor's engines and of the proxy's own. ``beside`` are the services of other
        policies: dedicated engines have other devices than theirs.
        """
        self.max_model_len, self.proxy_model_len = max_model_len, proxy_model_len
        self._config, self._groups, self._watch = config, joined.groups, watch
        self._everyone, self._world, self._worlds = joined.everyone, joined.world, worlds
        self._background, self._stop, self._judges = background, stop, judges
        self._probes = BackgroundLoop("probes")
        visible = torch.cuda.device_count() if joined.groups.device.type == "cuda" else None
        hosts = joined.everyone.hosts
        theirs = [engine for other in beside for engine in other._dedicated()]
        self._started = engine_placement(config, hosts, worlds, visible=visible, beside=theirs)
        """The engines on the hosts of their world."""
        self.placement = led_placement(self._started, hosts, worlds)
        """The engines on the hosts of the actor's world, which send them weights."""
        self._led: dict[int, LedEngine] = {}
        """The engines of other worlds to which this rank sends weights."""
        self._engines: dict[int, EngineProcess] = {}
        """This rank's engines, and its parts of engines that other hosts serve."""
        self._sandbox: SandboxService | None = None
        self._keepers: dict[int, ServiceKeeper] = {}
        """Those of this rank's engines, by the engine's number."""
        self._sandbox_keeper: ServiceKeeper | None = None
        self._addresses: dict[int, EngineAddress] = {}
        self._clients: dict[int, RemoteEngine] = {}
        self.sandbox_endpoint = config.sandbox.endpoint or ""
        """Addresses of the sandboxes, this host's first; known after ``wait``."""
        self.sandbox_token: str | None = None
        """The token that the run's own sandboxes require; None where it has none."""

    def _dedicated(self) -> Sequence[EnginePlace]:
        """The engines whose devices no rank computes on."""
        alone = self._config.actor_rollout_ref.rollout.placement == "dedicated"
        return [e for e in self._started.engines if alone or e.role == "proxy"]

    def _has(self, role: str) -> bool:
        """Whether this rank's world has the engines or the sandboxes."""
        return world_of_role(self._worlds, role) is self._world

    def start(self) -> None:
        """Start what belongs to this rank. Collective over all ranks of the run."""
        config, groups = self._config, self._groups
        own_sandbox = (
            self._judges and not config.sandbox.endpoint and config.reward.provider == "local"
        )
        if own_sandbox:
            self.sandbox_token = self._everyone.broadcast_from_first(secrets.token_hex(32))
        if self._has("rollout"):
            self._start_engines()
        if own_sandbox and self._has("sandbox") and groups.is_first_of_host:
            # The sandbox ends with the thread that starts it, so the main thread starts it.
            self._sandbox = SandboxService(self._start_sandbox)
            self._sandbox_keeper = self._kept(self._sandbox)

    def _start_engines(self) -> None:
        """Start this host's engines, on its first rank. Collective over the engines' world."""
        config, groups = self._config, self._groups
        meetings = allocate_engine_rendezvous(self._started, groups)
        if not groups.is_first_of_host:
            return
        run_dir = Path(config.trainer.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        for place in self._started.engines_on(groups.host_index):
            longest = self.max_model_len if place.role == "rollout" else self.proxy_model_len
            assert longest is not None
            part = meetings.get(place.number)
            if part is not None:
                part = replace(part, number=groups.host_index - place.host)
            spec = engine_spec(config, groups, self._started, place, longest, part)
            self._engines[place.number] = engine = EngineProcess(spec)
            sleeps = place.role == "rollout" and config.actor_rollout_ref.rollout.engine_sleeps
            self._keepers[place.number] = self._kept(EngineService(engine), waits=sleeps)

    def _kept(self, service: Service, *, waits: bool = False) -> ServiceKeeper:
        keeper = ServiceKeeper(service, most=self._config.trainer.service_restarts, waits=waits)
        self._watch.add_check(keeper.final_death_message)
        self._watch.add_check(keeper.final_silence_message, hang=True)
        return keeper

    def _start_sandbox(self, port: int) -> EmbeddedSandbox:
        config, groups = self._config.sandbox, self._groups
        hosts, here = self._everyone.hosts.of_rank, self._everyone.host_index
        ranks = [rank for world in self._worlds if not world.serves for rank in world.ranks]
        computing = sum(hosts[rank] == here for rank in ranks)
        workers = default_sandbox_workers(usable_cores(), computing)
        return EmbeddedSandbox.start(
            workers=config.workers or workers,
            **sandbox_options(self._config),
            host=groups.hosts.addresses[groups.host_index],
            port=port,
            token=self.sandbox_token,
            wait=False,
        )

    def wait(self) -> None:
        """Return when everything answers on all hosts. Collective over all ranks of the run. Raises
        StopRequested if a stop is requested meanwhile.
        """
        everyone, box, engines = self._everyone, self._sandbox, self._engines.values()

        async def ready(start: Callable[[], None], what: str) -> None:
            with track_wait(what):
                await asyncio.wrap_future(AbandonableCall(start, what).future)

        async def all_ready() -> None:
            starts = [
                ready(
                    engine.wait_ready,
                    f"engine {engine.address.name}, log {engine.address.log_path}",
                )
                for engine in engines
            ]
            await asyncio.gather(*starts, *([ready(box.wait_ready, "the sandbox")] if box else []))

        # A start may take minutes, for which no rank must wait in one collective.
        starting = self._background.submit(all_ready()) if engines or box else None
        limit = self._config.trainer.wait_timeout
        waiting = WaitRules(groups=everyone, stop=self._stop, limit=limit)
        waiting.wait_together(starting, "the engines and sandboxes to start")
        self._watch_services()
        addresses = {number: engine.address for number, engine in self._serving().items()}
        everywhere = everyone.all_gather((addresses, box.box.endpoint if box else ""))
        for there, _ in everywhere:
            self._addresses |= there
        # This host's sandbox comes first: a client takes the first of those that are equally busy.
        mine = everyone.hosts.first_rank(everyone.host_index)
        boxes = [endpoint for _, endpoint in everywhere[mine:] + everywhere[:mine] if endpoint]
        self.sandbox_endpoint = self.sandbox_endpoint or ",".join(boxes)
        leads = self._world is self._worlds[0] and not self._has("rollout")
        if leads and self._groups.is_first_of_host:
            led = self.placement.of_role("rollout").engines_served_by(self._groups.host_index)
            self._led = {e.number: LedEngine(RemoteEngine(self._addresses[e.number])) for e in led}
            self._probes.run(self._look_at_led())

    def _watch_services(self) -> None:
        """Ask this rank's services for signs of life from now on, on a loop that runs nothing
        else.
        """
        limit, probes = self._config.trainer.failure_timeout, self._probes
        self._watch.add_check(BlockedLoopDetector(self._background, limit), hang=True)
        for number, engine in self._engines.items():
            probed = EngineProbe(engine.connect())
            self._keepers[number].watch(SilenceDetector(probed, probes, limit))
        if (box := self._sandbox) is not None and self._sandbox_keeper is not None:
            probed = SandboxProbe(lambda: box.box, self.sandbox_token)
            self._sandbox_keeper.watch(SilenceDetector(probed, probes, limit))

    # Engines that were started again

    def needs_restore(self) -> bool:
        """Whether an engine of the actor, of this host or led from it, is lost, or was started
        again and has not been restored yet."""
        own = any(not keeper.is_up or keeper.fresh for _, keeper in self._kept_engines())
        return own or (bool(self._led) and self._probes.run(self._look_at_led()))

    async def _look_at_led(self) -> bool:
        limit = self._config.trainer.failure_timeout
        up = await asyncio.gather(*(engine.is_up(limit) for engine in self._led.values()))
        return not all(up) or any(engine.fresh for engine in self._led.values())

    async def restore(self, asleep: Collection[EngineMemory]) -> int:
        """Wait until all engines of the actor on this host run, those that are lost after a
        restart; returns the number that was started again since the last call. These have no
        weights, and their memory sleeps as ``asleep`` says of the others'.
        """
        limit, probes = self._config.trainer.failure_timeout, self._probes
        own = (self._restored(keeper, n, asleep) for n, keeper in self._kept_engines())
        # The client of a led engine belongs to the loop that looks at it.
        led = (probes.submit(one.wait_until_up(limit)) for one in self._led.values())
        return sum(await asyncio.gather(*own, *map(asyncio.wrap_future, led)))

    def _serving(self) -> dict[int, EngineProcess]:
        """The engines that this rank's processes serve, without parts that others serve."""
        served = (
            place.number for place in self._started.engines_served_by(self._groups.host_index)
        )
        return {number: self._engines[number] for number in served if number in self._engines}

    def _kept_engines(self) -> list[tuple[int, ServiceKeeper]]:
        actors = {place.number for place in self._started.of_role("rollout").engines}
        return [(n, keeper) for n, keeper in self._keepers.items() if n in actors]

    async def _restored(
        self, keeper: ServiceKeeper, number: int, asleep: Collection[EngineMemory]
    ) -> bool:
        engine, before = self._engines[number].connect(), keeper.restarts
        try:
            if keeper.is_up:
                try:
                    async with asyncio.timeout(self._config.trainer.failure_timeout):
                        await engine.health()
                except (ServiceLost, TimeoutError) as error:
                    # Something else may listen at its port, and say nothing.
                    keeper.request_restart(str(error) or "it does not answer", before)
            if not keeper.is_up:
                keeper.allow_restart()
            with track_wait(f"the {keeper.service.name} to start again"):
                while not keeper.is_up:
                    if keeper.failure:
                        raise EngineError(keeper.failure)
                    await asyncio.sleep(_LOOK_SECONDS)
            restarted, keeper.fresh = keeper.fresh, False
            # Parts without a server sleep and wake with the one that has it.
            if restarted and asleep and number in self._serving():
                # Adapters are useless without the weights that were read at the start.
                keeps = pushes_adapters(self._config)
                await engine.sleep(1 if keeps else 2)
                for memory in ENGINE_MEMORY:
                    if memory not in asleep:
                        await engine.wake((memory,))
            return restarted
        finally:
            await engine.close()

    def restarts(self) -> dict[str, float]:
        """How often engines and sandboxes of this rank, and engines that it leads, were started
        again, by the metric's name."""
        own = (*self._keepers.values(), *self._led.values())
        found = {"engine/restarts": float(sum(one.restarts for one in own))}
        if self._sandbox_keeper is not None:
            found["sandbox/restarts"] = float(self._sandbox_keeper.restarts)
        return found

    def connect(self, role: EngineRole = "rollout") -> CountedEngine:
        """A client of all engines of the role, of every host."""
        return self._client(self.placement.of_role(role).engines)

    def connect_to_host_engines(self) -> Engine | None:
        """A client of the engines of the actor to which this host sends weights, on its first rank;
        None elsewhere."""
        here = self.placement.of_role("rollout").engines_served_by(self._groups.host_index)
        return self._client(here) if here and self._groups.is_first_of_host else None

    def _client(self, places: Sequence[EnginePlace]) -> CountedEngine:
        clients: dict[str, CountedEngine] = {}
        for number in (place.number for place in places):
            own, address = self._serving().get(number), self._addresses[number]
            if number not in self._clients:
                self._clients[number] = RemoteEngine(address) if own is None else own.connect()
            clients[address.name] = self._clients[number]
        if len(clients) == 1:
            return next(iter(clients.values()))
        keys, layout = engine_config(self._config, places[0].role), self._groups.layout
        return EnginePool(
            clients,
            # Enough for an engine never to wait for requests, divided between the leaders.
            at_once=max(1, 2 * max_sequences(keys, self._groups.device) // layout.data),
            joins_calls=ENGINES[keys.name].joins_calls,
            first=self._groups.place.dp * len(clients) // layout.data,
        )

    def gauges(self) -> list[Gauge]:
        """The present queues of all engines and sandboxes of the run, for any thread; those that
        do not answer within seconds have no series, and before ``wait`` has returned none has.
        """
        if not self._addresses:
            return []
        return self._probes.run(self._queues())

    async def _queues(self) -> list[Gauge]:
        engines = dict(await asyncio.gather(*map(fetch_counters, self._addresses.values())))
        boxes: dict[str, int] = {}
        if self._judges and self.sandbox_endpoint:
            async with SandboxClient(self.sandbox_endpoint, token=self.sandbox_token) as client:
                boxes = await client.queue_lengths()
        asked, waiting = (
            [({"engine": e}, found[name]) for e, found in engines.items() if name in found]
            for name in ("under_way", "waiting")
        )
        return [
            gauge
            for gauge in (
                Gauge("ctrl_engine_completions", "Completions asked of an engine.", asked),
                Gauge("ctrl_engine_waiting", "Those that it has no room for yet.", waiting),
                Gauge(
                    "ctrl_sandbox_waiting",
                    "Programs that wait for a worker.",
                    [({"sandbox": address}, length) for address, length in boxes.items()],
                ),
            )
            if gauge.samples
        ]

    def stop(self) -> None:
        """End this rank's child processes, also those that are still starting."""
        for keeper in (self._sandbox_keeper, *self._keepers.values()):
            if keeper is not None:
                keeper.stop()
        for led in self._led.values():
            self._probes.run_before_close(led.close())
        self._probes.close()


async def fetch_counters(address: EngineAddress) -> tuple[str, Counters]:
    """Name and counters of an engine; no counters if it does not answer within seconds."""
    client = RemoteEngine(address)
    try:
        counted = await asyncio.wait_for(client.counters(), _GAUGE_SECONDS)
        return address.name, counted[address.name]
    except (EngineError, TimeoutError):
        return address.name, {}
    finally:
        await client.close()


class BlockedLoopDetector:
    """Notices a coroutine that blocks the loop of the requests to engines and sandboxes."""

    def __init__(self, loop: BackgroundLoop, limit: float) -> None:
        self._loop, self._limit, self._standstill = loop, limit, StallClock()

    def __call__(self) -> str | None:
        """A message about the fault, or None, for ``FailureWatch.add_check``."""
        held = self._standstill.seconds_unchanged(self._loop.turns)
        if held < self._limit:
            return None
        name = self._loop.running_task_name() or "a coroutine of the run"
        return (
            f"{name} has blocked the event loop of the requests to engines and sandboxes for "
            f"{held:.0f} s; let it await long work (asyncio.to_thread); it is here:\n"
            + "".join(self._loop.stack_lines())
        )
