"""Scores critics on held-out rows without training: one engine, one model after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ctrl_megatron.config import Config
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.pipeline.assembly import engine_layout, engine_weights, reward_sum
from ctrl_megatron.pipeline.interrupt import StopFlag
from ctrl_megatron.pipeline.run import guarded, join, prompt_tables
from ctrl_megatron.pipeline.services import ServiceStart
from ctrl_megatron.pipeline.validation import validate
from ctrl_megatron.pipeline.worker import Speaker
from ctrl_megatron.resharding.sources import DirectorySource


def evaluate(config: Config, critics: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Validation rates per stage; ``critics`` maps a stage's name to its critic's HF directory.

    Revisions come from the configured proxy. All critics must have the actor's architecture.
    """
    stop = StopFlag().install()
    groups = join(config)
    results: dict[str, dict[str, float]] = {}
    with guarded(groups, config) as (watch, clean_up):
        background = BackgroundLoop()
        starting = ServiceStart(config, groups, Path(config.trainer.run_dir))
        clean_up.append(starting.stop)
        codec = TextCodec(config.actor_rollout_ref.model.tokenizer)
        train, validation = prompt_tables(config, codec)
        services = starting.wait()
        for service in services.guarded():
            watch.guard(service)
        engine = services.connect() if groups.is_leader else None
        rows = [*train.rows, *(validation.rows if validation else ())]
        rewards = reward_sum(config, services, codec, rows) if groups.is_leader else None
        for number, (stage, directory) in enumerate(critics.items()):
            actor = DirectorySource(directory, engine_layout(config), groups)
            weights = engine_weights(config, groups, actor, engine, background)
            weights.actor_changed(number)
            speaker = Speaker(
                config=config,
                groups=groups,
                background=background,
                stop=stop,
                codec=codec,
                engine=engine,
                rewards=rewards,
                weights=weights,
                validation=validation,
            )
            results[stage] = validate(speaker)
        watch.quiet()
        speaker.close()
    stop.restore()
    return results
