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
    def needs_values(self) -> bool:
        """True where a value model is trained."""
        enable = self.critic.enable
        return self.algorithm.adv_estimator == "gae" if enable is None else enable

    @property
    def value_path(self) -> str:
        """What the value model starts from."""
        return self.critic.model.path or self.actor_rollout_ref.model.path

    @property
    def value_mini_batch_size(self) -> int:
        """Prompts per optimizer step of the value model."""
        return self.critic.ppo_mini_batch_size or self.actor_rollout_ref.actor.ppo_mini_batch_size

    @property
    def value_epochs(self) -> int:
        """Passes of the value model over the batch of one training step."""
        return self.critic.ppo_epochs or self.actor_rollout_ref.actor.ppo_epochs

    @property
    def gen_batch_size(self) -> int:
        """Prompts that are sampled together."""
        if not self.algorithm.filter_groups.enable or self.data.gen_batch_size is None:
            return self.data.train_batch_size
        return self.data.gen_batch_size

    @property
    def needs_reference(self) -> bool:
        """True where the objective contains a KL to the reference model."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
