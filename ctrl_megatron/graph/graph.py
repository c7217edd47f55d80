"""A pipeline as a graph of nodes: ``Pipeline(id).add_node(...).build()`` returns a ``TaskGraph``.

Argument names and their order follow siiRL's guide (sections 4.1, 4.3, 4.4); names of the guide
that have no effect are in ``siirl_names.py``. ``executor.py`` runs a graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.config.options import explicit_parameters
from ctrl_megatron.errors import did_you_mean
from ctrl_megatron.graph.declarations import Service, as_node_function
from ctrl_megatron.graph.node import Function, Node
from ctrl_megatron.graph.siirl_names import GraphNeighbours, NodeRole, NodeType

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Functions of a pipeline that report on its steps; the training loop itself knows no field of
    a pipeline."""

    metrics: Callable[[Any, TensorDict], Mapping[str, float]] = lambda worker, batch: {}
    """(worker, the step's last batch) -> metrics beside those of the nodes. Collective. Called for
    each policy that learns, with its worker and batch."""
    examples: Callable[[Any, TensorDict], Sequence[Mapping[str, Any]]] = lambda worker, batch: []
    """(worker, the step's last batch) -> records for the report, whose fields are shown in their
    order. Called on rank 0, for each policy that learns."""
    validate: Callable[[Any], Mapping[str, float]] | None = None
    """worker -> rates over the validation rows; None without validation. Collective."""
    rewards: tuple[str, ...] = ()
    """Reward functions that run even if ``reward.reward_funcs`` does not name them."""


