"""A pipeline as a graph of nodes: ``Pipeline(id).add_node(...).build()`` returns a ``TaskGraph``.

Argument names and their order follow siiRL's guide (sections 4.1, 4.3, 4.4); names of the guide
that have no effect are in ``siirl_names.py``. ``executor.py`` runs a graph.
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrl_megatron.config.import_path import imported
from ctrl_megatron.config.options import accepted, named_parameters
from ctrl_megatron.errors import UserError, did_you_mean, place_of
from ctrl_megatron.pipeline.siirl_names import (
    GraphNeighbours,
    NodeLife,
    NodeRole,
    NodeStatus,
    NodeType,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

Function = Callable[..., Any]
_MODEL_TYPES = (NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutput:
    """The result of a node: fields of the batch (or a whole new batch) and scalar metrics."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    batch: TensorDict | None = None
    moved: Sequence[int] | None = None
    """Where the rows of ``batch`` come from other data ranks: the number of each in the batches of
    all data ranks before the node, one after the other. The fields that nodes beside it return
    later for the former rows are brought to the new ones."""


class Node(NodeLife):
    """A function with a name and dependencies.

    The function is ``func`` (a callable) or ``executable_ref`` (an import path, ``"module:name"``
    or ``"module.name"``), which is imported at once, so that a typing error stops the run before
    it starts. A coroutine function runs aside, on the host's event loop, while the trainer goes on
    (``executor.Executor``); if it raises, it is called up to ``retry_limit`` times more.
    ``config`` gives values to parameters of the function.
    ``filter_plugin(batch)`` returns a (B,) bool tensor: from this node on the rows with False have
    an empty ``response_mask`` (``executor.filtered``). The function gets worker and batch of the
    policy number ``agent_group`` (``executor.Executor``). ``siirl_names`` says which values of
    ``node_type``, ``node_role`` and ``only_forward_compute`` have an effect; ``agent_options`` has
    none.

    Raises ValueError for an empty id, a wrong enumeration, a dependency that is no id, a negative
    ``retry_limit`` or ``agent_group``, two functions, and for what a function cannot do: a
    coroutine function cannot work on a model or filter, and no other function can be retried, since
    it issues collectives.
    UnresolvedReference (an ImportError and a ValueError) for an import path without a function.
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
    ) -> None:
        if not isinstance(node_id, str) or not node_id:
            raise ValueError(f"node_id must be a non-empty string, got {node_id!r}")
        for value, kind in ((node_type, NodeType), (node_role, NodeRole)):
            if not isinstance(value, kind):
                raise ValueError(f"node {node_id!r}: {value!r} is not a {kind.__name__}")
        if not isinstance(agent_group, int) or agent_group < 0:
            raise ValueError(f"node {node_id!r}: agent_group={agent_group!r} is no number from 0")
        if func is not None and executable_ref is not None:
            raise ValueError(f"node {node_id!r}: give either func or executable_ref, not both")
        self.node_id, self.node_type, self.node_role = node_id, node_type, node_role
        self.only_forward_compute = only_forward_compute
        self.dependencies = _ids(dependencies, node_id)
        self.config = dict(config or {})
        self.filter_plugin, self.retry_limit = filter_plugin, retry_limit
        self.executable = (
            func if executable_ref is None else imported(executable_ref, f"node {node_id!r}")
        )
        self.agent_group, self.agent_options = agent_group, agent_options
        _check_executable(self)

    @property
    def runs_aside(self) -> bool:
        """Whether the function is a coroutine function, which runs on the host's event loop."""
        function = self.executable
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """Configuration keys, or groups of keys, that the function reads (``node_keys.reads``)."""
        return tuple(getattr(self.executable, "reads", ()))

    @property
    def changes_weights(self) -> bool:
        """True for a node after which the step cannot be abandoned."""
        return self.node_type is NodeType.MODEL_TRAIN and not self.only_forward_compute

    def run(self, /, *, _dag_worker_instance: Any = None, **kwargs: Any) -> Any:
        """Call the node's function with ``kwargs`` and with the entries of ``config`` that its
        parameters name.

        ``_dag_worker_instance`` is the ``self`` of a method that was taken from its class. The
        result of a coroutine function is a coroutine that the caller awaits. An exception keeps its
        type and gets a note that names the node; ``sys.exit`` becomes a UserError. A node without a
        function returns None.
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

    def run_in_step(self, worker: Any, batch: Any, batches: Sequence[Any] = ()) -> Any:
        """``run`` as a step does it: the function gets those of ``worker``, ``batch``, ``batches``
        (of all policies) and the ``config`` of its policy that its parameters name, and a method
        that was taken from its class gets the worker as its ``self``, as siiRL's guide has it
        (section 5.5).
        """
        instance, given = self._step_call(worker, batch, batches)
        return self.run(_dag_worker_instance=instance, **given)

    def check_call(self) -> None:
        """TypeError if the node's function cannot be called as ``run_in_step`` does."""
        if self.executable is not None:
            instance, given = self._step_call(SimpleNamespace(config=None), None, ())
            bound = () if instance is None else (instance,)
            inspect.signature(self.executable).bind(*bound, **{**self._own_options(), **given})

    def _step_call(
        self, worker: Any, batch: Any, batches: Sequence[Any]
    ) -> tuple[Any, dict[str, Any]]:
        """(the ``self`` of a method, else None; the keyword arguments)."""
        if self.executable is None:
            return None, {}
        names = named_parameters(self.executable)
        offered = {"worker": worker, "batch": batch}
        if "config" in names:
            offered["config"] = worker.config
        if "batches" in names:
            offered["batches"] = batches
        instance = worker if next(iter(names), None) == "self" else None
        return instance, accepted(self.executable, offered)

    def _own_options(self) -> dict[str, Any]:
        if self.executable is None or not self.config:
            return {}
        return accepted(self.executable, self.config)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.update_status(NodeStatus.RUNNING)
        try:
            yield
        except SystemExit as error:
            self.update_status(NodeStatus.FAILED, f"sys.exit({error.code})")
            # It would end the event loop, which also serves the engines' clients.
            raise UserError(
                f"node {self.node_id!r}: {place_of(self.executable)} calls sys.exit({error.code})",
                remedy="raise an error instead",
            ) from error
        except BaseException as error:
            self.update_status(NodeStatus.FAILED, f"{type(error).__name__}: {error}")
            error.add_note(f"in node {self.node_id!r}")
            raise

    def __repr__(self) -> str:
        shown = {
            "node_id": self.node_id,
            "node_type": self.node_type.value,
            "node_role": self.node_role.value,
            "dependencies": self.dependencies,
            "status": self.status.value,
        }
        return f"Node({shown})"


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
    def draws_rows(self) -> bool:
        """Whether a node of dynamic sampling draws the rows of a step, instead of the loop."""
        return any(n.node_role is NodeRole.DYNAMIC_SAMPLING for n in self.nodes.values())

    @property
    def reads(self) -> tuple[str, ...]:
        """Configuration keys that its nodes and its validation read beside those of every run."""
        own = getattr(self.report.validate, "reads", ())
        return (*own, *(key for node in self.nodes.values() for key in node.reads))

    @property
    def revises(self) -> bool:
        """Whether a node asks the proxy for revisions."""
        return "actor_rollout_ref.proxy" in self.reads

    @property
    def required_rewards(self) -> tuple[str, ...] | None:
        """Reward functions that run even if ``reward.reward_funcs`` does not name them. None if no
        node reads the group ``reward``: then the run has no reward function and starts no sandbox.
        """
        return self.report.rewards if "reward" in self.reads else None

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


