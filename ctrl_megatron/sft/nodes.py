"""Supervised fine-tuning as a pipeline of two nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from ctrl_megatron.checkpoint.convert import POLICY_FOLDER
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.pipeline.batch import pad_rows, tensors_of
from ctrl_megatron.pipeline.builder import Pipeline
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.interrupt import StopFlag
from ctrl_megatron.pipeline.node import NodeRole, NodeType
from ctrl_megatron.pipeline.task_graph import TaskGraph

Tokens = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class SftWorker:
    """What one rank holds during fine-tuning."""

    groups: ProcessGroups
    background: BackgroundLoop
    stop: StopFlag
    policy: Policy
    codec: TextCodec
    examples: list[tuple[Tokens, Tokens]]
    """(prompt, response with the token that ends it) of every training row."""
    timeline: Timeline = field(default_factory=Timeline)
    step: int = 0

    @property
    def trained(self) -> dict[str, Policy]:
        """The model that learns, by the name of its folder in a checkpoint."""
        return {POLICY_FOLDER: self.policy}


def sft_pipeline() -> TaskGraph:
    """Collate, then one optimizer step."""
    here = "ctrl_megatron.sft.nodes"
    return (
        Pipeline("sft_pipeline", "supervised fine-tuning on synthesised critiques")
        .add_node("collate", f"{here}:collate", node_type=NodeType.DATA_LOAD)
        .add_node(
            "update",
            f"{here}:update",
            ["collate"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
        )
        .build()
    )


def collate(worker: SftWorker, batch: TensorDict) -> NodeOutput:
    """``row`` (the global batch) -> this data-parallel rank's padded rows."""
    rows = batch["row"].tolist()[worker.groups.place.dp :: worker.groups.layout.data]
    prompts, responses = zip(*(worker.examples[row] for row in rows), strict=True)
    return NodeOutput(batch=pad_rows(prompts, responses, pad_token_id=worker.codec.pad_token_id))


def cross_entropy(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    rows: dict[str, torch.Tensor],
    counts: GlobalCounts,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A ``models.policy.LossFn``: mean negative log-likelihood of the response tokens."""
    mask = rows["response_mask"]
    return -log_probs[mask].sum() / counts.tokens, {
        "sft/entropy": entropy.detach()[mask].sum() / counts.tokens
    }


def update(worker: SftWorker, batch: TensorDict) -> NodeOutput:
    """One optimizer step on the global batch."""
    metrics = worker.policy.step(tensors_of(batch), cross_entropy)
    return NodeOutput(metrics={k if "/" in k else f"sft/{k}": v for k, v in metrics.items()})
