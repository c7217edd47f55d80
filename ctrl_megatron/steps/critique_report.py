"""Metrics and examples of critiques, as they are drawn and at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.data.rows import CRITIQUE, Row
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.steps.batch import data_rows_of, number_or_none, samples_of
from ctrl_megatron.steps.performance import step_performance
from ctrl_megatron.steps.sample import Revision, Sample
from ctrl_megatron.steps.sampling import EXAMPLES_PER_STEP, length_metrics
from ctrl_megatron.steps.worker import DAGWorker


def measure_critiques(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Name -> (n,) float32, whose mean over all ranks is reported, one number per critique or
    revision: for critiques as they were drawn, and for their revisions where there are any."""
    critiques = [sample for sample in samples if sample.task == CRITIQUE]
    valid = [float(critique.judgment is not None) for critique in critiques]
    measured = length_metrics(critiques, "critique")
    if samples:
        measured["critique/valid_rate"] = torch.tensor(valid)
    if any(sample.outcome for sample in samples):
        measured |= revision_metrics(samples)
    return measured


def revision_metrics(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Name -> (n,) float32, one number per revision that was asked for, whose mean is reported."""
    revisions = [sample.revision or Revision() for sample in samples if sample.is_revised]
    lengths = [float("nan") if one.tokens is None else float(one.tokens) for one in revisions]
    return {
        "revision/length": torch.tensor(lengths),
        "revision/left_out_rate": torch.tensor([float(not one.fits) for one in revisions]),
    }


def critique_metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """Speed, pass rates of first solutions and of revisions, how verdicts came about, whether there
    was anything to learn, and the rewards of each task where there are several. Collective.
    """
    every = list(zip(samples_of(batch), data_rows_of(worker.train, batch), strict=True))
    critiques = [(sample, row) for sample, row in every if sample.task == CRITIQUE]
    before = [row.pass_rate for _, row in critiques]
    rates = worker.global_means(
        {
            "pass_rate/before": torch.tensor([rate for rate in before if rate is not None]),
            "pass_rate/after": batch["pass_rate"][batch["rewarded"] & batch["valid"]],
            "critique/copied_rate": batch["copied"][~batch["copied"].isnan()],
            "critique/leaked_rate": batch.get("reward/leak", torch.zeros(0)),
            "reward/cached_rate": batch["cached"][~batch["reward/critic"].isnan()].float(),
            **reward_signal_metrics(batch["reward/critic"], texts(batch["uid"]), every),
            **critique_judgment_metrics(critiques),
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
    here, totals = texts(batch["task"]), placed_rewards(batch)
    measured, lengths = dict[str, torch.Tensor](), batch["response_mask"].sum(dim=1).float()
    for task in tasks:
        of_task = torch.tensor([name == task for name in here])
        measured[f"task/{task}/share"] = of_task.float()
        measured[f"task/{task}/reward"] = totals[of_task]
        measured[f"task/{task}/length"] = lengths[of_task & batch["rewarded"]]
    return measured


def placed_rewards(batch: TensorDict) -> torch.Tensor:
    """(B,) float32: the rewards that the node ``place_scores`` placed; NaN where there is none."""
    totals = batch["token_level_scores"].sum(dim=1)
    return torch.where(batch["rewarded"], totals, float("nan"))


def critique_examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """The first critique of each group with what came of it, those with a revision first."""
    samples, rows = samples_of(batch), data_rows_of(worker.train, batch)
    uids, versions = texts(batch["uid"]), texts(batch["version"])
    examples: dict[str, dict[str, Any]] = {}
    for i in sorted(range(len(uids)), key=lambda i: samples[i].judgment is None):
        if uids[i] in examples:
            continue
        sample, row, revision = samples[i], rows[i], samples[i].revision or Revision()
        if row.task != CRITIQUE:
            examples[uids[i]] = {
                "id": row.id,
                "task": row.task,
                "prompt": row.prompt[-1]["content"],
                "response": sample.text,
                "reward": number_or_none(placed_rewards(batch)[i]),
                "versions": f"response by {versions[i]}",
            }
            continue
        examples[uids[i]] = {
            "id": row.id,
            "problem": row.problem,
            "solution": row.solution,
            "critique": sample.text,
            "judgment": "none" if sample.judgment is None else "valid",
            "revision": revision.text,
            "reward": number_or_none(batch["reward/critic"][i]),
            "passed_before": row.pass_rate,
            "passed_after": number_or_none(batch["pass_rate"][i]),
            "copied": number_or_none(batch["copied"][i]),
            "detail": sample.outcome.detail if sample.outcome else "",
            "versions": f"critique by {versions[i]}"
            + (f", revision by {revision.version}" if revision.version else ""),
        }
    return list(examples.values())[:EXAMPLES_PER_STEP]


def reward_signal_metrics(
    rewards: torch.Tensor, uids: Sequence[str], every: Sequence[tuple[Sample, Row]]
) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics: of each group with several revisions (``uids`` name the
    groups) the share of different ones, and of each row with a known pass rate the reward minus
    that rate.

    ``rewards`` (B,) float32 is NaN for critiques that were not judged, and so is the difference.
    """
    groups: dict[str, list[Sample]] = {}
    for uid, (sample, _) in zip(uids, every, strict=True):
        groups.setdefault(uid, []).append(sample)
    distinct = []
    for members in groups.values():
        revisions = [(s.revision or Revision()).text for s in members if s.is_revised]
        if len(revisions) > 1:
            distinct.append(len(set(revisions)) / len(revisions))
    gains = [
        float(reward) - row.pass_rate
        for reward, (_, row) in zip(rewards, every, strict=True)
        if row.pass_rate is not None
    ]
    return {
        "group/distinct_revision_rate": torch.tensor(distinct),
        "group/reward_minus_first": torch.tensor(gains),
    }


def critique_judgment_metrics(critiques: Sequence[tuple[Sample, Row]]) -> dict[str, torch.Tensor]:
    """Vectors whose means are metrics: the judgment of critiques that contain one; and, for rows
    whose columns ``wrong`` and ``right`` name the fault, whether the critique quotes it.

    A quotation is a text between backticks. Right programs have an empty ``wrong``.
    """
    named, exact = [], []
    for sample, row in critiques:
        if sample.program is not None:
            continue  # whose fault the columns do not know
        wrong, right = row.extra.get("wrong"), row.extra.get("right")
        if isinstance(wrong, str) and isinstance(right, str) and wrong:
            quotes = [f"`{text}`" in sample.text for text in (wrong, right)]
            named.append(float(quotes[0]))
            exact.append(float(all(quotes)))
    judgments = [sample.judgment for sample, _ in critiques]
    return {
        "judgment/correct_rate": torch.tensor(
            [float(judgment) for judgment in judgments if judgment is not None]
        ),
        "fault/named_rate": torch.tensor(named),
        "fault/exact_edit_rate": torch.tensor(exact),
    }
