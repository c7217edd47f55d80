"""Rewards of critiques, by the execution of the revisions that follow them, and of programs."""

from ctrl_megatron.prompts import desanitize, sanitize
from ctrl_megatron.rewards.cache import CacheFileError, VerdictCache
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.rewards.grading import MAX_REQUESTS, RUN_TIMEOUT
from ctrl_megatron.rewards.items import RewardFunction, RewardItem, RewardOutcome
from ctrl_megatron.rewards.normalize import normalize_code
from ctrl_megatron.rewards.registry import (
    get_reward_factory,
    make_reward,
    register_reward,
    reward_parameters,
)
from ctrl_megatron.rewards.reward_sum import JudgeCounts, RewardSum, Scores, weighted_sum

__all__ = [
    "MAX_REQUESTS",
    "RUN_TIMEOUT",
    "CacheFileError",
    "JudgeCounts",
    "RewardFunction",
    "RewardItem",
    "RewardModelForCritic",
    "RewardOutcome",
    "RewardSum",
    "Scores",
    "VerdictCache",
    "desanitize",
    "get_reward_factory",
    "make_reward",
    "normalize_code",
    "register_reward",
    "reward_parameters",
    "sanitize",
    "weighted_sum",
]
