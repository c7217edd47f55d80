"""One round of speaking: critiques by the actor, revisions by the proxy, verdicts of the sandbox.

Nodes call these with the rows of one data-parallel rank; what the engine or the sandbox answers is
on every rank of the model copy afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ctrl_megatron.pipeline import speech
from ctrl_megatron.pipeline.batch import CritiqueRow, share_prompts, versions_of
from ctrl_megatron.pipeline.worker import DAGWorker
from ctrl_megatron.rewards import RewardItem, RewardOutcome
from ctrl_megatron.types import Completion


def draw_critiques(
    worker: DAGWorker, chosen: Sequence[int], *, mini_batch_size: int, attempt: int = 0
) -> list[CritiqueRow]:
    """This rank's critiques of its share of the ``chosen`` rows of the data. Collective.

    ``attempt`` numbers the draws of one training step.
    """
    worker.make_room()
    version = worker.weights.use("actor")
    mine = share_prompts(len(chosen), mini_batch_size, worker.groups)
    rows = [chosen[prompt] for prompt, _ in mine]
    answers = worker.ask(
        lambda: speech.critiques(worker, worker.train, rows, greedy=False, attempt=attempt)
    )
    name = f"{worker.config.trainer.experiment_name}/{worker.step}"
    if attempt:
        name += f"/{attempt}"
    drawn = [
        CritiqueRow(
            uid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{prompt}")),
            problem_id=worker.train.rows[row].id,
            mini_batch=mini_batch,
            prompt=worker.train.prompts[row],
            completion=completion,
        )
        for (prompt, mini_batch), row, group in zip(mine, rows, answers, strict=True)
        for completion in group
    ]
    assert_spoken_by(version, [r.completion for r in drawn])
    return drawn


def write_revisions(
    worker: DAGWorker, ids: Sequence[str], critiques: Sequence[str], valid: Sequence[bool]
) -> tuple[list[str], list[int]]:
    """(a revision per row, empty for invalid critiques; lengths of the others). Collective."""
    version = worker.weights.use("proxy")
    rows = [i for i, ok in enumerate(valid) if ok]
    answers = worker.ask(
        lambda: speech.revisions(worker, [ids[i] for i in rows], [critiques[i] for i in rows])
    )
    worker.weights.rest()
    assert_spoken_by(version, answers)
    written = [""] * len(valid)
    for i, answer in zip(rows, answers, strict=True):
        written[i] = worker.codec.decode(answer.token_ids)
    return written, [len(a.token_ids) for a in answers]


async def judge(
    worker: DAGWorker, ids: Sequence[str], critiques: Sequence[str], revisions: Sequence[str]
) -> list[RewardOutcome]:
    """What each critique earned (leaders only)."""
    _, rows = worker.reward.parse_query(ids)
    return await worker.reward.judge(
        [
            RewardItem(text=revision, critique=critique, row=row)
            for critique, revision, row in zip(critiques, revisions, rows, strict=True)
        ]
    )


def assert_spoken_by(version: str, completions: Sequence[Completion]) -> None:
    """RuntimeError unless every completion was drawn from these weights alone."""
    wrong = {v for c in completions if (v := versions_of(c)) != version}
    if wrong:
        raise RuntimeError(f"completions were drawn from {sorted(wrong)}, not from {version}")
