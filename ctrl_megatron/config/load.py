"""From a YAML file and dotted overrides to a checked ``Config``, and back to text."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctrl_megatron.config import yaml_text
from ctrl_megatron.config.checks import Purpose, check
from ctrl_megatron.config.coerce import build
from ctrl_megatron.config.schema import Config
from ctrl_megatron.config.trainer import Sft


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), purpose: Purpose = "rl"
) -> Config:
    """Defaults, then the YAML file, then ``key=value`` overrides in order; typed and checked.

    ``purpose`` says which keys are required: those of RL training, of SFT, or none.
    Values may refer to others as ``${group.key}``.
    Raises ValueError with one line per problem, each naming the key, its place and the remedy.
    """
    tree, places = _read_file(Path(path)) if path is not None else (DictConfig({}), {})
    for text in overrides:
        key, value = parse_override(text)
        if purpose == "sft":
            _require_own_key(key, text)
        _assign(tree, key, value, text)
        places[key] = f"override {text!r}"
    try:
        # The defaults take part so that a reference can name a key that nobody set.
        merged = _overlay(to_dict(Config()), OmegaConf.to_container(tree, resolve=False))
        plain = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        key = getattr(error, "full_key", None) or "a value"
        raise ValueError(f"{key}: the reference cannot be resolved: {reason}") from error
    assert isinstance(plain, dict)
    config = build(Config, {str(key): value for key, value in plain.items()}, places)
    check(config, purpose)
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """``"a.b=1e-3"`` as ``("a.b", 0.001)``; the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise ValueError(f"override {text!r} is not of the form group.key=value")
    return key, yaml_text.read(value, f"override {text!r}")[0]


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists, every default written out."""
    return _plain(dataclasses.asdict(config))


def to_yaml(config: Config) -> str:
    """The configuration as YAML; ``load_config`` reads it back to an equal object."""
    return yaml_text.write(to_dict(config))


def _require_own_key(key: str, text: str) -> None:
    """SFT has keys of its own for what RL trains with; the file may hold both, but who types the
    other one would wait for an effect in vain.
    """
    group, _, name = key.rpartition(".")
    if group != "sft" and name in {field.name for field in dataclasses.fields(Sft)}:
        raise ValueError(f"override {text!r} has no effect on SFT, which reads sft.{name}")


def _read_file(path: Path) -> tuple[DictConfig, dict[str, str]]:
    if not path.is_file():
        near = _nearest_file(path)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"the configuration file {path} does not exist{hint}")
    tree, places = yaml_text.read(path.read_text(encoding="utf-8"), str(path))
    if tree is None:
        return DictConfig({}), places
    if isinstance(tree, dict):
        return DictConfig(tree), places
    raise ValueError(f"{path} must hold groups of keys, not {type(tree).__name__}")


def _nearest_file(path: Path) -> Path | None:
    names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None


def _assign(tree: DictConfig, key: str, value: Any, text: str) -> None:
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except (OmegaConfBaseException, TypeError, AttributeError) as error:
        raise ValueError(f"override {text!r} does not fit the file: {error}") from error


def _overlay(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    both = {k: _overlay(below[k], above[k]) for k in below.keys() & above.keys()}
    return {**below, **above, **both}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
