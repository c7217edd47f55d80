"""Where a run begins and ends, whatever it does: training, fine-tuning, evaluating.

Ranks meet; a failure on one ends all; Ctrl-C and SIGTERM ask for a stop; an engine and a sandbox
start on every host that needs them; and whatever happens nothing of it stays.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import ProcessGroups, initialize, shutdown
from ctrl_megatron.parallel.layout import layout_for
from ctrl_megatron.pipeline.failure import EXIT_CODE, FailureWatch
from ctrl_megatron.pipeline.stop import StopFlag
from ctrl_megatron.rollout.client import RemoteEngine, log_tail
from ctrl_megatron.rollout.engine import Engine, EngineAddress, EngineSpec
from ctrl_megatron.rollout.launch import EngineProcess
from ctrl_megatron.rollout.weight_chunks import remove_segments
from ctrl_megatron.sandbox import EmbeddedSandbox


@dataclass(slots=True, kw_only=True)
class Session:
    """What every run has on a rank before there is a model."""

    config: Config
    groups: ProcessGroups
    background: BackgroundLoop
    stop: StopFlag
    watch: FailureWatch
    at_end: list[Callable[[], None]]
    """Called last to first whatever happens."""

    def start_services(self) -> Services:
        """This host's engine and sandbox, starting; a death of one is this rank's failure."""
        services = Services(self.config, self.groups, self.watch)
        self.at_end.append(services.stop)
        services.start()
        return services


@contextmanager
def session(config: Config) -> Iterator[Session]:
    """A run's body on this rank: a failure on any rank ends all ranks, printing the first cause."""
    stop = StopFlag().install()
    groups = join(config)
    pids = set(groups.from_here(os.getpid()).values())
    at_end: list[Callable[[], None]] = [lambda: remove_segments(pids.__contains__)]
    one_at_a_time = threading.Lock()

    def clean_up() -> None:
        # The watch and the main thread may both get here; whoever is second waits for the first,
        # since it ends the process afterwards.
        with one_at_a_time:
            while at_end:
                at_end.pop()()

    watch = FailureWatch(groups, timeout=config.trainer.failure_timeout, clean_up=clean_up)
    background = BackgroundLoop()
    try:
        yield Session(
            config=config,
            groups=groups,
            background=background,
            stop=stop,
            watch=watch,
            at_end=at_end,
        )
        watch.close()
        background.close()
    except BaseException as error:
        watch.report(error)
        clean_up()
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors of a broken process group can hang; nothing of value is left in this process.
        watch.exit(EXIT_CODE)
    clean_up()
    shutdown()
    stop.restore()


def join(config: Config) -> ProcessGroups:
    """Meet the other ranks that the launcher started, in the configured layout. Collective."""
    launch, megatron = read_launch(), config.actor_rollout_ref.actor.megatron
    layout = layout_for(
        launch.world_size,
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
    )
    return initialize(
        layout,
        seed=config.trainer.seed,
        timeout_seconds=config.trainer.distributed_timeout,
        launch=launch,
    )


def child_died(
    name: str, pid: int, alive: Callable[[], bool], last_words: Callable[[], str]
) -> str | None:
    """What happened to a child process, with the end of what it wrote; None while it lives."""
    if alive():
        return None
    words = last_words().strip() or "(none)"
    return f"the {name} (pid {pid}) died; the end of its output:\n{words}"


class Services:
    """An engine, and a sandbox unless one is running elsewhere, on every host with a leader.

    The engine comes up while models are loaded.
    """

    def __init__(self, config: Config, groups: ProcessGroups, watch: FailureWatch) -> None:
        self._config, self._groups, self._watch = config, groups, watch
        self._engine: EngineProcess | None = None
        self._sandbox: EmbeddedSandbox | None = None
        self._address: EngineAddress | None = None
        self.sandbox_endpoint = ""
        """Where this host's sandbox answers; known after ``wait``."""

    def start(self) -> None:
        """Start this host's processes, on its first rank."""
        config, groups = self._config, self._groups
        if not (groups.is_first_here and groups.is_leader):
            return
        run_dir = Path(config.trainer.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        log = "engine.log" if groups.is_first else f"engine.{groups.here}.log"
        self._engine = EngineProcess(engine_spec(config, run_dir / log))
        if config.sandbox.endpoint or config.reward.provider != "local":
            return
        # It ties its life to the thread that starts it, so that is the main thread.
        self._sandbox = box = EmbeddedSandbox.start(
            workers=config.sandbox.workers,
            isolation=config.sandbox.isolation,  # type: ignore[arg-type]
        )
        self._watch.guard(partial(child_died, "sandbox service", box.pid, box.alive, box.log))

    def wait(self) -> None:
        """Until both answer on all hosts. Collective."""
        addresses = None
        if (engine := self._engine) is not None:
            engine.wait_ready()
            log = partial(log_tail, engine.address.log_path)
            self._watch.guard(partial(child_died, "rollout engine", engine.pid, engine.alive, log))
            endpoint = self._sandbox.endpoint if self._sandbox else self._config.sandbox.endpoint
            addresses = (engine.address, endpoint or "")
        near = self._groups.from_first_here(addresses)
        if near is not None:
            self._address, self.sandbox_endpoint = near

    def connect(self) -> Engine:
        """A client of this host's engine."""
        if self._engine is not None:
            return self._engine.connect()
        assert self._address is not None
        return RemoteEngine(self._address)

    def stop(self) -> None:
        """End this rank's child processes, also one that is still starting."""
        for service in (self._sandbox, self._engine):
            if service is not None:
                service.stop()


def engine_spec(config: Config, log: Path) -> EngineSpec:
    """The configured engine, holding the actor's initial weights."""
    family, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    return EngineSpec(
        name=rollout.name,
        model_path=family.model.path,
        dtype=family.rollout_dtype,
        max_model_len=config.max_model_len,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gib=rollout.kv_cache_gib,
        max_num_seqs=rollout.max_num_seqs,
        enforce_eager=rollout.enforce_eager,
        may_sleep=rollout.free_cache_engine,
        seed=rollout.seed,
        threads=rollout.threads,
        startup_timeout=config.trainer.distributed_timeout,
        log_path=str(log),
        extra=dict(rollout.engine_kwargs),
    )
