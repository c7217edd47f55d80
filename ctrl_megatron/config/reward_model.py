"""Keys of ``reward_model``: a frozen model that rewards texts."""

from __future__ import annotations

from dataclasses import dataclass

from ctrl_megatron.config.actor_rollout_ref import RoleLayout
from ctrl_megatron.config.keys import AT_LEAST_1, Condition, group, key, when

REWARD_MODEL = when("reward_model.enable", True)
"""The condition of keys of the reward model."""
_APART = Condition(("placement.reward_model",), bool, "{0}=RANKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFiles:
    """The files of the reward model."""

    path: str | None = None
    """Hugging Face directory of a sequence classification model with one label (required)."""
    tokenizer_path: str | None = None
    """Directory of its tokenizer and chat template; None for path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """A frozen model whose number for a conversation is a reward; its other settings are those of
    `actor_rollout_ref.actor`."""

    enable: bool = False
    """Add the reward function reward_model, which this model computes, to the others."""
    model: RewardModelFiles = group(RewardModelFiles)
    weight: float = 1.0
    """Its weight in the sum; with 0 it is a metric."""
    max_length: int | None = key(None, AT_LEAST_1)
    """Longest conversation that is rewarded, in the model's own tokens; longer ones have no reward.
    None for the model's context, or the token budget of passes without gradients where that is
    less."""
    megatron: RoleLayout = group(RoleLayout, read=_APART)
