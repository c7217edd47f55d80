"""Episodes: the actor acts in an environment for several turns, and is trained on its own tokens.

A row's response is then the whole episode, token by token as it was generated: the answers of the
model and, between them, what the environment showed. ``response_mask`` is on for the answers only,
so log-probs, losses, advantages and the KL are those of the model's tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from ctrl_megatron.background import gather_results
from ctrl_megatron.config import Config
from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import DRAWN, NodeFunction, as_node_function, node
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.steps.batch import data_rows_of, number_or_none
from ctrl_megatron.steps.ctrl import DRAWS, add_update_nodes, add_weight_sync
from ctrl_megatron.steps.performance import step_performance
from ctrl_megatron.steps.sample import Fields, Sample
from ctrl_megatron.steps.sampling import (
    EXAMPLES_PER_STEP,
    balance,
    draw_seed,
    group_uid,
    length_metrics,
    node_output_of_samples,
    prepare_and_ask,
    rates_by_set,
    require_weight_version,
    sampling_params,
    share_prompts,
    validation_batches,
    validation_params,
)
from ctrl_megatron.steps.worker import DAGWorker, RolloutWorker
from ctrl_megatron.types import Completion, FinishReason, Message, SamplingParams, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's reply to an action."""

    text: str = ""
    """The next message to the model; not used where the episode is over."""
    done: bool = False
    """Whether the episode is over."""
    score: float | None = None
    """The score of the episode if it ends here; None where it is unknown, which leaves the episode
    out of the loss."""
    fields: Fields = field(default_factory=dict)
    """Further columns of the batch, of which those of the last observation count. All episodes of a
    run have the same."""


class Environment(Protocol):
    """The world of one episode. Many are in use at once, on one event loop, which no method may
    block: long work belongs into a thread or another process.
    """

    async def reset(self) -> Sequence[Message]:
        """The conversation that the first action answers; ``row.prompt`` is the row's own."""
        ...

    async def step(self, action: str) -> Observation:
        """The reply to the model's answer."""
        ...

    async def close(self) -> None:
        """Free what the episode holds. Called once, also after an error."""
        ...


EnvironmentMaker = Callable[[RolloutWorker, Row, int], Environment]
"""Takes the worker, the row and a seed; returns the environment of one episode of the row. The seed
depends on the run's seed, the step, the row and the episode's number in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The most that an episode may be."""

    turns: int
    """Answers of the model."""
    turn_tokens: int
    """Tokens of one answer."""
    prompt: int
    """Tokens of the first prompt."""
    response: int
    """Tokens of all answers and observations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that has ended."""

    prompt: tuple[int, ...]
    response: Completion
    """All tokens after the prompt. Observations have the log-prob 0."""
    drawn: tuple[bool, ...]
    """Whether the model drew each of them."""
    answers: tuple[str, ...]
    """The model's texts, turn by turn."""
    observations: tuple[Observation, ...]
    """The environment's replies, as many."""

    @property
    def last_turn(self) -> Observation:
        return self.observations[-1]

    @property
    def sample_fields(self) -> Fields:
        first, count = self.observations[0], len(self.drawn)
        replies = [f"\n\n{seen.text}\n\n" for seen in self.observations[:-1]]
        return {
            "episode": "".join(chain(*zip(self.answers, [*replies, ""], strict=True))),
            "turns": len(self.answers),
            "done": self.last_turn.done,
            "observed_tokens": count - sum(self.drawn),
            "first_score": first.score,
            "score": self.last_turn.score,
            **self.last_turn.fields,
        }


EPISODE_FIELDS = ("episode", "turns", "done", "observed_tokens", "first_score", "score")
"""The fields of the batch that every episode has, beside those of its environment."""


