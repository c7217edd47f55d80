"""Which weights the engine holds, the switch between actor and proxy, and its sleep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.resharding.push import EngineLink, SyncReport, push
from ctrl_megatron.resharding.sources import WeightSource

Role = Literal["actor", "proxy"]
_MEMORY: tuple[str, ...] = ("weights", "kv_cache")


class EngineWeights:
    """One engine speaks for two models in turn; every completion names the one that spoke.

    With ``may_sleep`` the engine gives its device memory to the trainer between ``rest`` and the
    next ``load`` or ``use``. It is awake at first. All ranks call the same methods in the same
    order; rank 0 drives the engine.
    """

    def __init__(
        self,
        sources: Mapping[Role, WeightSource],
        link: EngineLink | None,
        groups: Groups,
        *,
        verify: bool,
        may_sleep: bool = False,
    ) -> None:
        self._sources, self._link, self._groups, self._verify = sources, link, groups, verify
        self._may_sleep, self._asleep = may_sleep, set[str]()
        self._actor_step = 0
        self._loaded: str | None = None
        self.reports: list[SyncReport] = []
        """Pushes since the last ``take_reports``."""

    def version(self, role: Role) -> str:
        """The name under which the engine knows the role's present weights."""
        return "proxy" if role == "proxy" else f"actor@{self._actor_step}"

    def actor_changed(self, step: int) -> None:
        """The trainer's weights are now those after ``step`` training steps."""
        self._actor_step = step

    def use(self, role: Role) -> str:
        """Let the engine generate with the role's weights; returns their version. Collective."""
        version = self.load(role)
        self._wake("kv_cache")
        return version

    def load(self, role: Role) -> str:
        """Make the engine hold the role's weights; returns their version. Collective."""
        version = self.version(role)
        self._wake("weights")
        if self._loaded != version:
            # A push that fails half-way leaves nothing that may be relied on.
            self._loaded = None
            source = self._sources[role]
            self.reports.append(
                push(source, self._link, self._groups, version=version, verify=self._verify)
            )
            self._loaded = version
        return version

    def rest(self) -> None:
        """Nobody needs the engine for a while: free its device memory. Collective."""
        if not self._may_sleep or self._asleep == set(_MEMORY):
            return
        # Engines fall asleep as a whole.
        self._wake("kv_cache")
        # Another leader may still be generating; and nobody may take the memory before it is free.
        self._groups.barrier()
        if self._link:
            self._link.loop.run(self._link.engine.sleep(_MEMORY))
        self._asleep = set(_MEMORY)
        self._groups.barrier()

    def _wake(self, tag: str) -> None:
        if tag not in self._asleep:
            return
        self._groups.barrier()
        if self._link:
            self._link.loop.run(self._link.engine.wake((tag,)))
        self._asleep.remove(tag)
        self._groups.barrier()

    def take_reports(self) -> list[SyncReport]:
        """The pushes since the last call."""
        reports, self.reports = self.reports, []
        return reports
