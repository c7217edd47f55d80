"""The reward of a step: the weights of its stage, the gate, and rewards that stay apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.config import load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.run.checks.nodes import check_group_filter
from ctrl_megatron.run.checks.rewards import check_rows_rewardable
from ctrl_megatron.run.checks.rl import check_estimator_and_loss
from ctrl_megatron.steps.dynamic_sampling import groups_with_varied_rewards
from ctrl_megatron.steps.model_reward import total_rewards, weighted_parts
from ctrl_megatron.steps.sample import Sample, SampleRewards
from ctrl_megatron.steps.worker import RolloutWorker
from ctrl_megatron.types import Completion

NAN = float("nan")
PATHS = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=/model")
STAGES = "reward.schedule=[{from_step: 3, weights: {critic: 0, judge: 2}}]"


def worker_of(*overrides: str, step: int = 1) -> Any:
    config = load_config(None, [*PATHS, "reward.judge.weight=0.5", *overrides], "rl")
    rows = [Row(id="r0", prompt=(), task="critique"), Row(id="r1", prompt=(), task="solving")]
    worker = SimpleNamespace(
        config=config,
        train=PromptTable(rows=tuple(rows), prompts=((), ()), dropped=0),
        reward_weights=plan_rewards(config).weights,
        step=step - 1,
    )
    worker.step_weights = RolloutWorker.step_weights.fget(worker)  # type: ignore[attr-defined]
    return worker


def batch_of(ids: str = "0000", **rewards: list[float]) -> TensorDict:
    batch = TensorDict({"score": torch.full((4,), 9.0)}, batch_size=[4])
    for name, values in rewards.items():
        batch[f"reward/{name}"] = torch.tensor(values)
    batch["problem_id"] = NonTensorStack(*(f"r{i}" for i in ids))
    return batch


CRITIC, JUDGE = [1.0, 0.0, NAN, 0.5], [1.0, -1.0, 1.0, 0.0]


def test_without_a_schedule_the_score_stays_as_it_was_computed() -> None:
    assert total_rewards(worker_of(), batch_of()).tolist() == [9.0] * 4


def test_a_step_has_the_weights_of_its_stage() -> None:
    batch = batch_of(critic=CRITIC, judge=JUDGE)
    before = total_rewards(worker_of(STAGES, step=2), batch)
    torch.testing.assert_close(before, torch.tensor([1.5, -0.5, NAN, 0.5]), equal_nan=True)
    after = total_rewards(worker_of(STAGES, step=3), batch)
    assert after.tolist() == [2.0, -2.0, 2.0, 0.0]  # what the critic does not know counts nothing
    with pytest.raises(UserError, match="no node of this pipeline writes the field reward/judge"):
        total_rewards(worker_of(STAGES), batch_of(critic=CRITIC))


def test_a_false_judgment_earns_the_gate_whatever_else_it_earned() -> None:
    gate = [0.0, 1.0, 1.0, 0.0]
    batch = batch_of(critic=CRITIC, judge=JUDGE, judge_gate=gate)
    found = total_rewards(worker_of("reward.judge.gate=-1"), batch)
    assert found.tolist() == [1.5, -1.0, -1.0, 0.5]


def test_a_function_adds_nothing_to_rows_of_other_tasks() -> None:
    tasks = "reward.reward_tasks={judge: [critique], critic: [critique, solving]}"
    batch = batch_of("0101", critic=[1.0, 1.0, 0.0, 0.5], judge=[1.0, NAN, 1.0, NAN])
    found = total_rewards(worker_of(STAGES, tasks), batch)
    assert found.tolist() == [1.5, 1.0, 0.5, 0.5]


def test_gdpo_gets_every_reward_by_itself_and_leaves_out_what_is_unknown() -> None:
    worker = worker_of("algorithm.adv_estimator=gdpo", STAGES, step=2)
    batch = batch_of(critic=[1.0, NAN, NAN, 0.5], judge=[1.0, -1.0, NAN, 0.0])
    parts, weights = weighted_parts(worker, batch)
    assert weights.tolist() == [1.0, 0.5] and parts.shape == (4, 2)
    total = total_rewards(worker, batch)
    torch.testing.assert_close(total, torch.tensor([1.5, -0.5, NAN, 0.5]), equal_nan=True)
    parts, weights = weighted_parts(
        worker_of("algorithm.adv_estimator=gdpo", STAGES, step=3), batch
    )
    assert weights.tolist() == [2.0] and parts.shape == (4, 1)


def sample(uid: str, **rewards: float | None) -> Sample:
    known = [reward for reward in rewards.values() if reward is not None]
    completion = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", spans=())
    outcome = SampleRewards(total=sum(known), rewards=rewards)
    return Sample(row_id="r0", uid=uid, completion=completion, outcome=outcome)


def test_a_group_teaches_if_its_sum_differs_or_under_gdpo_any_one_reward() -> None:
    samples = [
        # The sum is the same, and both rewards differ.
        *(sample("cancelling", critic=1.0, judge=0.0), sample("cancelling", critic=0.0, judge=1.0)),
        *(sample("equal", critic=1.0, judge=1.0), sample("equal", critic=1.0, judge=1.0)),
        *(sample("varied", critic=1.0, judge=1.0), sample("varied", critic=0.0, judge=1.0)),
    ]
    weights = {"critic": 1.0, "judge": 1.0}
    summed = groups_with_varied_rewards(samples, weights)
    assert [group[0].uid for group in summed] == ["varied"]
    apart = groups_with_varied_rewards(samples, weights, separately=True)
    assert [group[0].uid for group in apart] == ["cancelling", "varied"]
    gated = [
        sample("gated", critic=1.0, judge=1.0, judge_gate=1.0),
        sample("gated", critic=0.0, judge=1.0, judge_gate=1.0),
    ]
    assert groups_with_varied_rewards(gated, weights, gate=-1.0) == []


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("reward.schedule=[{from: 1}]",), r"^reward\.schedule\[0\]: \{'from': 1\} is no stage"),
        (("reward.schedule=[{from_step: 0, weights: {judge: 1}}]",), "is no stage"),
        (("reward.schedule=[{from_step: 1, weights: {judge: true}}]",), "is no stage"),
        (
            ("reward.schedule=[{from_step: 2, weights: {code: 1}}]",),
            "code is no reward of this run",
        ),
        (
            ("reward.schedule=[{from_step: 2, weights: {critic: 0, judge: 0}}]",),
            "from step 2 all weights are 0",
        ),
        (
            ("reward.schedule=[{from_step: 2, weights: {judge: 1}}, {from_step: 2, weights: {}}]",),
            "two stages begin there",
        ),
        (
            (STAGES, "algorithm.adv_estimator=remax"),
            r"remax .* which reward\.schedule does not fit",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        worker_of(*overrides)


def test_an_estimator_of_single_rewards_refuses_what_changes_their_sum() -> None:
    both = ("reward.judge.gate=-1", "algorithm.use_kl_in_reward=true")
    config = worker_of("algorithm.adv_estimator=gdpo", *both).config
    with pytest.raises(UserError) as refused:
        check_estimator_and_loss(config)
    gate, kl = str(refused.value).splitlines()
    assert gate.startswith("reward.judge.gate replaces the sum of the rewards, and algorithm.adv_")
    assert kl.startswith("algorithm.use_kl_in_reward: algorithm.adv_estimator=gdpo reads the")
    check_estimator_and_loss(worker_of("algorithm.adv_estimator=grpo", *both).config)


def test_every_stage_rewards_the_rows_and_leaves_groups_to_compare() -> None:
    switch = "reward.schedule=[{from_step: 3, weights: {critic: 0, judge: 1}}]"
    mixed = (
        "reward.judge.weight=0",
        "reward.reward_funcs=[critic,code]",
        "reward.reward_tasks={critic: [critique]}",
    )
    on = "algorithm.filter_groups.enable=true"
    config = worker_of(switch, on, "reward.judge.weight=0").config
    check_group_filter(config, plan_rewards(config))
    config = worker_of(*mixed, "reward.schedule=[{from_step: 3, weights: {code: 0}}]").config
    rows = [Row(id=task, prompt=(), task=task) for task in ("critique", "code")]
    with pytest.raises(UserError, match="rewards the task 'code' from step 3 on"):
        check_rows_rewardable(plan_rewards(config), rows)
