"""Rewards of critiques, from the execution of the revisions that they lead to."""

from ctrl_megatron.prompts import desanitize, sanitize
from ctrl_megatron.rewards.critic import MAX_REQUESTS, RewardModelForCritic, RewardOutcome
from ctrl_megatron.rewards.normalize import count_normalized_duplicates, normalize_code
from ctrl_megatron.rewards.registry import get_reward, register_reward
from ctrl_megatron.rewards.samples import RUN_TIMEOUT, Sample

__all__ = [
    "MAX_REQUESTS",
    "RUN_TIMEOUT",
    "RewardModelForCritic",
    "RewardOutcome",
    "Sample",
    "count_normalized_duplicates",
    "desanitize",
    "get_reward",
    "normalize_code",
    "register_reward",
    "sanitize",
]
