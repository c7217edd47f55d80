"""A node of a task graph: its function, what it depends on, and its result."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.config.options import accepted_options, explicit_parameters
from ctrl_megatron.errors import UserError, describe_location
from ctrl_megatron.graph.declarations import KEYS_OF_ROLES, OF_MODELS, Service, as_node_function
from ctrl_megatron.graph.siirl_names import NodeLife, NodeRole, NodeStatus, NodeType

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ctrl_megatron.config import Config


Function = Callable[..., Any]


MODEL_TYPES = (NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN)
"""The kinds of nodes that issue collectives."""


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
    an empty ``response_mask`` (``executor.apply_filter_plugin``). The function gets worker and
    batch of the policy number ``agent_group`` (``executor.Executor``). ``siirl_names`` says which
    values of ``node_type``, ``node_role`` and ``only_forward_compute`` have an effect;
    ``agent_options`` has none.

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
        self.executable_ref = executable_ref
        given = (
            func if executable_ref is None else import_callable(executable_ref, f"node {node_id!r}")
        )
        self.declared = None if given is None else as_node_function(given)
        self.agent_group, self.agent_options = agent_group, agent_options
        _check_executable(self)

    @property
    def executable(self) -> Function | None:
        """The function alone; None for a node that does nothing."""
        return None if self.declared is None else self.declared.function

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, which runs on the host's event loop."""
        function = self.executable
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    @property
    def config_keys(self) -> tuple[str, ...]:
        """Configuration keys, or groups of keys, that the function reads."""
        if self.declared is None:
            return ()
        silent = self.declared.config_keys == () and self._is_method
        return KEYS_OF_ROLES.get(self.node_role, ()) if silent else self.declared.config_keys

    @property
    def _is_method(self) -> bool:
        """Whether the function was taken from its class, so that the worker is its ``self``."""
        names = () if self.executable is None else explicit_parameters(self.executable)
        return next(iter(names), None) == "self"

    @property
    def services(self) -> tuple[Service, ...]:
        return () if self.declared is None else self.declared.uses

    @property
    def written_fields(self) -> tuple[str, ...]:
        """The fields that the function says it writes."""
        return () if self.declared is None else self.declared.writes or ()

    def needed_fields(self, config: Config) -> Mapping[str, str]:
        """The fields that the function says it needs, with the settings that make them so."""
        return {} if self.declared is None else self.declared.needed_fields(config)

    def may_write(self, field: str) -> bool:
        """Whether the function says that it writes the field of the batch, or says nothing and may
        write it."""
        if self.declared is not None and self.declared.writes is not None:
            return field in self.declared.writes
        role = OF_MODELS.get(field)
        return role is None or self.node_role is role

    @property
    def changes_weights(self) -> bool:
        """True for a node that trains a model: once it begins, the step cannot be abandoned. A push
        of the weights to engines is none."""
        return self.node_type is NodeType.MODEL_TRAIN and not self.only_forward_compute

    def call_in_step(self, worker: Any, batch: Any, batches: Sequence[Any] = ()) -> Any:
        """The result of the function in a step: it gets those of ``worker``, ``batch``, ``batches``
        (of all policies) and the ``config`` of its policy that its parameters name, and a method
        that was taken from its class gets the worker as its ``self``, as siiRL's guide has it
        (section 5.5); otherwise as ``run``.
        """
        if self.executable is None:
            return self._completed(None)
        instance, given = self._step_call(worker, batch, batches)
        bound = () if instance is None else (instance,)
        with self._watched():
            return self._completed(self.executable(*bound, **{**self._own_options(), **given}))

    def run(self, /, *, _dag_worker_instance: Any = None, **kwargs: Any) -> Any:
        """The guide's call: the node's function gets ``kwargs`` and the entries of ``config`` that
        its parameters name.

        ``_dag_worker_instance`` is the ``self`` of a method that was taken from its class. The
        result of a coroutine function is a coroutine that the caller awaits. An exception keeps its
        type and gets a note that names the node; ``sys.exit`` becomes a UserError. A node without a
        function returns None.
        """
        if self.executable is None:
            return self._completed(None)
        bound = () if _dag_worker_instance is None else (_dag_worker_instance,)
        with self._watched():
            return self._completed(self.executable(*bound, **{**self._own_options(), **kwargs}))

    def _completed(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._finish(result)
        self.update_status(NodeStatus.COMPLETED)
        return result

    async def _finish(self, result: Awaitable[Any]) -> Any:
        with self._watched():
            answer = await result
            self.update_status(NodeStatus.COMPLETED)
            return answer

    def check_parameters(self) -> None:
        """TypeError if the node's function cannot be called as ``call_in_step`` does."""
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
        names = explicit_parameters(self.executable)
        offered = {"worker": worker, "batch": batch}
        if "config" in names:
            offered["config"] = worker.config
        if "batches" in names:
            offered["batches"] = batches
        instance = worker if self._is_method else None
        if instance is not None and hasattr(worker, "agent_group"):
            # The guide's methods take their models from it (section 5.5).
            offered["agent_group"] = worker.agent_group
        return instance, accepted_options(self.executable, offered)

    def _own_options(self) -> dict[str, Any]:
        if self.executable is None or not self.config:
            return {}
        return accepted_options(self.executable, self.config)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.update_status(NodeStatus.RUNNING)
        try:
            yield
        except SystemExit as error:
            self.update_status(NodeStatus.FAILED, f"sys.exit({error.code})")
            # It would end the event loop, which also serves the engines' clients.
            raise UserError(
                f"node {self.node_id!r}: {describe_location(self.executable)} calls "
                f"sys.exit({error.code})",
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
    function, aside = node.executable, node.is_async
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
    if aside and node.node_type in MODEL_TYPES:
        raise ValueError(
            f"node {node.node_id!r}: a {node.node_type.value} node issues collectives, which a "
            "coroutine function cannot do; write it as an ordinary function"
        )
