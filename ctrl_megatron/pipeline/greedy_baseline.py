"""What the actor earns without chance: one greedy critique per prompt, the baseline of ReMax.

The greedy critiques travel as texts of their group's rows and share the engine calls and the
sandbox time of the sampled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.pipeline import speech
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.rounds import assert_spoken_by
from ctrl_megatron.pipeline.worker import DAGWorker, texts
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.rewards import RewardOutcome

FIELD = "greedy_critique"


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a batch by the first row of each."""

    heads: tuple[int, ...]
    """(G,) row numbers."""
    of_row: tuple[int, ...]
    """(B,) which group a row belongs to."""


def groups_of(uids: Sequence[str]) -> Groups:
    """Groups in the order of their first rows."""
    heads: dict[str, int] = {}
    for row, uid in enumerate(uids):
        heads.setdefault(uid, row)
    numbers = {uid: number for number, uid in enumerate(heads)}
    return Groups(tuple(heads.values()), tuple(numbers[uid] for uid in uids))


def draw_greedy(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``greedy_critique`` (B,) text: the actor's likeliest critique of each row's prompt."""
    version = worker.weights.use("actor")
    rows = [worker.train.number_of[row] for row in per_group(batch, "problem_id")]
    answers = worker.ask(lambda: speech.critiques(worker, worker.train, rows, greedy=True))
    assert_spoken_by(version, [answer[0] for answer in answers])
    said = [worker.codec.decode(answer[0].token_ids) for answer in answers]
    return NodeOutput(fields=over_rows(batch, **{FIELD: said}))


def per_group(batch: TensorDict, field: str) -> list[str]:
    """A text field's value in the first row of each group."""
    values = texts(batch[field])
    return [values[head] for head in groups_of(texts(batch["uid"])).heads]


def over_rows(batch: TensorDict, **per_group: Sequence[str]) -> dict[str, NonTensorStack]:
    """Fields with each group's text in all of its rows."""
    of_row = groups_of(texts(batch["uid"])).of_row
    return {
        name: NonTensorStack(*[values[group] for group in of_row])
        for name, values in per_group.items()
    }


def greedy_rows(batch: TensorDict) -> tuple[list[str], list[str], list[bool]]:
    """(row ids, critiques, whether they hold a judgment), one per group; empty without the node."""
    if FIELD not in batch:
        return [], [], []
    critiques = per_group(batch, FIELD)
    valid = [parse_judgment(critique) is not None for critique in critiques]
    return per_group(batch, "problem_id"), critiques, valid


def baselines(batch: TensorDict, outcomes: Sequence[RewardOutcome]) -> dict[str, torch.Tensor]:
    """``reward_baselines`` (B,) from one outcome per group, NaN where it could not be judged."""
    earned = [float("nan") if o.reward is None else o.reward for o in outcomes]
    of_row = groups_of(texts(batch["uid"])).of_row
    return {"reward_baselines": torch.tensor([earned[group] for group in of_row])}
