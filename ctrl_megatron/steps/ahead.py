"""Samples of later training steps, which the engines draw while one trains
(``actor_rollout_ref.rollout.staleness``).

The weights that draw them are up to so many updates behind those that train on them, which
``algorithm.rollout_correction`` corrects by importance sampling or rejection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.steps.draws import StepDraw
from ctrl_megatron.steps.sample import completion_from_state, spans_from_versions_text
from ctrl_megatron.steps.sampling import RowListener, begin_draw, share_prompts

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ctrl_megatron.steps.worker import DAGWorker
    from ctrl_megatron.types import Completion

_STOP_ROUNDS = 10
"""Seconds that a stop waits for texts which are being drawn; then the save is made without them."""


def begin_draws_ahead(worker: DAGWorker, on_completion: RowListener | None) -> None:
    """Start to draw the samples of the next ``rollout.staleness`` steps of the run, as far as they
    are not begun, from the actor's weights as they are now. ``on_completion`` as in ``begin_draw``.
    Collective.

    Without ``rollout.update_in_flight`` new draws begin only when the earlier ones are used up:
    weights are pushed while nothing is drawn, and the engines have so many steps to draw without an
    interruption.
    """
    rollout = worker.config.actor_rollout_ref.rollout
    worker.ahead.forget_before(worker.step)
    if not rollout.update_in_flight and worker.ahead.draw_of_step(worker.step + 1) is not None:
        return
    # The step in hand has its samples, and none follows the last one.
    count = min(rollout.staleness, worker.total_steps - 1 - worker.step)
    assert worker.peek is not None
    batches = worker.peek(worker.config.data.train_batch_size, count)
    for step, rows in enumerate(batches, start=worker.step + 1):
        if worker.ahead.draw_of_step(step) is None:
            draw = begin_draw(
                worker,
                rows,
                mini_batch_size=worker.config.actor_rollout_ref.actor.ppo_mini_batch_size,
                step=step,
                on_completion=on_completion,
            )
            worker.ahead.add_draw(draw)


def report_staleness(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``rollout/staleness``: the updates between the weights that drew a sample's tokens and those
    that are about to train on it; and, with updates in flight, ``rollout/mixed_rate``. Collective.
    Raises RuntimeError where a token is more than ``rollout.staleness`` updates old.
    """
    worker.device_owner.version(worker.role, worker.step)
    rollout, lengths = worker.config.actor_rollout_ref.rollout, batch["response_mask"].sum(dim=1)
    spans = [
        spans_from_versions_text(*one)
        for one in zip(texts(batch["version"]), lengths.tolist(), strict=True)
    ]
    known = worker.device_owner.versions[worker.role]
    behind = {span.version: known.versions_behind(span.version) for of in spans for span in of}
    if max(behind.values(), default=0) > rollout.staleness:
        raise RuntimeError(
            f"samples are {min(behind.values())} to {max(behind.values())} updates old, and at "
            f"most actor_rollout_ref.rollout.staleness={rollout.staleness} may be"
        )
    ages = [
        sum(behind[span.version] * (span.end - span.start) for span in of) / length
        for of, length in zip(spans, lengths.tolist(), strict=True)
        if length
    ]
    values = {"rollout/staleness": torch.tensor(ages)}
    if rollout.update_in_flight:
        values["rollout/mixed_rate"] = torch.tensor([float(len(of) > 1) for of in spans])
    return NodeOutput(metrics=worker.global_means(values))


class SavedDraws:
    """The draws ahead as a part of a checkpoint, so that a resumed run trains on the same texts."""

    def __init__(self, worker: DAGWorker) -> None:
        self._worker = worker

    def state_dict(self) -> dict[str, Any]:
        """The completions of every row that earlier steps have begun to draw for later ones, and
        the names of the weights. Collective.

        Waits for completions that are being drawn, after a stop for ten seconds at most: a resumed
        run draws anew what is not there then or whose engines are lost, from later weights. What
        the step in hand has begun is left out: the resumed run repeats that step.
        """
        worker = self._worker
        begun = [d for d in worker.ahead.all_draws() if d.begun < worker.step <= d.step]
        limit = worker.config.actor_rollout_ref.rollout.staleness
        worker.device_owner.version(worker.role, worker.step)  # has a name from now on
        return {
            "versions": worker.device_owner.versions[worker.role].last_step_numbers(limit + 1),
            "draws": [self._state(draw) for draw in self._there(begun)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the draws of ``state_dict``, but for those with another number of samples than
        this run draws, and those that are older than it allows.
        """
        if not state:
            return
        worker, rollout = self._worker, self._worker.config.actor_rollout_ref.rollout
        updates = worker.device_owner.update_count(worker.role)
        worker.device_owner.versions[worker.role].restore_names(state["versions"], updates)
        for saved in state["draws"]:
            age, samples = saved["step"] - saved["begun"], len(saved["groups"][0])
            if samples == rollout.n and age <= rollout.staleness:
                worker.ahead.add_draw(self._draw(saved))

    def _state(self, draw: StepDraw) -> dict[str, Any]:
        """The draw, whose completions are there, with the groups of all ranks in the order of its
        rows. Collective.
        """
        prompts, groups = self._mine(draw.rows), self._worker.groups
        completions = groups.broadcast_from_leader(draw.groups.result() if draw.groups else None)
        pairs = [(prompt, group) for (prompt, _), group in zip(prompts, completions, strict=True)]
        every = dict(pair for part in groups.gather_data_ranks(pairs) for pair in part)
        return {
            "step": draw.step,
            "begun": draw.begun,
            "rows": list(draw.rows),
            "version": draw.version,
            "groups": [[dataclasses.asdict(c) for c in every[prompt]] for prompt in sorted(every)],
        }

    def _draw(self, saved: dict[str, Any]) -> StepDraw:
        done: Future[list[list[Completion]]] | None = None
        if self._worker.groups.is_leader:
            # As a draw of this run, whose completions are there already.
            done = Future()
            mine = [saved["groups"][place] for place, _ in self._mine(saved["rows"])]
            done.set_result([[completion_from_state(c) for c in group] for group in mine])
        return StepDraw(
            step=saved["step"],
            begun=saved["begun"],
            rows=tuple(saved["rows"]),
            attempt=0,
            version=saved["version"],
            groups=done,
        )

    def _mine(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        size = self._worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
        return share_prompts(len(rows), size, self._worker.groups)

    def _there(self, draws: Sequence[StepDraw]) -> list[StepDraw]:
        """Those of the draws whose completions all ranks have, for which they wait."""
        worker = self._worker
        if not draws:
            return []
        if not worker.stop.requested_on_any_rank(worker.groups):
            there = []
            for draw in draws:
                try:
                    what = f"texts of {draw.version} from the engines"
                    worker.wait_conditions.wait_together(draw.groups, what)
                except ServiceLost:
                    continue
                there.append(draw)
            return there
        futures = [draw.groups for draw in draws if draw.groups is not None]
        for _ in range(_STOP_ROUNDS):
            wait(futures, timeout=1.0)
            (busy,) = worker.groups.any_rank(not all(future.done() for future in futures))
            if not busy:
                break
        lost = worker.groups.any_rank(*(_is_lost(draw) for draw in draws))
        return [draw for draw, gone in zip(draws, lost, strict=True) if not gone]


def _is_lost(draw: StepDraw) -> bool:
    done = draw.groups
    return done is not None and (not done.done() or done.exception() is not None)
