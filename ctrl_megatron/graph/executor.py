"""Runs the nodes of a graph for one step, on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from tensordict import TensorDict

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.errors import (
    ServiceFault,
    UserError,
    convert_user_code_errors,
    describe_location,
    find_user_error,
    is_user_code_mistake,
    is_user_defined,
)
from ctrl_megatron.graph.columns import select_rows
from ctrl_megatron.graph.declarations import OF_TOKENS
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.node import Node, NodeOutput
from ctrl_megatron.graph.world_link import (
    ReceiveMessage,
    RunNode,
    SendMessage,
    SingleWorld,
    WorldLink,
)
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.stop import StopFlag, StopRequested
from ctrl_megatron.parallel.waiting import WaitRules


class ExecutorWorker(Protocol):
    """The part of the worker (the nodes' first argument) that the executor uses."""

    groups: ProcessGroups
    background: BackgroundLoop
    timeline: Timeline
    stop: StopFlag

    @property
    def wait_conditions(self) -> WaitRules: ...


class Executor:
    """Runs the nodes of a graph with a worker.

    The leader of each model copy starts coroutine functions on the background loop and continues;
    the first node that depends on one waits for it, and its output is sent to all ranks of the
    copy. All other functions run on the main thread in the graph's order, so that every rank issues
    collectives in the same order.

    Each policy that learns has a worker and a batch of its own, which the nodes of its
    ``agent_group`` get; a node may read the others' batches (``batches``). The names of a policy's
    metrics begin with its own (``policy_metric_prefix``).
    """

    def __init__(
        self,
        graph: TaskGraph,
        worker: ExecutorWorker,
        *,
        agents: Sequence[ExecutorWorker] = (),
        runs: Callable[[Node], bool] = lambda node: True,
        before_update: Callable[[TensorDict, int], None] = lambda batch, policy: None,
        link: WorldLink | None = None,
    ) -> None:
        """``agents`` are the workers of all policies, ``worker`` first; none for that one alone. A
        node for which ``runs`` is False is left out. In every step ``before_update`` is called on
        all ranks for each policy, with its batch, which the first of its nodes that changes weights
        is about to use, and its number. ``link`` leads to other worlds.
        """
        self.graph, self._worker, self._before_update = graph, worker, before_update
        self._agents = agents or (worker,)
        self.batches: list[TensorDict] = []
        """The batch of each policy."""
        every = [graph.nodes[node_id] for node_id in graph.get_topological_sort()]
        self._link = link or SingleWorld()
        self._program = self._link.plan_actions(graph, [node for node in every if runs(node)])
        self._pending: dict[str, tuple[Future[NodeOutput] | None, int]] = {}
        """Nodes that run aside: the result, on leaders, and how many moves came before it."""
        self._moves: list[list[Sequence[int]]] = []
        """``NodeOutput.moved`` of this step's nodes, in order, for each policy."""
        self._updating: set[int] = set()
        """The policies whose weights this step has begun to change."""
        self.weights_changed = False
        """Whether a step that did not end has begun to change weights."""

    def run_step(self, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """The first policy's batch after the last node, and the metrics of all nodes.

        Raises StopRequested, on all ranks at the same node, if a stop is requested before the first
        node that changes weights. After that the step is finished, whatever its nodes wait for.
        """
        metrics: dict[str, float] = {}
        self.weights_changed = False
        self._updating.clear()
        self._moves = [[] for _ in self._agents]
        self.batches = [batch, *(batch.copy() for _ in self._agents[1:])]
        left = list(self._program)
        try:
            while left:
                match left[0]:
                    case RunNode(node):
                        self._ready(node, metrics)
                        policy = node.agent_group
                        if node.is_async:
                            self._start(node)
                        else:
                            self._filter(node, metrics)
                            with (
                                self._worker.timeline.phase(node.node_id),
                                convert_node_errors(node),
                            ):
                                output = node.call_in_step(
                                    self._agents[policy], self.batches[policy], self.batches
                                )
                            self._merge(policy, output, metrics, node)
                    case SendMessage(message):
                        self._ready(message.node, metrics)
                        self._link.send(message, self.batches[0])
                    case ReceiveMessage(message):
                        with self._worker.timeline.phase(f"wait_{message.source}", kind="wait"):
                            output = self._link.receive(message, self.batches[0])
                        self._merge(0, output, metrics)
                del left[0]
            for needed in list(self._pending):
                self._collect(needed, metrics)
            self.weights_changed = False
        except (StopRequested, ServiceFault) as why:
            # What failed is behind, unless it was to send, which has not been done then.
            failed = left[:1] if left and isinstance(left[0], SendMessage) else []
            self._link.abandon_step([*failed, *left[1:]], why)
            raise
        finally:
            self._worker.stop.deferred = False
            for future, _ in self._pending.values():
                if future is not None:
                    future.cancel()
            self._pending.clear()
        return self.batches[0], metrics

    def _ready(self, node: Node, metrics: dict[str, float]) -> None:
        """Wait for everything that the node, here or in another world, has to wait for."""
        ancestors, policy = self.graph.get_ancestors(node.node_id), node.agent_group
        for needed in [n for n in self._pending if n in ancestors]:
            self._collect(needed, metrics)
        # The world that deals the rows decides it for the others.
        may_stop = self._link.has_rank_zero and not self.weights_changed
        if may_stop and self._worker.stop.requested_on_any_rank(self._worker.groups):
            raise StopRequested
        if node.changes_weights and policy not in self._updating:
            self._updating.add(policy)
            self.weights_changed = self._worker.stop.deferred = True
            self._before_update(self.batches[policy], policy)

    def _filter(self, node: Node, metrics: dict[str, float]) -> None:
        """Apply the node's ``filter_plugin``, if it has one. Collective."""
        if node.filter_plugin is None:
            return
        policy = node.agent_group
        self.batches[policy], kept = apply_filter_plugin(self.batches[policy], node)
        totals = self._agents[policy].groups.sum_over_data(kept)
        share = float(totals[0] / totals[1].clamp(min=1))
        metrics[f"{policy_metric_prefix(policy)}filter/{node.node_id}"] = share

    def _merge(
        self,
        policy: int,
        output: NodeOutput | None,
        metrics: dict[str, float],
        node: Node | None = None,
    ) -> None:
        """Take the output of ``node``; None for one of another world, which has checked it."""
        if node is not None and _is_users(node):
            check_output(node, self.batches[policy], output)
        if output is None:
            return
        if not policy and output.batch is not None and output.batch is not self.batches[0]:
            self._link.notify_rows_changed()
        # An entry of a batch, as the guide's methods return it, comes in a wrapper.
        reported = getattr(output.metrics, "data", output.metrics)
        named = with_policy_prefix(reported, policy)
        if repeated := metrics.keys() & named.keys():
            by = "" if node is None else f", of which {node.node_id!r} is the second"
            raise UserError(f"two nodes report the metrics {sorted(repeated)}{by}")
        metrics.update(named)
        merged = self.batches[policy] if output.batch is None else output.batch
        if "metrics" in merged:
            merged = merged.exclude("metrics")
        for name, value in output.fields.items():
            merged[name] = value
        self.batches[policy] = merged
        if output.moved is not None:
            self._moves[policy].append(output.moved)

    def _start(self, node: Node) -> None:
        future = None
        if self._agents[node.agent_group].groups.is_leader:
            future = self._worker.background.submit(self._run_aside(node, tuple(self.batches)))
        self._pending[node.node_id] = future, len(self._moves[node.agent_group])

    async def _run_aside(self, node: Node, batches: Sequence[TensorDict]) -> NodeOutput:
        worker, batch = self._agents[node.agent_group], batches[node.agent_group]
        with self._worker.timeline.phase(node.node_id, kind="host"), convert_node_errors(node):
            for retries_left in range(node.retry_limit, -1, -1):
                try:
                    return await node.call_in_step(worker, batch, batches)
                except Exception:
                    if not retries_left:
                        raise
            raise AssertionError("a negative retry_limit, which Node refuses")

    def _collect(self, node_id: str, metrics: dict[str, float]) -> None:
        policy = self.graph.nodes[node_id].agent_group
        with self._worker.timeline.phase(f"wait_{node_id}", kind="wait"):
            (future, before), what = self._pending.pop(node_id), f"the node {node_id}"
            output = self._worker.wait_conditions.wait_together(future, what)
            output = self._agents[policy].groups.broadcast_from_leader(output)
        for moved in self._moves[policy][before:] if output is not None else ():
            output = self._brought(output, moved, node_id, self._agents[policy].groups)
        self._merge(policy, output, metrics, self.graph.nodes[node_id])

    def _brought(
        self, output: NodeOutput, moved: Sequence[int], node_id: str, groups: ProcessGroups
    ) -> NodeOutput:
        """The output with its fields at the rows that ``moved`` has dealt to this rank. Collective.
        UserError for a field without one value per row.
        """
        if output.batch is not None:
            raise UserError(
                f"the node {node_id!r} returns a batch, but its rows went to other ranks while it "
                "ran; return fields"
            )
        for name, value in output.fields.items():
            if isinstance(value, torch.Tensor) and value.dim() != 1:
                raise UserError(
                    f"the node {node_id!r} returns {name} of shape {tuple(value.shape)}, but its "
                    "rows went to other ranks while it ran; return one value per row"
                )
        parts = groups.gather_data_ranks(dict(output.fields))
        return dataclasses.replace(output, fields=select_rows(parts, moved))


def _is_users(node: Node) -> bool:
    """Whether the node's function was written outside this package."""
    function = node.executable.func if isinstance(node.executable, partial) else node.executable
    return function is not None and is_user_defined(function)


@contextmanager
def convert_node_errors(node: Node) -> Iterator[None]:
    """Turn a mistake in a node's function into a UserError that names the node and the line; what
    fails in this package or a library that the function calls keeps its type.
    """
    try:
        yield
    except Exception as error:
        if find_user_error(error) or not _is_users(node) or not is_user_code_mistake(error):
            raise
        with convert_user_code_errors(
            f"the node {node.node_id!r} ({describe_location(node.executable)}) failed"
        ):
            raise


def check_output(node: Node, batch: TensorDict, output: object) -> None:
    """Raise UserError that names the node of the user's for an output that is none, and for fields
    of tokens with another shape than the batch's ``response_mask`` (B, R), in the output or written
    into ``batch``.
    """
    what = f"the node {node.node_id!r} ({describe_location(node.executable)})"
    if output is not None and not isinstance(output, NodeOutput):
        raise UserError(f"{what} returned {type(output).__name__}, no NodeOutput")
    merged = batch if output is None or output.batch is None else output.batch
    fields = {} if output is None else output.fields
    mask = fields.get("response_mask", merged.get("response_mask", None))
    for name in OF_TOKENS if isinstance(mask, torch.Tensor) else ():
        value = fields.get(name, merged.get(name, None))
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if (
            shape == tuple(mask.shape)
            and not name.endswith("_mask")
            and not value.is_floating_point()
        ):
            raise UserError(
                f"{what} writes {name} as {value.dtype}, which cuts numbers off",
                remedy="make it with dtype=torch.float32",
            )
        if shape != tuple(mask.shape):
            raise UserError(
                f"{what} writes {name} of shape {shape}; expected {tuple(mask.shape)}",
                remedy="give it one number per token of the responses, as batch['responses'] and "
                "batch['response_mask'] have it",
            )


def apply_filter_plugin(batch: TensorDict, node: Node) -> tuple[TensorDict, torch.Tensor]:
    """The batch after the node's ``filter_plugin``, and (2,) float64: kept rows, all rows.

    Rows that the filter drops keep their place with an empty ``response_mask`` (and ``loss_mask``,
    if there is one): they count in no loss and no group, and because the number of rows stays the
    same, every rank issues the same collectives. UserError for a filter that fails or returns
    anything but a (B,) bool tensor, and for a batch without a ``response_mask``.
    """
    name, plugin = node.node_id, node.filter_plugin
    assert plugin is not None
    with convert_user_code_errors(
        f"filter_plugin of the node {name!r} ({describe_location(plugin)}) failed"
    ):
        keep = plugin(batch)
    if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool or keep.shape != batch.shape:
        kind, shape = type(keep).__name__, tuple(getattr(keep, "shape", ()))
        raise UserError(
            f"filter_plugin of the node {name!r} ({describe_location(plugin)}) returned {kind} of "
            f"shape {shape}",
            remedy=f"return a bool tensor of shape {tuple(batch.shape)}, True for rows to keep",
        )
    if "response_mask" not in batch:
        raise UserError(
            f"filter_plugin of the node {name!r} got a batch without response_mask",
            remedy="filter at a node after the one that draws samples",
        )
    # Coroutine functions that were started earlier may still read the batch.
    batch = batch.copy()
    for mask in ("response_mask", "loss_mask"):
        if mask in batch:
            batch[mask] = batch[mask] & keep[:, None]
    return batch, torch.tensor([keep.sum(), len(keep)], dtype=torch.float64)


def policy_metric_prefix(policy: int) -> str:
    """The prefix of a policy's metric names: empty for the first, ``agent1/`` for the second."""
    return f"agent{policy}/" if policy else ""


def with_policy_prefix(metrics: Mapping[str, float], policy: int) -> dict[str, float]:
    """``metrics`` under the names that the policy of that number has."""
    return {f"{policy_metric_prefix(policy)}{name}": value for name, value in metrics.items()}
