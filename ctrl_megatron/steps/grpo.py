"""GRPO without critiques: prompts, completions, reward functions, update.

Source: DeepSeekMath (arXiv 2402.03300). The column ``prompt`` of the data is the question; any
functions of ``reward.reward_funcs`` reward the completion: ``code``, ``binary_code`` and
``code_format`` of this package, or your own as ``module:function``. The nodes after the rewards are
those of CTRL's step (``add_update_nodes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.measures import pass_rate_of_draws
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import DRAWN, REWARD_MODEL, node
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeType
from ctrl_megatron.rewards import RewardItem, RewardSum
from ctrl_megatron.steps.ahead import begin_draws_ahead, report_staleness
from ctrl_megatron.steps.batch import data_rows_of, fields_of_samples, number_or_none, samples_of
from ctrl_megatron.steps.chain import with_decoded_text
from ctrl_megatron.steps.ctrl import (
    DRAWS,
    JUDGES,
    add_next_draw_and_balance,
    add_update_nodes,
    add_weight_sync,
)
from ctrl_megatron.steps.dynamic_sampling import add_dynamic_sampling
from ctrl_megatron.steps.masks import seed_masks
from ctrl_megatron.steps.model_reward import model_reward_parts
from ctrl_megatron.steps.performance import step_performance
from ctrl_megatron.steps.sample import Fields, Sample, outcomes_of, reward_columns
from ctrl_megatron.steps.sampling import (
    EXAMPLES_PER_STEP,
    begin_judging,
    draw_arguments,
    draw_samples,
    generate,
    length_metrics,
    node_output_of_samples,
    per_row_listener,
    rates_by_set,
    validation_batches,
    validation_params,
)
from ctrl_megatron.steps.worker import DAGWorker, RolloutWorker
from ctrl_megatron.types import Completion


def grpo_pipeline(config: Config) -> TaskGraph:
    """The graph of a step for the configuration. Raises ValueError for settings that only CTRL's
    pipeline supports.
    """
    return _of_completions("grpo_training_pipeline", config)


def ppo_pipeline(config: Config) -> TaskGraph:
    """``grpo_pipeline`` with a value model, under its name in siiRL's guide; UserError without
    one."""
    if not config.needs_value_model:
        raise UserError(
            "ppo_pipeline trains a value model, and no estimator reads values",
            key=f"algorithm.adv_estimator={config.algorithm.adv_estimator}",
            remedy="set algorithm.adv_estimator=gae, or take grpo_pipeline",
        )
    return _of_completions("ppo_training_pipeline", config)


def dapo_pipeline(config: Config) -> TaskGraph:
    """``grpo_pipeline`` with dynamic sampling, under its name in siiRL's guide; UserError without
    it."""
    if not config.algorithm.filter_groups.enable:
        raise UserError(
            "dapo_pipeline samples groups until enough have different rewards",
            key="algorithm.filter_groups.enable=false",
            remedy="set it to true, or take grpo_pipeline",
        )
    return _of_completions("dapo_training_pipeline", config)


def _of_completions(name: str, config: Config) -> TaskGraph:
    if "critic" in config.reward.reward_funcs:
        raise ValueError(
            "reward.reward_funcs: critic rewards critiques by their revisions, and this pipeline "
            "has neither; name functions of completions: [code], [my_module:my_function]"
        )
    if config.algorithm.adv_estimator == "remax":
        raise ValueError(
            "algorithm.adv_estimator=remax needs a greedy baseline, which only ctrl_pipeline draws"
        )
    pipeline = Pipeline(name, "draw, reward, update", report=_report(config))
    drawn, judged = _add_drawing_nodes(pipeline, config)
    add_update_nodes(pipeline, config, drawn=drawn, judged=judged)
    return pipeline.build()


def coupled_grpo_pipeline(config: Config) -> TaskGraph:
    """``grpo_pipeline`` for a masked-diffusion model, on the coupled scores of its completions.

    Source: DiffuCoder (arXiv 2506.20639). The engine ``diffusion`` draws; before the first score
    every row gets the masks of all passes (``masks.seed_masks``). Nothing compares the scores with
    the engine's log-probs, which are no estimates of the same number.
    """
    pipeline = Pipeline(
        "coupled_grpo_pipeline", "draw, reward, mask, update", report=_report(config)
    )
    drawn, judged = _add_drawing_nodes(pipeline, config)
    pipeline.add_node("masks", seed_masks, [drawn], node_type=NodeType.COMPUTE)
    add_update_nodes(pipeline, config, drawn="masks", judged=judged, corrects=False)
    return pipeline.build()


def _report(config: Config) -> StepReport:
    return StepReport(
        metrics=step_performance,
        examples=completion_examples,
        validate=validate_completions if config.data.val_files else None,
    )


def _add_drawing_nodes(pipeline: Pipeline, config: Config) -> tuple[str, list[str]]:
    """Add the nodes from prompts to rewards; returns the last node that draws, and the nodes that
    judge.
    """
    if config.algorithm.filter_groups.enable:
        drawn, judged = add_dynamic_sampling(pipeline, JUDGED, measure_completions, JUDGED_COLUMNS)
    else:
        judged = ["function_reward"]
        synced = add_weight_sync(pipeline, config)
        pipeline.add_node("rollout_actor", generate_completions, synced, **DRAWS)
        pipeline.add_node("function_reward", reward_completions, ["rollout_actor"], **JUDGES)
        drawn = add_next_draw_and_balance(pipeline, config, "rollout_actor", begin_next_completions)
    return drawn, judged


@node(writes=(*DRAWN, "sample", "completion", "problem_id"))
def generate_completions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Draw ``rollout.n`` completions for the rows at positions ``row`` of the training data;
    returns this data rank's samples, with the column ``completion`` (texts). Collective."""
    on_completion = partial(_begin_reward, worker)
    drawn = draw_samples(worker, **draw_arguments(worker, batch), on_completion=on_completion)
    samples = [with_decoded_text(worker, sample) for sample in drawn]
    return node_output_of_samples(worker, samples, measure_completions, completion_columns)


