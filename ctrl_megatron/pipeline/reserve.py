"""Judged groups that a step of dynamic sampling had no use for, kept for the next step."""

from __future__ import annotations

import dataclasses
from typing import Any

from ctrl_megatron.pipeline.batch import CritiqueRow
from ctrl_megatron.rewards import RewardOutcome
from ctrl_megatron.types import Completion, Verdict, VersionSpan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCritique:
    """A critique with all that came of it."""

    row: CritiqueRow
    critique: str
    revision: str
    revision_tokens: int | None
    """None where nothing was revised."""
    outcome: RewardOutcome

    @property
    def uid(self) -> str:
        """Names the group."""
        return self.row.uid

    @property
    def mini_batch(self) -> int:
        """Which optimizer step the row belongs to."""
        return self.row.mini_batch

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return self.row.num_tokens


Group = list[JudgedCritique]


class SamplingReserve:
    """Groups, oldest first; the same on every rank."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def take(self) -> list[Group]:
        """All groups; the reserve is empty afterwards."""
        taken, self._groups = self._groups, []
        return taken

    def keep(self, groups: list[Group]) -> None:
        """Put groups aside."""
        self._groups += groups

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        return {"groups": [[dataclasses.asdict(row) for row in g] for g in self._groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._groups = [[_judged(row) for row in group] for group in state["groups"]]


def _judged(state: dict[str, Any]) -> JudgedCritique:
    row, outcome = state["row"], state["outcome"]
    drawn = row["completion"]
    completion = Completion(
        token_ids=tuple(drawn["token_ids"]),
        log_probs=tuple(drawn["log_probs"]),
        finish_reason=drawn["finish_reason"],
        spans=tuple(VersionSpan(**span) for span in drawn["spans"]),
    )
    verdict = outcome["verdict"]
    if verdict is not None:
        lists = {name: tuple(verdict[name]) for name in ("passed", "detail")}
        outcome = {**outcome, "verdict": Verdict(**{**verdict, **lists})}
    return JudgedCritique(
        row=CritiqueRow(**{**row, "prompt": tuple(row["prompt"]), "completion": completion}),
        critique=state["critique"],
        revision=state["revision"],
        revision_tokens=state["revision_tokens"],
        outcome=RewardOutcome(**outcome),
    )
