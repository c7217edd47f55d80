"""One greedy critique and one greedy revision for every held-out row, judged whatever it says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ctrl_megatron.eval.critique_revision import CritiqueResult, summarise
from ctrl_megatron.pipeline import speech
from ctrl_megatron.pipeline.prompts_table import PromptTable
from ctrl_megatron.pipeline.worker import Speaker
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.types import Completion


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
) -> list[CritiqueResult]:
    chosen = [table.rows[row] for row in rows]
    texts = [worker.codec.decode(r.token_ids) for r in revisions]
    outcomes = await worker.reward.judge_solutions(
        [*(row.solution for row in chosen), *texts], [*chosen, *chosen]
    )
    before, after = outcomes[: len(rows)], outcomes[len(rows) :]
    return [
        CritiqueResult(judgment=parse_judgment(c), before=b.verdict, after=a.verdict)
        for c, b, a in zip(critiques, before, after, strict=True)
    ]
