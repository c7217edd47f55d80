"""The run's own sandbox as a service that is watched and started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ctrl_megatron.config import Config
from ctrl_megatron.keeping import child_death_message
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxError, SandboxLimits


def sandbox_options(config: Config) -> dict[str, Any]:
    """The configured options of a sandbox that the run starts (``EmbeddedSandbox.start``)."""
    limits = SandboxLimits(problem_seconds=config.sandbox.problem_seconds)
    return {"isolation": config.sandbox.isolation, "limits": limits}


_DRAIN_SECONDS = 2.0
"""Seconds for a sandbox to end by itself; a suspended one never does."""


class SandboxService:
    """``Service`` of a sandbox, which ``start(port)`` starts; port 0 takes a free one."""

    name = "sandbox service"

    def __init__(self, start: Callable[[int], EmbeddedSandbox]) -> None:
        self._start, self._port, self.box = start, 0, start(0)

    def death_message(self) -> str | None:
        return child_death_message(self.name, self.box.pid, self.box.alive, self.box.log)

    def stop(self) -> None:
        self.box.stop(_DRAIN_SECONDS)

    def launch_again(self) -> None:
        self.box = self._start(self._port)

    def wait_ready(self) -> None:
        self.box.wait_ready()
        # A start that fails leaves a box without an address.
        self._port = int(self.box.endpoint.rpartition(":")[2])


class SandboxProbe:
    """The run's own sandbox; its service answers while all of its workers are busy."""

    def __init__(self, box: Callable[[], EmbeddedSandbox], token: str | None) -> None:
        self._box, self._client = box, SandboxClient(box().endpoint, token=token, attempts=1)

    async def is_answering(self) -> bool:
        try:
            await self._client.isolation_levels()
        except SandboxError:
            return False
        return True

    async def close(self) -> None:
        await self._client.close()

    def silence_message(self, seconds: float) -> str:
        box = self._box()
        words = box.log().strip() or "(none)"
        return (
            f"the sandbox service (pid {box.pid}) runs but has not answered for "
            f"{seconds:.0f} s; the end of its output:\n{words}"
        )
