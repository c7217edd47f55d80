"""Which weights the engine holds, and the switch between actor and proxy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.resharding.push import EngineLink, SyncReport, push
from ctrl_megatron.resharding.sources import WeightSource

Role = Literal["actor", "proxy"]


class EngineWeights:
    """One engine speaks for two models in turn; every completion names the one that spoke."""

    def __init__(
        self,
        sources: Mapping[Role, WeightSource],
        link: EngineLink | None,
        groups: Groups,
        *,
        verify: bool,
    ) -> None:
        self._sources, self._link, self._groups, self._verify = sources, link, groups, verify
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
        """Make the engine hold the role's weights; returns their version. Collective."""
        version = self.version(role)
        if self._loaded != version:
            # A push that fails half-way leaves nothing that may be relied on.
            self._loaded = None
            source = self._sources[role]
            self.reports.append(
                push(source, self._link, self._groups, version=version, verify=self._verify)
            )
            self._loaded = version
        return version

    def take_reports(self) -> list[SyncReport]:
        """The pushes since the last call."""
        reports, self.reports = self.reports, []
        return reports
