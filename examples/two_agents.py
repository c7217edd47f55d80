"""Two policies in one step: a solver writes programs, a critic criticises them, and both learn.

    ctrl-train-rl --nproc-per-node 2 --config FILE \
        dag.custom_pipeline_fn=examples.two_agents:build actor_rollout_ref.proxy.kind=agent1 \
        policies.agent1.actor_rollout_ref.model.path=DIRECTORY

The solver, agent 1, answers every problem several times, and its reward is the share of the tests
that an answer passes. The critic, agent 0, criticises one wrong answer of every problem (the first
solution of the data's row where none is wrong), the solver revises it after each critique, and the
critic's reward is the share of the tests that the revision passes. Rows are those of CTRL. The
solver learns from its first answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.pipeline import (
    DAGWorker,
    NodeOutput,
    NodeType,
    Pipeline,
    Sample,
    StepReport,
    TaskGraph,
    add_update_nodes,
    balance,
    critique_columns,
    draw_samples,
    fields_of_samples,
    gather_samples,
    judge,
    make_batch,
    node,
    revise,
    revision_columns,
    reward_columns,
    samples_of,
    step_performance,
    texts,
    verdict_columns,
    with_decoded_text,
)
from ctrl_megatron.prompts import critique_messages, generation_messages

CRITIC, SOLVER = 0, 1
"""The numbers of the policies: ``actor_rollout_ref`` and ``policies.agent1`` of the
configuration."""


def build(config: Config) -> TaskGraph:
    """The graph: the solver's answers, the critic's critiques, revisions, and both updates."""
    report = StepReport(metrics=metrics, examples=examples, rewards=("critic",))
    pipeline = Pipeline("two_agents", "answer, criticise, revise, update both", report=report)
    draws: dict[str, Any] = {"node_type": NodeType.MODEL_INFERENCE}
    pipeline.add_node("answer", answer, agent_group=SOLVER, **draws)
    pipeline.add_node("criticise", criticise, ["answer"], **draws)
    pipeline.add_node("revise", revise_answers, ["criticise"], **draws)
    pipeline.add_node("sandbox", judge_revisions, ["revise"], node_type=NodeType.ENV_INTERACT)
    pipeline.add_node("balance", balance, ["revise"], **draws)
    pipeline.add_node("balance_answers", balance, ["revise"], agent_group=SOLVER, **draws)
    of_critic, of_solver = config.agents
    add_update_nodes(
        pipeline, of_solver, drawn="balance_answers", judged=["answer"], agent_group=SOLVER
    )
    add_update_nodes(pipeline, of_critic, drawn="balance", judged=["sandbox"])
    return pipeline.build()


@node(uses=("rewards",))
def answer(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """From ``row`` (positions of the global batch) to the solver's batch: ``answer`` (B,) text and
    ``score`` (B,) float32, the share of the tests that it passes.
    """

    def prompt(row: Any) -> Sequence[int]:
        return tokens(worker, generation_messages(row.attempt().problem))

    samples = draw_samples(
        worker, batch["row"].tolist(), mini_batch_size=mini_batch_size(worker), asks=prompt
    )
    answers = [worker.codec.decode(sample.completion.token_ids) for sample in samples]
    rows = [worker.train.row(sample.row_id) for sample in samples]

    async def run() -> list[float | None]:
        assert worker.rewards is not None
        return [one.reward for one in await worker.rewards.judge_solutions(answers, rows)]

    scores = worker.run_on_leader(run, "the judging of answers")
    samples = [
        dataclasses.replace(sample, fields={"answer": text, "score": score})
        for sample, text, score in zip(samples, answers, scores, strict=True)
    ]
    return NodeOutput(batch=make_batch(samples, pad_token_id=worker.codec.pad_token_id))


def criticise(worker: DAGWorker, batch: TensorDict, batches: Sequence[TensorDict]) -> NodeOutput:
    """From ``row`` and the solver's batch to the critic's: critiques, with the program that each is
    about in ``solution`` (B,) text and the share of the tests that this passes in ``before`` (B,).
    """
    answers = gather_samples(worker.agents[SOLVER], batches[SOLVER])
    criticised = wrong_answers(worker, answers)

    def prompt(row: Any) -> Sequence[int]:
        return critique_prompt(worker, criticised.get(row.id, row))

    drawn = draw_samples(
        worker, batch["row"].tolist(), mini_batch_size=mini_batch_size(worker), asks=prompt
    )
    samples = []
    for sample in drawn:
        row = criticised.get(sample.row_id, worker.train.row(sample.row_id))
        about = {"solution": row.solution, "before": row.pass_rate}
        samples.append(dataclasses.replace(with_decoded_text(worker, sample), fields=about))
    made = make_batch(samples, pad_token_id=worker.codec.pad_token_id)
    return NodeOutput(batch=made, fields=fields_of_samples(samples, critique_columns))


def wrong_answers(worker: DAGWorker, answers: Sequence[Sample]) -> dict[str, Any]:
    """Row id -> the row with the solver's first wrong answer as its solution, where there is one
    whose critique fits ``data.max_prompt_length``.
    """
    longest, found = worker.config.data.max_prompt_length, dict[str, Any]()
    for answered in answers:
        id_, score = answered.row_id, answered.fields["score"]
        if id_ not in found and score is not None and score < 1:
            text = answered.fields["answer"]
            wrong = dataclasses.replace(worker.train.row(id_), solution=text, pass_rate=score)
            if len(critique_prompt(worker, wrong)) <= longest:
                found[id_] = wrong
    return found


@node(uses=("proxy",))
def revise_answers(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """The revisions after valid critiques (``Sample.revision``), by ``actor_rollout_ref.proxy``:
    with its kind ``agent1`` by the solver.
    """
    revised = revise(worker, samples_of(batch), criticised_rows(worker, batch))
    return NodeOutput(fields=fields_of_samples(revised, revision_columns))


@node(uses=("rewards",))
async def judge_revisions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``score``, ``reward/critic``, ``pass_rate`` (B,) float32 of the revisions. Runs beside the
    log-probs.
    """
    judged = await judge(worker, samples_of(batch), criticised_rows(worker, batch))
    return NodeOutput(fields=fields_of_samples(judged, reward_columns, verdict_columns))


