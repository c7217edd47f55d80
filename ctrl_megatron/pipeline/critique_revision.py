"""From critiques to judged revisions: what the nodes of CTRL's step and its validation share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict

from ctrl_megatron.data.rows import Row
from ctrl_megatron.pipeline.sampling import (
    Fields,
    Sample,
    columns,
    draw_samples,
    generate,
    greedy_params,
    length_metrics,
    reward_fields,
)
from ctrl_megatron.pipeline.worker import DAGWorker, RolloutWorker
from ctrl_megatron.prompts import generation_messages, parse_judgment, revision_request, sanitize
from ctrl_megatron.rewards import RewardItem, RewardOutcome, Scores
from ctrl_megatron.types import Completion, Message


def draw_critiques(
    worker: DAGWorker, rows: Sequence[int], *, mini_batch_size: int, attempt: int = 0
) -> list[Sample]:
    """Critiques by the actor with the fields of ``read_critique``."""
    drawn = draw_samples(worker, rows, mini_batch_size=mini_batch_size, attempt=attempt)
    return [dataclasses.replace(s, fields=read_critique(worker, s.completion)) for s in drawn]


def read_critique(worker: RolloutWorker, completion: Completion) -> Fields:
    """``critique`` (text), ``valid`` (it holds a judgment), ``judged_correct`` (which one)."""
    critique = worker.codec.decode(completion.token_ids)
    judgment = parse_judgment(critique)
    return {"critique": critique, "valid": judgment is not None, "judged_correct": bool(judgment)}


def revision_messages(row: Row, critique: str) -> list[Message]:
    """The dialogue that asks for a revision: problem, the first solution's code, critique."""
    answer: Message = {"role": "assistant", "content": sanitize(row.solution)}
    return [*generation_messages(row.attempt().problem), answer, revision_request(critique)]


def judgment_of(fields: Fields) -> bool | None:
    """What a critique with these fields says of the solution; None without a judgment."""
    return bool(fields["judged_correct"]) if fields["valid"] else None


def judgments(batch: TensorDict, prefix: str = "") -> list[bool | None]:
    """``judgment_of`` every row (B), from fields whose names begin with ``prefix``."""
    valid, correct = batch[f"{prefix}valid"].tolist(), batch[f"{prefix}judged_correct"].tolist()
    return [judged if ok else None for ok, judged in zip(valid, correct, strict=True)]


def revise(
    worker: RolloutWorker, rows: Sequence[Row], critiques: Sequence[str]
) -> list[Completion]:
    """The frozen proxy's revision of each row's solution after its critique. Collective.

    Revisions are greedy, so that a critique's reward does not depend on luck; equal critiques of
    one solution are answered once.
    """
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    prompts = [
        tuple(
            worker.codec.encode_chat(revision_messages(row, critique), add_generation_prompt=True)
        )
        for row, critique in zip(rows, critiques, strict=True)
    ]
    different = list(dict.fromkeys(prompts))
    answers = generate(worker, "proxy", different, greedy_params(worker, limit))
    revision = {prompt: answer[0] for prompt, answer in zip(different, answers, strict=True)}
    return [revision[prompt] for prompt in prompts]


def revise_valid(
    worker: RolloutWorker,
    rows: Sequence[Row],
    critiques: Sequence[str],
    valid: Sequence[bool],
) -> tuple[list[str], list[int | None]]:
    """(revisions, their lengths in tokens); "" and None for critiques that are not valid.
    Collective.
    """
    chosen = [i for i, ok in enumerate(valid) if ok]
    answers = revise(worker, [rows[i] for i in chosen], [critiques[i] for i in chosen])
    texts = [""] * len(valid)
    lengths: list[int | None] = [None] * len(valid)
    for i, answer in zip(chosen, answers, strict=True):
        texts[i], lengths[i] = worker.codec.decode(answer.token_ids), len(answer.token_ids)
    return texts, lengths


def reward_items(
    rows: Sequence[Row],
    critiques: Sequence[str],
    judgments: Sequence[bool | None],
    revisions: Sequence[str],
    lengths: Sequence[int],
) -> list[RewardItem]:
    """What the reward functions are given; ``lengths`` are the critiques' in tokens."""
    return [
        RewardItem(text=revision, critique=critique, judgment=judgment, row=row, length=length)
        for row, critique, judgment, revision, length in zip(
            rows, critiques, judgments, revisions, lengths, strict=True
        )
    ]


def score_fields(scores: Scores, weights: Mapping[str, float]) -> list[Fields]:
    """Per row ``reward_fields`` and, of the critic's verdict, ``pass_rate``, ``cached`` and
    ``detail``.
    """
    pairs = zip(reward_fields(scores, weights), scores.outcomes, strict=True)
    return [{**rewards, **_verdict_fields(outcome)} for rewards, outcome in pairs]


def _verdict_fields(outcome: RewardOutcome | None) -> Fields:
    outcome = outcome or RewardOutcome(reward=None)
    return {
        "pass_rate": outcome.pass_rate,
        "cached": outcome.cached,
        "detail": outcome.detail,
    }


def draw_and_judge(worker: DAGWorker, rows: Sequence[int], attempt: int) -> list[Sample]:
    """Critiques of ``rows`` with what came of them, for dynamic sampling. Collective."""
    drawn = draw_critiques(worker, rows, mini_batch_size=len(rows), attempt=attempt)
    about = [worker.train.row(sample.problem_id) for sample in drawn]
    critiques = [str(sample.fields["critique"]) for sample in drawn]
    valid = [bool(sample.fields["valid"]) for sample in drawn]
    judged = [judgment_of(sample.fields) for sample in drawn]
    revisions, lengths = revise_valid(worker, about, critiques, valid)
    sizes = [len(sample.completion.token_ids) for sample in drawn]
    items = reward_items(about, critiques, judged, revisions, sizes)
    scores = worker.ask(lambda: worker.score(items))
    scored = score_fields(scores, worker.reward_weights)
    return [
        dataclasses.replace(
            sample,
            fields={**sample.fields, "revision": revision, "revision_length": length, **score},
        )
        for sample, revision, length, score in zip(drawn, revisions, lengths, scored, strict=True)
    ]


def measure_critiques(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """What the metrics say of critiques as they were drawn, and of their revisions if there are."""
    measured = length_metrics(samples, "critique")
    fields = columns([sample.fields for sample in samples])
    if samples:
        measured["critique/valid_rate"] = fields["valid"].float()
    if "revision_length" in fields:
        measured["revision/length"] = fields["revision_length"]
    return measured
