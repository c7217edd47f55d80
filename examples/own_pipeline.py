"""A pipeline and a reward function of your own in one short file: GRPO on completions.

    ctrl-train-rl --nproc-per-node 2 --config FILE \
        dag.custom_pipeline_fn=examples.own_pipeline:build

It is ``grpo_pipeline`` written out, with a reward of its own. Run the command from the folder above
this one, or put this file on the Python path and name its module.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.pipeline import (
    NodeOutput,
    NodeType,
    Pipeline,
    StepReport,
    TaskGraph,
    add_update_nodes,
    balance,
    draw_samples,
    make_batch,
    step_performance,
    texts,
)


def build(config: Config) -> TaskGraph:
    """The graph: draw, reward, equal shares of the ranks, and the half of every built-in pipeline
    that follows."""
    pipeline = Pipeline("own_pipeline", report=StepReport(metrics=metrics, examples=examples))
    pipeline.add_node("draw", draw, node_type=NodeType.MODEL_INFERENCE)
    pipeline.add_node("reward", reward, ["draw"], node_type=NodeType.ENV_INTERACT)
    pipeline.add_node("balance", balance, ["draw"], node_type=NodeType.MODEL_INFERENCE)
    add_update_nodes(pipeline, config, drawn="balance", judged=["reward"])
    return pipeline.build()


def draw(worker: Any, batch: TensorDict) -> NodeOutput:
    """``row`` (positions of the global batch) -> this rank's samples, ``completion`` (B,) text."""
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    drawn = draw_samples(worker, batch["row"].tolist(), mini_batch_size=size)
    samples = [
        dataclasses.replace(s, fields={"completion": worker.codec.decode(s.completion.token_ids)})
        for s in drawn
    ]
    return NodeOutput(batch=make_batch(samples, pad_token_id=worker.codec.pad_token_id))


async def reward(worker: Any, batch: TensorDict) -> NodeOutput:
    """``score`` (B,) float32: the share of vowels. Runs at the same time as the log-probs."""
    shares = [
        sum(c in "aeiou" for c in text.lower()) / max(1, len(text))
        for text in texts(batch["completion"])
    ]
    score = torch.tensor(shares, dtype=torch.float32)
    return NodeOutput(fields={"score": score})


def metrics(worker: Any, batch: TensorDict) -> dict[str, float]:
    """Speed and mean reward of the step."""
    return {
        **step_performance(worker, batch),
        **worker.global_means({"reward/vowels": batch["score"]}),
    }


def examples(worker: Any, batch: TensorDict) -> list[dict[str, Any]]:
    """One completion per step, for the report."""
    return [{"completion": texts(batch["completion"])[0], "score": float(batch["score"][0])}]
