"""The plan of a run's rewards, made once from the configuration and read by all that need it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ctrl_megatron.config import Config
from ctrl_megatron.config.algorithm import RewardStage
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import convert_input_errors
from ctrl_megatron.rewards.grading import RetryPolicy
from ctrl_megatron.rewards.registry import MODEL_REWARD, columns_read_by, reward_parameters

OF_CRITIQUES = ("critic", "delta", "echo_gain", "transition")
"""Functions that read the verdict on a revision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReward:
    """One reward function of a run."""

    weight: float
    """Factor of its rewards in the sum. A function of weight 0 runs: its rewards are metrics."""
    reads: tuple[str, ...]
    """Columns that it reads of a row."""
    options: Mapping[str, Any]
    """Keyword arguments of its factory that the configuration sets."""
    runs_programs: bool
    """True where it needs a sandbox or another provider that runs programs."""
    tasks: tuple[str, ...] | None = None
    """Tasks of the rows that it rewards (``Row.task``); None for every row."""

    def filter_rows(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if self.tasks is None or row.task in self.tasks]


@dataclass(frozen=True, slots=True)
class RewardPlan:
    """The reward functions of a run; none where no node of the pipeline reads rewards."""

    functions: Mapping[str, PlannedReward]
    """Name -> function, in the order of the sum: ``critic``, the others of ``reward.reward_funcs``,
    ``overlong`` (``reward.overlong_buffer``), ``judge`` (``reward.judge.weight``), ``judge_gate``
    (``reward.judge.gate``), ``transition`` (``reward.transition``), ``reward_model``
    (``reward_model``), ``leak`` (``algorithm.distillation`` with a hint)."""
    gate: float | None = None
    """The total of a critique whose ``judge_gate`` is 1; None without a gate."""
    stages: tuple[RewardStage, ...] = ()
    """Changes of the weights in the course of the run (``reward.schedule``)."""

    @property
    def weights(self) -> dict[str, float]:
        return {name: function.weight for name, function in self.functions.items()}

    @property
    def weights_by_stage(self) -> dict[int, dict[str, float]]:
        """First training step -> the weights from there on (``weights_at``)."""
        begins = sorted({1, *(stage.from_step for stage in self.stages)})
        return {step: weights_at(self.weights, self.stages, step) for step in begins}

    @property
    def text_rewards(self) -> dict[str, PlannedReward]:
        """Name -> function of the reward functions that are called with texts: all but the reward
        of a model, whose passes all ranks make together."""
        return {name: f for name, f in self.functions.items() if name != MODEL_REWARD}

    @property
    def runs_programs(self) -> bool:
        """True where a function needs a sandbox or another provider that runs programs."""
        return any(function.runs_programs for function in self.functions.values())


def plan_rewards(config: Config, always: Sequence[str] | None = ()) -> RewardPlan:
    """The reward functions that the configuration turns on, and those that ``always`` names.

    A function that only ``always`` names has weight 0, and so has ``critic`` where only a
    function of ``OF_CRITIQUES`` reads it. None for ``always`` says that no node of the pipeline
    asks reward functions: the plan has at most the reward of a model. Raises ``UserError`` for an
    unknown name, and for an import path that cannot be imported.
    """
    reward, judged = config.reward, config.needs_reward_model
    if always is None:
        weight = config.reward_model.weight
        return RewardPlan({MODEL_REWARD: _planned(config, MODEL_REWARD, weight)} if judged else {})
    terms: dict[str, float] = {}
    if reward.overlong_buffer.enable:
        terms["overlong"] = reward.overlong_buffer.penalty_factor
    scheduled = any("judge" in stage.weights for stage in reward.stages)
    if reward.judge.weight or (scheduled and "judge" not in reward.weights):
        terms["judge"] = reward.judge.weight
    if reward.judge.gate is not None:
        terms["judge_gate"] = 0.0
    if reward.transition.is_on:
        terms["transition"] = 1.0
    if judged:
        terms[MODEL_REWARD] = config.reward_model.weight
    if config.algorithm.distillation.has_hint and "leak" not in reward.weights:
        # What a teacher knows beyond the critic must not get into critiques unseen.
        terms["leak"] = 0.0
    configured = {**reward.weights, **terms}
    needed = (*always, *(("critic",) if configured.keys() & OF_CRITIQUES else ()))
    weights = {**dict.fromkeys(needed, 0.0), **configured}
    names = sorted(weights, key=lambda name: name != "critic")
    with convert_input_errors("reward.reward_funcs"):
        functions = {name: _planned(config, name, weights[name]) for name in names}
    return RewardPlan(functions, reward.judge.gate, reward.stages)


def weights_at(
    weights: Mapping[str, float], stages: Iterable[RewardStage], step: int
) -> dict[str, float]:
    """The weights of the training step ``step``, counted from 1: ``weights``, and over them those
    of every stage that has begun.
    """
    begun = [stage for stage in stages if stage.from_step <= step]
    found = dict(weights)
    for stage in sorted(begun, key=lambda stage: stage.from_step):
        found |= stage.weights
    return found


def _planned(config: Config, name: str, weight: float) -> PlannedReward:
    tasks = config.reward.tasks_by_function.get(name)
    if name == MODEL_REWARD:
        return PlannedReward(weight=weight, reads=(), options={}, runs_programs=False, tasks=tasks)
    parameters = reward_parameters(name)
    return PlannedReward(
        weight=weight,
        reads=columns_read_by(name),
        options=_options(config, name, parameters),
        runs_programs=name == "critic" or "provider" in parameters,
        tasks=tasks,
    )


def _options(config: Config, name: str, parameters: frozenset[str]) -> dict[str, Any]:
    reward = config.reward
    patience = RetryPolicy(share=reward.max_failed_share, retries=reward.judging_retries)
    shared = {
        "run_timeout": reward.run_timeout,
        "max_requests": reward.max_requests,
        "patience": patience,
        "shared_process_graders": reward.shared_process_graders,
    }
    configured: dict[str, Any] = {}
    if name == "critic":
        configured = {
            "run_all_cases": reward.run_all_cases,
            "copying": reward.copying,
            "copying_threshold": reward.copying_threshold,
            "show_progress": False,
        }
    elif name == "overlong" and reward.overlong_buffer.enable:
        configured = {
            "max_length": config.data.max_response_length,
            "cache_length": reward.overlong_buffer.len,
        }
    elif name == "transition" and reward.transition.is_on:
        configured = asdict(reward.transition)
    elif name in ("judge", "judge_gate"):
        configured = {
            key: value for key, value in asdict(reward.judge).items() if key in parameters
        }
    elif name in ("delta", "echo_gain"):
        configured = {"run_all_cases": reward.run_all_cases}
    given = {key: value for key, value in shared.items() if key in parameters}
    return {**given, **configured, **reward.reward_options.get(name, {})}
