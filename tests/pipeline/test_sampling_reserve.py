"""What dynamic sampling keeps, and what it keeps over a checkpoint."""

from __future__ import annotations

import json

import torch

from ctrl_megatron.pipeline.batch import CritiqueRow
from ctrl_megatron.pipeline.dynamic_sampling import _useful_groups
from ctrl_megatron.pipeline.mini_batches import means_over_steps, mini_batches
from ctrl_megatron.pipeline.reserve import JudgedCritique, SamplingReserve
from ctrl_megatron.rewards import RewardOutcome
from ctrl_megatron.types import Completion, Verdict, VersionSpan


def judged(uid: str, reward: float | None) -> JudgedCritique:
    completion = Completion(
        token_ids=(5, 6),
        log_probs=(-0.5, -0.25),
        finish_reason="stop",
        spans=(VersionSpan("actor@3", 0, 2),),
    )
    row = CritiqueRow(
        uid=uid, problem_id="p/1", mini_batch=1, prompt=(1, 2, 3), completion=completion
    )
    outcome = RewardOutcome(
        reward=reward,
        judgment=False,
        verdict=None
        if reward is None
        else Verdict(passed=(True, False), total=2, detail=("", "E"), forged=True),
        error="" if reward is not None else "the sandbox is down",
    )
    return JudgedCritique(
        row=row, critique="said", revision="code", revision_tokens=7, outcome=outcome
    )


def test_only_groups_with_different_rewards_are_useful() -> None:
    rows = [
        *(judged("mixed", 0.0), judged("equal", 1.0), judged("mixed", 0.5), judged("equal", 1.0)),
        # What could not be judged says nothing, but stays with its group.
        *(judged("lost", None), judged("lost", 1.0), judged("mixed", None)),
    ]
    (group,) = _useful_groups(rows)
    assert [row.outcome.reward for row in group] == [0.0, 0.5, None]
    assert _useful_groups([judged("lost", None)]) == []


def test_the_reserve_survives_json() -> None:
    groups = [[judged("a", 0.0), judged("a", 1.0)], [judged("b", None), judged("b", 0.5)]]
    reserve = SamplingReserve()
    reserve.keep(groups)
    restored = SamplingReserve()
    restored.load_state_dict(json.loads(json.dumps(reserve.state_dict())))
    assert restored.take() == groups
    assert restored.take() == []


def test_mini_batches_cover_every_row_once_per_epoch() -> None:
    numbers = torch.tensor([1, 0, 1, 2, 0])
    rows = [piece.tolist() for piece in mini_batches(numbers, epochs=2)]
    assert rows == [[1, 4], [0, 2], [3]] * 2
    steps = [{"lr": 1.0, "actor/kl": 2.0}, {"lr": 3.0, "actor/kl": 4.0}]
    assert means_over_steps(steps, "actor") == {"actor/lr": 2.0, "actor/kl": 3.0}
