"""How a graph is walked: branches, host nodes that retry, nodes that filter rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ctrl_megatron.metrics import Timeline
from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.pipeline import Node, NodePlace, NodeStatus, NodeType, TaskGraph
from ctrl_megatron.pipeline.executor import Executor
from ctrl_megatron.pipeline.graph import NodeOutput


@pytest.fixture
def worker() -> Iterator[Any]:
    """One rank that is its own leader and that nobody asks to stop."""
    background = BackgroundLoop()
    yield SimpleNamespace(
        groups=SimpleNamespace(
            is_leader=True, from_leader=lambda value: value, on_any=lambda *flags: flags
        ),
        background=background,
        timeline=Timeline(),
        stop=SimpleNamespace(agreed=lambda groups: False),
    )
    background.close()


def graph_of(*nodes: Node) -> TaskGraph:
    graph = TaskGraph("g")
    for node in nodes:
        graph.add_node(node)
    return graph


def batch() -> TensorDict:
    return TensorDict({"x": torch.tensor([1.0, 2.0, 3.0])}, batch_size=[3])


def test_both_branches_reach_the_node_that_joins_them(worker: Any) -> None:
    async def aside(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"twice": 2 * batch["x"]}, metrics={"aside": 1.0})

    def here(worker: Any, batch: TensorDict) -> NodeOutput:
        assert "twice" not in batch
        return NodeOutput(fields={"square": batch["x"] ** 2}, metrics={"here": 1.0})

    def join(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"sum": batch["twice"] + batch["square"]})

    graph = graph_of(
        Node("aside", NodeType.ENV_INTERACT, func=aside, place=NodePlace.HOST),
        Node("here", NodeType.COMPUTE, func=here),
        Node("join", NodeType.COMPUTE, dependencies=["aside", "here"], func=join),
    )
    for _ in range(2):
        done, metrics = Executor(graph, worker).run_step(batch())
        assert done["sum"].tolist() == [3.0, 8.0, 15.0]
        assert metrics == {"aside": 1.0, "here": 1.0}


@pytest.mark.parametrize("retries", [1, 2])
def test_a_host_node_is_tried_again(worker: Any, retries: int) -> None:
    tries: list[int] = []

    async def flaky(worker: Any, batch: TensorDict) -> NodeOutput:
        tries.append(len(tries))
        if len(tries) < 3:
            raise OSError("not yet")
        return NodeOutput(metrics={"tries": float(len(tries))})

    node = Node("n", NodeType.ENV_INTERACT, func=flaky, place=NodePlace.HOST, retry_limit=retries)
    executor = Executor(graph_of(node), worker)
    if retries == 2:
        assert executor.run_step(batch())[1] == {"tries": 3.0}
        assert node.status is NodeStatus.COMPLETED
    else:
        with pytest.raises(OSError, match="not yet"):
            executor.run_step(batch())
        assert len(tries) == 2 and node.error_info == "OSError: not yet"


def test_a_filter_drops_rows_from_its_node_on(worker: Any) -> None:
    def count(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(metrics={"rows": float(len(batch))})

    node = Node("n", NodeType.COMPUTE, func=count, filter_plugin=lambda b: b["x"] > 1)
    done, metrics = Executor(graph_of(node), worker).run_step(batch())
    assert metrics == {"rows": 2.0} and done["x"].tolist() == [2.0, 3.0]


def test_two_nodes_that_report_one_metric_are_an_error(worker: Any) -> None:
    def report(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(metrics={"same": 1.0})

    nodes = [Node(name, NodeType.COMPUTE, func=report) for name in "ab"]
    with pytest.raises(ValueError, match=r"two nodes report the metrics \['same'\]"):
        Executor(graph_of(*nodes), worker).run_step(batch())
