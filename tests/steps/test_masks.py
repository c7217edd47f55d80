"""The masks of coupled scores: one seed per row and pass, whatever the ranks and the order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.steps.masks import batch_for_pass, scored_passes, seed_masks

ROWS = [("a", "p1"), ("a", "p1"), ("b", "p2"), ("b", "p2"), ("c", "p1")]
"""(group, problem) of the rows; two groups are about the same problem."""


def configured(*extra: str) -> Config:
    pipeline = "dag.custom_pipeline_fn=ctrl_megatron.pipeline:coupled_grpo_pipeline"
    given = ("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.rollout.name=diffusion")
    return load_config(None, [pipeline, *given, "reward.reward_funcs=[code]", *extra], "none")


def batch_of(rows: list[tuple[str, str]]) -> TensorDict:
    attention = torch.ones(len(rows), 9, dtype=torch.int64)
    attention[:, 0] = 0
    return TensorDict(
        {
            "uid": NonTensorStack(*[uid for uid, _ in rows]),
            "problem_id": NonTensorStack(*[problem for _, problem in rows]),
            "attention_mask": attention,
            "response_mask": torch.ones(len(rows), 6, dtype=torch.bool),
        },
        batch_size=[len(rows)],
    )


def seeded(rows: list[tuple[str, str]], config: Config, step: int = 3) -> TensorDict:
    worker: Any = SimpleNamespace(config=config, step=step)
    batch = batch_of(rows)
    output = seed_masks(worker, batch)
    for name, value in output.fields.items():
        batch[name] = value
    return batch


def test_seeds_depend_on_row_sample_pass_and_step_alone() -> None:
    config = configured()
    batch = seeded(ROWS, config)
    first, second = batch["mask_seed"], batch["mask_seed@1"]
    # Another group of the same problem begins with the same sample.
    assert first[0] == first[4] and len({*first.tolist(), *second.tolist()}) == 8
    apart = [seeded(part, config) for part in (ROWS[2:], ROWS[:2])]
    assert torch.equal(torch.cat([one["mask_seed"] for one in apart]), first[[2, 3, 4, 0, 1]])
    assert not (seeded(ROWS, config, step=4)["mask_seed"] == first).any()
    fixed = configured("actor_rollout_ref.actor.random_masking=false")
    still = seeded(ROWS, fixed)
    assert torch.equal(still["mask_seed"], still["mask_seed@1"])
    assert torch.equal(still["mask_seed"], seeded(ROWS, fixed, step=4)["mask_seed"])


@pytest.mark.parametrize("number", [0, 1])
def test_a_pass_sees_its_own_scores_and_masks(number: int) -> None:
    config = configured()
    batch = seeded(ROWS, config)
    for name in ("old_log_probs", "ref_log_prob"):
        batch[name], batch[f"{name}@1"] = torch.zeros(5, 6), torch.ones(5, 6)
    # An unjudged row leaves its group after the old scores and before the update.
    batch["uid"] = NonTensorStack("a/unjudged/0", *[uid for uid, _ in ROWS[1:]])
    seen = batch_for_pass(batch, number, config)
    assert not [name for name, _ in seen.items() if "@" in name]
    assert (seen["old_log_probs"] == number).all() and (seen["ref_log_prob"] == number).all()
    assert not seen["masked"][:, :3].any() and seen["masked"][:, 3:].any()
    other = batch_for_pass(seeded(ROWS, config), number, config)
    assert torch.equal(seen["masked"], other["masked"])
    assert not torch.equal(seen["masked"], batch_for_pass(batch, 1 - number, config)["masked"])
    assert list(scored_passes(batch, config)) == [0, 1]


def test_a_batch_without_masks_is_the_same_in_every_pass() -> None:
    config = configured()
    batch = batch_of(ROWS)
    assert batch_for_pass(batch, 1, config) is batch and list(scored_passes(batch, config)) == [0]
