"""The treatment of rows whose rewards are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards import RewardOutcome, Scores, register_reward, registry
from ctrl_megatron.steps.ctrl import place_scores
from ctrl_megatron.steps.sample import outcomes_of
from ctrl_megatron.steps.worker import DAGWorker

NAN = float("nan")


def scores_of(
    rewards: list[float], *, name: str = "code", parts: bool = False, **more: torch.Tensor
) -> tuple[TensorDict, dict[str, float]]:
    """The batch after the node ``scores``, and its metrics; ``more`` are further fields."""
    worker: Any = SimpleNamespace(
        config=load_config(None, ["data.train_files=x.parquet", "actor_rollout_ref.model.path=m"]),
        reward_weights={name: 1.0},
        step_weights={name: 1.0},
        groups=SimpleNamespace(sum_over_data=lambda totals: totals),
        judged_rate_metrics=dict,
    )
    worker.global_means = lambda values: DAGWorker.global_means(worker, values)
    rows = len(rewards)
    mask = torch.ones(rows, 2, dtype=torch.bool)
    fields: dict[str, Any] = {"score": torch.tensor(rewards), "response_mask": mask, **more}
    if parts:
        fields[f"reward/{name}"] = fields["score"]
    batch = TensorDict(fields, batch_size=[rows])
    batch["uid"] = NonTensorStack(*"a" * rows)
    output = place_scores(worker, batch)
    return batch.update(TensorDict(output.fields, batch_size=[rows])), output.metrics


def test_a_row_without_a_reward_leaves_loss_and_group() -> None:
    batch, metrics = scores_of([1.0, NAN, 0.0])
    assert batch["response_mask"].any(dim=1).tolist() == [True, False, True]
    assert list(batch["uid"]) == ["a", "a/unjudged/1", "a"]
    assert batch["token_level_scores"].tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert metrics["reward/masked_rate"] == pytest.approx(1 / 3)


def test_the_reward_is_on_the_last_token_that_the_model_drew() -> None:
    masks = [[True, False, True, False], [False, True, False, False], [True, True, True, True]]
    batch, _ = scores_of([1.0, 2.0, 3.0], response_mask=torch.tensor(masks))
    assert batch["token_level_scores"].tolist() == [[0, 0, 1, 0], [0, 2, 0, 0], [0, 0, 0, 3]]


def test_a_step_without_any_reward_ends_the_run() -> None:
    with pytest.raises(UserError, match="no sample of the step has a reward"):
        scores_of([NAN, NAN])


def test_a_function_of_the_users_that_never_knows_is_named() -> None:
    with pytest.raises(
        UserError, match=r"^reward\.reward_funcs: mine:f returned None for every item"
    ):
        scores_of([NAN, NAN], name="mine:f", parts=True)
    with pytest.raises(UserError, match="no sample of the step has a reward"):
        scores_of([NAN, NAN], parts=True)


def test_a_function_that_the_user_registered_is_named_too() -> None:
    register_reward("never_knows")(lambda: None)
    try:
        with pytest.raises(UserError, match=r"^reward\.reward_funcs: never_knows returned None"):
            scores_of([NAN, NAN], name="never_knows", parts=True)
    finally:
        del registry._FACTORIES["never_knows"]


def test_a_function_of_the_users_is_named_under_remax() -> None:
    with pytest.raises(UserError, match=r"^reward\.reward_funcs: mine:f returned None"):
        scores_of([NAN, NAN], name="mine:f", parts=True, reward_baselines=torch.zeros(2))


def test_a_row_whose_baseline_was_lost_leaves_loss_and_group() -> None:
    batch, metrics = scores_of([1.0, 1.0, 0.0], reward_baselines=torch.tensor([0.5, NAN, 0.5]))
    assert batch["response_mask"].any(dim=1).tolist() == [True, False, True]
    assert metrics["reward/masked_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("score", [float("inf"), -float("inf"), 1e30])
def test_a_score_that_no_update_could_bear_is_refused(score: float) -> None:
    with pytest.raises(UserError, match=r"the field score contains .*at most 1e"):
        scores_of([0.5, NAN, score])


def test_a_row_knows_how_much_its_critique_held_of_the_program() -> None:
    outcomes = [RewardOutcome(reward=None, copied=1.0, copying="mask"), RewardOutcome(reward=0.0)]
    rewards = [outcome.reward for outcome in outcomes]
    scores = Scores(parts={"critic": rewards}, totals=rewards, outcomes=[*outcomes])
    assert [outcome.copied for outcome in outcomes_of(scores)] == [1.0, None]