def of_policy(node_id: str, policy: int) -> str:
    """The id of a built-in node that several policies have: ``agent1_NAME`` for the second one."""
    return f"agent{policy}_{node_id}" if policy else node_id


def _described(described: Mapping[str, Any], number: int, graph_id: str) -> Node:
    """The node of an entry of a file."""
    where = f"graph {graph_id!r}: node {described.get('node_id', f'number {number}')!r}"
    for name in ("node_id", "node_type"):
        if not described.get(name):
            raise ValueError(f"{where} has no {name}")
    known = list(named_parameters(Node.__init__))[1:-1]
    given = dict(described)
    for name in given:
        if name not in known:
            raise ValueError(f"{where} cannot have the entry {name!r}{did_you_mean(name, known)}")
    for name, kind in (("node_type", NodeType), ("node_role", NodeRole)):
        if name in given and (text := str(given[name]).upper()) not in kind.__members__:
            raise ValueError(
                f"{where}: {name}={given[name]} is none of {', '.join(kind.__members__)}"
                f"{did_you_mean(text, kind.__members__)}"
            )
        elif name in given:
            given[name] = kind[text]
    if isinstance(plugin := given.get("filter_plugin"), str):
        given["filter_plugin"] = imported(plugin, f"{where}: filter_plugin")
    return Node(**given)


def _ids(dependencies: Sequence[str] | None, node_id: str) -> list[str]:
    """The dependencies, each once."""
    if isinstance(dependencies, str):
        raise ValueError(
            f"node {node_id!r}: dependencies must be a list of ids, got the string "
            f"{dependencies!r}; write [{dependencies!r}]"
        )
    for dependency in dependencies or ():
        if not isinstance(dependency, str) or not dependency:
            raise ValueError(f"node {node_id!r}: {dependency!r} is not a node id")
    return list(dict.fromkeys(dependencies or ()))


def _check_executable(node: Node) -> None:
    """A coroutine function runs on one rank of a model copy: no collectives, no blocking."""
    function, aside = node.executable, node.runs_aside
    if function is not None and not callable(function):
        raise ValueError(f"node {node.node_id!r}: func {function!r} is not callable")
    if node.retry_limit < 0 or (node.retry_limit and not aside):
        raise ValueError(
            f"node {node.node_id!r}: retry_limit={node.retry_limit} must be 0 or more, and 0 "
            "except for coroutine functions: others issue collectives, and ranks would retry apart"
        )
    if aside and node.filter_plugin is not None:
        raise ValueError(
            f"node {node.node_id!r}: a coroutine function cannot have a filter_plugin; filter at "
            "another node"
        )
    if aside and node.node_type in _MODEL_TYPES:
        raise ValueError(
            f"node {node.node_id!r}: a {node.node_type.value} node issues collectives, which a "
            "coroutine function cannot do; write it as an ordinary function"
        )
