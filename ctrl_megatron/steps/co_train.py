"""Critic and solver that learn in the same steps, each from what the other writes.

The solver (agent 1) writes programs for every problem, the critic (agent 0) criticises some of
them, and the solver revises each criticised program after each of its critiques. A program and a
revision are worth the share of the tests that they pass, a critique what its revisions are worth on
average. Groups are the first programs of a problem, the critiques of a program, and the revisions
after a critique. Sources: ECHO (arXiv 2601.06794) updates both in every step; CURE (2506.03136) and
Code-A1 (2603.15611) train a coder with a tester in this way. docs/co_training.md explains the
choices.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import DRAWN, node
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole, NodeType
from ctrl_megatron.prompts import generation_messages, revision_messages
from ctrl_megatron.rewards import RewardOutcome
from ctrl_megatron.steps.batch import fields_of_samples, samples_of
from ctrl_megatron.steps.chain import criticise, judge
from ctrl_megatron.steps.conversation import validate_critiques
from ctrl_megatron.steps.critique_report import (
    critique_examples,
    critique_metrics,
    measure_critiques,
)
from ctrl_megatron.steps.ctrl import DRAWS, add_update_nodes
from ctrl_megatron.steps.dynamic_sampling import dynamic_sampling
from ctrl_megatron.steps.performance import engine_metrics
from ctrl_megatron.steps.rounds import names_of_samples
from ctrl_megatron.steps.sample import (
    REVISION_COLUMNS,
    TURN_COLUMNS,
    CriticisedProgram,
    Revision,
    Sample,
    SampleRewards,
    critique_columns,
    revision_columns,
    reward_columns,
    turn_columns,
    verdict_columns,
)
from ctrl_megatron.steps.sampling import (
    EXAMPLES_PER_STEP,
    balance,
    draw_arguments,
    draw_samples,
    gather_samples,
    generate,
    length_metrics,
    node_output_of_samples,
    sampling_params,
    share_prompts,
)
from ctrl_megatron.steps.worker import DAGWorker

CRITIC, SOLVER = 0, 1
"""The numbers of the policies."""
_JUDGED = ("sample", "score", "pass_rate", "cached", "detail")
_PROGRAMS = (turn_columns, reward_columns, verdict_columns)
"""The columns of the solver's batch."""


