"""Which groups dynamic sampling keeps, and what it keeps over a checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ctrl_megatron.pipeline.batch import LeftoverGroups, Sample
from ctrl_megatron.pipeline.dynamic_sampling import groups_that_teach
from ctrl_megatron.pipeline.losses import means_over_steps, mini_batches
from ctrl_megatron.types import Completion, VersionSpan

ALONE: Any = SimpleNamespace(sum_over_data=lambda counts: counts)


def judged(uid: str, reward: float | None, *, style: float = 0.0) -> Sample:
    earned = {"reward/format": 1.0, "reward/critic": reward, "reward/style": style}
    fields = {"critique": "text", "valid": True, **earned}
    completion = Completion(
        token_ids=(5, 6),
        log_probs=(-0.5, -0.25),
        finish_reason="stop",
        spans=(VersionSpan("actor@3", 0, 2),),
    )
    return Sample(
        uid=uid,
        problem_id="p/1",
        mini_batch=1,
        prompt=(1, 2, 3),
        completion=completion,
        fields=fields,
    )


def test_only_groups_with_different_rewards_are_useful() -> None:
    rows = [
        *(judged("mixed", 0.0), judged("equal", 1.0), judged("mixed", 0.5), judged("equal", 1.0)),
        # What could not be judged says nothing, but stays with its group.
        *(judged("lost", None), judged("lost", 1.0), judged("mixed", None)),
    ]
    weights = {"format": 1.0, "critic": 2.0, "overlong": 1.0, "soft_overlong_punishment": 1.0}
    (group,) = groups_that_teach(rows, weights)
    assert [row.fields["reward/critic"] for row in group] == [0.0, 0.5, None]
    assert groups_that_teach([judged("lost", None)], weights) == []


def test_groups_are_compared_by_the_sum_of_their_rewards() -> None:
    rows = [judged("even", 1.0, style=0.0), judged("even", 0.0, style=1.0)]
    assert groups_that_teach(rows, {"format": 1.0, "critic": 1.0, "style": 1.0}) == []
    assert groups_that_teach(rows, {"format": 1.0, "critic": 1.0, "style": 0.5}) == [rows]


def test_leftover_groups_survive_json() -> None:
    groups = [[judged("a", 0.0), judged("a", 1.0)], [judged("b", None), judged("b", 0.5)]]
    leftover = LeftoverGroups()
    leftover.keep(groups)
    restored = LeftoverGroups()
    restored.load_state_dict(json.loads(json.dumps(leftover.state_dict(), allow_nan=False)))
    assert restored.take() == groups
    assert restored.take() == []


def test_mini_batches_cover_every_row_once_per_epoch() -> None:
    pieces = mini_batches(numbered([1, 0, 1, 2, 0]), ALONE, epochs=2)
    assert [piece["row"].tolist() for piece in pieces] == [[1, 4], [0, 2], [3]] * 2


def test_a_mini_batch_without_a_token_in_the_loss_is_left_out() -> None:
    batch = numbered([1, 0, 1, 2, 0])
    batch["response_mask"][[1, 4]] = False
    assert [p["row"].tolist() for p in mini_batches(batch, ALONE, epochs=1)] == [[0, 2], [3]]
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["loss_mask"][3] = False
    assert [p["row"].tolist() for p in mini_batches(batch, ALONE, epochs=1)] == [[0, 2]]
    batch["loss_mask"][:] = False
    with pytest.raises(ValueError, match="no response token of the step"):
        next(mini_batches(batch, ALONE, epochs=1))


def test_one_that_teaches_another_rank_is_kept() -> None:
    batch = numbered([0, 1])
    batch["response_mask"][:] = False
    elsewhere: Any = SimpleNamespace(sum_over_data=lambda counts: counts + torch.tensor([0, 3]))
    assert [p["row"].tolist() for p in mini_batches(batch, elsewhere, epochs=1)] == [[1]]


def numbered(mini_batch: list[int]) -> TensorDict:
    """Rows of two response tokens in these mini-batches."""
    rows = len(mini_batch)
    fields: dict[str, Any] = {"mini_batch": torch.tensor(mini_batch), "row": torch.arange(rows)}
    fields["response_mask"] = torch.ones(rows, 2, dtype=torch.bool)
    return TensorDict(fields, batch_size=[rows])


def test_means_over_steps_name_what_has_no_prefix() -> None:
    steps = [{"lr": 1.0, "actor/kl": 2.0}, {"lr": 3.0, "actor/kl": 4.0}]
    assert means_over_steps(steps, "actor") == {"actor/lr": 2.0, "actor/kl": 3.0}
