"""ReMax's baseline reaches every row of its group, whatever order the rows are in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards import Scores
from ctrl_megatron.steps.greedy_baseline import first_rows_of_groups, judge_greedy_revisions
from ctrl_megatron.steps.sample import Revision, Sample
from ctrl_megatron.types import Completion


def batch() -> TensorDict:
    made = TensorDict({}, batch_size=[4])
    made["uid"] = NonTensorStack("b", "a", "b", "c")
    made["problem_id"] = NonTensorStack("p2", "p1", "p2", "p3")
    of = {"b": greedy("b", True), "a": greedy("a", None), "c": greedy("c", False)}
    made["greedy_sample"] = NonTensorStack(*(of[uid] for uid in "babc"))
    return made


def greedy(uid: str, judgment: bool | None) -> Sample:
    nothing = Completion(token_ids=(), log_probs=(), finish_reason="stop", spans=())
    return Sample(
        row_id=uid,
        completion=nothing,
        text=f"to {uid}",
        judgment=judgment,
        revision=Revision(text=f"of {uid}"),
    )


def test_a_group_is_judged_once_and_all_its_rows_get_the_baseline() -> None:
    assert first_rows_of_groups(batch()) == [0, 1, 3]
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
