"""The groups that dynamic sampling keeps, and its state in a checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ctrl_megatron.config import load_config
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.pipeline import NodeOutput, NodeRole, Pipeline
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.run.checks.nodes import check_group_filter
from ctrl_megatron.run.loop import Schedule, TrainingLoop
from ctrl_megatron.steps.draws import LeftoverGroups
from ctrl_megatron.steps.dynamic_sampling import groups_with_varied_rewards
from ctrl_megatron.steps.losses import means_over_steps, mini_batches
from ctrl_megatron.steps.sample import Revision, Sample, SampleRewards
from ctrl_megatron.types import Completion, VersionSpan

ALONE: Any = SimpleNamespace(
    sum_over_data=lambda counts: counts, gather_data_ranks=lambda own: [own]
)


def judged(uid: str, reward: float | None, *, style: float = 0.0) -> Sample:
    earned = {"format": 1.0, "critic": reward, "style": style}
    completion = Completion(
        token_ids=(5, 6),
        log_probs=(-0.5, -0.25),
        finish_reason="stop",
        spans=(VersionSpan("actor@3", 0, 2),),
    )
    return Sample(
        uid=uid,
        row_id="p/1",
        mini_batch=1,
        prompt=(1, 2, 3),
        completion=completion,
        text="text",
        judgment=True,
        revision=Revision(text="revised", tokens=3),
        outcome=SampleRewards(total=reward, rewards=earned, detail="why"),
        fields={"own": 1.0},
    )


def test_only_groups_with_different_rewards_are_useful() -> None:
    rows = [
        *(judged("mixed", 0.0), judged("equal", 1.0), judged("mixed", 0.5), judged("equal", 1.0)),
        # A sample that was not judged carries no signal, but stays in its group.
        *(judged("lost", None), judged("lost", 1.0), judged("mixed", None)),
    ]
    weights = {"format": 1.0, "critic": 2.0, "overlong": 1.0, "soft_overlong_punishment": 1.0}
    (group,) = groups_with_varied_rewards(rows, weights)
    assert [row.outcome.rewards["critic"] for row in group if row.outcome] == [0.0, 0.5, None]
    assert groups_with_varied_rewards([judged("lost", None)], weights) == []


def test_groups_are_compared_by_the_sum_of_their_rewards() -> None:
    rows = [judged("even", 1.0, style=0.0), judged("even", 0.0, style=1.0)]
    assert groups_with_varied_rewards(rows, {"format": 1.0, "critic": 1.0, "style": 1.0}) == []
    assert groups_with_varied_rewards(rows, {"format": 1.0, "critic": 1.0, "style": 0.5}) == [rows]


def test_leftover_groups_survive_json() -> None:
    groups = [[judged("a", 0.0), judged("a", 1.0)], [judged("b", None), judged("b", 0.5)]]
    leftover = LeftoverGroups()
    leftover.add_groups(groups)
    restored = LeftoverGroups()
    stored = json.loads(json.dumps(leftover.state_dict(), allow_nan=False))
    # Checkpoints of earlier versions have the row's id under this name.
    first = stored["groups"][0][0]
    assert first["problem_id"] == "p/1" and "row_id" not in first
    restored.load_state_dict(stored)
    assert restored.take_all() == groups
    assert restored.take_all() == []


def test_mini_batches_cover_every_row_once() -> None:
    pieces = mini_batches(numbered([1, 0, 1, 2, 0]), ALONE)
    assert [piece["row"].tolist() for piece in pieces] == [[1, 4], [0, 2], [3]]


def test_a_rank_without_rows_of_a_mini_batch_has_it_too() -> None:
    groups: Any = SimpleNamespace(
        sum_over_data=lambda counts: counts + torch.tensor([0, 5, 0]),
        gather_data_ranks=lambda own: [own, [1]],
    )
    pieces = mini_batches(numbered([2, 0, 2]), groups)
    assert [piece["row"].tolist() for piece in pieces] == [[1], [], [0, 2]]


def test_a_mini_batch_without_a_token_in_the_loss_is_left_out() -> None:
    batch = numbered([1, 0, 1, 2, 0])
    batch["response_mask"][[1, 4]] = False
    assert [p["row"].tolist() for p in mini_batches(batch, ALONE)] == [[0, 2], [3]]
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["loss_mask"][3] = False
    assert [p["row"].tolist() for p in mini_batches(batch, ALONE)] == [[0, 2]]
    batch["loss_mask"][:] = False
    with pytest.raises(ValueError, match="no response token of the step"):
        next(mini_batches(batch, ALONE))


def test_one_that_teaches_another_rank_is_kept() -> None:
    batch = numbered([0, 1])
    batch["response_mask"][:] = False
    elsewhere: Any = SimpleNamespace(
        sum_over_data=lambda counts: counts + torch.tensor([0, 3]),
        gather_data_ranks=lambda own: [own],
    )
    assert [p["row"].tolist() for p in mini_batches(batch, elsewhere)] == [[1]]


def numbered(mini_batch: list[int]) -> TensorDict:
    """Rows of two response tokens in these mini-batches."""
    rows = len(mini_batch)
    fields: dict[str, Any] = {"mini_batch": torch.tensor(mini_batch), "row": torch.arange(rows)}
    fields["response_mask"] = torch.ones(rows, 2, dtype=torch.bool)
    return TensorDict(fields, batch_size=[rows])


def test_means_over_steps_name_what_has_no_prefix() -> None:
    steps = [{"lr": 1.0, "actor/kl": 2.0}, {"lr": 3.0, "actor/kl": 4.0}]
    assert means_over_steps(steps, "actor") == {"actor/lr": 2.0, "actor/kl": 3.0}


FILTERED = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4")


@pytest.mark.parametrize(
    ("functions", "weights", "always", "named"),
    [
        ("[soft_overlong_punishment]", "[1]", (), "of soft_overlong_punishment none counts"),
        ("[critic,soft_overlong_punishment]", "[0,1]", ("critic",), "of critic, soft_over"),
        ("[code,soft_overlong_punishment]", "[0,2]", (), "of code, soft_over"),
    ],
)
def test_groups_that_could_never_differ_are_refused(
    functions: str, weights: str, always: tuple[str, ...], named: str
) -> None:
    given = (
        f"reward.reward_funcs={functions}",
        f"reward.reward_weights={weights}",
        "dag.custom_pipeline_fn=mine:build",
    )
    config = load_config(None, [*FILTERED, *given], "none")
    with pytest.raises(UserError, match=rf"^reward\.reward_funcs: .*{named}"):
        check_group_filter(config, plan_rewards(config, always))
    for other in (load_config(None, list(given), "none"), load_config(None, [*FILTERED], "none")):
        check_group_filter(other, plan_rewards(other, always))


def loop_over(rows: int, *, drawn_per_step: list[int], epochs: int, size: int) -> TrainingLoop:
    """A loop whose only node draws ``size`` rows so many times in each step."""
    sampler = ResumableSampler(rows, seed=1)

    def draw(worker: Any, batch: TensorDict) -> NodeOutput:
        assert len(batch) == 0
        for _ in range(drawn_per_step[worker.step % len(drawn_per_step)]):
            sampler.next_batch(size)
        return NodeOutput()

    graph = Pipeline("g").add_node("d", draw, node_role=NodeRole.DYNAMIC_SAMPLING).build()
    nothing: Any = lambda *_, **__: None  # noqa: E731
    names = ("begin_step", "end_step", "show_line", "log", "add_stage")
    recorder: Any = SimpleNamespace(**dict.fromkeys(names, nothing))
    store: Any = SimpleNamespace(save=nothing, wait_for_save=nothing, pop_save_report=nothing)
    groups = SimpleNamespace(all_gather=lambda value: [value], is_first=False, rank=0)
    stop = SimpleNamespace(requested_on_any_rank=lambda groups: False)
    worker: Any = SimpleNamespace(
        step=0,
        trained_models={},
        saved_models={},
        groups=groups,
        timeline=Timeline(),
        stop=stop,
        background=None,
    )
    worker.agents = [worker]
    return TrainingLoop(
        worker=worker,
        graph=graph,
        sampler=sampler,
        store=store,
        recorder=recorder,
        schedule=Schedule(
            batch_size=size, total_steps=epochs * (rows // size), total_epochs=epochs
        ),
    )


@pytest.mark.parametrize(
    ("drawn_per_step", "steps"), [([1], 12), ([2], 6), ([4], 3), ([1, 3], 6), ([5], 3), ([30], 1)]
)
def test_epochs_count_rows_and_not_steps(drawn_per_step: list[int], steps: int) -> None:
    """Two epochs of six batches: whatever a step draws, no row begins a third one but in a step
    that had begun before.
    """
    loop = loop_over(20, drawn_per_step=drawn_per_step, epochs=2, size=3)
    assert loop.run() and loop.worker.step == steps
    again = loop_over(20, drawn_per_step=drawn_per_step, epochs=2, size=3)
    again.sampler.load_state_dict(loop.sampler.state_dict())
    assert again.run() and again.worker.step == 0
