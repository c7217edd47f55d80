"""Parts that training and evaluation build in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import Row
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
from ctrl_megatron.rewards import RewardSum
from ctrl_megatron.rewards.build import build_reward_sum
from ctrl_megatron.rollout.engine import Engine
from ctrl_megatron.sandbox import SandboxClient
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


def reward_sum(
    config: Config, services: Services, codec: TextCodec, rows: Sequence[Row]
) -> RewardSum:
    """The configured reward functions over the training and validation ``rows``.

    The critic's runs in any case: its outcomes are metrics of every run.
    """
    return build_reward_sum(
        config,
        sandbox_endpoint=services.sandbox_endpoint,
        rows=rows,
        tokenizer=codec.tokenizer,
        measured=("critic",),
    )


def isolation_metrics(worker: Speaker) -> dict[str, float]:
    """``sandbox/isolation``: the lowest level among the run's services, 0 none, 1 standard, 2
    strict; nothing where none of ours judges. Collective."""

    async def work() -> list[str]:
        judge = worker.rewards.judge if worker.rewards is not None else None
        return list((await judge.ping()).values()) if isinstance(judge, SandboxClient) else []

    # From the strictest to none; a service that does not tell its level is not ours.
    levels = [LEVELS[::-1].index(level) for level in worker.ask(work) if level in LEVELS]
    return {"sandbox/isolation": float(min(levels))} if levels else {}
