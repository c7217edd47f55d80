"""Names of siiRL's guide (sections 4.3 and 4.4) under which a graph runs no differently.

Pipelines that were written after the guide import these enumerations, label their nodes with them
and ask a graph for its neighbours, so the names exist here with the guide's values. Only a few have
an effect, and ``graph.py`` and ``declarations.py`` define it:

- ``NodeType.MODEL_TRAIN`` without ``only_forward_compute`` changes weights: a step that has reached
  such a node is finished even if a stop is requested. ``MODEL_TRAIN`` and ``MODEL_INFERENCE`` nodes
  issue collectives, so they cannot be coroutine functions.
- ``NodeRole.DYNAMIC_SAMPLING`` marks a node that draws the rows of its step. ``ACTOR``,
  ``REFERENCE`` and ``CRITIC`` name the model whose log-probs or values a node writes, and
  ``REWARD_MODEL``, which the guide does not have, the model that computes a reward.

A node's ``agent_group`` names the policy that it uses (``executor.py``). All other values, its
``status`` and ``agent_options`` are labels for readers.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Generic, Protocol, TypeVar


class NodeType(Enum):
    """The kind of work that a node does."""

    COMPUTE = "COMPUTE"
    DATA_LOAD = "DATA_LOAD"
    ENV_INTERACT = "ENV_INTERACT"
    MODEL_INFERENCE = "MODEL_INFERENCE"
    MODEL_TRAIN = "MODEL_TRAIN"
    PUT_TO_BUFFER = "PUT_TO_BUFFER"
    GET_FROM_BUFFER = "GET_FROM_BUFFER"
    BARRIER_SYNC = "BARRIER_SYNC"
    CUSTOM = "CUSTOM"


class NodeRole(Enum):
    """The model or function that a node belongs to."""

    DEFAULT = "DEFAULT"
    ACTOR = "ACTOR"
    ADVANTAGE = "ADVANTAGE"
    CRITIC = "CRITIC"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    DYNAMIC_SAMPLING = "DYNAMIC_SAMPLING"
    REWARD_MODEL = "REWARD_MODEL"


class NodeStatus(Enum):
    """The progress of a node's latest run; ``Node.run`` sets RUNNING, COMPLETED and FAILED."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class NodeLife:
    """The guide's questions about a node. A run asks none of them: it walks its nodes in one order
    that is fixed when the graph is built, and ends where one fails."""

    node_id: str
    dependencies: list[str]
    retry_limit: int
    status = NodeStatus.PENDING
    retries_done = 0
    error_info: str | None = None

    def add_dependency(self, dependency_id: str) -> None:
        if dependency_id not in self.dependencies:
            self.dependencies.append(dependency_id)

    def remove_dependency(self, dependency_id: str) -> None:
        if dependency_id in self.dependencies:
            self.dependencies.remove(dependency_id)

    def is_ready(self, completed_node_ids: Collection[str]) -> bool:
        """Whether the node has not begun and waits for none but these."""
        return self.status is NodeStatus.PENDING and {*self.dependencies} <= {*completed_node_ids}

    def update_status(self, new_status: NodeStatus, error_info: str | None = None) -> None:
        """Set the status, and why the node failed; a completed node has no such reason."""
        self.status = new_status
        self.error_info = None if new_status is NodeStatus.COMPLETED else error_info

    def can_retry(self) -> bool:
        """Whether the node failed and may be tried once more."""
        return self.status is NodeStatus.FAILED and self.retries_done < self.retry_limit

    def increment_retry_count(self) -> None:
        self.retries_done += 1

    def reset(self) -> None:
        self.status, self.retries_done, self.error_info = NodeStatus.PENDING, 0, None


class Dependent(Protocol):
    """A node as far as the queries below need it."""

    dependencies: list[str]

    def reset(self) -> None: ...


N = TypeVar("N", bound=Dependent)


class GraphNeighbours(Generic[N]):
    """The guide's queries of a graph."""

    nodes: dict[str, N]

    @property
    def rev_adj(self) -> dict[str, list[str]]:
        """Node id -> ids of the nodes that it depends on."""
        return {node_id: list(node.dependencies) for node_id, node in self.nodes.items()}

    @property
    def adj(self) -> dict[str, list[str]]:
        """Node id -> ids of the nodes that depend on it, in the order of insertion."""
        return {
            node_id: [other for other, node in self.nodes.items() if node_id in node.dependencies]
            for node_id in self.nodes
        }

    def get_entry_nodes(self) -> list[N]:
        return [node for node in self.nodes.values() if not node.dependencies]

    def get_exit_nodes(self) -> list[N]:
        adjacent = self.adj
        return [node for node_id, node in self.nodes.items() if not adjacent[node_id]]

    def get_dependencies(self, node_id: str) -> list[N]:
        return [self.nodes[other] for other in self.rev_adj[node_id]]

    def get_dependents(self, node_id: str) -> list[N]:
        return [self.nodes[other] for other in self.adj[node_id]]

    get_downstream_nodes = get_dependents

    def reset_nodes_status(self) -> None:
        for node in self.nodes.values():
            node.reset()
