"""Metrics and examples of critiques, as they are drawn and at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.data.rows import CRITIQUE
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.steps.batch import Sample, columns, known
from ctrl_megatron.steps.chain import Critique, critiques_of
from ctrl_megatron.steps.model_reward import total_rewards
from ctrl_megatron.steps.performance import step_performance
from ctrl_megatron.steps.sampling import EXAMPLES_PER_STEP, length_metrics
from ctrl_megatron.steps.worker import DAGWorker


def measure_critiques(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Vectors whose means are reported for critiques as they were drawn, and for their revisions
    where there are any.
    """
    critiques = [sample for sample in samples if sample.fields["task"] == CRITIQUE]
    measured = length_metrics(critiques, "critique")
    fields = columns([sample.fields for sample in samples])
    if samples:
        drawn = torch.tensor([sample.fields["task"] == CRITIQUE for sample in samples])
        measured["critique/valid_rate"] = fields["valid"][drawn].float()
        if "revision_length" in fields:
            measured |= revision_metrics(fields, fields["valid"] & drawn)
    return measured


def revision_metrics(
    fields: Mapping[str, torch.Tensor], revised: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Vectors whose means are reported, from the columns of ``Critique.revised`` and ``revised``
    (B,) bool.
    """
    return {
        "revision/length": fields["revision_length"],
        "revision/left_out_rate": (~fields["revision_fits"])[revised].float(),
    }


def critique_metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """Speed, pass rates of first solutions and of revisions, how verdicts came about, whether there
    was anything to learn, and the rewards of each task where there are several. Collective.
    """
    every = critiques_of(worker, batch)
    critiques = [critique for critique in every if critique.row.task == CRITIQUE]
    before = [critique.row.pass_rate for critique in critiques]
    rates = worker.means(
        {
            "pass_rate/before": torch.tensor([rate for rate in before if rate is not None]),
            "pass_rate/after": batch["pass_rate"][batch["rewarded"] & batch["valid"]],
            "critique/copied_rate": batch["copied"][~batch["copied"].isnan()],
            "reward/cached_rate": batch["cached"][~batch["reward/critic"].isnan()].float(),
            **reward_signal(batch["reward/critic"], texts(batch["uid"]), every),
            **critique_signal(critiques),
            **task_metrics(worker, batch),
        }
    )
    return {**step_performance(worker, batch), **rates}


def task_metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, torch.Tensor]:
    """Vectors whose means are reported for every task of the training rows, if there are several:
    share of the responses, their weighted rewards, and their lengths in tokens.
    """
    tasks = sorted({row.task for row in worker.train.rows})
    if len(tasks) == 1:
        return {}
    here, totals = texts(batch["task"]), total_rewards(worker, batch)
    measured, lengths = dict[str, torch.Tensor](), batch["response_mask"].sum(dim=1).float()
    for task in tasks:
        mine = torch.tensor([name == task for name in here])
        measured[f"task/{task}/share"] = mine.float()
        measured[f"task/{task}/reward"] = totals[mine]
        measured[f"task/{task}/length"] = lengths[mine & batch["rewarded"]]
    return measured


def critique_examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """The first critique of each group with what came of it, those with a revision first."""
    critiques, uids = critiques_of(worker, batch), texts(batch["uid"])
    details, versions = texts(batch["detail"]), texts(batch["version"])
    examples: dict[str, dict[str, Any]] = {}
    for i in sorted(range(len(uids)), key=lambda i: critiques[i].judgment is None):
        if uids[i] in examples:
            continue
        critique, row = critiques[i], critiques[i].row
        if row.task != CRITIQUE:
            examples[uids[i]] = {
                "id": row.id,
                "task": row.task,
                "prompt": row.prompt[-1]["content"],
                "response": critique.text,
                "reward": known(total_rewards(worker, batch)[i]),
                "versions": f"response by {versions[i]}",
            }
            continue
        examples[uids[i]] = {
            "id": row.id,
            "problem": row.problem,
            "solution": row.solution,
            "critique": critique.text,
            "judgment": "none" if critique.judgment is None else "valid",
            "revision": critique.revision,
            "reward": known(batch["reward/critic"][i]),
            "passed_before": row.pass_rate,
            "passed_after": known(batch["pass_rate"][i]),
            "copied": known(batch["copied"][i]),
            "detail": details[i],
            "versions": f"critique by {versions[i]}"
            + (f", revision by {critique.revised_by}" if critique.revised_by else ""),
        }
    return list(examples.values())[:EXAMPLES_PER_STEP]


def reward_signal(
    rewards: torch.Tensor, uids: Sequence[str], critiques: Sequence[Critique]
) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics, over whole groups, which ``uids`` name.

    ``rewards`` (B,) float32 is NaN for critiques that were not judged. A group of one teaches
    nothing and has no share here.
    """
    groups: dict[str, list[Critique]] = {}
    for uid, critique in zip(uids, critiques, strict=True):
        groups.setdefault(uid, []).append(critique)
    distinct = []
    for members in groups.values():
        revisions = [c.revision for c in members if c.is_revised]
        if len(revisions) > 1:
            distinct.append(len(set(revisions)) / len(revisions))
    gains = [
        float(reward) - critique.row.pass_rate
        for reward, critique in zip(rewards, critiques, strict=True)
        if critique.row.pass_rate is not None
    ]
    return {
        "group/distinct_revision_rate": torch.tensor(distinct),
        "group/reward_minus_first": torch.tensor(gains),
    }


def critique_signal(critiques: Sequence[Critique]) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics: the judgment of critiques that contain one; and, for rows
    whose columns ``wrong`` and ``right`` name the fault, whether the critique quotes it.

    A quotation is a text between backticks. Right programs have an empty ``wrong``.
    """
    named, exact = [], []
    for critique in critiques:
        wrong, right = critique.row.extra.get("wrong"), critique.row.extra.get("right")
        if isinstance(wrong, str) and isinstance(right, str) and wrong:
            quotes = [f"`{text}`" in critique.text for text in (wrong, right)]
            named.append(float(quotes[0]))
            exact.append(float(all(quotes)))
    judgments = [critique.judgment for critique in critiques]
    return {
        "judgment/correct_rate": torch.tensor(
            [float(judgment) for judgment in judgments if judgment is not None]
        ),
        "fault/named_rate": torch.tensor(named),
        "fault/exact_edit_rate": torch.tensor(exact),
    }
