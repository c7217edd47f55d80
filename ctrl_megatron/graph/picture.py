"""A graph of a step as a person sees it: as a tree for the terminal, and as facts that the report
of a run draws (``metrics.report.figures.graph_svg``).
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.tree import Tree

from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.node import Node
from ctrl_megatron.graph.siirl_names import NodeRole, NodeType

FILE = "graph.json"
"""The file in a run's directory that has the facts."""
_WIDTH = 100


def describe_nodes(graph: TaskGraph) -> list[dict[str, Any]]:
    """The nodes in the order in which they run: ``name``, ``after`` (the nodes that are waited for,
    without those that another of them has waited for), ``place`` (``engines``, ``trainer`` or
    ``aside``) and ``policy``.
    """
    return [
        {
            "name": node_id,
            "after": _waited_for(graph, node_id),
            "place": _place(graph.nodes[node_id]),
            "policy": graph.nodes[node_id].agent_group,
        }
        for node_id in graph.get_topological_sort()
    ]


def graph_tree_lines(graph: TaskGraph) -> list[str]:
    """Lines of a tree: each node stands below the last of those that it waits for, with the others
    behind its name.
    """
    root = Tree(f"a step of {graph.graph_id}")
    branches: dict[str, Tree] = {}
    for fact in describe_nodes(graph):
        *others, last = fact["after"] or [""]
        text = fact["name"]
        text += {"engines": " (engines)", "aside": " (aside)"}.get(fact["place"], "")
        text += f", after {' and '.join(others)} too" if others else ""
        branches[fact["name"]] = branches.get(last, root).add(text)
    console = Console(width=_WIDTH, no_color=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(root, markup=False)
    return captured.get().rstrip().split("\n")


def _waited_for(graph: TaskGraph, node_id: str) -> list[str]:
    direct = graph.nodes[node_id].dependencies
    behind = {one for other in direct for one in graph.get_ancestors(other)}
    return [one for one in direct if one not in behind]


def _place(node: Node) -> str:
    if node.is_async:
        return "aside"
    draws = node.node_role in (NodeRole.ROLLOUT, NodeRole.DYNAMIC_SAMPLING)
    return "engines" if draws or node.node_type is NodeType.MODEL_INFERENCE else "trainer"
