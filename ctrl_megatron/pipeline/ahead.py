"""Samples of the next training step, which the engines draw while this one trains
(``actor_rollout_ref.rollout.staleness``).

The weights that draw them are one update behind those that train on them, which
``algorithm.rollout_correction`` corrects by importance sampling or rejection.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.pipeline.batch import Draw, completion_of, texts
from ctrl_megatron.pipeline.graph import NodeOutput
from ctrl_megatron.pipeline.sampling import RowListener, begin_draw, share_prompts

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ctrl_megatron.pipeline.worker import DAGWorker
    from ctrl_megatron.types import Completion

_STOP_ROUNDS = 10
"""Seconds that a stop waits for texts which are being drawn; then the save is made without them."""


def begin_ahead(worker: DAGWorker, heard: RowListener | None) -> None:
    """Start to draw the samples of the next step from the actor's weights as they are now, unless
    this step is the last one. ``heard`` as in ``begin_draw``. Collective.
    """
    worker.ahead.forget_before(worker.step)
    if worker.step + 1 < worker.total_steps:
        assert worker.peek is not None
        draw = begin_draw(
            worker,
            worker.peek(worker.config.data.train_batch_size),
            mini_batch_size=worker.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            step=worker.step + 1,
            heard=heard,
        )
        worker.ahead.keep(draw)


def report_staleness(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``rollout/staleness``: the updates between the weights that drew a sample and those that are
    about to train on it. Raises RuntimeError where it is above ``rollout.staleness``.
    """
    now = _number(worker.device.version("actor", worker.step))
    ages = [now - _number(version) for version in texts(batch["version"])]
    limit = worker.config.actor_rollout_ref.rollout.staleness
    if ages and not 0 <= min(ages) <= max(ages) <= limit:
        raise RuntimeError(
            f"samples are {min(ages)} to {max(ages)} updates old, and at most "
            f"actor_rollout_ref.rollout.staleness={limit} may be"
        )
    values = torch.tensor([float(age) for age in ages])
    return NodeOutput(metrics=worker.means({"rollout/staleness": values}))


def _number(version: str) -> int:
    return int(version.partition("@")[2])


class SavedDraws:
    """The draws ahead as a part of a checkpoint, so that a resumed run trains on the same texts."""

    def __init__(self, worker: DAGWorker) -> None:
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        """The completions of every row of the next step, in the order of its rows; empty where
        nothing was begun for it. Collective.

        Waits for completions that are being drawn, after a stop for ten seconds at most: without
        them, or if their engines are lost, a resumed run draws the step anew, from weights that are
        one update younger.
        """
        worker = self._worker
        draw = worker.ahead.of(worker.step)
        if draw is None or not self._is_there(draw):
            return {}
        mine = self._mine(draw)
        groups = worker.groups.from_leader(draw.groups.result() if draw.groups else None)
        pairs = [(place, group) for (place, _), group in zip(mine, groups, strict=True)]
        every = dict(pair for part in worker.groups.from_data_ranks(pairs) for pair in part)
        return {
            "step": draw.step,
            "rows": list(draw.rows),
            "version": draw.version,
            "groups": [[dataclasses.asdict(c) for c in every[place]] for place in sorted(every)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the draw of ``state_dict``, unless this run draws another number of samples."""
        worker = self._worker
        if not state or len(state["groups"][0]) != worker.config.actor_rollout_ref.rollout.n:
            return
        draw = Draw(
            step=state["step"],
            rows=tuple(state["rows"]),
            attempt=0,
            version=state["version"],
            groups=None,
        )
        if worker.groups.is_leader:
            done: Future[list[list[Completion]]] = Future()
            mine = [state["groups"][place] for place, _ in self._mine(draw)]
            done.set_result([[completion_of(c) for c in group] for group in mine])
            draw = dataclasses.replace(draw, groups=done)
        worker.ahead.keep(draw)

    def _mine(self, draw: Draw) -> list[tuple[int, int]]:
        size = self._worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
        return share_prompts(len(draw.rows), size, self._worker.groups)

    def _is_there(self, draw: Draw) -> bool:
        """Whether all ranks have the draw's completions, for which they wait."""
        worker = self._worker
        if not worker.stop.agreed(worker.groups):
            try:
                worker.waiting.together(draw.groups, f"texts of {draw.version} from the engines")
            except ServiceLost:
                return False
            return True
        for _ in range(_STOP_ROUNDS):
            if draw.groups is not None:
                wait((draw.groups,), timeout=1.0)
            (busy,) = worker.groups.on_any(draw.groups is not None and not draw.groups.done())
            if not busy:
                break
        lost = draw.groups is not None and (
            not draw.groups.done() or draw.groups.exception() is not None
        )
        return not any(worker.groups.on_any(lost))