def criticised_rows(worker: DAGWorker, batch: TensorDict) -> list[Any]:
    """The row of each critique, with the program that it is about."""
    return [
        dataclasses.replace(worker.train.row(sample.row_id), solution=sample.fields["solution"])
        for sample in samples_of(batch)
    ]


def critique_prompt(worker: DAGWorker, row: Any) -> Sequence[int]:
    """The request for a critique of the row's solution, in tokens."""
    return tokens(worker, critique_messages(row.attempt().problem, row.solution))


def tokens(worker: DAGWorker, messages: Any) -> Sequence[int]:
    """A conversation after which the model answers, in tokens."""
    return worker.codec.encode_chat(messages, add_generation_prompt=True)


def mini_batch_size(worker: DAGWorker) -> int:
    """Prompts of an optimizer step."""
    return worker.config.actor_rollout_ref.actor.ppo_mini_batch_size


def metrics(worker: DAGWorker, batch: TensorDict) -> dict[str, float]:
    """For the critic speed and pass rates; the solver's reward is ``agent1/reward/mean``."""
    if worker.role != "actor":
        return {}
    after = batch["pass_rate"][batch["rewarded"] & batch["valid"]]
    rates = {"critique/valid_rate": batch["valid"].float(), "pass_rate/before": batch["before"]}
    return {
        **step_performance(worker, batch),
        **worker.global_means({**rates, "pass_rate/after": after}),
    }


def examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """One answer and one critique per step, with the weights that drew them."""
    shown: dict[str, Any] = {"agent": worker.role, "id": texts(batch["problem_id"])[0]}
    if worker.role == "actor":
        shown |= {name: texts(batch[name])[0] for name in ("solution", "critique", "revision")}
        shown["revised_by"] = texts(batch["revision_version"])[0]
    else:
        shown["answer"] = texts(batch["answer"])[0]
    score = batch["score"][0]
    shown |= {"reward": None if score.isnan() else float(score)}
    return [{**shown, "version": texts(batch["version"])[0]}]
