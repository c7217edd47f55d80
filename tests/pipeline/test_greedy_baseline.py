"""ReMax's baseline reaches every row of its group, whatever order the rows are in."""

from __future__ import annotations

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.pipeline.greedy_baseline import baselines, greedy_rows, over_rows, per_group
from ctrl_megatron.rewards import RewardOutcome


def batch() -> TensorDict:
    made = TensorDict({}, batch_size=[4])
    made["uid"] = NonTensorStack("b", "a", "b", "c")
    made["problem_id"] = NonTensorStack("p2", "p1", "p2", "p3")
    return made


def test_without_the_node_there_is_nothing_to_add() -> None:
    assert greedy_rows(batch()) == ([], [], [])


def test_a_group_speaks_once_and_all_its_rows_hear() -> None:
    made = batch()
    said = ["Overall judgment: Correct", "no judgment", "Overall judgment: Incorrect"]
    for name, value in over_rows(made, greedy_critique=said).items():
        made[name] = value
    ids, critiques, valid = greedy_rows(made)
    assert (ids, critiques, valid) == (["p2", "p1", "p3"], said, [True, False, True])
    assert per_group(made, "uid") == ["b", "a", "c"]


def test_what_could_not_be_judged_is_no_baseline() -> None:
    outcomes = [RewardOutcome(reward=reward, judgment=True) for reward in (0.5, None, 1.0)]
    found = baselines(batch(), outcomes)["reward_baselines"]
    assert found[[0, 2, 3]].tolist() == [0.5, 0.5, 1.0]
    assert torch.isnan(found[1])
