"""A pipeline as a graph of nodes: ``Pipeline(id).add_node(...).build()`` gives a ``TaskGraph``.

Enum values, argument names and their order follow siiRL's guide (sections 4.1, 4.3, 4.4). What
walks a graph is in ``executor.py``.
"""

from __future__ import annotations

import heapq
import importlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Any

from ctrl_megatron.errors import UserError, place_of

if TYPE_CHECKING:
    from tensordict import TensorDict


class NodeType(Enum):
    """What kind of work a node does."""

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
    """Which model or function a node speaks for."""

    DEFAULT = "DEFAULT"
    ACTOR = "ACTOR"
    ADVANTAGE = "ADVANTAGE"
    CRITIC = "CRITIC"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    DYNAMIC_SAMPLING = "DYNAMIC_SAMPLING"


class NodeStatus(Enum):
    """How far a node is in the current step."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


class NodePlace(Enum):
    """Where a node runs: with the engine, with the trainer, or aside on the host's event loop."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    HOST = "host"


class UnresolvedReference(ImportError, ValueError):
    """A reference to a function that cannot be imported: an import error that the user typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutput:
    """What a node adds: fields of the batch (or a whole new batch) and scalars."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    batch: TensorDict | None = None


Function = Callable[..., Any]
_MODEL_TYPES = (NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN)


