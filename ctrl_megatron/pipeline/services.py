"""The processes a run starts beside itself: an engine and a sandbox on every host with a leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ctrl_megatron.config import Config
from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.rollout.client import RemoteEngine, log_tail
from ctrl_megatron.rollout.engine import Engine, EngineAddress, EngineSpec
from ctrl_megatron.rollout.launch import EngineProcess
from ctrl_megatron.sandbox import EmbeddedSandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A child process as the failure watch sees it."""

    name: str
    alive: Callable[[], bool]
    pid: int
    last_words: Callable[[], str]
    """The end of what it wrote."""

    def died(self) -> str | None:
        """What happened to it, or None while it lives."""
        if self.alive():
            return None
        said = self.last_words().strip()
        return f"the {self.name} (pid {self.pid}) died; the end of its output:\n{said or '(none)'}"


@dataclass(slots=True, kw_only=True)
class Services:
    """Addresses of this host's services; the processes themselves on its first rank."""

    engine_address: EngineAddress | None = None
    sandbox_endpoint: str = ""
    engine: EngineProcess | None = None
    sandbox: EmbeddedSandbox | None = None

    def guarded(self) -> list[Guarded]:
        """This rank's child processes."""
        found = []
        if (engine := self.engine) is not None:
            log = partial(log_tail, engine.log_path)
            found.append(
                Guarded(name="rollout engine", alive=engine.alive, pid=engine.pid, last_words=log)
            )
        if (box := self.sandbox) is not None:
            found.append(
                Guarded(name="sandbox service", alive=box.alive, pid=box.pid, last_words=box.log)
            )
        return found

    def connect(self) -> Engine:
        """A client of the engine."""
        if self.engine is not None:
            return self.engine.connect()
        assert self.engine_address is not None
        return RemoteEngine(self.engine_address)


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


class ServiceStart:
    """Starts what is not already running elsewhere; the engine comes up while models are loaded."""

    def __init__(self, config: Config, groups: Groups, run_dir: Path) -> None:
        self._config, self._groups = config, groups
        self._sandbox: EmbeddedSandbox | None = None
        self._services: Services | None = None
        self._engine: EngineProcess | None = None
        if groups.is_first_here and groups.is_leader:
            run_dir.mkdir(parents=True, exist_ok=True)
            log = "engine.log" if groups.is_first else f"engine.{groups.here}.log"
            self._engine = EngineProcess(engine_spec(config, run_dir / log))
            if not config.sandbox.endpoint and config.reward.provider == "local":
                # It ties its life to the thread that starts it, so that is the main thread.
                self._sandbox = _embedded(config)

    def wait(self) -> Services:
        """Addresses of both, once they answer on all hosts. Collective."""
        found = None
        if self._engine is not None:
            self._engine.wait_ready()
            self._services = Services(engine=self._engine, sandbox=self._sandbox)
            endpoint = self._sandbox.endpoint if self._sandbox else self._config.sandbox.endpoint
            found = (self._engine.address, endpoint or "")
        self._services = self._services or Services()
        if (near := self._groups.from_first_here(found)) is not None:
            self._services.engine_address, self._services.sandbox_endpoint = near
        return self._services

    def guarded(self) -> list[Guarded]:
        """The child processes that run already."""
        return Services(sandbox=self._sandbox).guarded()

    def stop(self) -> None:
        """End this rank's child processes, also one that is still starting."""
        for service in (self._sandbox, self._engine):
            if service is not None:
                service.stop()


def _embedded(config: Config) -> EmbeddedSandbox:
    return EmbeddedSandbox.start(
        workers=config.sandbox.workers,
        isolation=config.sandbox.isolation,  # type: ignore[arg-type]
    )
