"""Steps whose updates are skipped: counted, not saved over good ones, and the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.graph import Pipeline
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeType
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.models.parallel_model import SkippedUpdate
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.run.loop import Schedule, TrainingLoop


class Found:
    """What a loop over steps, some of which are bad, has saved, said and kept."""

    def __init__(self, bad: set[int], *, limit: int, total: int = 8) -> None:
        self.saved: list[int] = []
        self.states: dict[int, Any] = {}
        self.exported: list[int] = []
        self.said: list[str] = []
        self.counted: dict[int, float] = {}
        self.kept: list[tuple[int, list[str]]] = []
        groups: Any = SimpleNamespace(
            all_gather=lambda value: [value],
            gather_data_ranks=lambda value: [value, ["other"]],
            is_first=False,
            rank=0,
        )
        worker: Any = SimpleNamespace(
            step=0,
            trained_models={"policy": SimpleNamespace(take_skipped_updates=self._take)},
            saved_models={},
            groups=groups,
            timeline=Timeline(),
            stop=SimpleNamespace(requested_on_any_rank=lambda groups: False),
            background=None,
        )
        worker.agents = [worker]
        self._worker, self._bad = worker, bad
        nothing: Any = lambda *_, **__: None  # noqa: E731
        recorder: Any = SimpleNamespace(
            show_line=self.said.append,
            end_step=self._end,
            **dict.fromkeys(("begin_step", "log", "add_stage"), nothing),
        )
        store: Any = SimpleNamespace(
            save=self._save,
            export_hf=lambda models, step: self.exported.append(step),
            wait_for_save=nothing,
            pop_save_report=nothing,
        )
        self.loop = TrainingLoop(
            worker=worker,
            graph=_pipeline(),
            sampler=ResumableSampler(10, seed=1),
            store=store,
            recorder=recorder,
            schedule=Schedule(
                batch_size=2, total_steps=total, save_freq=1, save_hf_freq=1, max_bad_steps=limit
            ),
            keep_batch=self._keep,
        )

    def _take(self) -> list[SkippedUpdate]:
        if self._worker.step not in self._bad:
            return []
        return [SkippedUpdate(reason="the loss is nan", rows=(1,), learning_rate="some.lr=1")]

    def _end(self, step: int, metrics: dict[str, float], *_: Any) -> None:
        if "update/skipped" in metrics:
            self.counted[step] = metrics["update/skipped"]

    def _save(self, models: Any, step: int, state: dict[str, Any]) -> None:
        self.saved.append(step)
        self.states[step] = state

    def _keep(self, step: int, batch: TensorDict) -> Path:
        self.kept.append((step, sorted(map(str, batch.keys()))))
        return Path(f"dumps/{step}")


def _pipeline() -> Any:
    def draw(worker: Any, batch: TensorDict) -> NodeOutput:
        names = NonTensorStack("first", "second")
        return NodeOutput(batch=TensorDict({"problem_id": names}, batch_size=[2]))

    def update(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"after": torch.zeros(2)})

    pipeline = Pipeline("p").add_node("draw", draw)
    pipeline.add_node("update", update, ["draw"], node_type=NodeType.MODEL_TRAIN)
    return pipeline.build()


def test_a_run_goes_on_after_bad_steps_and_saves_when_one_is_good() -> None:
    found = Found({2, 3, 5, 8}, limit=3)
    assert found.loop.run()
    # The last step is saved whatever it was: the run ends with it.
    assert found.saved == [1, 4, 6, 7, 8] and found.exported == [1, 4, 6, 7]
    assert found.counted == dict.fromkeys((2, 3, 5, 8), 1.0) and found.kept == []
    warnings = [line for line in found.said if line.startswith("warning:")]
    assert warnings[0] == (
        "warning: step 2 does not update policy: the loss is nan; rows: second, other"
    )


def test_a_stop_after_the_update_saves_the_rows_with_the_weights() -> None:
    class Stopping:
        def begin(self, step: int) -> None: ...
        def before_update(self, step: int, batch: TensorDict, policy: int) -> None: ...
        def end(self, step: int, batches: Any, metrics: Any) -> None:
            if step == 2:
                raise StopRequested

    found, sampler = Found(set(), limit=3), ResumableSampler(10, seed=1)
    found.loop.watchers = (Stopping(),)
    assert not found.loop.run()
    for _ in range(2):
        sampler.next_batch(2)
    assert found.saved == [1, 2] and found.states[2]["sampler"] == sampler.state_dict()


@pytest.mark.parametrize("limit", [1, 2])
def test_bad_steps_in_a_row_end_the_run_with_the_batch_before_the_update(limit: int) -> None:
    found = Found({2, 4, 5, 6}, limit=limit)
    last = {1: 2, 2: 5}[limit]
    with pytest.raises(UserError) as caught:
        found.loop.run()
    assert str(caught.value) == (
        f"some.lr=1: {limit} steps in a row, up to step {last}, skipped an update "
        f"(trainer.max_bad_steps): the loss is nan; the last checkpoint is that of step "
        f"{found.saved[-1]}; lower it, continue from an older checkpoint (trainer.resume_mode), "
        f"or look at the batch in dumps/{last} with ctrl-replay"
    )
    assert found.kept == [(last, ["problem_id"])]
    assert found.saved == {1: [1], 2: [1, 3]}[limit] and last in found.counted
