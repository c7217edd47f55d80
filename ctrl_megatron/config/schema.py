"""The root of the configuration: one group per top-level key."""

from __future__ import annotations

from dataclasses import dataclass, field

from ctrl_megatron.config.algorithm import Algorithm, Critic, Reward, Sandbox
from ctrl_megatron.config.data import Data
from ctrl_megatron.config.rollout import ActorRolloutRef
from ctrl_megatron.config.trainer import Dag, Sft, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a run is told. Build it with ``load_config``."""

    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    critic: Critic = field(default_factory=Critic)
    algorithm: Algorithm = field(default_factory=Algorithm)
    reward: Reward = field(default_factory=Reward)
    sandbox: Sandbox = field(default_factory=Sandbox)
    trainer: Trainer = field(default_factory=Trainer)
    dag: Dag = field(default_factory=Dag)
    sft: Sft = field(default_factory=Sft)

    @property
    def sequence_tokens(self) -> int:
        """Longest critique prompt plus the longest critique."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def needed_model_len(self) -> int:
        """Longest sequence that the engine can meet: a revision prompt holds the problem, the
        solution and the critique, so it counts as a whole critique sequence."""
        return self.sequence_tokens + self.actor_rollout_ref.rollout.revision_max_tokens

    @property
    def max_model_len(self) -> int:
        """Longest sequence the engine is built for."""
        given = self.actor_rollout_ref.rollout.max_model_len
        return self.needed_model_len if given is None else given

    @property
    def needs_reference(self) -> bool:
        """True where the objective contains a KL to the reference model."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
