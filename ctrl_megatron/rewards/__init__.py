"""Rewards: of critiques, from the execution of the revisions that they lead to, and of programs."""

from ctrl_megatron.prompts import desanitize, sanitize
from ctrl_megatron.rewards.critic import MAX_REQUESTS, RewardModelForCritic, RewardOutcome
from ctrl_megatron.rewards.disk_cache import CacheFileError, verdict_cache
from ctrl_megatron.rewards.items import RewardFunction, RewardItem
from ctrl_megatron.rewards.normalize import count_normalized_duplicates, normalize_code
from ctrl_megatron.rewards.registry import (
    get_reward,
    make_reward,
    make_rewards,
    register_reward,
    reward_parameters,
)
from ctrl_megatron.rewards.samples import RUN_TIMEOUT, Sample
from ctrl_megatron.rewards.weighted import WeightedReward, WeightedRewards, reward_metrics

__all__ = [
    "MAX_REQUESTS",
    "RUN_TIMEOUT",
    "CacheFileError",
    "RewardFunction",
    "RewardItem",
    "RewardModelForCritic",
    "RewardOutcome",
    "Sample",
    "WeightedReward",
    "WeightedRewards",
    "count_normalized_duplicates",
    "desanitize",
    "get_reward",
    "make_reward",
    "make_rewards",
    "normalize_code",
    "register_reward",
    "reward_metrics",
    "reward_parameters",
    "sanitize",
    "verdict_cache",
]
