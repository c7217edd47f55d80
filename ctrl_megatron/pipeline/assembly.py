"""Parts that training and evaluation build in the same way."""

from __future__ import annotations

from typing import Any

from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_provider_keys
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.pipeline.services import Services
from ctrl_megatron.pipeline.weights import EngineWeights
from ctrl_megatron.pipeline.worker import Speaker
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.push import EngineLink
from ctrl_megatron.resharding.sources import DirectorySource, WeightSource
from ctrl_megatron.rewards import (
    RewardModelForCritic,
    WeightedReward,
    make_rewards,
    reward_parameters,
)
from ctrl_megatron.rewards.disk_cache import verdict_cache
from ctrl_megatron.rewards.providers import CodeProvider, make_provider
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.access import read_token
from ctrl_megatron.sandbox.isolation import LEVELS


def engine_layout(config: Config) -> EngineLayout:
    """How the configured engine wants its weights."""
    family = config.actor_rollout_ref
    return EngineLayout(
        dtype=family.rollout_dtype, bucket_bytes=family.rollout.update_bucket_megabytes << 20
    )


def engine_weights(
    config: Config,
    groups: Groups,
    actor: WeightSource,
    engine: Engine | None,
    background: BackgroundLoop,
    *,
    may_sleep: bool = False,
) -> EngineWeights:
    """The switch between ``actor`` and the configured proxy; ValueError if their shapes differ."""
    family = config.actor_rollout_ref
    proxy_shape, shape = read_model_shape(family.proxy_path), read_model_shape(family.model.path)
    if proxy_shape != shape:
        raise ValueError(
            f"actor_rollout_ref.proxy.model.path={family.proxy_path} has another architecture than "
            "the actor; one engine speaks for both, so their shapes must be equal"
        )
    link = EngineLink(engine=engine, loop=background) if groups.is_first_here and engine else None
    proxy = DirectorySource(family.proxy_path, engine_layout(config), groups)
    return EngineWeights(
        {"actor": actor, "proxy": proxy},
        link,
        groups,
        verify=config.trainer.verify_weight_sync,
        may_sleep=may_sleep,
    )


def reward_model(config: Config, services: Services, codec: TextCodec) -> RewardModelForCritic:
    """The reward model over the training and validation rows."""
    judge = code_judge(config, services.sandbox_endpoint)
    return RewardModelForCritic(
        [*config.data.train_files, *config.data.val_files],
        codec.tokenizer,
        run_all_cases=config.reward.run_all_cases,
        max_requests=config.reward.max_requests,
        run_timeout=config.reward.run_timeout,
        sandbox=judge,
        show_progress=False,
        cache=verdict_cache(config.reward.cache_path),
        compare_lax=config.reward.compare_lax,
    )


def further_rewards(config: Config, critic: RewardModelForCritic | None) -> WeightedReward | None:
    """The configured reward functions besides the critic's, None where there are none.

    They share the critic's judge and its memory of verdicts; without ``critic`` they cannot run
    programs, but every mistake in their names and options shows. Raises ValueError for those.
    """
    reward = config.reward
    weights = {name: weight for name, weight in reward.weights.items() if name != "critic"}
    if not weights:
        return None
    ours: dict[str, Any] = {
        "provider": critic and critic.judge,
        "cache": critic and critic.cache,
        "run_timeout": reward.run_timeout,
        "max_requests": reward.max_requests,
    }
    options = {
        name: {
            **{key: value for key, value in ours.items() if key in reward_parameters(name)},
            **reward.reward_options.get(name, {}),
        }
        for name in weights
    }
    return WeightedReward(make_rewards(list(weights), options), list(weights.values()))


def isolation_metrics(worker: Speaker) -> dict[str, float]:
    """``sandbox/isolation``: the lowest level among the run's services, 0 none, 1 standard, 2
    strict; nothing where none of ours judges. Collective."""

    async def work() -> list[str]:
        judge = worker.reward.judge if worker.reward is not None else None
        return list((await judge.ping()).values()) if isinstance(judge, SandboxClient) else []

    # From the strictest to none; a service that does not tell its level is not ours.
    levels = [LEVELS[::-1].index(level) for level in worker.ask(work) if level in LEVELS]
    return {"sandbox/isolation": float(min(levels))} if levels else {}


def code_judge(config: Config, sandbox_endpoint: str) -> SandboxClient | CodeProvider:
    """Who runs the revisions. Raises ValueError naming a missing key, package or option."""
    name, at_once = config.reward.provider, config.reward.max_requests
    if name == "local":
        file = config.sandbox.token_file
        return SandboxClient(
            sandbox_endpoint,
            max_concurrency=at_once,
            token=None if file is None else read_token(file),
            identity={"provider": name, "isolation": config.sandbox.isolation},
        )
    options = {**read_provider_keys(name), **config.reward.provider_options}
    return make_provider(name, max_concurrency=at_once, **options)
