"""What a run is told: typed keys, YAML and overrides, checks, and the environment."""

from ctrl_megatron.config.checks import RESERVED, Purpose, check, check_files, check_world_size
from ctrl_megatron.config.load import load_config, parse_override, to_dict, to_yaml
from ctrl_megatron.config.schema import Config

__all__ = [
    "RESERVED",
    "Config",
    "Purpose",
    "check",
    "check_files",
    "check_world_size",
    "load_config",
    "parse_override",
    "to_dict",
    "to_yaml",
]