def co_train_pipeline(config: Config, *, programs: int = 1, revisions: int = 2) -> TaskGraph:
    """The graph of a step of critic and solver. Of the ``rollout.n`` programs that the solver
    writes for a problem the first ``programs`` different ones are criticised, ``rollout.n`` times
    each, and each critique is followed by so many ``revisions``.

    UserError for a run without a second policy, and for numbers that no group can have.
    """
    if len(config.agents) != 2:
        raise UserError(
            f"co_train_pipeline trains a critic and a solver, and the run has {len(config.agents)} "
            "policies",
            key="policies",
            remedy="name the solver's directory in policies.agent1.actor_rollout_ref.model.path",
        )
    for name, number, least in (("programs", programs, 1), ("revisions", revisions, 2)):
        if number < least:
            raise UserError(
                f"is {number}", key=f"dag.options.{name}", remedy=f"give {least} or more"
            )

    if config.needs_reward_model:
        raise UserError(
            "a reward model would score programs as answers to the request for a critique",
            key="reward_model.enable",
            remedy="leave it out",
        )

    @node(writes=(*DRAWN, *_JUDGED, *TURN_COLUMNS, "problem_id"), uses=("rewards",))
    def write_programs(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """From ``row`` to the solver's judged programs."""

        def request(row: Row) -> Sequence[int]:
            return _tokens(worker, generation_messages(row.attempt().problem))

        drawn = draw_samples(worker, **draw_arguments(worker, batch), asks=request)
        samples = _judged_programs(worker, drawn)
        return node_output_of_samples(worker, samples, _no_measure, *_PROGRAMS)

    @node(writes=(*DRAWN, "sample", "task", "critique", "valid", "judged_correct", "problem_id"))
    def criticise_programs(
        worker: DAGWorker, batch: TensorDict, batches: Sequence[TensorDict]
    ) -> NodeOutput:
        """From the solver's programs to the critic's batch."""
        written = gather_samples(worker.agents[SOLVER], batches[SOLVER])
        samples = draw_critiques_of(worker, written, programs)
        columns = (critique_columns, turn_columns)
        return node_output_of_samples(worker, samples, measure_critiques, *columns)

    @node(writes=(*DRAWN, *_JUDGED, *TURN_COLUMNS, "problem_id"), uses=("rewards",))
    def revise_programs(
        worker: DAGWorker, batch: TensorDict, batches: Sequence[TensorDict]
    ) -> NodeOutput:
        """From the critiques to the solver's batch of programs and judged revisions."""
        critiques = gather_samples(worker.agents[CRITIC], batches[CRITIC])
        own = samples_of(batch)
        samples = [*own, *draw_revisions_of(worker, own, critiques, revisions)]
        return node_output_of_samples(worker, samples, measure_programs, *_PROGRAMS)

    @node(writes=(*_JUDGED, *REVISION_COLUMNS), uses=("rewards",))
    def reward_critiques(
        worker: DAGWorker, batch: TensorDict, batches: Sequence[TensorDict]
    ) -> NodeOutput:
        """The rewards of the critiques, from the revisions."""
        revised = gather_samples(worker.agents[SOLVER], batches[SOLVER])
        samples = _with_mean_rewards(worker, samples_of(batch), revised)
        columns = (revision_columns, reward_columns, verdict_columns)
        return NodeOutput(fields=fields_of_samples(samples, *columns))

    report = StepReport(
        metrics=_metrics,
        examples=_examples,
        validate=validate_critiques if config.data.val_files else None,
        rewards=("critic",),
    )
    pipeline = Pipeline("co_train", "write, criticise, revise, update both", report=report)
    add, after = pipeline.add_node, ["reward_critiques"]
    solver: dict[str, Any] = {"agent_group": SOLVER}
    if config.algorithm.filter_groups.enable:
        write = dynamic_sampling((write_programs,), _no_measure, _PROGRAMS)
        add("write_programs", write, node_role=NodeRole.DYNAMIC_SAMPLING, **solver)
    else:
        add("write_programs", write_programs, **DRAWS, **solver)
    add("criticise_programs", criticise_programs, ["write_programs"], **DRAWS)
    add("revise_programs", revise_programs, ["criticise_programs"], **DRAWS, **solver)
    # It reads two batches, so that no dump of one can repeat it.
    judges: dict[str, Any] = {"node_role": NodeRole.REWARD, "node_type": NodeType.MODEL_INFERENCE}
    add("reward_critiques", reward_critiques, ["revise_programs"], **judges)
    add("balance_programs", balance, after, **DRAWS, **solver)
    add("balance_critiques", balance, after, **DRAWS)
    of_critic, of_solver = config.agents
    for own, last, number in (
        (of_solver, "balance_programs", SOLVER),
        (of_critic, "balance_critiques", CRITIC),
    ):
        add_update_nodes(pipeline, own, drawn=last, judged=[last], agent_group=number)
    return pipeline.build()


def draw_critiques_of(worker: DAGWorker, written: Sequence[Sample], programs: int) -> list[Sample]:
    """The critic's samples about the first ``programs`` different programs of every problem in
    ``written``, the solver's of all ranks: this data rank's share. About the data's solution where
    the request for a critique of none of them fits ``data.max_prompt_length``. Collective.
    """
    problems = dict[str, list[Sample]]()
    for sample in sorted(written, key=lambda sample: sample.mini_batch):
        problems.setdefault(sample.uid, []).append(sample)
    groups = [*problems.values()]
    size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
    asked = [
        (request, number)
        for place, number in share_prompts(len(groups), size, worker.groups)
        for request in _critique_requests(worker, groups[place], programs)
    ]
    names = [f"{about.row_id}/{uid.rpartition('/')[2]}" for (uid, about, _), _ in asked]
    rows = [about.row_with_program(worker.train.row(about.row_id)) for (_, about, _), _ in asked]
    prompts = [prompt for (_, _, prompt), _ in asked]
    params = sampling_params(worker, names, step=worker.step)
    return [
        dataclasses.replace(
            critique, uid=uid, mini_batch=number, prompt=prompt, program=about.program
        )
        for ((uid, about, prompt), number), answers in zip(
            asked, criticise(worker, rows, prompts, params, None), strict=True
        )
        for critique in answers
    ]


def _critique_requests(
    worker: DAGWorker, written: Sequence[Sample], programs: int
) -> list[tuple[str, Sample, tuple[int, ...]]]:
    """(uid of the critiques' group, a sample with the program that they are about, their prompt)
    for a problem's programs."""
    found, seen = list[tuple[str, Sample, tuple[int, ...]]](), set[str]()
    for place, sample in enumerate(written):
        rate = sample.outcome.pass_rate if sample.outcome else None
        if sample.text in seen or rate is None or len(found) == programs:
            continue
        seen.add(sample.text)
        program = CriticisedProgram(text=sample.text, pass_rate=rate)
        about = dataclasses.replace(sample, program=program)
        row = about.row_with_program(worker.train.row(sample.row_id))
        prompt = tuple(_tokens(worker, row.prompt))
        if len(prompt) <= worker.config.data.max_prompt_length:
            found.append((f"{sample.uid}/{place}", about, prompt))
    if found:
        return found
    first = dataclasses.replace(written[0], program=None)
    number = worker.train.row_number_by_id[first.row_id]
    return [(f"{first.uid}/data", first, worker.train.prompts[number])]


def draw_revisions_of(
    worker: DAGWorker, own: Sequence[Sample], critiques: Sequence[Sample], revisions: int
) -> list[Sample]:
    """The solver's judged samples after those of ``critiques``, the critic's of all ranks, that
    contain a judgment and are about problems of this rank, whose programs are ``own``. None where
    the request exceeds the solver's ``data.max_prompt_length``. Collective.
    """
    mini_batch = {sample.uid: sample.mini_batch for sample in own}
    asked = list[tuple[str, Sample, tuple[int, ...]]]()
    for name, critique in zip(names_of_samples(critiques), critiques, strict=True):
        if critique.judgment is None or _problem(name) not in mini_batch:
            continue
        row = critique.row_with_program(worker.train.row(critique.row_id))
        messages = revision_messages(row.attempt().problem, row.solution, critique.text)
        prompt = tuple(_tokens(worker, messages))
        if len(prompt) <= worker.config.data.max_prompt_length:
            asked.append((name, critique, prompt))
    names = [f"{critique.row_id}/{name.partition('/')[2]}" for name, critique, _ in asked]
    params = dataclasses.replace(sampling_params(worker, names, step=worker.step), n=revisions)
    drawn = generate(worker, worker.role, [prompt for *_, prompt in asked], params)
    samples = [
        Sample(
            uid=name,
            row_id=critique.row_id,
            task=critique.task,
            mini_batch=mini_batch[_problem(name)],
            prompt=prompt,
            completion=completion,
            turn=2,
            parent=name,
            program=critique.program,
        )
        for (name, critique, prompt), answers in zip(asked, drawn, strict=True)
        for completion in answers
    ]
    return _judged_programs(worker, samples)


def _problem(critique: str) -> str:
    """The uid of the programs that the critique of that name (``names_of_samples``) is about."""
    return critique.rsplit("/", 2)[0]


def _tokens(worker: DAGWorker, messages: Any) -> Sequence[int]:
    return worker.codec.encode_chat(messages, add_generation_prompt=True)


def _judged_programs(worker: DAGWorker, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with their texts and outcomes: the share of the tests that a program passes is
    the reward ``critic``, and every other one is 0, so that no weight or gate of theirs counts.
    Collective."""
    programs = [worker.codec.decode(sample.completion.token_ids) for sample in samples]
    rows = [worker.train.row(sample.row_id) for sample in samples]

    async def run() -> list[RewardOutcome]:
        assert worker.rewards is not None
        return await worker.rewards.judge_solutions(programs, rows)

    judged = worker.run_on_leader(run, "the judging of programs")
    return [
        dataclasses.replace(
            sample,
            text=program,
            outcome=SampleRewards(
                total=one.reward,
                rewards=dict.fromkeys(worker.reward_weights, 0.0) | {"critic": one.reward},
                pass_rate=one.reward,
                cached=one.cached,
                detail=one.detail,
            ),
        )
        for sample, program, one in zip(samples, programs, judged, strict=True)
    ]


def _with_mean_rewards(
    worker: DAGWorker, critiques: Sequence[Sample], revised: Sequence[Sample]
) -> list[Sample]:
    """The critiques with their first revision, and the means over all of them as their rewards.
    ``revised`` are the solver's samples of all ranks. Collective."""
    after = defaultdict[str, list[Revision]](list)
    for one in revised:
        version = one.completion.spans[0].version
        after[one.parent].append(
            Revision(text=one.text, tokens=len(one.completion.token_ids), version=version)
        )
    names = names_of_samples(critiques)
    pairs = [
        (place, dataclasses.replace(critique, revision=revision))
        for place, (name, critique) in enumerate(zip(names, critiques, strict=True))
        for revision in after.get(name, [Revision(fits=False) if critique.is_revised else None])
    ]
    asked = [sample for _, sample in pairs]
    rows = [sample.row_with_program(worker.train.row(sample.row_id)) for sample in asked]
    judged = worker.run_on_leader(lambda: judge(worker, asked, rows), "the judging of critiques")
    found = defaultdict[int, list[Sample]](list)
    for (place, _), sample in zip(pairs, judged, strict=True):
        found[place].append(sample)
    return [_mean_sample(found[place]) for place in range(len(critiques))]


def _mean_sample(judged: Sequence[Sample]) -> Sample:
    """One critique with each of its revisions as one sample; a mean is that of what is known."""
    outcomes = [sample.outcome for sample in judged if sample.outcome is not None]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    whole = dataclasses.replace(
        outcomes[0],
        total=mean([one.total for one in outcomes]),
        rewards={
            name: mean([one.rewards[name] for one in outcomes]) for name in outcomes[0].rewards
        },
        pass_rate=mean([one.pass_rate for one in outcomes]),
        copied=mean([one.copied for one in outcomes]),
    )
    return dataclasses.replace(judged[0], outcome=whole)


# Reports


def _no_measure(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    return {}


def measure_programs(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Name -> (n,) float32, whose mean over all ranks is reported, for the solver's first programs
    and its revisions: their lengths, their pass rates, and the share that is right.
    """
    measured = dict[str, torch.Tensor]()
    for turn, name in ((1, "program"), (2, "revised_program")):
        here = [sample for sample in samples if sample.turn == turn]
        rates = [sample.outcome.pass_rate for sample in here if sample.outcome is not None]
        known = [rate for rate in rates if rate is not None]
        measured |= length_metrics(here, name)
        measured[f"{name}/pass_rate"] = torch.tensor(known)
        measured[f"{name}/right"] = torch.tensor([float(rate == 1) for rate in known])
    return measured


def _metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """``critique_metrics`` of the critic; for the solver what engines of its own counted, beside
    ``measure_programs``. Collective."""
    if worker.role == "actor":
        return critique_metrics(worker, batch)
    return engine_metrics(worker) if worker.owner is not worker.agents[CRITIC].owner else {}


def _examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """Critiques with what came of them, and programs and revisions of the solver."""
    if worker.role == "actor":
        return critique_examples(worker, batch)
    shown = dict[str, dict[str, Any]]()
    for sample in samples_of(batch):
        shown.setdefault(
            sample.uid,
            {
                "agent": worker.role,
                "id": sample.row_id,
                "turn": sample.turn,
                "program": sample.text,
                "passed": sample.outcome.pass_rate if sample.outcome else None,
                "version": sample.completion.spans[0].version,
            },
        )
    return [*shown.values()][:EXAMPLES_PER_STEP]
