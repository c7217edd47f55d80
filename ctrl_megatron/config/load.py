"""Loads a checked ``Config`` from a YAML file and dotted overrides, and writes it as text.

YAML is read by the rules of YAML 1.2's core schema: PyYAML follows YAML 1.1, where ``1e-6`` is
text, ``on`` is true and ``010`` is eight. Here ``1e-6`` is a number, and only ``true`` and
``false`` are booleans.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ctrl_megatron.config.checks import (
    Purpose,
    check_key_relations,
    switch_settings,
    unread_keys,
)
from ctrl_megatron.config.coerce import KeyPlace, build_config
from ctrl_megatron.config.foreign import at
from ctrl_megatron.config.keys import value_at_key
from ctrl_megatron.config.schema import ALIASES, KEYS, Config
from ctrl_megatron.config.secrets import (
    HIDDEN,
    hidden_key_names,
    secret_storage_advice,
    secrets_in_tree,
    secrets_in_value,
    values_without_secrets,
)
from ctrl_megatron.config.translation import CONFIG_FORMATS, translate
from ctrl_megatron.errors import (
    UserError,
    conceal_in_user_errors,
    convert_input_errors,
    nearest_name,
    raise_all,
    read_text,
)

_NUMBERS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
_SERVER = re.compile(r"https?://[\w.:\[\]-]+/?")
"""An address without name, password, path and query."""
_NAME_END = re.compile(r"[=:\s]")
_FORMAT = "config_format"
"""The key that names the trainer whose configuration it is; it is in no ``Config``."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own table of implicit types."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's interface


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text that either version of YAML would read as another type."""


for _tag, _pattern, _first in _NUMBERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), purpose: Purpose = "rl"
) -> Config:
    """Defaults, then the YAML file, then ``key=value`` overrides in order; typed and checked.

    ``purpose`` is the training whose keys are required, or ``none``.
    Values may refer to others as ``${group.key}``. The key ``config_format`` says that the keys are
    those of another trainer, whose translation is in ``Config.translation``.
    Raises ValueError with one line per problem, each naming the key, its place and the remedy.
    """
    tree, places = _read_file(Path(path)) if path is not None else (DictConfig({}), {})
    _conceal(OmegaConf.to_container(tree, resolve=False))
    for text in overrides:
        key, value = parse_override(text)
        key = ALIASES.get(key, key)
        value = _spelt_out(key, value)
        _conceal(_nested({key: value}, "", {}))
        try:
            OmegaConf.update(tree, key, value, merge=False)
        except (OmegaConfBaseException, TypeError, AttributeError) as error:
            raise UserError(f"override {text!r} does not fit the file: {error}") from error
        places = {k: place for k, place in places.items() if not k.startswith(key + ".")}
        places[key] = KeyPlace(f"override {text!r}", is_override=True)
    given = with_current_key_names(OmegaConf.to_container(tree, resolve=False))
    try:
        given, places, notes = _translated(given, places)
        plain = raw = given
        if "${" in str(given):
            merged = _with_defaults(given)
            plain = with_current_key_names(OmegaConf.to_container(merged, resolve=True))
            with _environment_as_written():
                raw = with_current_key_names(OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        key = getattr(error, "full_key", None) or "a value"
        raise UserError(f"{key}: the reference cannot be resolved: {reason}") from error
    assert isinstance(plain, dict)
    _conceal(plain)
    config = build_config(Config, {str(key): value for key, value in plain.items()}, places)
    written = _written(given, places)
    if notes:
        unread = unread_keys(config)
        for name in [name for name in written if name in unread]:
            why = f"not read with {switch_settings(config, unread[name])}"
            notes.append(f"{written.pop(name)}: {name} is passed over: {why}")
    _require_secrets(config, places)
    check_key_relations(config, purpose, written)
    object.__setattr__(config, "written", written)
    object.__setattr__(config, "translation", tuple(notes))
    object.__setattr__(config, "unresolved", _unresolved(config, plain, raw))
    return config


def _with_defaults(given: Any) -> DictConfig:
    """``given`` over the defaults: a reference can name a key that is not set, or has another
    name."""
    former = _tree({old: f"${{{new}}}" for old, new in ALIASES.items() if new in KEYS})
    return DictConfig(_overlay(_overlay(to_dict(Config()), former), given))


def _translated(
    given: Any, places: dict[str, KeyPlace]
) -> tuple[Any, dict[str, KeyPlace], list[str]]:
    """The tree ``given``, its places and the lines of its translation, if ``config_format`` names
    another trainer."""
    form = given.pop(_FORMAT, None)
    if form is None:
        return given, places, []
    with _environment_as_written():  # secrets stay references
        around: Any = OmegaConf.to_container(_with_defaults(given), resolve=True)
    try:
        found = translate(_part(given, around), around, places, form)
    except UserError as error:
        raise error if form in CONFIG_FORMATS else UserError(f"{_FORMAT} {error}") from None
    notes = [f"{_FORMAT}={form}:", *found.notes]
    return _nested(found.settings, "", found.places), dict(found.places), notes


def _part(given: Any, around: Any) -> Any:
    """What ``around`` has in place of everything in ``given``."""
    if isinstance(given, dict) and isinstance(around, dict):
        return {name: _part(value, around[name]) for name, value in given.items()}
    return around


def _conceal(tree: Any) -> None:
    """Keep the secrets of ``tree`` out of messages, which have to name a server."""
    conceal_in_user_errors(text for text in secrets_in_tree(tree) if not _SERVER.fullmatch(text))


def _require_secrets(config: Config, places: Mapping[str, KeyPlace]) -> None:
    """UserError for what a run did not write because it can be a secret."""
    left_out, problems = unread_keys(config), list[UserError]()
    for key in (key for name, key in KEYS.items() if name not in left_out):
        for name in dict.fromkeys(hidden_key_names(key, value_at_key(config, key.name))):
            place = places.get(name) or places.get(key.name)
            problems.append(
                UserError(
                    f"{f'{place}: ' if place else ''}{name} has {HIDDEN} in place of what can be a "
                    "secret, which no file of a run holds",
                    remedy=f"give the value again, {name}=VALUE; {secret_storage_advice(key)}",
                )
            )
    raise_all(problems)


@contextmanager
def _environment_as_written() -> Iterator[None]:
    """Let references to the environment resolve to their own text."""

    def written(name: str, function: str) -> Callable[..., str]:
        return lambda *arguments: f"${{{function}:{','.join(map(str, arguments))}}}"

    originals = {"oc.env": oc.env, "oc.decode": oc.decode}
    for name in originals:
        OmegaConf.register_new_resolver(name, written(name, name), replace=True)
    try:
        yield
    finally:
        for name, original in originals.items():
            OmegaConf.register_new_resolver(name, original, replace=True)


def _unresolved(config: Config, plain: Any, raw: Any) -> dict[str, tuple[Any, Any]]:
    """``Config.unresolved``: the keys whose value ``raw`` refers to the environment."""
    return {
        name: (value_at_key(config, name), at(raw, name))
        for name in KEYS
        if "${oc.env:" in str(at(raw, name)) and at(raw, name) != at(plain, name)
    }


def parse_override(text: str) -> tuple[str, Any]:
    """``"a.b=1e-3"`` as ``("a.b", 0.001)``; the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if key.startswith("+"):
        raise UserError(f"override {key!r}: keys are set without a +; leave it out")
    if not equals or not key or not all(key.split(".")):
        raise UserError(f"override {_NAME_END.split(text)[0]!r} is not of the form group.key=value")
    try:
        return key, parse_yaml(value, f"override {text!r}")[0]
    except UserError:
        # Text that is not YAML has no parts of which some could be shown.
        declared = next((KEYS[name] for name in KEYS if f"{key}.".startswith(f"{name}.")), None)
        conceal_in_user_errors(secrets_in_value(declared, value) if declared else ())
        return key, parse_yaml(value, f"override {text!r}")[0]


