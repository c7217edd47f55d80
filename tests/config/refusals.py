"""Configurations that are refused, and the reasons."""

from __future__ import annotations

from ctrl_megatron.config import load_config

ACTOR = "actor_rollout_ref.actor."
PATHS = ("data.train_files=a.parquet", "actor_rollout_ref.model.path=model")


def messages(*overrides: str) -> list[str]:
    """One line per problem of a run with these overrides."""
    try:
        load_config(None, [*PATHS, *overrides])
    except ValueError as error:
        return str(error).splitlines()
    return []
