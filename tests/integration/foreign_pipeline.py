"""A pipeline that has nothing to do with CTRL, with options, a reward function and a policy loss of
a user's own.

Two reward nodes in two branches, one of them aside; no critique, no revision, no reward function of
the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import agg_loss, register_policy_loss
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.pipeline import NodeOutput, NodeType, Pipeline, StepReport, TaskGraph
from ctrl_megatron.steps.batch import make_batch
from ctrl_megatron.steps.ctrl import (
    advantages,
    old_log_prob,
    report_weight_sync,
    rollout_correction,
    update_actor,
)
from ctrl_megatron.steps.sampling import draw_samples


def brevity(items: Sequence[Any]) -> list[float]:
    """A reward function: short completions are better."""
    return [1.0 / (1 + item.length) for item in items]


@register_policy_loss("foreign_ratio")
def foreign_ratio(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    sharpness: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """A loss in the form of siiRL's guide (section 11.4), which reports its hyper-parameter."""
    ratio = (sharpness * (log_prob - old_log_prob)).exp()
    return (
        agg_loss(-advantages * ratio, response_mask, loss_agg_mode),
        torch.zeros(()),
        agg_loss(old_log_prob - log_prob, response_mask, "token-mean"),
        torch.tensor(sharpness),
    )


def build(*, vowel_weight: float = 1.0) -> TaskGraph:
    """Draw, two rewards beside each other, their sum, update, a report of the pushes."""
    return up_to_update(vowel_weight).add_node("sync", report_weight_sync, ["update"]).build()


def build_without_sync() -> TaskGraph:
    """The pipeline without the node that reports pushes."""
    return up_to_update(1.0).build()


def up_to_update(vowel_weight: float) -> Pipeline:
    """Draw, two rewards beside each other, their sum, update."""
    report = StepReport(metrics=spread, examples=shown)
    update: dict[str, Any] = {"node_type": NodeType.MODEL_TRAIN}
    return (
        Pipeline("foreign", report=report)
        .add_node("draw", draw, node_type=NodeType.MODEL_INFERENCE)
        .add_node(
            "short",
            reward_short,
            ["draw"],
            node_type=NodeType.ENV_INTERACT,
            retry_limit=1,
        )
        .add_node("vowels", reward_vowels, ["draw"])
        .add_node("old_log_prob", old_log_prob, ["draw"], only_forward_compute=True, **update)
        .add_node("sum", add_rewards, ["short", "vowels"], config={"vowel_weight": vowel_weight})
        .add_node("rollout_correction", rollout_correction, ["sum", "old_log_prob"])
        .add_node("advantages", advantages, ["sum"])
        .add_node("update", update_actor, ["advantages", "rollout_correction"], **update)
    )


def draw(worker: Any, batch: TensorDict) -> NodeOutput:
    """``row`` -> samples with their text as the field ``answer``."""
    rows = batch["row"].tolist()
    drawn = draw_samples(worker, rows, mini_batch_size=len(rows))
    samples = [
        dataclasses.replace(s, fields={"answer": worker.codec.decode(s.completion.token_ids)})
        for s in drawn
    ]
    return NodeOutput(batch=make_batch(samples, pad_token_id=worker.codec.pad_token_id))


async def reward_short(worker: Any, batch: TensorDict) -> NodeOutput:
    """Fewer tokens are better."""
    return NodeOutput(fields={"short": -batch["response_mask"].sum(dim=1).float()})


def reward_vowels(worker: Any, batch: TensorDict) -> NodeOutput:
    """More vowels are better."""
    counts = [sum(c in "aeiou" for c in text) for text in texts(batch["answer"])]
    return NodeOutput(fields={"vowels": torch.tensor(counts, dtype=torch.float32)})


def add_rewards(worker: Any, batch: TensorDict, vowel_weight: float) -> NodeOutput:
    """The weighted sum on the last token."""
    mask = batch["response_mask"]
    rewards = torch.zeros(mask.shape)
    last = mask.sum(dim=1).clamp(min=1) - 1
    rewards[torch.arange(len(mask)), last] = batch["short"] + vowel_weight * batch["vowels"]
    metrics = {"foreign/vowel_weight": vowel_weight}
    return NodeOutput(fields={"token_level_rewards": rewards}, metrics=metrics)


def spread(worker: Any, batch: TensorDict) -> dict[str, float]:
    """The metrics that this pipeline adds to a step."""
    return worker.global_means({"foreign/short": batch["short"], "foreign/vowels": batch["vowels"]})


def shown(worker: Any, batch: TensorDict) -> list[dict[str, Any]]:
    """The examples that the report shows."""
    first = {name: texts(batch[name])[0] for name in ("answer", "version")}
    return [{**first, "vowels": float(batch["vowels"][0])}]
