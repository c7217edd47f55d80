"""A directed acyclic graph of nodes; a node may have several dependents and dependencies."""

from __future__ import annotations

import heapq
from difflib import get_close_matches

from ctrl_megatron.pipeline.node import Node


class TaskGraph:
    """Nodes by id. Every order it gives is the order of insertion, the same in every process."""

    def __init__(self, graph_id: str) -> None:
        self.graph_id = graph_id
        self.nodes: dict[str, Node] = {}

    @property
    def rev_adj(self) -> dict[str, list[str]]:
        """Id -> ids it depends on. A view of the nodes' dependencies as they are now."""
        return {node_id: list(node.dependencies) for node_id, node in self.nodes.items()}

    @property
    def adj(self) -> dict[str, list[str]]:
        """Id -> ids that depend on it; dependencies that do not exist are left out."""
        found: dict[str, list[str]] = {node_id: [] for node_id in self.nodes}
        for node_id, node in self.nodes.items():
            for dependency in node.dependencies:
                if dependency in found:
                    found[dependency].append(node_id)
        return found

    def add_node(self, node: Node) -> None:
        """Add a node; its dependencies may come later. ValueError for a taken id or no Node."""
        if not isinstance(node, Node):
            raise ValueError(f"graph {self.graph_id!r}: {node!r} is not a Node")
        if node.node_id in self.nodes:
            raise ValueError(f"graph {self.graph_id!r} already has a node {node.node_id!r}")
        self.nodes[node.node_id] = node

    def get_topological_sort(self) -> list[str]:
        """Ids, dependencies first (Kahn); of several that could follow, the first inserted.

        So nodes that were added after their dependencies keep the order in which they were added.
        Raises ValueError for a dependency that does not exist, or naming the nodes of a cycle.
        """
        self._check_dependencies_exist()
        names, dependents = list(self.nodes), self.adj
        place = {node_id: i for i, node_id in enumerate(names)}
        missing = {node_id: len(node.dependencies) for node_id, node in self.nodes.items()}
        ready = [place[node_id] for node_id, count in missing.items() if count == 0]
        order: list[str] = []
        while ready:
            current = names[heapq.heappop(ready)]
            order.append(current)
            for dependent in dependents[current]:
                missing[dependent] -= 1
                if missing[dependent] == 0:
                    heapq.heappush(ready, place[dependent])
        if len(order) < len(names):
            cycle = " -> ".join(self._cycle([n for n in names if missing[n] > 0]))
            raise ValueError(f"graph {self.graph_id!r} has a cycle: {cycle}")
        return order

    def validate_graph(self) -> tuple[bool, str | None]:
        """(True, None), or (False, what is wrong, naming the graph and the nodes)."""
        try:
            self.get_topological_sort()
        except ValueError as error:
            return False, str(error)
        return True, None

    def get_entry_nodes(self) -> list[Node]:
        """Nodes without dependencies."""
        return [node for node in self.nodes.values() if not node.dependencies]

    def get_exit_nodes(self) -> list[Node]:
        """Nodes on which no node depends."""
        adjacent = self.adj
        return [node for node_id, node in self.nodes.items() if not adjacent[node_id]]

    def get_node(self, node_id: str) -> Node:
        """The node of that id; ValueError with the nearest id if there is none."""
        if node_id not in self.nodes:
            raise ValueError(
                f"graph {self.graph_id!r} has no node {node_id!r}{self._hint(node_id)}"
            )
        return self.nodes[node_id]

    def get_dependents(self, node_id: str) -> list[Node]:
        """Nodes that depend directly on ``node_id``."""
        self.get_node(node_id)
        return [self.nodes[n] for n in self.adj[node_id]]

    def get_downstream_nodes(self, node_id: str) -> list[Node]:
        """Another name of ``get_dependents``."""
        return self.get_dependents(node_id)

    def get_dependencies(self, node_id: str) -> list[Node]:
        """Nodes on which ``node_id`` depends directly."""
        return [self.get_node(n) for n in self.get_node(node_id).dependencies]

    def get_ancestors(self, node_id: str) -> set[str]:
        """Ids of all nodes that must have run before ``node_id``."""
        found: set[str] = set()
        unseen = list(self.get_node(node_id).dependencies)
        while unseen:
            current = unseen.pop()
            if current not in found:
                found.add(current)
                unseen += self.get_node(current).dependencies
        return found

    def reset(self) -> None:
        """All nodes back to PENDING."""
        for node in self.nodes.values():
            node.reset()

    def _check_dependencies_exist(self) -> None:
        for node_id, node in self.nodes.items():
            for dependency in node.dependencies:
                if dependency not in self.nodes:
                    raise ValueError(
                        f"graph {self.graph_id!r}: node {node_id!r} depends on {dependency!r}, "
                        f"which does not exist{self._hint(dependency)}"
                    )

    def _cycle(self, blocked: list[str]) -> list[str]:
        """A cycle in the direction of the flow, first node repeated at the end.

        A blocked node depends on another blocked one, so going backwards must meet a node twice.
        """
        inside, path = set(blocked), [blocked[0]]
        while True:
            earlier = next(d for d in self.nodes[path[-1]].dependencies if d in inside)
            if earlier in path:
                return [earlier, *reversed(path[path.index(earlier) :])]
            path.append(earlier)

    def _hint(self, node_id: str) -> str:
        nearest = get_close_matches(node_id, self.nodes, n=1)
        return f"; did you mean {nearest[0]!r}?" if nearest else ""