async def play_episode(
    environment: Environment,
    engine: Engine,
    codec: TextCodec,
    limits: EpisodeLimits,
    params: SamplingParams,
    name: str,
) -> Episode:
    """One episode. ``params`` are those of every turn, but for its room and for the name of its
    draw, which is made of ``name`` and the number of the turn.

    It ends when the environment is done, after ``limits.turns`` answers, or where the next
    observation would leave no room for an answer. UserError for a first prompt that is too long.
    """
    try:
        prompt = codec.encode_chat(await environment.reset())
        if len(prompt) > limits.prompt:
            raise UserError(
                f"the environment of {name} begins with {len(prompt)} tokens",
                key=f"data.max_prompt_length={limits.prompt}",
                remedy="raise it, or shorten what reset returns",
            )
        tokens, log_probs, drawn = list[int](), list[float](), list[bool]()
        answers, observations = list[str](), list[Observation]()
        versions = list[VersionSpan]()
        reason: FinishReason = "stop"
        while True:
            room = min(limits.turn_tokens, limits.response - len(tokens))
            turn = dataclasses.replace(
                params, n=1, max_tokens=room, rows=(f"{name}/{len(answers)}",)
            )
            ((completion,),) = await engine.generate([[*prompt, *tokens]], turn)
            start, new = len(tokens), completion.token_ids
            tokens += new
            log_probs += completion.log_probs or [0.0] * len(new)
            drawn += [True] * len(new)
            versions += [
                VersionSpan(span.version, start + span.start, start + span.end)
                for span in completion.spans
            ]
            answers.append(codec.decode(new))
            observations.append(await environment.step(answers[-1]))
            if observations[-1].done or len(answers) == limits.turns:
                break
            ended = completion.finish_reason == "stop"
            reply = codec.encode_next_turn(observations[-1].text, ended=ended)
            if len(tokens) + len(reply) >= limits.response:
                reason = "length"
                break
            tokens += reply
            log_probs += [0.0] * len(reply)
            drawn += [False] * len(reply)
    finally:
        await environment.close()
    return Episode(
        prompt=tuple(prompt),
        response=Completion(
            token_ids=tuple(tokens),
            log_probs=tuple(log_probs),
            finish_reason=reason,
            spans=_joined(versions, len(tokens)),
        ),
        drawn=tuple(drawn),
        answers=tuple(answers),
        observations=tuple(observations),
    )


