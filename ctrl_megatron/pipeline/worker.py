"""What one rank holds during a run; nodes get it as their first argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ctrl_megatron.algorithms import AdaptiveKLController, FixedKLController
from ctrl_megatron.checkpoint.convert import POLICY_FOLDER, VALUE_FOLDER
from ctrl_megatron.config import Config
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.models.value import ValueModel
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.pipeline.interrupt import StopFlag, StopRequested
from ctrl_megatron.pipeline.prompts_table import PromptTable
from ctrl_megatron.pipeline.reserve import SamplingReserve
from ctrl_megatron.resharding.engine_weights import EngineWeights
from ctrl_megatron.rewards import RewardModelForCritic, WeightedReward
from ctrl_megatron.rollout.engine import Engine

T = TypeVar("T")
_POLL_SECONDS = 0.05


@dataclass(slots=True, kw_only=True)
class Speaker:
    """What it takes to let critic and proxy speak and to judge what they say."""

    config: Config
    groups: ProcessGroups
    background: BackgroundLoop
    stop: StopFlag
    codec: TextCodec
    engine: Engine | None
    """Given on leaders."""
    reward: RewardModelForCritic | None
    """Given on leaders."""
    weights: EngineWeights
    validation: PromptTable | None
    timeline: Timeline = field(default_factory=Timeline)
    step: int = 0
    """Training steps that are finished."""

    def ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The leader's answer to ``work``, on all ranks of its model copy. Collective.

        Raises StopRequested, on all ranks, if a stop is requested while any leader waits.
        """
        answer, interrupted = None, False
        if self.groups.is_leader:
            future = self.background.submit(work())
            while not future.done() and not self.stop.is_set:
                time.sleep(_POLL_SECONDS)
            interrupted = not future.done()
            if interrupted:
                future.cancel()
            else:
                answer = future.result()
        if self.stop.agreed(self.groups, interrupted):
            raise StopRequested
        return self.groups.from_leader(answer)

    def close(self) -> None:
        """Let go of connections and end the background loop."""
        if self.engine is not None:
            self.background.run(self.engine.close())
        if self.reward is not None:
            self.background.run(self.reward.close())
        self.background.close()


@dataclass(slots=True, kw_only=True)
class DAGWorker(Speaker):
    """Models, services and state of one rank; every rank has one, there is no controller."""

    policy: Policy
    reference: Policy | None
    """The frozen KL anchor; None where the objective has no KL."""
    further_rewards: WeightedReward | None = None
    """Reward functions besides the critic's; those of leaders can run programs."""
    value: ValueModel | None = None
    """Given where the estimator reads values."""
    reserve: SamplingReserve = field(default_factory=SamplingReserve)
    """Groups that dynamic sampling left over."""
    draw: Callable[[int], list[int]]
    """So many further rows of the data, the same on every rank."""
    kl_controller: FixedKLController | AdaptiveKLController
    train: PromptTable

    @property
    def temperature(self) -> float:
        """Temperature of all log-probs: the sampling temperature, 1 where sampling is greedy."""
        return self.config.actor_rollout_ref.rollout.temperature or 1.0

    @property
    def trained(self) -> dict[str, ParallelModel]:
        """The models that learn, by the name of their folder in a checkpoint."""
        both: dict[str, ParallelModel] = {POLICY_FOLDER: self.policy}
        return both if self.value is None else {**both, VALUE_FOLDER: self.value}

    @property
    def actor_learns(self) -> bool:
        """False in the steps that belong to the value model alone."""
        return self.step >= self.config.trainer.critic_warmup

    def make_room(self) -> None:
        """Free what the configuration lets go of the device while the engine speaks."""
        megatron = self.config.actor_rollout_ref.actor.megatron
        if megatron.grad_offload or megatron.optimizer_offload:
            for model in self.trained.values():
                model.offload(gradients=megatron.grad_offload, optimizer=megatron.optimizer_offload)

    def means(self, values: dict[str, torch.Tensor]) -> dict[str, float]:
        """Global mean of each (values selected by no mask) vector over the data-parallel ranks.

        A name whose vectors are empty on all ranks is left out: there is nothing to report.
        """
        names = sorted(values)
        local = torch.tensor(
            [[float(values[n].double().sum()), float(values[n].numel())] for n in names],
            dtype=torch.float64,
        )
        totals = self.groups.sum_over_data(local).tolist()
        return {n: s / c for n, (s, c) in zip(names, totals, strict=True) if c}


def texts(field_value: Any) -> Sequence[str]:
    """A non-tensor field of the batch as a list."""
    return field_value.tolist() if hasattr(field_value, "tolist") else list(field_value)
