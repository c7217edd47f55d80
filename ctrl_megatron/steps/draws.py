"""Draws that were begun for a later step, and groups that dynamic sampling did not need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ctrl_megatron.steps.sample import (
    CriticisedProgram,
    Group,
    Revision,
    Sample,
    SampleRewards,
    completion_from_state,
)
from ctrl_megatron.types import Completion


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDraw:
    """The samples of a training step that the engines are drawing or have drawn."""

    step: int
    """Training steps before the one that trains on them."""
    begun: int
    """Training steps that were finished when they were begun."""
    rows: tuple[int, ...]
    """Positions of the step's rows in ``worker.train``."""
    attempt: int
    """Number of the draw within the step."""
    version: str
    """The weights that began to draw."""
    groups: Future[list[list[Completion]]] | None
    """``rollout.n`` completions of each row of this data rank; None on ranks that are not
    leaders."""


class DrawsAhead:
    """Draws that were begun before their step, by the number of steps before it."""

    def __init__(self) -> None:
        self._draws: dict[int, StepDraw] = {}

    def add_draw(self, draw: StepDraw) -> None:
        self._draws[draw.step] = draw

    def forget_before(self, step: int) -> None:
        self._draws = {number: draw for number, draw in self._draws.items() if number >= step}

    def draw_of_step(self, step: int) -> StepDraw | None:
        """The draw for the step after ``step`` steps; None where none was begun."""
        return self._draws.get(step)

    def draw_of_rows(self, step: int, rows: Sequence[int]) -> StepDraw | None:
        """The draw for the step after ``step`` steps, if it is of ``rows``; None where there is
        none. It is kept: a run that is stopped within the step repeats it from a save."""
        draw = self.draw_of_step(step)
        return draw if draw is not None and draw.rows == tuple(rows) else None

    def all_draws(self) -> list[StepDraw]:
        return list(self._draws.values())


class LeftoverGroups:
    """Judged groups that a step did not need, oldest first; the same on every rank."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def take_all(self) -> list[Group]:
        """All groups; none is left afterwards."""
        taken, self._groups = self._groups, []
        return taken

    def add_groups(self, groups: list[Group]) -> None:
        self._groups += groups

    def state_dict(self) -> dict[str, Any]:
        """The groups as JSON, for a resumed run."""
        return {"groups": [[_state(sample) for sample in group] for group in self._groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the groups of ``state_dict``; those of an earlier format are drawn anew."""
        known = [group for group in state["groups"] if all("outcome" in row for row in group)]
        self._groups = [[_sample(row) for row in group] for group in known]


def _state(sample: Sample) -> dict[str, Any]:
    """A sample as checkpoints store it, where ``row_id`` has the batch's name ``problem_id``."""
    state = dataclasses.asdict(sample)
    state["problem_id"] = state.pop("row_id")
    return state


def _sample(state: dict[str, Any]) -> Sample:
    revision, outcome = state["revision"], state["outcome"]
    program = state.get("program")
    return Sample(
        uid=state["uid"],
        row_id=state["problem_id"],
        task=state["task"],
        mini_batch=state["mini_batch"],
        prompt=tuple(state["prompt"]),
        completion=completion_from_state(state["completion"]),
        drawn=tuple(state["drawn"]),
        text=state["text"],
        judgment=state["judgment"],
        revision=None if revision is None else Revision(**revision),
        outcome=None if outcome is None else SampleRewards(**outcome),
        turn=state.get("turn", 1),
        parent=state.get("parent", ""),
        program=None if program is None else CriticisedProgram(**program),
        fields=state["fields"],
    )