def recorded_value(file: Path, key: str) -> Any:
    """The value of the dotted ``key`` in a run's ``config.yaml``; None where it has none. UserError
    if the file cannot be read."""
    return at(parse_yaml(read_text(file), str(file))[0], key)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists, every default written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def dict_without_secrets(config: Config) -> dict[str, Any]:
    """The configuration as ``to_dict`` has it, without what can be a secret."""
    return json.loads(json.dumps(_tree(values_without_secrets(config))))


def to_yaml(config: Config) -> str:
    """Every key that is read, as YAML; ``load_config`` returns an equal configuration from it.

    Keys that nothing reads with these settings are left out, because they would be refused. What
    can be a secret is ``***``, and comments say what to do in its place; ``load_config`` asks for
    it. References to the environment are written as they are.
    """
    left_out = unread_keys(config)
    values = {
        name: value
        for name, value in values_without_secrets(config).items()
        if name not in left_out
    }
    hidden = (
        f"# {name}: {HIDDEN} is not written; {secret_storage_advice(KEYS[key])}\n"
        for key, value in values.items()
        for name in dict.fromkeys(hidden_key_names(KEYS[key], value))
    )
    return "".join(hidden) + dump_yaml(_tree(values))


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names -> values as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        below = tree
        for group in groups:
            below = below.setdefault(group, {})
        below[last] = value
    return tree


