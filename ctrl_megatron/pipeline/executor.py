"""Walks a task graph for one training step: the same order on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensordict import TensorDict

from ctrl_megatron.metrics import Timeline
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.pipeline.interrupt import StopFlag, StopRequested
from ctrl_megatron.pipeline.node import Node, NodePlace, NodeType
from ctrl_megatron.pipeline.task_graph import TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutput:
    """What a node adds: fields of the batch (or a whole new batch) and scalars."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    batch: TensorDict | None = None


class Worker(Protocol):
    """What the executor needs of the object that nodes get as their first argument."""

    groups: ProcessGroups
    background: BackgroundLoop
    timeline: Timeline
    stop: StopFlag


class Executor:
    """Runs the nodes of a graph with a worker.

    Nodes placed on the host are coroutines: the leader of each model copy starts them on the
    background loop and the walk goes on; the first node that depends on one waits for it and hands
    its output to all ranks of the copy. Everything else runs here, in the graph's order, so
    collectives cannot meet in different orders on different ranks.
    """

    def __init__(self, graph: TaskGraph, worker: Worker) -> None:
        self._graph, self._worker = graph, worker
        self._order = [graph.nodes[node_id] for node_id in graph.get_topological_sort()]
        self._pending: dict[str, Future[NodeOutput] | None] = {}

    def run_step(self, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """The batch after the last node, and all nodes' metrics.

        Raises StopRequested, on all ranks at the same node, if a stop is asked for before the first
        node that changes weights; after that the step is finished.
        """
        metrics: dict[str, float] = {}
        stoppable = True
        try:
            for node in self._order:
                for needed in self._waiting_for(node):
                    batch = self._merge(batch, self._collect(needed), metrics)
                stoppable = stoppable and not _changes_weights(node)
                if stoppable and self._worker.stop.agreed(self._worker.groups):
                    raise StopRequested
                if node.place is NodePlace.HOST:
                    self._start(node, batch)
                    continue
                with self._worker.timeline.phase(node.node_id):
                    output = node.run(worker=self._worker, batch=batch)
                batch = self._merge(batch, output, metrics)
            for needed in list(self._pending):
                batch = self._merge(batch, self._collect(needed), metrics)
        finally:
            for future in self._pending.values():
                if future is not None:
                    future.cancel()
            self._pending.clear()
        return batch, metrics

    def _waiting_for(self, node: Node) -> list[str]:
        needed = self._graph.get_ancestors(node.node_id)
        return [node_id for node_id in self._pending if node_id in needed]

    def _start(self, node: Node, batch: TensorDict) -> None:
        future = None
        if self._worker.groups.is_leader:
            future = self._worker.background.submit(self._timed(node, batch))
        self._pending[node.node_id] = future

    async def _timed(self, node: Node, batch: TensorDict) -> NodeOutput:
        with self._worker.timeline.phase(node.node_id, kind="host"):
            return await node.run(worker=self._worker, batch=batch)

    def _collect(self, node_id: str) -> NodeOutput:
        with self._worker.timeline.phase(f"wait_{node_id}", kind="wait"):
            future = self._pending.pop(node_id)
            output = future.result() if future is not None else None
            return self._worker.groups.from_leader(output)

    @staticmethod
    def _merge(batch: TensorDict, output: NodeOutput, metrics: dict[str, float]) -> TensorDict:
        repeated = metrics.keys() & output.metrics.keys()
        if repeated:
            raise ValueError(f"two nodes report the metrics {sorted(repeated)}")
        metrics.update(output.metrics)
        merged = output.batch if output.batch is not None else batch
        for name, value in output.fields.items():
            merged[name] = value
        return merged


def _changes_weights(node: Node) -> bool:
    return node.node_type is NodeType.MODEL_TRAIN and not node.only_forward_compute
