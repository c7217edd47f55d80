"""The configuration: typed keys, YAML and overrides, checks, and environment variables."""

from ctrl_megatron.config.actor_rollout_ref import (
    BUILT_IN_PIPELINES,
    COUPLED_GRPO_PIPELINE,
    CRITIQUE_PIPELINES,
    GRPO_PIPELINE,
    Actor,
)
from ctrl_megatron.config.checks import Purpose, check_world_size, require_files_exist
from ctrl_megatron.config.load import (
    dict_without_secrets,
    load_config,
    parse_override,
    parse_yaml,
    to_dict,
    to_yaml,
)
from ctrl_megatron.config.schema import KEYS, Config

__all__ = [
    "BUILT_IN_PIPELINES",
    "COUPLED_GRPO_PIPELINE",
    "CRITIQUE_PIPELINES",
    "GRPO_PIPELINE",
    "KEYS",
    "Actor",
    "Config",
    "Purpose",
    "check_world_size",
    "dict_without_secrets",
    "load_config",
    "parse_override",
    "parse_yaml",
    "require_files_exist",
    "to_dict",
    "to_yaml",
]
