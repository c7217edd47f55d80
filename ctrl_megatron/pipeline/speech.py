"""What the engine is asked for: critiques from the actor, revisions from the proxy."""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.pipeline.prompts_table import PromptTable
from ctrl_megatron.pipeline.worker import Speaker
from ctrl_megatron.types import Completion, SamplingParams


def critique_params(worker: Speaker, *, greedy: bool, attempt: int = 0) -> SamplingParams:
    """How critiques are drawn: sampled in training, greedily once per prompt in validation.

    ``attempt`` numbers the draws of one training step.
    """
    config, rollout = worker.config, worker.config.actor_rollout_ref.rollout
    seed = rollout.seed * 1_000_003 + worker.step * 1009 + worker.groups.place.dp
    seed += attempt * 15_485_863
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=0.0 if greedy else rollout.temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=-1 if greedy else rollout.top_k,
        n=1 if greedy else rollout.n,
        seed=seed % 2**31,
        stop_token_ids=tuple(worker.codec.eos_token_ids),
    )


def revision_params(worker: Speaker) -> SamplingParams:
    """Revisions are greedy, so that a critique's reward does not depend on luck."""
    rollout = worker.config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=rollout.revision_max_tokens,
        temperature=0.0,
        n=1,
        stop_token_ids=tuple(worker.codec.eos_token_ids),
    )


async def critiques(
    worker: Speaker, table: PromptTable, rows: Sequence[int], *, greedy: bool, attempt: int = 0
) -> list[list[Completion]]:
    """Critiques of the table's ``rows`` from whatever weights the engine holds (leaders only)."""
    assert worker.engine is not None
    if not rows:
        return []
    prompts = [list(table.prompts[row]) for row in rows]
    return await worker.engine.generate(
        prompts, critique_params(worker, greedy=greedy, attempt=attempt)
    )


async def revisions(
    worker: Speaker, ids: Sequence[str], critique_texts: Sequence[str]
) -> list[Completion]:
    """One revision per (row id, critique) from whatever weights the engine holds (leaders only)."""
    assert worker.engine is not None
    if not ids:
        return []
    dialogues, _ = worker.reward.parse_query(ids)
    codec = worker.codec
    prompts = [
        codec.encode_chat(
            worker.reward.build_revision_messages(dialogue, critique), add_generation_prompt=True
        )
        for dialogue, critique in zip(dialogues, critique_texts, strict=True)
    ]
    answers = await worker.engine.generate(prompts, revision_params(worker))
    return [answer[0] for answer in answers]
