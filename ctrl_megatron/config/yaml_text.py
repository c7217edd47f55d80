"""YAML read by the rules of YAML 1.2's core schema, with the line of every key.

PyYAML follows YAML 1.1, where ``1e-6`` is text, ``on`` is true and ``010`` is eight. Here a
number is what a programmer would call one, and only ``true`` and ``false`` are booleans.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own table of implicit types."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's interface


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what either version of YAML would misread."""


for _tag, _pattern, _first in _NUMBERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """The tree of ``text``, and for every dotted key the place where it stands.

    Raises ValueError naming ``source`` and the line for text that is not YAML or repeats a key.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            places: dict[str, str] = {}
            if node is None:
                return None, places
            _locate(node, "", source, places)
            return loader.construct_document(node), places
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from error


def write(tree: Any) -> str:
    """``tree`` as YAML text in the order of its keys; ``read`` gives it back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _locate(node: yaml.Node, prefix: str, source: str, places: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key = f"{prefix}.{name.value}" if prefix else str(name.value)
        place = f"{source} line {name.start_mark.line + 1}"
        if key in places and name.value != "<<":
            raise ValueError(f"{place}: the key {key!r} stands twice (first at {places[key]})")
        places[key] = place
        _locate(value, key, source, places)
