"""One greedy critique and one greedy revision for every held-out row, judged whatever it says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ctrl_megatron.eval.critique_revision import Round, summarise
from ctrl_megatron.pipeline import speech
from ctrl_megatron.pipeline.prompts_table import PromptTable
from ctrl_megatron.pipeline.worker import Speaker
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.types import Completion, Verdict


def validate(worker: Speaker) -> dict[str, float]:
    """Rates over the whole validation file (see ``eval.critique_revision``). Collective.

    Unlike in training, the revision of an invalid critique is written and judged too: the table
    compares what revisions are worth, not how often a format was kept.
    """
    table = worker.validation
    if table is None:
        raise ValueError("data.val_files is empty; there is nothing to validate on")
    place, layout = worker.groups.place, worker.groups.layout
    size = worker.config.data.val_batch_size
    # The same number of batches on every rank, because asking is collective.
    batches = [
        list(range(start, min(start + size, len(table.rows))))[place.dp :: layout.data]
        for start in range(0, len(table.rows), size)
    ]
    mine = [row for batch in batches for row in batch]
    texts: dict[int, str] = {}
    revisions: list[Completion] = []
    worker.weights.use("actor")
    with worker.timeline.phase("validate_critiques"):
        for batch in batches:
            drawn = worker.ask(partial(speech.critiques, worker, table, batch, greedy=True))
            spoken = [worker.codec.decode(answers[0].token_ids) for answers in drawn]
            texts |= zip(batch, spoken, strict=True)
    worker.weights.use("proxy")
    with worker.timeline.phase("validate_revisions"):
        for batch in batches:
            ids, said = [table.rows[row].id for row in batch], [texts[row] for row in batch]
            revisions += worker.ask(partial(speech.revisions, worker, ids, said))
    worker.weights.rest()
    with worker.timeline.phase("validate_sandbox"):
        critiques = [texts[row] for row in mine]
        rounds = worker.ask(lambda: _judge(worker, table, mine, critiques, revisions))
    everything = [r for part in worker.groups.from_data_ranks(rounds) for r in part]
    return summarise(everything)


async def _judge(
    worker: Speaker,
    table: PromptTable,
    rows: Sequence[int],
    critiques: Sequence[str],
    revisions: Sequence[Completion],
) -> list[Round]:
    reward = worker.reward
    assert reward is not None
    _, samples = reward.parse_query([table.rows[row].id for row in rows])
    first = [
        reward.judge_solution(table.rows[row].solution, s)
        for row, s in zip(rows, samples, strict=True)
    ]
    second = [
        reward.judge_solution(worker.codec.decode(r.token_ids), s)
        for r, s in zip(revisions, samples, strict=True)
    ]
    verdicts = await asyncio.gather(*first, *second)
    before, after = verdicts[: len(rows)], verdicts[len(rows) :]
    return [_round(c, b, a) for c, b, a in zip(critiques, before, after, strict=True)]


def _round(critique: str, before: Verdict, after: Verdict) -> Round:
    judgment = parse_judgment(critique)
    return Round(
        valid=judgment is not None,
        judged_correct=judgment,
        passed_before=before.accepted,
        pass_rate_before=before.pass_rate,
        passed_after=after.accepted,
        pass_rate_after=after.pass_rate,
    )
