"""Sampling until enough groups teach something (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms import groups_with_signal
from ctrl_megatron.pipeline.batch import deal
from ctrl_megatron.pipeline.ctrl_nodes import critique_batch, critique_lengths, outcome_fields
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.reserve import Group, JudgedCritique
from ctrl_megatron.pipeline.rounds import draw_critiques, judge, write_revisions
from ctrl_megatron.pipeline.worker import DAGWorker
from ctrl_megatron.prompts import parse_judgment


def sample_groups(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """The judged critique batch of this rank: ``train_batch_size`` groups of different rewards.

    Draws rows of the data itself, ``gen_batch_size`` at a time. Groups beyond what the step needs
    wait for the next one, whose own log-probs are then taken anew. Raises RuntimeError, on all
    ranks, where ``max_num_gen_batches`` do not give enough groups.
    """
    config = worker.config
    wanted, limit = config.data.train_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    useful, found, sampled, drawn = worker.reserve.take(), 0, 0, 0
    parts: list[JudgedCritique] = []
    while len(useful) < wanted and drawn < limit:
        fresh = _one_round(worker, worker.draw(config.gen_batch_size), attempt=drawn)
        everything = [row for part in worker.groups.from_data_ranks(fresh) for row in part]
        fresh_groups = _useful_groups(everything)
        useful += fresh_groups
        found += len(fresh_groups)
        sampled += len({row.uid for row in everything})
        drawn += 1
        parts += fresh
    if len(useful) < wanted:
        raise RuntimeError(
            f"algorithm.filter_groups: after {drawn} batches of {config.gen_batch_size} prompts "
            f"only {len(useful)} groups had different rewards, {wanted} are needed; raise "
            "algorithm.filter_groups.max_num_gen_batches, actor_rollout_ref.rollout.n or "
            "actor_rollout_ref.rollout.temperature, lower data.train_batch_size, or train on "
            "problems that are neither always nor never solved"
        )
    worker.reserve.keep(useful[wanted:])
    made = _collate(worker, useful[:wanted])
    metrics = {"sampling/rounds": float(drawn), "sampling/reserve": float(len(useful) - wanted)}
    if sampled:
        metrics["sampling/useful_rate"] = found / sampled
    lengths = {
        **critique_lengths(
            [p.row for p in parts], torch.tensor([p.outcome.judgment is not None for p in parts])
        ),
        "revision/length": torch.tensor(
            [float(p.revision_tokens) for p in parts if p.revision_tokens is not None]
        ),
    }
    return NodeOutput(batch=made, metrics={**metrics, **worker.means(lengths)})


def _one_round(worker: DAGWorker, rows: list[int], *, attempt: int) -> list[JudgedCritique]:
    """This rank's critiques of its share of ``rows``, revised and judged. Collective."""
    drawn = draw_critiques(worker, rows, mini_batch_size=len(rows), attempt=attempt)
    ids = [row.problem_id for row in drawn]
    said = [worker.codec.decode(row.completion.token_ids) for row in drawn]
    valid = [parse_judgment(critique) is not None for critique in said]
    revisions, lengths = write_revisions(worker, ids, said, valid)
    outcomes = worker.ask(lambda: judge(worker, ids, said, revisions))
    counts = iter(lengths)
    return [
        JudgedCritique(
            row=row,
            critique=critique,
            revision=revision,
            revision_tokens=next(counts) if ok else None,
            outcome=outcome,
        )
        for row, critique, revision, ok, outcome in zip(
            drawn, said, revisions, valid, outcomes, strict=True
        )
    ]


def _useful_groups(rows: list[JudgedCritique]) -> list[Group]:
    """Whole groups, in order, in which judged critiques earned different rewards."""
    judged = [row for row in rows if row.outcome.reward is not None]
    if not judged:
        return []
    signal = groups_with_signal(
        torch.tensor([row.outcome.reward for row in judged]), [row.uid for row in judged]
    )
    groups: dict[str, Group] = {
        row.uid: [] for row, useful in zip(judged, signal.tolist(), strict=True) if useful
    }
    for row in rows:
        if row.uid in groups:
            groups[row.uid].append(row)
    return list(groups.values())


def _collate(worker: DAGWorker, groups: list[Group]) -> TensorDict:
    """This rank's share of the step's groups as the batch that the other pipelines' nodes give."""
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    rows = [
        replace(judged, row=replace(judged.row, mini_batch=number // size))
        for number, group in enumerate(groups)
        for judged in group
    ]
    mine = deal(rows, worker.groups)
    made = critique_batch(worker, [judged.row for judged in mine])
    made["revision"] = NonTensorStack(*[judged.revision for judged in mine])
    for name, value in outcome_fields([judged.outcome for judged in mine]).items():
        made[name] = value
    return made
