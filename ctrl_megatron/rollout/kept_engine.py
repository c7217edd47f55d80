"""An engine as a service that is watched and started again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ctrl_megatron.background import track_wait
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.keeping import child_death_message
from ctrl_megatron.rollout.client import RemoteEngine, log_tail
from ctrl_megatron.rollout.engine import EngineDied, EngineError
from ctrl_megatron.rollout.launch import EngineProcess

_LOOK_SECONDS = 1.0


class EngineService:
    """``Service`` of an engine."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.name = f"engine {process.address.name}"
        self.stop, self.launch_again = process.stop, process.launch_again
        self.wait_ready = process.wait_ready

    def death_message(self) -> str | None:
        process, path = self.process, self.process.address.log_path
        return child_death_message(self.name, process.pid, process.alive, lambda: log_tail(path))


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """An engine answers during generations, updates and sleep too."""

    engine: RemoteEngine

    async def is_answering(self) -> bool:
        try:
            await self.engine.health()
        except EngineDied:
            # The watch of its process reports more about it.
            return False
        except EngineError:
            # An answer too; the caller of the engine gets the error.
            return True
        return True

    async def close(self) -> None:
        await self.engine.close()

    def silence_message(self, seconds: float) -> str:
        address = self.engine.address
        return (
            f"the rollout engine (pid {address.pid}) runs but has not answered for {seconds:.0f} "
            f"s; the end of its log {address.log_path}:\n{log_tail(address.log_path)}"
        )


class LedEngine:
    """An engine that a rank of another world keeps (``placement.rollout``), as the rank sees it
    that sends its weights: a restart shows in the identity of its process."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine, self._process = engine, ""
        self.close = engine.close
        self.restarts = 0
        """Restarts of the run."""
        self.fresh = False
        """Whether it was started again and has no weights yet."""

    async def is_up(self, limit: float) -> bool:
        """Whether it answers within ``limit`` seconds."""
        try:
            process = await asyncio.wait_for(self._engine.process_identity(), limit)
        except (ServiceLost, TimeoutError):
            return False
        if self._process not in ("", process):
            self.restarts, self.fresh = self.restarts + 1, True
        self._process = process
        return True

    async def wait_until_up(self, limit: float) -> bool:
        """Return when it answers; whether it was started again since the last call."""
        with track_wait(f"engine {self._engine.address.name} to be started again by its host"):
            while not await self.is_up(limit):
                await asyncio.sleep(_LOOK_SECONDS)
        restarted, self.fresh = self.fresh, False
        return restarted