def parse_yaml(
    text: str, source: str, tags: Mapping[str, Callable[[str], Any]] = MappingProxyType({})
) -> tuple[Any, dict[str, KeyPlace]]:
    """The tree of ``text``, and the place of every dotted key. ``tags``: a tag such as ``!Ref`` ->
    what becomes of the text behind it.

    Raises UserError naming ``source`` and the line for text that is not YAML or repeats a key.
    """

    class Tagged(_Loader):
        """Knows the tags of this text."""

    for tag, made in tags.items():
        Tagged.add_constructor(tag, lambda loader, node, made=made: made(node.value))
    try:
        node, tree = yaml.compose(text, Tagged), yaml.load(text, Tagged)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {_yaml_problem(error)}") from error
    places: dict[str, KeyPlace] = {}
    _locate(node, "", source, places)
    return tree, places


def dump_yaml(tree: Any) -> str:
    """``tree`` as YAML text in the order of its keys; ``parse_yaml`` returns an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _yaml_problem(error: yaml.YAMLError) -> str:
    """The problem on one line, with its line in the file."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    # A password without quotes can begin with one of these signs.
    problem = re.sub(r"\b(alias|anchor) '.*'", r"\1", problem)
    problem = re.sub(r"(?<=for the tag) '.*'", "; put text that begins with ! in quotes", problem)
    return f"{problem} (line {mark.line + 1})" if mark is not None else problem


def _locate(node: yaml.Node | None, prefix: str, source: str, places: dict[str, KeyPlace]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key = f"{prefix}.{name.value}" if prefix else str(name.value)
        place = KeyPlace(f"{source} line {name.start_mark.line + 1}")
        if key in places and name.value != "<<":
            raise UserError(f"{place}: the key {key!r} is set twice (first at {places[key]})")
        places[key] = place
        _locate(value, key, source, places)


def _written(given: Any, places: Mapping[str, KeyPlace]) -> dict[str, KeyPlace]:
    """The keys that are set, and the place of each; a key that is null is not set."""
    written = {}
    for name in KEYS:
        parts, value = name.split("."), given
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            below = (k for k in places if k.startswith(f"{name}."))
            # A key that YAML's << inserts has no place of its own.
            found = next((k for k in (*above, *below) if k in places), None)
            written[name] = KeyPlace("the file") if found is None else places[found]
    return written


def _read_file(path: Path) -> tuple[DictConfig, dict[str, KeyPlace]]:
    if path.is_dir():
        raise UserError(f"the configuration file {path} is a directory; name a file in it")
    if not path.is_file():
        names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        near = nearest_name(path.name, names)
        hint = f"; did you mean {path.parent / near}?" if near else ""
        raise UserError(f"the configuration file {path} does not exist{hint}")
    with convert_input_errors(f"the configuration file {path}"):
        text = path.read_text(encoding="utf-8")
    tree, places = parse_yaml(text, str(path))
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{path} must hold groups of keys, not {type(tree).__name__}")
    for old, new in ALIASES.items():
        if old in places and new in places:
            raise UserError(f"{places[new]}: the key {new!r} is set twice (first at {places[old]})")
    present = {ALIASES.get(name, name): place for name, place in places.items()}
    return DictConfig(with_current_key_names(_nested(tree or {}, "", places))), present


def with_current_key_names(tree: Any) -> Any:
    """The tree with the keys of ``ALIASES`` where they belong."""
    for old, new in ALIASES.items():
        group, _, name = old.rpartition(".")
        if isinstance(below := at(tree, group), dict) and name in below:
            tree = _overlay(tree, _tree({new: below.pop(name)}))
    return tree


def _spelt_out(key: str, value: Any) -> Any:
    """The value of a key, or the group that it is short for."""
    return {"auto": True} if (key, value) == ("placement", "auto") else value


def _nested(tree: Mapping[Any, Any], prefix: str, places: Mapping[str, KeyPlace]) -> dict[Any, Any]:
    """The tree with a name such as ``kl_ctrl.kl_coef`` inside a group as a group of its own. What
    is below a key, such as the options of a function, stays as it is.
    """
    found: dict[Any, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        value = _spelt_out(key, value)
        if isinstance(value, Mapping) and key not in KEYS:
            value = _nested(value, f"{key}.", places)
        *above, last = name.split(".") if isinstance(name, str) else [name]
        for part in reversed(above):
            last, value = part, {last: value}
        both = last in found
        if both and not (isinstance(value, dict) and isinstance(found[last], dict)):
            raise UserError(f"{places[key]}: {prefix}{last} is a value and a group of keys")
        found[last] = _overlay(found[last], value) if both else value
    return found


def _overlay(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    both = {k: _overlay(below[k], above[k]) for k in below.keys() & above.keys()}
    return {**below, **above, **both}
