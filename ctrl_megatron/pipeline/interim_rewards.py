# ruff: noqa
"""INTERIM: the reward sum over today's functions."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ctrl_megatron.data.schema import Row
from ctrl_megatron.prompts import generation_messages, revision_request, sanitize
from ctrl_megatron.rewards import RewardOutcome as RewardOutcome
from ctrl_megatron.rewards.ablations import (
    TransitionTable,
    judgment_rewards,
    transition_rewards,
    truth_of,
)
from ctrl_megatron.rewards.items import RewardItem as OldItem
from ctrl_megatron.rewards.overlong import soft_overlong_punishment
from ctrl_megatron.rewards.samples import problem_of
from ctrl_megatron.sandbox import SandboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    text: str
    critique: str = ""
    judgment: bool | None = None
    row: Row | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    parts: dict
    outcomes: list


def revision_messages(row, critique):
    return [
        *generation_messages(problem_of(asdict(row))),
        {"role": "assistant", "content": sanitize(row.solution)},
        revision_request(critique),
    ]


def weighted_sum(parts, weights):
    used = [weights[n] * parts[n] for n in parts if weights[n]]
    return torch.stack(used).sum(dim=0)


class RewardSum:
    def __init__(self, config, critic, further):
        self.config, self.critic, self.further = config, critic, further
        w = dict(config.reward.weights)
        w = {"critic": w.pop("critic", 0.0), **w}
        if config.reward.overlong_buffer.enable:
            w["overlong"] = config.reward.overlong_buffer.penalty_factor
        if config.reward.judgment_weight:
            w["judgment"] = config.reward.judgment_weight
        if config.reward.transition.is_on:
            w["transition"] = 1.0
        self.weights = w

    async def score(self, items):
        samples = [asdict(i.row) for i in items]
        outcomes = await self.critic.judge_all(
            [i.critique for i in items], [i.text for i in items], samples
        )
        parts = {"critic": [o.reward for o in outcomes]}
        if self.further is not None:
            old = [
                OldItem(text=i.text, critique=i.critique, sample=s, length=i.length)
                for i, s in zip(items, samples)
            ]
            parts |= (await self.further.score(old)).parts
        r = self.config.reward
        if "overlong" in self.weights:
            parts["overlong"] = [
                soft_overlong_punishment(
                    i.length,
                    max_length=self.config.data.max_response_length,
                    cache_length=r.overlong_buffer.len,
                )
                for i in items
            ]
        truths = [truth_of(i.row.pass_rate) for i in items]
        if "judgment" in self.weights:
            parts["judgment"] = judgment_rewards([i.judgment for i in items], truths, 1.0)
        if "transition" in self.weights:
            after = [
                None if i.judgment is None else (bool(o.passed) and all(o.passed))
                for i, o in zip(items, outcomes)
            ]
            made = transition_rewards(truths, after, TransitionTable(**asdict(r.transition)))
            parts["transition"] = [0.0 if m is None else m for m in made]
        return Scores(parts=parts, outcomes=outcomes)

    async def judge_solution(self, text, row):
        try:
            return await self.critic.judge_solution(text, asdict(row))
        except SandboxError:
            return None

    async def close(self):
        if self.critic is not None:
            await self.critic.close()


def build_reward_sum(config, sandbox_endpoint, codec, *, leads):
    from ctrl_megatron.config.environment import read_provider_keys
    from ctrl_megatron.rewards import (
        RewardModelForCritic,
    )
    from ctrl_megatron.rewards.disk_cache import verdict_cache
    from ctrl_megatron.rewards.providers import make_provider
    from ctrl_megatron.sandbox import SandboxClient
    from ctrl_megatron.sandbox.access import read_token

    critic = None
    if leads:
        attempts, at_once = config.sandbox.attempts, config.sandbox.max_concurrency
        name = config.reward.provider
        if name == "local":
            file = config.sandbox.token_file
            judge = SandboxClient(
                sandbox_endpoint,
                attempts=attempts,
                max_concurrency=at_once,
                token=None if file is None else read_token(file),
                identity={"provider": name, "isolation": config.sandbox.isolation},
            )
        else:
            options = {**read_provider_keys(name), **config.reward.provider_options}
            judge = make_provider(name, attempts=attempts, max_concurrency=at_once, **options)
        critic = RewardModelForCritic(
            [*config.data.train_files, *config.data.val_files],
            codec.tokenizer,
            num_examine=config.reward.num_examine,
            run_all_cases=config.reward.run_all_cases,
            max_requests=config.reward.max_requests,
            run_timeout=config.reward.run_timeout,
            sandbox=judge,
            show_progress=False,
            cache=verdict_cache(config.reward.cache_path),
            compare_lax=config.reward.compare_lax,
        )
    return RewardSum(config, critic, further_rewards(config, critic))


def further_rewards(config, critic):
    from ctrl_megatron.rewards import WeightedReward, make_rewards, reward_parameters

    reward = config.reward
    weights = {name: weight for name, weight in reward.weights.items() if name != "critic"}
    if not weights:
        return None
    ours = {
        "provider": critic and critic.judge,
        "cache": critic and critic.cache,
        "run_timeout": reward.run_timeout,
        "max_requests": reward.max_requests,
    }
    options = {
        name: {
            **{k: v for k, v in ours.items() if k in reward_parameters(name)},
            **reward.reward_options.get(name, {}),
        }
        for name in weights
    }
    return WeightedReward(make_rewards(list(weights), options), list(weights.values()))


async def isolation_of(rewards):
    from ctrl_megatron.sandbox import SandboxClient
    from ctrl_megatron.sandbox.isolation import LEVELS

    judge = rewards.critic.judge if rewards.critic is not None else None
    found = list((await judge.ping()).values()) if isinstance(judge, SandboxClient) else []
    levels = [LEVELS[::-1].index(level) for level in found if level in LEVELS]
    return {"sandbox/isolation": float(min(levels))} if levels else {}


RewardSum.isolation = isolation_of