class TaskGraph(GraphNeighbours[Node]):
    """Nodes by id, in the order of insertion, which is the same in every process."""

    def __init__(self, graph_id: str, report: StepReport | None = None) -> None:
        self.graph_id = graph_id
        self.nodes: dict[str, Node] = {}
        self.report = report or StepReport()

    @classmethod
    def load_from_config(
        cls,
        graph_id: str,
        config_data: Sequence[Mapping[str, Any]],
        report: StepReport | None = None,
    ) -> TaskGraph:
        """The validated graph of nodes as a file describes them: the arguments of ``Node`` by name,
        with the names of enumerations as text and ``filter_plugin`` as an import path. ValueError
        names the node and the entry that is missing, unknown or wrong.
        """
        graph = cls(graph_id, report)
        for number, described in enumerate(config_data, 1):
            graph.add_node(_described(described, number, graph_id))
        valid, reason = graph.validate_graph()
        if not valid:
            raise ValueError(reason)
        return graph

    @property
    def draws_own_rows(self) -> bool:
        """Whether a node of dynamic sampling draws the rows of a step, instead of the loop."""
        return any(n.node_role is NodeRole.DYNAMIC_SAMPLING for n in self.nodes.values())

    @property
    def config_keys(self) -> tuple[str, ...]:
        """Configuration keys that its nodes and its validation read beside those of every run."""
        keys = (
            ()
            if self.report.validate is None
            else as_node_function(self.report.validate).config_keys
        )
        return (*keys, *(key for node in self.nodes.values() for key in node.config_keys))

    @property
    def services(self) -> frozenset[Service]:
        used = () if self.report.validate is None else as_node_function(self.report.validate).uses
        return frozenset((*used, *(one for node in self.nodes.values() for one in node.services)))

    @property
    def required_rewards(self) -> tuple[str, ...] | None:
        """The reward functions that run even if ``reward.reward_funcs`` does not name them, as
        ``plan_rewards`` takes them; () if rewards are used and none is compulsory. None if no node
        uses rewards: the run has no reward function and starts no sandbox."""
        return self.report.rewards if "rewards" in self.services else None

    def add_node(self, node: Node) -> None:
        """Add a node; its dependencies may be added later. ValueError if its id is taken."""
        if not isinstance(node, Node):
            raise ValueError(f"graph {self.graph_id!r}: {node!r} is not a Node")
        if node.node_id in self.nodes:
            raise ValueError(f"graph {self.graph_id!r} already has a node {node.node_id!r}")
        self.nodes[node.node_id] = node

    def get_topological_sort(self) -> list[str]:
        """Ids, dependencies first (Kahn); of several ready nodes the one that was inserted first.

        Raises ValueError for a dependency that does not exist, and for a cycle, naming its nodes.
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
        """(True, None), or (False, a message that names the graph and the nodes)."""
        try:
            self.get_topological_sort()
        except ValueError as error:
            return False, str(error)
        return True, None

    def get_node(self, node_id: str) -> Node:
        """The node of that id; ValueError with the most similar id if there is none."""
        if node_id not in self.nodes:
            raise ValueError(
                f"graph {self.graph_id!r} has no node {node_id!r}"
                f"{did_you_mean(node_id, self.nodes)}"
            )
        return self.nodes[node_id]

    def get_ancestors(self, node_id: str) -> set[str]:
        """Ids of all nodes that must have run before ``node_id``."""
        ancestors: set[str] = set()
        unseen = list(self.get_node(node_id).dependencies)
        while unseen:
            current = unseen.pop()
            if current not in ancestors:
                ancestors.add(current)
                unseen += self.get_node(current).dependencies
        return ancestors

    def _check_dependencies_exist(self) -> None:
        for node_id, node in self.nodes.items():
            for dependency in node.dependencies:
                if dependency not in self.nodes:
                    raise ValueError(
                        f"graph {self.graph_id!r}: node {node_id!r} depends on {dependency!r}, "
                        f"which does not exist{did_you_mean(dependency, self.nodes)}"
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


class Pipeline:
    """Builder of a TaskGraph: ``Pipeline(id).add_node(...).add_node(...).build()``.

    ``description`` is for readers of the code.
    """

    def __init__(
        self, pipeline_id: str, description: str = "", *, report: StepReport | None = None
    ) -> None:
        self.pipeline_id, self.report = pipeline_id, report
        self._nodes: dict[str, Node] = {}

    def add_node(
        self,
        node_id: str,
        func: str | Function,
        deps: Sequence[str] | None = None,
        *,
        node_type: NodeType = NodeType.COMPUTE,
        node_role: NodeRole = NodeRole.DEFAULT,
        only_forward_compute: bool = False,
        agent_group: int = 0,
        config: dict[str, Any] | None = None,
        filter_plugin: Callable[[TensorDict], Any] | None = None,
        agent_options: Any = None,
        retry_limit: int = 0,
    ) -> Pipeline:
        """Add a node that runs ``func`` (callable or import path) after ``deps``; returns itself.

        ``deps`` may name nodes that are added later; ``Node`` documents the other arguments. Raises
        ValueError for an id that this pipeline already has, and the errors of ``Node``.
        """
        if node_id in self._nodes:
            raise ValueError(f"pipeline {self.pipeline_id!r} already has a node {node_id!r}")
        self._nodes[node_id] = Node(
            node_id,
            node_type,
            node_role,
            only_forward_compute,
            agent_group,
            deps,
            config,
            func if isinstance(func, str) else None,
            filter_plugin,
            agent_options,
            retry_limit,
            func=None if isinstance(func, str) else func,
        )
        return self

    def build(self) -> TaskGraph:
        """The validated graph; ValueError names the pipeline and what is wrong with it."""
        if not self._nodes:
            raise ValueError(f"pipeline {self.pipeline_id!r} has no nodes")
        graph = TaskGraph(self.pipeline_id, self.report)
        for node in self._nodes.values():
            graph.add_node(node)
        valid, reason = graph.validate_graph()
        if not valid:
            raise ValueError(f"pipeline {self.pipeline_id!r}: {reason}")
        return graph


def policy_node_id(node_id: str, policy: int) -> str:
    """The id of a built-in node that several policies have: ``agent1_NAME`` for the second one."""
    return f"agent{policy}_{node_id}" if policy else node_id


def _described(described: Mapping[str, Any], number: int, graph_id: str) -> Node:
    """The node of an entry of a file."""
    where = f"graph {graph_id!r}: node {described.get('node_id', f'number {number}')!r}"
    for name in ("node_id", "node_type"):
        if not described.get(name):
            raise ValueError(f"{where} has no {name}")
    known = list(explicit_parameters(Node.__init__))[1:-1]
    fields = dict(described)
    for name in fields:
        if name not in known:
            raise ValueError(f"{where} cannot have the entry {name!r}{did_you_mean(name, known)}")
    for name, kind in (("node_type", NodeType), ("node_role", NodeRole)):
        if name in fields and (text := str(fields[name]).upper()) not in kind.__members__:
            raise ValueError(
                f"{where}: {name}={fields[name]} is none of {', '.join(kind.__members__)}"
                f"{did_you_mean(text, kind.__members__)}"
            )
        elif name in fields:
            fields[name] = kind[text]
    if isinstance(plugin := fields.get("filter_plugin"), str):
        fields["filter_plugin"] = import_callable(plugin, f"{where}: filter_plugin")
    return Node(**fields)
