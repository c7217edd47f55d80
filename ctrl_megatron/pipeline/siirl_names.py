"""Names of siiRL's guide (sections 4.3 and 4.4) under which a graph runs no differently.

Pipelines that were written after the guide import these enumerations, label their nodes with them
and ask a graph for its neighbours, so the names exist here with the guide's values. Only a few have
an effect, and ``graph.py`` and ``node_fields.py`` define it:

- ``NodeType.MODEL_TRAIN`` without ``only_forward_compute`` changes weights: a step that has reached
  such a node is finished even if a stop is requested. ``MODEL_TRAIN`` and ``MODEL_INFERENCE`` nodes
  issue collectives, so they cannot be coroutine functions.
- ``NodeRole.DYNAMIC_SAMPLING`` marks a node that draws the rows of its step. ``ACTOR``,
  ``REFERENCE`` and ``CRITIC`` name the model whose log-probs or values a node writes.

All other values, a node's ``status``, ``agent_group`` and ``agent_options`` are labels for readers.
"""

from __future__ import annotations

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


class NodeStatus(Enum):
    """The progress of a node's latest run; ``Node.run`` sets RUNNING, COMPLETED and FAILED."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class Dependent(Protocol):
    """A node as far as the queries below need it."""

    dependencies: list[str]


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
        """Nodes without dependencies."""
        return [node for node in self.nodes.values() if not node.dependencies]

    def get_dependents(self, node_id: str) -> list[N]:
        """Nodes that depend directly on ``node_id``."""
        return [self.nodes[other] for other in self.adj[node_id]]

    get_downstream_nodes = get_dependents