def begin_next_completions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Begins the next step's completions, with the actor's weights before this step's update."""
    begin_draws_ahead(worker, partial(_begin_reward, worker))
    return report_staleness(worker, batch)


@node(writes=("sample", "score"), uses=("rewards",))
async def reward_completions(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """From ``sample`` to the judged samples, ``score`` and every function's ``reward/NAME``, (B,)
    float32 each. Runs beside the log-probs.
    """
    samples, rows = samples_of(batch), data_rows_of(worker.train, batch)
    items = [completion_item(s.text, row, s.length) for s, row in zip(samples, rows, strict=True)]
    outcomes = outcomes_of(await worker.score(items))
    judged = [replace(s, outcome=outcome) for s, outcome in zip(samples, outcomes, strict=True)]
    return NodeOutput(fields=fields_of_samples(judged, reward_columns))


def completion_columns(sample: Sample) -> Fields:
    """The column ``completion``: the text of the sample."""
    return {"completion": sample.text}


JUDGED = (generate_completions, reward_completions)
"""The nodes from rows to judged completions."""
JUDGED_COLUMNS = (completion_columns, reward_columns)
"""Make the columns that these nodes write."""


def _begin_reward(worker: RolloutWorker, row: Row, completion: Completion) -> None:
    """Start to judge the completion, on the leader's event loop."""

    def start(rewards: RewardSum) -> None:
        tokens = completion.token_ids
        rewards.begin(completion_item(worker.codec.decode(tokens), row, len(tokens)))

    begin_judging(worker, start)


def completion_item(text: str, row: Row, length: int) -> RewardItem:
    """A completion of so many tokens for the reward functions."""
    return RewardItem(text=text, row=row, length=length)


def measure_completions(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Name -> (B,) float32, one number per completion, whose mean is reported: the completions'
    lengths."""
    return length_metrics(samples, "response")


def completion_examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """The first completion of each group with its rewards."""
    samples, versions = samples_of(batch), texts(batch["version"])
    rows, examples = data_rows_of(worker.train, batch), dict[str, dict[str, Any]]()
    for i, uid in enumerate(texts(batch["uid"])):
        rewards = {
            name: number_or_none(batch[f"reward/{name}"][i]) for name in worker.reward_weights
        }
        examples.setdefault(
            uid,
            {
                "id": rows[i].id,
                "prompt": rows[i].prompt[-1]["content"],
                "completion": samples[i].text,
                **rewards,
                "versions": f"completion by {versions[i]}",
            },
        )
    return list(examples.values())[:EXAMPLES_PER_STEP]


@node(reads=REWARD_MODEL, uses=("rewards",))
def validate_completions(worker: RolloutWorker) -> dict[str, float]:
    """Mean of every reward over the completions of every validation row (``rollout.val_kwargs``),
    and the share of rows that one of several completions solves. Collective.

    ``unjudged`` counts rewards that are unknown because a service failed. The reward of a model on
    the ranks of another world is not measured. With several validation
    files, each has means of its own too.
    """
    table = worker.validation
    assert table is not None
    items: list[RewardItem] = []
    ids: list[str] = []
    with worker.timeline.phase("validate_completions"):
        for batch in validation_batches(worker):
            rows = [table.rows[row] for row in batch]
            params = validation_params(worker, [row.id for row in rows])
            drawn = generate(
                worker,
                worker.role,
                [table.prompts[row] for row in batch],
                params,
                finished=per_row_listener(rows, params.n, partial(_begin_reward, worker)),
            )
            for row, completions in zip(rows, drawn, strict=True):
                for completion in completions:
                    text = worker.codec.decode(completion.token_ids)
                    items.append(completion_item(text, row, len(completion.token_ids)))
                    ids.append(row.id)
    with worker.timeline.phase("validate_rewards"):
        rewards = worker.run_on_leader(lambda: worker.score(items), "the judging of texts").parts
        worker.judged_rate_metrics()
        rewards |= model_reward_parts(worker, items)
    local = [
        (id_, (id_, {name: rewards[name][i] for name in rewards})) for i, id_ in enumerate(ids)
    ]
    results = [result for part in worker.groups.gather_data_ranks(local) for result in part]
    return rates_by_set(table.sets, results, mean_rewards)


def mean_rewards(results: Sequence[tuple[str, Mapping[str, float | None]]]) -> dict[str, float]:
    """Rates over the texts of rows, which are pairs of the row's id and the text's rewards.

    ``reward/NAME`` is the mean of every function over the texts that it could judge; ``unjudged``
    counts the others. ``pass@K`` is the share of rows of which one of K texts passes every test, by
    a function of ``SOLVES``.
    """
    means, rewards = {"unjudged": 0.0}, [of_text for _, of_text in results]
    for name in rewards[0] if rewards else ():
        judged = [r for of_text in rewards if (r := of_text[name]) is not None]
        means["unjudged"] += len(rewards) - len(judged)
        if judged:
            means[f"reward/{name}"] = sum(judged) / len(judged)
    for name in [name for name in SOLVES if rewards and name in rewards[0]][:1]:
        draws: dict[str, list[bool | None]] = {}
        for row, of_text in results:
            found = of_text[name]
            draws.setdefault(row, []).append(None if found is None else found >= 1.0)
        means |= pass_rate_of_draws(draws)
    return means


SOLVES = ("code", "binary_code")
"""Reward functions whose value is 1 exactly where every test passes."""
