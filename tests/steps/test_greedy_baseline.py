"""ReMax's baseline reaches every row of its group, whatever order the rows are in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards import Scores
from ctrl_megatron.steps.greedy_baseline import group_heads, judge_greedy_revisions


def batch() -> TensorDict:
    made = TensorDict({}, batch_size=[4])
    texts = {
        "uid": ["b", "a", "b", "c"],
        "problem_id": ["p2", "p1", "p2", "p3"],
        "greedy_critique": ["to b", "to a", "to b", "to c"],
        "greedy_revision": ["of b", "of a", "of b", "of c"],
    }
    for name, values in texts.items():
        made[name] = NonTensorStack(*values)
    made["greedy_valid"] = torch.tensor([True, False, True, True])
    made["greedy_revision_fits"] = torch.ones(4, dtype=torch.bool)
    made["greedy_judged_correct"] = torch.tensor([True, False, True, False])
    return made


def test_a_group_is_judged_once_and_all_its_rows_get_the_baseline() -> None:
    assert group_heads(batch()) == [0, 1, 3]
    seen: list[Any] = []

    async def score(items: list[Any]) -> Any:
        seen.extend(items)
        rewards: Any = [0.5, None, 1.0]
        return Scores(parts={"critic": rewards}, totals=rewards, outcomes=[None] * 3)

    worker: Any = SimpleNamespace(
        train=SimpleNamespace(row=lambda name: Row(id=name)),
        score=score,
        reward_weights={"critic": 0.5},
    )
    output = asyncio.run(judge_greedy_revisions(worker, batch()))
    assert [item.critique for item in seen] == ["to b", "to a", "to c"]
    assert [item.text for item in seen] == ["of b", "of a", "of c"]
    assert [item.judgment for item in seen] == [True, None, False]
    baselines = output.fields["reward_baselines"]
    assert baselines[[0, 2, 3]].tolist() == [0.25, 0.25, 0.5]
    # A critique that was not judged is no baseline.
    assert torch.isnan(baselines[1])
