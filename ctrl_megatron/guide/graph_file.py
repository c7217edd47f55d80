"""A pipeline as a file: YAML or JSON with the entries of siiRL's files.

    dag:
      custom_pipeline_fn: ctrl_megatron.pipeline:pipeline_from_file
      options: {file: examples/guide/grpo_graph.yaml}

``dag_id`` is the name of the graph and ``nodes`` the list of its nodes, each with arguments of
``graph.Node``. ``!Ref global_config.a.b`` in the ``config`` of a node is the value of that entry of
``global_config``. A function gets the name of its node as the parameter ``_node_id_``, if it has
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrl_megatron.config import Config, parse_yaml
from ctrl_megatron.errors import UserError, convert_input_errors, did_you_mean
from ctrl_megatron.graph.graph import TaskGraph

_ENTRIES = ("dag_id", "description", "global_config", "nodes")


@dataclass(frozen=True, slots=True)
class GraphReference:
    """``!Ref PATH``."""

    path: str


def pipeline_from_file(config: Config, *, file: str) -> TaskGraph:
    """The graph that ``file`` describes; UserError names the file and what is wrong with it."""
    with convert_input_errors(file):
        text = Path(file).read_text(encoding="utf-8")
    tree, _ = parse_yaml(text, file, {"!Ref": GraphReference})
    if not isinstance(tree, dict):
        raise UserError("has no entries", file=file, remedy=f"give {', '.join(_ENTRIES)}")
    for name in tree:
        if name not in _ENTRIES:
            raise UserError(
                f"cannot have the entry {name!r}{did_you_mean(name, _ENTRIES)}", file=file
            )
    for name in ("dag_id", "nodes"):
        if not tree.get(name):
            raise UserError(f"has no {name}", file=file, remedy=f"give {', '.join(_ENTRIES)}")
    nodes, values = tree["nodes"], tree.get("global_config") or {}
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise UserError("nodes must be a list of mappings", file=file)
    with convert_input_errors(file):
        described = [_resolved(node, values) for node in nodes]
        return TaskGraph.load_from_config(str(tree["dag_id"]), described)


def _resolved(node: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    own = {**_with_values(node.get("config") or {}, values), "_node_id_": node.get("node_id")}
    return {**node, "config": own}


def _with_values(tree: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(tree, dict):
        return {name: _with_values(value, values) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_with_values(value, values) for value in tree]
    if not isinstance(tree, GraphReference):
        return tree
    current: Any = {"global_config": values}
    for part in tree.path.split("."):
        if not isinstance(current, dict) or part not in current:
            raise UserError(
                f"!Ref {tree.path}: there is no such value",
                remedy="write !Ref global_config.NAME, with NAME in global_config",
            )
        current = current[part]
    return current
