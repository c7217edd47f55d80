"""The baseline of ReMax (arXiv 2310.10505): what one greedy critique per prompt earns.

Its fields have the same value in every row of a prompt's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tensordict import TensorDict

from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.steps.batch import data_rows_of, fields_from_rows, fields_of_samples
from ctrl_megatron.steps.chain import TRAINED, criticise, judge, revise
from ctrl_megatron.steps.sample import (
    REVISION_COLUMNS,
    ColumnMaker,
    Sample,
    critique_columns,
    revision_columns,
)
from ctrl_megatron.steps.sampling import greedy_params
from ctrl_megatron.steps.worker import DAGWorker
from ctrl_megatron.types import Completion

T = TypeVar("T")
_PREFIX = "greedy_"
_NO_TOKENS = Completion(token_ids=(), log_probs=(), finish_reason="stop", spans=())


def _named(*columns: str) -> tuple[str, ...]:
    return tuple(f"{_PREFIX}{name}" for name in columns)


@node(writes=_named("sample", "task", "critique", "valid", "judged_correct"))
def draw_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_sample``, the actor's likeliest critique for each row's prompt, and its
    ``critique_columns``.
    """
    rows = _of_groups(batch, data_rows_of(worker.train, batch))
    prompts = [worker.train.prompts[worker.train.row_number_by_id[row.id]] for row in rows]
    params = greedy_params(worker.codec, worker.config.data.max_response_length)
    drawn = criticise(worker, rows, prompts, params, TRAINED)
    # Its length is not rewarded.
    samples = [replace(sample, completion=_NO_TOKENS) for (sample,) in drawn]
    return _over_rows(batch, samples, critique_columns)


@node(writes=_named("sample", *REVISION_COLUMNS), uses=("proxy",))
def revise_greedy_critiques(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_sample`` with the proxy's revisions, none for invalid critiques, and the
    ``revision_columns``.
    """
    samples = _of_groups(batch, batch[f"{_PREFIX}sample"].tolist())
    rows = _of_groups(batch, data_rows_of(worker.train, batch))
    return _over_rows(batch, revise(worker, samples, rows), revision_columns)


@node(writes=("reward_baselines",), uses=("rewards",))
async def judge_greedy_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``reward_baselines`` (B,): the critic's part of the greedy critique's reward, NaN where it
    could not be judged. Runs beside the log-probs.
    """
    samples = _of_groups(batch, batch[f"{_PREFIX}sample"].tolist())
    rows = _of_groups(batch, data_rows_of(worker.train, batch))
    weight, earned = worker.reward_weights["critic"], list[float | None]()
    for sample in await judge(worker, samples, rows):
        reward = sample.outcome.rewards["critic"] if sample.outcome else None
        earned.append(None if reward is None else weight * reward)
    per_row = fields_from_rows(
        [{"reward_baselines": earned[group]} for group in _group_of_rows(batch)]
    )
    return NodeOutput(fields=per_row)


def first_rows_of_groups(batch: TensorDict) -> list[int]:
    """The number of the first row of each group of the batch."""
    heads: dict[str, int] = {}
    for row, uid in enumerate(texts(batch["uid"])):
        heads.setdefault(uid, row)
    return list(heads.values())


def _of_groups(batch: TensorDict, per_row: Sequence[T]) -> list[T]:
    return [per_row[head] for head in first_rows_of_groups(batch)]


def _group_of_rows(batch: TensorDict) -> list[int]:
    uids = texts(batch["uid"])
    number = {uids[head]: group for group, head in enumerate(first_rows_of_groups(batch))}
    return [number[uid] for uid in uids]


def _over_rows(batch: TensorDict, per_group: Sequence[Sample], maker: ColumnMaker) -> NodeOutput:
    """Each group's sample and its columns, with ``greedy_`` before their names, in all of its
    rows."""
    samples = [per_group[group] for group in _group_of_rows(batch)]
    fields = fields_of_samples(samples, maker)
    return NodeOutput(fields={f"{_PREFIX}{name}": column for name, column in fields.items()})
