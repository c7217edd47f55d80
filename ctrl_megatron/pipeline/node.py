"""One unit of work of a pipeline. Enum values and argument names follow siiRL's guide (4.3)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any


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


_MODEL_TYPES = (NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN)


class Node:
    """A function with a name, dependencies and a place.

    The function is ``func`` (a callable) or ``executable_ref`` (``"module:Class.method"`` or
    ``"module.function"``), which is imported at once, so that a typing error stops the run before
    it starts. A node without either only stands in a graph; it cannot run. ``filter_plugin`` and
    ``retry_limit`` are for executors and schedulers that filter or retry; ``run`` does neither.

    Raises ValueError for an empty id, a wrong enum, a dependency that is no id, a negative
    ``retry_limit``, both functions at once, or a host node that is no coroutine function or works
    on a model; UnresolvedReference (an ImportError and a ValueError) for a reference that leads
    nowhere.
    """

    def __init__(
        self,
        node_id: str,
        node_type: NodeType,
        node_role: NodeRole = NodeRole.DEFAULT,
        only_forward_compute: bool = False,
        dependencies: Sequence[str] | None = None,
        config: dict[str, Any] | None = None,
        executable_ref: str | None = None,
        filter_plugin: Callable[..., Any] | None = None,
        retry_limit: int = 0,
        *,
        func: Callable[..., Any] | None = None,
        place: NodePlace = NodePlace.TRAIN,
    ) -> None:
        if not isinstance(node_id, str) or not node_id:
            raise ValueError(f"node_id must be a non-empty string, got {node_id!r}")
        for value, kind in ((node_type, NodeType), (node_role, NodeRole), (place, NodePlace)):
            if not isinstance(value, kind):
                raise ValueError(f"node {node_id!r}: {value!r} is not a {kind.__name__}")
        if func is not None and executable_ref is not None:
            raise ValueError(f"node {node_id!r}: give either func or executable_ref, not both")
        if retry_limit < 0:
            raise ValueError(f"node {node_id!r}: retry_limit must be at least 0, got {retry_limit}")
        self.node_id = node_id
        self.node_type = node_type
        self.node_role = node_role
        self.only_forward_compute = only_forward_compute
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

    def run(self, /, **kwargs: Any) -> Any:
        """Call the node's function with ``config``'s entries and ``kwargs`` as keyword arguments.

        A coroutine function's result is a coroutine to be awaited. ``status`` follows; an exception
        keeps its type, gets a note that names the node (Python 3.11 on), and sets ``error_info``.
        Raises ValueError if the node has no function.
        """
        if self.executable is None:
            raise ValueError(f"node {self.node_id!r} has no function to run; give it func")
        with self._watched():
            result = self.executable(**self.config, **kwargs)
            if not inspect.isawaitable(result):
                self.update_status(NodeStatus.COMPLETED)
                return result
        return self._finish(result)

    async def _finish(self, result: Awaitable[Any]) -> Any:
        with self._watched():
            answer = await result
            self.update_status(NodeStatus.COMPLETED)
            return answer

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.update_status(NodeStatus.RUNNING)
        try:
            yield
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


def resolve(reference: str, node_id: str) -> Callable[..., Any]:
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
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise _unresolved(reference, node_id, error) from error
    try:
        for name in path.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        raise _unresolved(reference, node_id, error) from error
    if not callable(found):
        raise UnresolvedReference(f"node {node_id!r}: {reference!r} is not callable")
    return found


def _unresolved(reference: str, node_id: str, error: Exception) -> UnresolvedReference:
    return UnresolvedReference(f"node {node_id!r}: cannot resolve {reference!r}: {error}")


def _listed(dependencies: Sequence[str] | None, node_id: str) -> list[str]:
    if isinstance(dependencies, str):
        raise ValueError(
            f"node {node_id!r}: dependencies must be a list of ids, got the string "
            f"{dependencies!r}; write [{dependencies!r}]"
        )
    return list(dependencies or [])


def _check_executable(node: Node) -> None:
    """Host nodes run aside, on one rank of a model copy: no collectives, no blocking."""
    if node.executable is not None and not callable(node.executable):
        raise ValueError(f"node {node.node_id!r}: func {node.executable!r} is not callable")
    if node.place is not NodePlace.HOST:
        return
    if node.node_type in _MODEL_TYPES:
        raise ValueError(
            f"node {node.node_id!r}: a {node.node_type.value} node issues collectives and cannot "
            "run on the host's loop; give it another place"
        )
    if node.executable is not None and not _is_async(node.executable):
        raise ValueError(
            f"node {node.node_id!r}: a host node must be a coroutine function (async def), "
            "otherwise it would block the loop"
        )


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