class Node:
    """A function with a name, dependencies and a place.

    The function is ``func`` (a callable) or ``executable_ref`` (``"module:Class.method"`` or
    ``"module.function"``), which is imported at once, so that a typing error stops the run before
    it starts. ``filter_plugin(batch)`` gives a (B,) bool tensor: from this node on the other rows
    have an empty ``response_mask`` (``executor.filtered``). A host node that raises is tried
    ``retry_limit`` times more. ``agent_group`` and ``agent_options`` are attributes for functions
    that read them.

    Raises ValueError for an empty id, a wrong enum, a dependency that is no id, a ``retry_limit``
    that is negative or not a host node's (ranks would retry apart), both functions at once, or a
    host node that is no coroutine function, works on a model or filters; UnresolvedReference (an
    ImportError and a ValueError) for a reference that leads nowhere.
    """

    def __init__(
        self,
        node_id: str,
        node_type: NodeType,
        node_role: NodeRole = NodeRole.DEFAULT,
        only_forward_compute: bool = False,
        agent_group: int = 0,
        dependencies: Sequence[str] | None = None,
        config: dict[str, Any] | None = None,
        executable_ref: str | None = None,
        filter_plugin: Callable[[TensorDict], Any] | None = None,
        agent_options: Any = None,
        retry_limit: int = 0,
        *,
        func: Function | None = None,
        place: NodePlace = NodePlace.TRAIN,
    ) -> None:
        if not isinstance(node_id, str) or not node_id:
            raise ValueError(f"node_id must be a non-empty string, got {node_id!r}")
        for value, kind in ((node_type, NodeType), (node_role, NodeRole), (place, NodePlace)):
            if not isinstance(value, kind):
                raise ValueError(f"node {node_id!r}: {value!r} is not a {kind.__name__}")
        if func is not None and executable_ref is not None:
            raise ValueError(f"node {node_id!r}: give either func or executable_ref, not both")
        self.node_id, self.node_type, self.node_role = node_id, node_type, node_role
        self.only_forward_compute = only_forward_compute
        self.agent_group, self.agent_options = agent_group, agent_options
        self.dependencies: list[str] = []
        for dependency in _listed(dependencies, node_id):
            self.add_dependency(dependency)
        self.config = dict(config or {})
        self.executable_ref = executable_ref
        self.filter_plugin = filter_plugin
        self.retry_limit, self.retries_done = retry_limit, 0
        self.place = place
        self.status = NodeStatus.PENDING
        self.error_info: str | None = None
        self.executable = func if executable_ref is None else resolve(executable_ref, node_id)
        _check_executable(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys, or groups of keys, that its function says to read (``node_keys.reads``)."""
        return tuple(getattr(self.executable, "reads", ()))

    @property
    def changes_weights(self) -> bool:
        """True for a node after which the step cannot be abandoned."""
        return self.node_type is NodeType.MODEL_TRAIN and not self.only_forward_compute

    def run(self, /, *, _dag_worker_instance: Any = None, **kwargs: Any) -> Any:
        """Call the node's function with ``kwargs`` and those entries of ``config`` it has names
        for.

        A method taken from its class is bound to ``_dag_worker_instance``. A coroutine function's
        result is a coroutine to be awaited. ``status`` follows; an exception keeps its type, gets a
        note that names the node, and sets ``error_info``; ``sys.exit`` becomes a UserError. A node
        without a function returns None.
        """
        if self.executable is None:
            self.update_status(NodeStatus.COMPLETED)
            return None
        bound = () if _dag_worker_instance is None else (_dag_worker_instance,)
        with self._watched():
            result = self.executable(*bound, **{**self._own_options(), **kwargs})
            if not inspect.isawaitable(result):
                self.update_status(NodeStatus.COMPLETED)
                return result
        return self._finish(result)

    async def _finish(self, result: Awaitable[Any]) -> Any:
        with self._watched():
            answer = await result
            self.update_status(NodeStatus.COMPLETED)
            return answer

    def check_call(self, **kwargs: Any) -> None:
        """TypeError if the node's function cannot be called as ``run`` would with ``kwargs``."""
        if self.executable is not None:
            inspect.signature(self.executable).bind(**{**self._own_options(), **kwargs})

    def _own_options(self) -> dict[str, Any]:
        if not self.config:
            return {}
        assert self.executable is not None
        parameters = inspect.signature(self.executable).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return self.config
        return {name: value for name, value in self.config.items() if name in parameters}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.update_status(NodeStatus.RUNNING)
        try:
            yield
        except SystemExit as error:
            # It would end the event loop of host nodes, on which engines are asked too.
            self.update_status(NodeStatus.FAILED, f"{type(error).__name__}: {error}")
            raise UserError(
                f"node {self.node_id!r}: {place_of(self.executable)} calls sys.exit({error.code})",
                remedy="raise an error instead",
            ) from error
        except BaseException as error:
            self.update_status(NodeStatus.FAILED, f"{type(error).__name__}: {error}")
            error.add_note(f"in node {self.node_id!r}")
            raise

    def update_status(self, new_status: NodeStatus, error_info: str | None = None) -> None:
        """Set the status; every status but FAILED forgets the error."""
        self.status = new_status
        self.error_info = error_info if new_status is NodeStatus.FAILED else None

    def reset(self) -> None:
        """Back to PENDING, with all retries."""
        self.update_status(NodeStatus.PENDING)
        self.retries_done = 0

    def is_ready(self, completed_node_ids: Collection[str]) -> bool:
        """True for a pending node whose dependencies are all among ``completed_node_ids``."""
        return self.status is NodeStatus.PENDING and all(
            dependency in completed_node_ids for dependency in self.dependencies
        )

    def can_retry(self) -> bool:
        """True for a failed node with retries left."""
        return self.status is NodeStatus.FAILED and self.retries_done < self.retry_limit

    def increment_retry_count(self) -> None:
        """Count one retry."""
        self.retries_done += 1

    def add_dependency(self, dependency_id: str) -> None:
        """Run after ``dependency_id``; nothing changes if it does already."""
        if not isinstance(dependency_id, str) or not dependency_id:
            raise ValueError(f"node {self.node_id!r}: {dependency_id!r} is not a node id")
        if dependency_id not in self.dependencies:
            self.dependencies.append(dependency_id)

    def remove_dependency(self, dependency_id: str) -> None:
        """No longer wait for ``dependency_id``; nothing changes if it never did."""
        if dependency_id in self.dependencies:
            self.dependencies.remove(dependency_id)

    def __repr__(self) -> str:
        shown = {
            "node_id": self.node_id,
            "node_type": self.node_type.value,
            "node_role": self.node_role.value,
            "place": self.place.value,
            "dependencies": self.dependencies,
            "status": self.status.value,
        }
        return f"Node({shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a pipeline says of its steps; the loop and the report know no field of any pipeline."""

    metrics: Callable[[Any, TensorDict], Mapping[str, float]] = lambda worker, batch: {}
    """From (worker, the step's last batch) to scalars beyond the nodes' own. Collective."""
    examples: Callable[[Any, TensorDict], Sequence[Mapping[str, Any]]] = lambda worker, batch: []
    """From the same to records for the report, their fields in the order of display. Called on
    rank 0."""
    validate: Callable[[Any], Mapping[str, float]] | None = None
    """From the worker to rates over the validation rows. Collective; None: nothing to validate."""
    rewards: tuple[str, ...] = ()
    """Reward functions that it reads: they run also where ``reward.reward_funcs`` lacks them."""


class TaskGraph:
    """Nodes by id. Every order it gives is the order of insertion, the same in every process."""

    def __init__(self, graph_id: str, report: StepReport | None = None) -> None:
        self.graph_id = graph_id
        self.nodes: dict[str, Node] = {}
        self.report = report or StepReport()

    @property
    def rev_adj(self) -> dict[str, list[str]]:
        """Id -> ids it depends on. A view of the nodes' dependencies as they are now."""
        return {node_id: list(node.dependencies) for node_id, node in self.nodes.items()}

    @property
    def adj(self) -> dict[str, list[str]]:
        """Id -> ids that depend on it; dependencies that do not exist are left out."""
        dependents: dict[str, list[str]] = {node_id: [] for node_id in self.nodes}
        for node_id, node in self.nodes.items():
            for dependency in node.dependencies:
                if dependency in dependents:
                    dependents[dependency].append(node_id)
        return dependents

    @property
    def draws_rows(self) -> bool:
        """True where a node of dynamic sampling takes the rows of a step from the data itself."""
        return any(n.node_role is NodeRole.DYNAMIC_SAMPLING for n in self.nodes.values())

    @property
    def reads(self) -> tuple[str, ...]:
        """What its nodes read of the configuration beside what every run reads."""
        own = getattr(self.report.validate, "reads", ())
        return (*own, *(key for node in self.nodes.values() for key in node.reads))

    @property
    def revises(self) -> bool:
        """Whether a node asks the proxy for revisions."""
        return "actor_rollout_ref.proxy" in self.reads

    @property
    def measured(self) -> tuple[str, ...] | None:
        """Reward functions that run in any case; None where no node reads the group ``reward``:
        then none is made, and no sandbox starts."""
        return self.report.rewards if "reward" in self.reads else None

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

    get_downstream_nodes = get_dependents

    def get_dependencies(self, node_id: str) -> list[Node]:
        """Nodes on which ``node_id`` depends directly."""
        return [self.get_node(n) for n in self.get_node(node_id).dependencies]

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


class Pipeline:
    """``Pipeline(id).add_node(...).add_node(...).build()``."""

    def __init__(
        self, pipeline_id: str, description: str = "", *, report: StepReport | None = None
    ) -> None:
        self.pipeline_id, self.description, self.report = pipeline_id, description, report
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
        place: NodePlace = NodePlace.TRAIN,
    ) -> Pipeline:
        """Add a node that runs ``func`` (callable or import path) after ``deps``; chainable.

        ``deps`` may name nodes that are added later; the other arguments are ``Node``'s. Raises
        ValueError for an id that this pipeline has already and for what ``Node`` refuses.
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
            place=place,
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


def resolve(reference: str, node_id: str) -> Function:
    """The callable that ``reference`` names; UnresolvedReference if there is none.

    An exception inside the module, other than an ImportError, is the module's own and passes.
    """
    module_name, _, path = reference.partition(":")
    if not path:
        module_name, _, path = reference.rpartition(".")
    if not (module_name and path):
        raise UnresolvedReference(
            f"node {node_id!r}: {reference!r} is neither 'module:Class.method' nor "
            "'module.function'"
        )
    if module_name.startswith("."):
        raise UnresolvedReference(
            f"node {node_id!r}: {reference!r} is relative; write the module's full name"
        )
    wrong = f"node {node_id!r}: cannot resolve {reference!r}"
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UnresolvedReference(f"{wrong}: {error}") from error
    try:
        for name in path.split("."):
            target = getattr(target, name)
    except AttributeError as error:
        raise UnresolvedReference(f"{wrong}: {error}") from error
    if not callable(target):
        raise UnresolvedReference(f"node {node_id!r}: {reference!r} is not callable")
    return target


def _listed(dependencies: Sequence[str] | None, node_id: str) -> list[str]:
    if isinstance(dependencies, str):
        raise ValueError(
            f"node {node_id!r}: dependencies must be a list of ids, got the string "
            f"{dependencies!r}; write [{dependencies!r}]"
        )
    return list(dependencies or [])


def _check_executable(node: Node) -> None:
    """Host nodes run aside, on one rank of a model copy: no collectives, no blocking."""
    function, host = node.executable, node.place is NodePlace.HOST
    if function is not None and not callable(function):
        raise ValueError(f"node {node.node_id!r}: func {function!r} is not callable")
    if node.retry_limit < 0 or (node.retry_limit and not host):
        raise ValueError(
            f"node {node.node_id!r}: retry_limit={node.retry_limit} must be 0 or more, and 0 "
            "except for host nodes: the others issue collectives, and ranks would retry apart"
        )
    if host and node.filter_plugin is not None:
        raise ValueError(f"node {node.node_id!r}: a host node cannot filter; give it another place")
    if host and node.node_type in _MODEL_TYPES:
        raise ValueError(
            f"node {node.node_id!r}: a {node.node_type.value} node issues collectives and cannot "
            "run on the host's loop; give it another place"
        )
    if host and function is not None and not _is_async(function):
        raise ValueError(
            f"node {node.node_id!r}: a host node must be a coroutine function (async def), "
            "otherwise it would block the loop"
        )


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
