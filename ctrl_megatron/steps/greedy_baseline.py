"""The baseline of ReMax (arXiv 2310.10505): what one greedy critique per prompt earns.

Its fields have the same value in every row of a prompt's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tensordict import TensorDict

from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.node_fields import writes
from ctrl_megatron.graph.node_keys import REVISIONS, REWARDS, reads
from ctrl_megatron.steps.batch import Fields, columns, rows_of
from ctrl_megatron.steps.chain import (
    REVISION_FIELDS,
    TRAINED,
    criticise,
    critiques_of,
    judge,
    revise,
)
from ctrl_megatron.steps.sampling import greedy_params
from ctrl_megatron.steps.worker import DAGWorker

T = TypeVar("T")
_PREFIX = "greedy_"


@writes("greedy_task", "greedy_critique", "greedy_valid", "greedy_judged_correct")
def draw_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_critique``, ``greedy_valid``, ``greedy_judged_correct`` (B,): the actor's likeliest
    critique for each row's prompt.
    """
    rows = _of_groups(batch, rows_of(worker.train, batch))
    prompts = [worker.train.prompts[worker.train.number_of[row.id]] for row in rows]
    params = greedy_params(worker.codec, worker.config.data.max_response_length)
    drawn = criticise(worker, rows, prompts, params, TRAINED)
    return _over_rows(batch, [critique.drawn for (critique,) in drawn])


@reads(*REVISIONS)
@writes("greedy_revision", *(f"greedy_{name}" for name in REVISION_FIELDS))
def revise_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_revision`` (B,) text: the proxy's, empty for invalid critiques; and the other fields
    of ``generate_revisions``.
    """
    critiques = _of_groups(batch, critiques_of(worker, batch, prefix=_PREFIX))
    return _over_rows(batch, [critique.revised for critique in revise(worker, critiques)])


@reads(*REWARDS)
@writes("reward_baselines")
async def judge_greedy_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``reward_baselines`` (B,): the critic's part of the greedy critique's reward, NaN where it
    could not be judged. Runs beside the log-probs.
    """
    critiques = _of_groups(batch, critiques_of(worker, batch, prefix=_PREFIX))
    weight = worker.reward_weights["critic"]
    rewards = [fields["reward/critic"] for fields in await judge(worker, critiques)]
    earned = [None if reward is None else weight * float(reward) for reward in rewards]
    per_row = columns([{"reward_baselines": earned[group]} for group in _group_of_rows(batch)])
    return NodeOutput(fields=per_row)


def group_heads(batch: TensorDict) -> list[int]:
    """The first row of each group, in order."""
    heads: dict[str, int] = {}
    for row, uid in enumerate(texts(batch["uid"])):
        heads.setdefault(uid, row)
    return list(heads.values())


def _of_groups(batch: TensorDict, per_row: Sequence[T]) -> list[T]:
    return [per_row[head] for head in group_heads(batch)]


def _group_of_rows(batch: TensorDict) -> list[int]:
    uids = texts(batch["uid"])
    number = {uids[head]: group for group, head in enumerate(group_heads(batch))}
    return [number[uid] for uid in uids]


def _over_rows(batch: TensorDict, per_group: Sequence[Fields]) -> NodeOutput:
    """Each group's fields, their names prefixed with ``greedy_``, in all of its rows."""
    named = [{f"{_PREFIX}{name}": value for name, value in f.items()} for f in per_group]
    return NodeOutput(fields=columns([named[group] for group in _group_of_rows(batch)]))
