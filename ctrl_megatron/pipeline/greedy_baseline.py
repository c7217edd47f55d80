"""The baseline of ReMax (arXiv 2310.10505): what one greedy critique per prompt earns.

Three nodes beside those of CTRL's step. What they write stands in every row of a prompt's group.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDict

from ctrl_megatron.pipeline.critique_revision import (
    judgments,
    read_critique,
    revise_valid,
    reward_items,
)
from ctrl_megatron.pipeline.graph import NodeOutput
from ctrl_megatron.pipeline.node_keys import REVISIONS, REWARDS, reads
from ctrl_megatron.pipeline.sampling import Fields, columns, generate, greedy_params, texts
from ctrl_megatron.pipeline.worker import DAGWorker


def draw_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_critique``, ``greedy_valid``, ``greedy_judged_correct`` (B,): the actor's likeliest
    critique of each row's prompt.
    """
    heads = group_heads(batch)
    ids = texts(batch["problem_id"])
    prompts = [worker.train.prompts[worker.train.number_of[ids[head]]] for head in heads]
    limit = worker.config.data.max_response_length
    answers = generate(worker, "actor", prompts, greedy_params(worker, limit))
    return _over_rows(batch, [read_critique(worker, answer[0]) for answer in answers])


@reads(*REVISIONS)
def revise_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_revision`` (B,) text: the proxy's, empty for invalid critiques."""
    heads = group_heads(batch)
    rows = [worker.train.row(texts(batch["problem_id"])[head]) for head in heads]
    critiques = [texts(batch["greedy_critique"])[head] for head in heads]
    valid = batch["greedy_valid"][heads].tolist()
    revisions, _ = revise_valid(worker, rows, critiques, valid)
    return _over_rows(batch, [{"revision": revision} for revision in revisions])


@reads(*REWARDS)
async def judge_greedy_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``reward_baselines`` (B,): the critic's part of the greedy critique's reward, NaN where it
    could not be judged. Runs beside the log-probs.
    """
    heads = group_heads(batch)
    judged = judgments(batch, "greedy_")
    items = reward_items(
        [worker.train.row(texts(batch["problem_id"])[head]) for head in heads],
        [texts(batch["greedy_critique"])[head] for head in heads],
        [judged[head] for head in heads],
        [texts(batch["greedy_revision"])[head] for head in heads],
        [0] * len(heads),
    )
    scores = await worker.score(items)
    weight = worker.reward_weights["critic"]
    earned = [None if r is None else weight * r for r in scores.parts["critic"]]
    per_row = columns([{"reward_baselines": earned[group]} for group in _group_of_rows(batch)])
    return NodeOutput(fields=per_row)


def group_heads(batch: TensorDict) -> list[int]:
    """The first row of each group, in order."""
    heads: dict[str, int] = {}
    for row, uid in enumerate(texts(batch["uid"])):
        heads.setdefault(uid, row)
    return list(heads.values())


def _group_of_rows(batch: TensorDict) -> list[int]:
    uids = texts(batch["uid"])
    number = {uids[head]: group for group, head in enumerate(group_heads(batch))}
    return [number[uid] for uid in uids]


def _over_rows(batch: TensorDict, per_group: Sequence[Fields]) -> NodeOutput:
    """Each group's fields, named ``greedy_...``, in all of its rows."""
    named = [{f"greedy_{name}": value for name, value in f.items()} for f in per_group]
    return NodeOutput(fields=columns([named[group] for group in _group_of_rows(batch)]))