def _joined(spans: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """One span over all tokens where one version drew all answers."""
    versions = {span.version for span in spans}
    if len(versions) != 1:
        return tuple(spans)
    return (VersionSpan(versions.pop(), 0, tokens),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How a pipeline makes episodes: its nodes and its validation."""

    make: NodeFunction[..., Environment]
    """An ``EnvironmentMaker`` with what its environments declare: keys that they read, services
    that they use, and the columns of the batch that they write."""
    turns: int
    turn_tokens: int | None = None
    """Most tokens of one answer; None for as many as the response has room for."""
    fields: tuple[str, ...] = ()
    """Further columns that they write."""

    def limits(self, config: Config) -> EpisodeLimits:
        response = config.data.max_response_length
        return EpisodeLimits(
            turns=self.turns,
            turn_tokens=self.turn_tokens or response,
            prompt=config.data.max_prompt_length,
            response=response,
        )

    def play_all(
        self,
        worker: RolloutWorker,
        rows: Sequence[Row],
        params: SamplingParams,
        purpose: str,
        *numbers: int,
    ) -> list[list[Episode]]:
        """``params.n`` episodes of each row from the actor's weights, all at once. Collective.

        The seed of an environment is made of ``purpose``, the ``numbers``, the row and the number
        of the episode. Raises RuntimeError if other weights drew any token, and UserError for
        environments that do not have the same fields.
        """
        config, limits = worker.config, self.limits(worker.config)
        seed = config.actor_rollout_ref.rollout.seed

        async def one(row: Row, number: int) -> Episode:
            assert worker.engine is not None
            name = f"{row.id}/{number}"
            environment = self.make(worker, row, draw_seed(seed, f"{purpose}/{name}", *numbers))
            return await play_episode(
                environment, worker.engine, worker.codec, limits, params, name
            )

        async def ask() -> list[Episode]:
            return await gather_results(
                [partial(one, row, number) for row in rows for number in range(params.n)]
            )

        worker.wait_for_draws()
        version, played = prepare_and_ask(
            worker,
            lambda: worker.device_owner.to_engine(worker.role, worker.step),
            ask,
            f"{len(rows) * params.n} episodes of the actor",
        )
        require_weight_version([[episode.response for episode in played]], version)
        _check_fields(played)
        return [played[i : i + params.n] for i in range(0, len(played), params.n)]

    def draw(
        self, worker: DAGWorker, rows: Sequence[int], *, mini_batch_size: int, attempt: int = 0
    ) -> list[Sample]:
        """The samples of this data rank's share of ``rows`` (positions in ``worker.train``), with
        ``Episode.sample_fields``. Collective.
        """
        prompts = share_prompts(len(rows), mini_batch_size, worker.groups)
        table = [worker.train.rows[rows[prompt]] for prompt, _ in prompts]
        params = sampling_params(worker, [], step=worker.step, attempt=attempt)
        played = self.play_all(worker, table, params, "environment", worker.step, attempt)
        return [
            Sample(
                uid=group_uid(worker, worker.step, attempt, prompt),
                row_id=row.id,
                mini_batch=mini_batch,
                prompt=episode.prompt,
                completion=episode.response,
                drawn=episode.drawn,
                fields=episode.sample_fields,
            )
            for (prompt, mini_batch), row, group in zip(prompts, table, played, strict=True)
            for episode in group
        ]

    def node(self) -> Callable[..., NodeOutput]:
        """The node that plays a step's episodes."""

        make = self.make
        written = (*DRAWN, *EPISODE_FIELDS, *self.fields, *(make.writes or ()), "problem_id")

        @node(reads=make.reads, writes=written, uses=make.uses)
        def generate_episodes(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
            """From ``row`` (positions of the global batch) to the batch of this data rank's
            episodes with the fields of ``Episode.sample_fields``.
            """
            size = worker.config.actor_rollout_ref.actor.ppo_mini_batch_size
            samples = self.draw(worker, batch["row"].tolist(), mini_batch_size=size)
            return node_output_of_samples(worker, samples, measure_episodes)

        return generate_episodes

    def validation(self) -> Callable[[RolloutWorker], dict[str, float]]:
        """The validation: the mean score, turns and share of finished ones of the episodes of every
        validation row (``rollout.val_kwargs``); ``unjudged`` counts those without a score.
        """

        @node(reads=self.make.reads, uses=self.make.uses)
        def validate_episodes(worker: RolloutWorker) -> dict[str, float]:
            table = worker.validation
            assert table is not None
            episodes = list[tuple[str, Episode]]()
            with worker.timeline.phase("validate_episodes"):
                for places in validation_batches(worker):
                    rows = [table.rows[place] for place in places]
                    params = validation_params(worker, [])
                    played = self.play_all(worker, rows, params, "validation")
                    episodes += [
                        (row.id, episode)
                        for row, group in zip(rows, played, strict=True)
                        for episode in group
                    ]
            worker.judged_rate_metrics()
            local = [(id_, episode.sample_fields) for id_, episode in episodes]
            results = [result for part in worker.groups.gather_data_ranks(local) for result in part]
            return rates_by_set(table.sets, results, mean_scores)

        return validate_episodes


def _check_fields(played: Sequence[Episode]) -> None:
    """UserError unless all environments write the same fields, none of ``EPISODE_FIELDS``."""
    names = {tuple(episode.last_turn.fields) for episode in played}
    reserved = sorted({name for own in names for name in own} & set(EPISODE_FIELDS))
    if len(names) > 1 or reserved:
        shown = " or ".join(f"({', '.join(own)})" for own in sorted(names))
        raise UserError(
            f"the episodes' last observations have the fields {shown}",
            remedy="let every observation have the same fields, with names other than "
            f"{', '.join(EPISODE_FIELDS)}",
        )


def mean_scores(results: Sequence[Fields]) -> dict[str, float]:
    """The rates of validation over the fields of its episodes."""
    scores = [float(s) for one in results if (s := one["score"]) is not None]
    rates = {"unjudged": float(len(results) - len(scores))}
    if scores:
        rates["episode_score"] = sum(scores) / len(scores)
    if results:
        rates["episode_turns"] = sum(float(one["turns"] or 0) for one in results) / len(results)
    return rates


def measure_episodes(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Name -> (n,) float32, one number per episode, whose mean is reported."""

    def column(name: str) -> torch.Tensor:
        found = [sample.fields[name] for sample in samples]
        return torch.tensor([float("nan") if v is None else float(v) for v in found])

    gained = column("score") - column("first_score")
    return {
        **length_metrics(samples, "response"),
        "episode/turns": column("turns"),
        "episode/done_rate": column("done"),
        "episode/observed_tokens": column("observed_tokens"),
        "episode/gain": gained,
    }


def episode_examples(worker: DAGWorker, batch: TensorDict) -> list[dict[str, Any]]:
    """The first episode of each group with its score."""
    examples = dict[str, dict[str, Any]]()
    rows, said = data_rows_of(worker.train, batch), texts(batch["episode"])
    for i, uid in enumerate(texts(batch["uid"])):
        record = {
            "id": rows[i].id,
            "prompt": rows[i].prompt[-1]["content"],
            "episode": said[i],
            "turns": float(batch["turns"][i]),
            "score": number_or_none(batch["score"][i]),
        }
        examples.setdefault(uid, record)
    return list(examples.values())[:EXAMPLES_PER_STEP]


def environment_pipeline(
    config: Config, *, environment: str, turns: int = 4, turn_tokens: int | None = None
) -> TaskGraph:
    """GRPO or PPO on episodes in an environment of the user's: ``environment`` is the import path
    of an ``EnvironmentMaker``. An episode has up to ``turns`` answers of up to ``turn_tokens``
    tokens, and up to ``data.max_response_length`` tokens together with what the model reads.
    """
    make = import_callable(environment, "dag.options.environment")
    episodes = Episodes(make=as_node_function(make), turns=turns, turn_tokens=turn_tokens)
    return episode_graph("environment_pipeline", config, episodes)


def episode_graph(name: str, config: Config, episodes: Episodes) -> TaskGraph:
    """The graph of a step: episodes, whose environments score them, and the update.

    UserError for settings that episodes do not support.
    """
    if error := unsupported_setting_error(config, episodes):
        raise error
    report = episodes_report(config, episodes)
    pipeline = Pipeline(name, "act in environments, update", report=report)
    synced = add_weight_sync(pipeline, config)
    pipeline.add_node("generate_episodes", episodes.node(), synced, **DRAWS)
    pipeline.add_node("balance", balance, ["generate_episodes"], **DRAWS)
    add_update_nodes(pipeline, config, drawn="balance", judged=["balance"])
    return pipeline.build()


def episodes_report(config: Config, episodes: Episodes) -> StepReport:
    """The metrics, examples and validation of a pipeline of episodes."""
    return StepReport(
        metrics=step_performance,
        examples=episode_examples,
        validate=episodes.validation() if config.data.val_files else None,
    )


def unsupported_setting_error(config: Config, episodes: Episodes) -> UserError | None:
    """The error of the first setting that episodes do not support; None if they support all."""
    rollout = config.actor_rollout_ref.rollout
    for option, value in (("turns", episodes.turns), ("turn_tokens", episodes.turn_tokens)):
        if value is not None and value < 1:
            return UserError(f"is {value}", key=f"dag.options.{option}", remedy="give 1 or more")
    if rollout.staleness:
        return UserError(
            "episodes are not drawn ahead",
            key=f"actor_rollout_ref.rollout.staleness={rollout.staleness}",
            remedy="set it to 0",
        )
    if ENGINES[rollout.name].denoises:
        return UserError(
            "a masked-diffusion model has no conversation of several turns",
            key=f"actor_rollout_ref.rollout.name={rollout.name}",
            remedy="take an engine of autoregressive models",
        )
    if config.algorithm.filter_groups.enable or config.algorithm.adv_estimator == "remax":
        return UserError(
            "episodes support neither dynamic sampling nor remax",
            key="algorithm.filter_groups, algorithm.adv_estimator",
            remedy="turn filter_groups off, or take another estimator",
        )
    return None
