"""Supervised fine-tuning as a graph of two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms.coupled import CoupledMaskOptions
from ctrl_megatron.algorithms.denoising import draw_denoising_masks
from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.checkpoint.store import POLICY_FOLDER
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole, NodeType
from ctrl_megatron.metrics import Timeline, mfu, seconds_by_name
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.steps.batch import pad_rows, tensor_fields
from ctrl_megatron.steps.performance import global_token_count

Tokens = tuple[int, ...]
_VALIDATION_ROWS = 64


@dataclass(slots=True, kw_only=True)
class SftWorker:
    """The state of one rank during fine-tuning."""

    groups: ProcessGroups
    background: BackgroundLoop
    stop: StopFlag
    wait_conditions: WaitRules
    policy: Policy
    codec: TextCodec
    examples: list[tuple[Tokens, Tokens]]
    """(prompt, response with its end-of-text token) of every training example."""
    held_out: list[tuple[Tokens, Tokens]]
    """(prompt, response with its end-of-text token) of every validation example."""
    seed: int
    """Of a masked-diffusion model's masks, with the step and the row."""
    peak_flops: float
    """Peak rate of one device in FLOP/s."""
    timeline: Timeline = field(default_factory=Timeline)
    step: int = 0

    @property
    def agents(self) -> list[SftWorker]:
        return [self]

    @property
    def trained_models(self) -> dict[str, Policy]:
        """Name of the folder in a checkpoint -> the trained model."""
        return {POLICY_FOLDER: self.policy}

    saved_models = trained_models
    """The models that a checkpoint contains."""


def sft_pipeline(*, validates: bool) -> TaskGraph:
    """The graph: collate, then update."""
    report = StepReport(metrics=sft_performance, validate=held_out_loss if validates else None)
    return (
        Pipeline("sft_pipeline", "supervised fine-tuning on critiques", report=report)
        .add_node("collate", collate, node_type=NodeType.DATA_LOAD)
        .add_node(
            "update", update, ["collate"], node_type=NodeType.MODEL_TRAIN, node_role=NodeRole.ACTOR
        )
        .build()
    )


def collate(worker: SftWorker, batch: TensorDict) -> NodeOutput:
    """Read ``row`` (the global batch) and return this data rank's padded rows, and ``row`` of
    these.
    """
    rows = batch["row"].tolist()[worker.groups.place.dp :: worker.groups.layout.data]
    prompts, responses = zip(*(worker.examples[row] for row in rows), strict=True)
    padded = pad_rows(prompts, responses, pad_token_id=worker.codec.pad_token_id)
    padded["row"] = torch.tensor(rows)
    return NodeOutput(batch=_masked(worker, padded, [str(row) for row in rows], step=worker.step))


def _masked(worker: SftWorker, batch: TensorDict, names: Sequence[str], *, step: int) -> TensorDict:
    """The batch with the masks of its rows, which ``names`` tell apart, for a masked-diffusion
    model.
    """
    if worker.policy.shape.diffusion is None:
        return batch
    seeds = [CoupledMaskOptions().row_seed(worker.seed, step, name, 0) for name in names]
    width = batch["responses"].shape[1]
    batch["masked"], batch["mask_level"] = draw_denoising_masks(
        batch["attention_mask"], width, seeds
    )
    return batch


def update(worker: SftWorker, batch: TensorDict) -> NodeOutput:
    metrics = worker.policy.step(tensor_fields(batch), cross_entropy)
    return NodeOutput(metrics={k if "/" in k else f"sft/{k}": v for k, v in metrics.items()})


def cross_entropy(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    rows: dict[str, torch.Tensor],
    counts: GlobalCounts,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A ``models.policy.LossFn``: mean negative log-likelihood of the response tokens; of a
    masked-diffusion model the mean of its estimated bound (``algorithms.denoising``).
    """
    mask = rows["response_mask"]
    loss = -log_probs[mask].sum() / counts.tokens
    if "mask_level" in rows:
        return loss, {}  # the entropies are those of the masked tokens alone
    return loss, {"sft/entropy": entropy.detach()[mask].sum() / counts.tokens}


def sft_performance(worker: SftWorker, batch: TensorDict) -> dict[str, float]:
    """Tokens per second of the step, and MFU of its update. Collective."""
    _, update = worker.policy.take_flops()
    return {
        "perf/tokens_per_second": global_token_count(batch, worker.groups)
        / worker.timeline.elapsed(),
        "perf/mfu": mfu(
            flops=sum(worker.groups.gather_data_ranks(update)),
            seconds=seconds_by_name(worker.timeline.phases())["time/update"],
            devices=worker.groups.layout.world_size,
            peak=worker.peak_flops,
        ),
    }


def held_out_loss(worker: SftWorker) -> dict[str, float]:
    """``nll``: mean negative log-likelihood per response token of the first validation rows; of a
    masked-diffusion model its bound, with the same masks at every validation. Collective.
    """
    dp, size = worker.groups.place.dp, worker.groups.layout.data
    kept = worker.held_out[: _VALIDATION_ROWS // size * size] or worker.held_out
    chosen = list(enumerate(kept))
    mine = chosen[dp::size] or chosen[:1]
    prompts, responses = zip(*(example for _, example in mine), strict=True)
    batch = pad_rows(prompts, responses, pad_token_id=worker.codec.pad_token_id)
    batch = _masked(worker, batch, [f"held out {number}" for number, _ in mine], step=0)
    log_probs, _ = worker.policy.log_probs(tensor_fields(batch))
    mask = batch["response_mask"]
    pairs = worker.groups.gather_data_ranks((float(log_probs[mask].sum()), int(mask.sum())))
    return {"nll": -sum(total for total, _ in pairs) / sum(count for _, count in pairs)}
