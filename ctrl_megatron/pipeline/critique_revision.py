"""From critiques to judged revisions: what the nodes of CTRL's step and its validation share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tensordict import TensorDict

from ctrl_megatron.eval.critique_revision import Round, summarise
from ctrl_megatron.pipeline.interim_rewards import (
    RewardItem,
    RewardOutcome,
    Row,
    Scores,
    revision_messages,
)
from ctrl_megatron.pipeline.sampling import (
    Fields,
    generate,
    greedy_params,
    reward_fields,
    validation_batches,
)
from ctrl_megatron.pipeline.worker import RolloutWorker
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.types import Completion, Verdict


def read_critique(worker: RolloutWorker, completion: Completion) -> Fields:
    """``critique`` (text), ``valid`` (it holds a judgment), ``judged_correct`` (which one)."""
    critique = worker.codec.decode(completion.token_ids)
    judgment = parse_judgment(critique)
    return {"critique": critique, "valid": judgment is not None, "judged_correct": bool(judgment)}


def judgment_of(fields: Fields) -> bool | None:
    """What a critique with these fields says of the solution; None without a judgment."""
    return bool(fields["judged_correct"]) if fields["valid"] else None


def judgments(batch: TensorDict) -> list[bool | None]:
    """``judgment_of`` every row (B)."""
    pairs = zip(batch["valid"].tolist(), batch["judged_correct"].tolist(), strict=True)
    return [judged if valid else None for valid, judged in pairs]


def revise(
    worker: RolloutWorker, rows: Sequence[Row], critiques: Sequence[str]
) -> list[Completion]:
    """The frozen proxy's revision of each row's solution after its critique. Collective.

    Revisions are greedy, so that a critique's reward does not depend on luck.
    """
    limit = worker.config.actor_rollout_ref.rollout.revision_max_tokens
    prompts = [
        worker.codec.encode_chat(revision_messages(row, critique), add_generation_prompt=True)
        for row, critique in zip(rows, critiques, strict=True)
    ]
    answers = generate(worker, "proxy", prompts, greedy_params(worker, limit))
    return [answer[0] for answer in answers]


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


def score_fields(scores: Scores) -> list[Fields]:
    """Per row ``reward/NAME`` of every reward function and, of the critic's verdict, ``pass_rate``,
    ``cached``, ``forged`` (a grader that believes exit codes would have accepted) and ``detail``.
    """
    pairs = zip(reward_fields(scores), scores.outcomes, strict=True)
    return [{**rewards, **_verdict_fields(outcome)} for rewards, outcome in pairs]


def _verdict_fields(outcome: RewardOutcome | None) -> Fields:
    if outcome is None:
        return {"pass_rate": None, "cached": False, "forged": None, "detail": ""}
    passed = outcome.passed
    return {
        "pass_rate": sum(passed) / len(passed) if passed else 0.0,
        "cached": outcome.cached,
        "forged": None if outcome.forged is None else float(outcome.forged),
        "detail": next((d for d in outcome.detail if d), "") or outcome.error,
    }


def validate(worker: RolloutWorker) -> dict[str, float]:
    """One greedy critique and one greedy revision for every validation row; rates over all rows.

    Unlike in training, the revision of an invalid critique is written and judged too: the table
    compares what revisions are worth, not how often a format was kept. Rows that the sandbox failed
    to judge are counted as ``unjudged`` and left out of the rates. Collective.
    """
    table = worker.validation
    assert table is not None
    batches = validation_batches(worker)
    critiques: list[Fields] = []
    revisions: list[Completion] = []
    with worker.timeline.phase("validate_critiques"):
        params = greedy_params(worker, worker.config.data.max_response_length)
        for batch in batches:
            drawn = generate(worker, "actor", [table.prompts[row] for row in batch], params)
            critiques += [read_critique(worker, answers[0]) for answers in drawn]
    waiting = iter(critiques)
    with worker.timeline.phase("validate_revisions"):
        for batch in batches:
            written = [str(next(waiting)["critique"]) for _ in batch]
            revisions += revise(worker, [table.rows[row] for row in batch], written)
    worker.weights.rest()
    with worker.timeline.phase("validate_sandbox"):
        rows = [table.rows[row] for batch in batches for row in batch]
        answers = [worker.codec.decode(r.token_ids) for r in revisions]
        rounds = worker.ask(lambda: _judge_rounds(worker, rows, critiques, answers))
    everything = [r for part in worker.groups.from_data_ranks(rounds) for r in part]
    judged = [r for r in everything if r is not None]
    unjudged = {"unjudged": float(len(everything) - len(judged))}
    return {**summarise(judged), **unjudged} if judged else unjudged


async def _judge_rounds(
    worker: RolloutWorker,
    rows: Sequence[Row],
    critiques: Sequence[Fields],
    revisions: Sequence[str],
) -> list[Round | None]:
    judge = worker.rewards.judge_solution
    first = [judge(row.solution, row) for row in rows]
    second = [judge(revision, row) for revision, row in zip(revisions, rows, strict=True)]
    verdicts = await asyncio.gather(*first, *second)
    before, after = verdicts[: len(rows)], verdicts[len(rows) :]
    return [_round(*each) for each in zip(critiques, before, after, strict=True)]


def _round(critique: Fields, before: Verdict | None, after: Verdict | None) -> Round | None:
    if before is None or after is None:
        return None
    return Round(
        valid=bool(critique["valid"]),
        judged_correct=judgment_of(critique),
        passed_before=before.accepted,
        pass_rate_before=before.pass_rate,
        passed_after=after.accepted,
        pass_rate_after=after.pass_rate,
    )
