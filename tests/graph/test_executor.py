"""The execution of a graph: branches, host nodes that retry, nodes that filter rows."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.executor import Executor
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.parallel.stop import StopFlag, StopRequested
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.pipeline import Node, NodeStatus, NodeType, TaskGraph
from ctrl_megatron.steps.batch import pad_rows


@pytest.fixture
def worker() -> Iterator[Any]:
    """A single rank, its own leader."""
    background = BackgroundLoop()
    groups: Any = SimpleNamespace(
        is_leader=True,
        broadcast_from_leader=lambda value: value,
        any_rank=lambda *flags: flags,
        sum_over_data=lambda sums: sums,
    )
    stop = StopFlag()
    yield SimpleNamespace(
        groups=groups,
        background=background,
        timeline=Timeline(),
        stop=stop,
        wait_conditions=WaitRules(groups=groups, stop=stop, limit=60.0),
    )
    background.close()


def graph_of(*nodes: Node) -> TaskGraph:
    graph = TaskGraph("g")
    for node in nodes:
        graph.add_node(node)
    return graph


def batch() -> TensorDict:
    return TensorDict({"x": torch.tensor([1.0, 2.0, 3.0])}, batch_size=[3])


def test_a_stop_drops_a_step_until_it_changes_weights_and_then_waits_for_its_end(
    worker: Any,
) -> None:
    def ask(worker: Any, batch: TensorDict) -> NodeOutput:
        worker.stop._on_signal(signal.SIGTERM, None)
        return NodeOutput()

    def wait(worker: Any, batch: TensorDict) -> NodeOutput:
        done: Future[float] = Future()
        done.set_result(7.0)
        return NodeOutput(
            metrics={"waited": worker.wait_conditions.wait_together(done, "an engine")}
        )

    kind, train = NodeType.COMPUTE, NodeType.MODEL_TRAIN
    asked, waits = Node("ask", kind, func=ask), Node("wait", kind, func=wait)
    changes = Node("change", train, func=lambda worker, batch: NodeOutput())
    executor = Executor(graph_of(changes, asked, waits), worker)
    assert executor.run_step(batch())[1] == {"waited": 7.0}
    with pytest.raises(StopRequested):
        executor.run_step(batch())


def test_both_branches_reach_the_node_that_joins_them(worker: Any) -> None:
    async def aside(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"twice": 2 * batch["x"]}, metrics={"aside": 1.0})

    def here(worker: Any, batch: TensorDict) -> NodeOutput:
        assert "twice" not in batch
        return NodeOutput(fields={"square": batch["x"] ** 2}, metrics={"here": 1.0})

    def join(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"sum": batch["twice"] + batch["square"]})

    graph = graph_of(
        Node("aside", NodeType.ENV_INTERACT, func=aside),
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

    node = Node("n", NodeType.ENV_INTERACT, func=flaky, retry_limit=retries)
    executor = Executor(graph_of(node), worker)
    if retries == 2:
        assert executor.run_step(batch())[1] == {"tries": 3.0}
        assert node.status is NodeStatus.COMPLETED
    else:
        with pytest.raises(OSError, match="not yet"):
            executor.run_step(batch())
        assert len(tries) == 2 and node.status is NodeStatus.FAILED


def drawn() -> TensorDict:
    made = batch()
    made["response_mask"] = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    return made


def raises(worker: Any, batch: TensorDict) -> NodeOutput:
    {}.pop("agent_group")
    return NodeOutput()


def of_package(worker: Any, batch: TensorDict) -> NodeOutput:
    return NodeOutput(batch=pad_rows([], [], pad_token_id=0))


def long_scores(worker: Any, batch: TensorDict) -> NodeOutput:
    batch["token_level_rewards"] = torch.zeros(3, 9)
    return NodeOutput(batch=batch)


def whole_numbers(worker: Any, batch: TensorDict) -> NodeOutput:
    scores = torch.zeros_like(batch["response_mask"], dtype=torch.int64)
    return NodeOutput(fields={"token_level_scores": scores})


def a_dict(worker: Any, batch: TensorDict) -> Any:
    return {"score": 1.0}


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (raises, r"\(raises \(.*test_executor.py line \d+\)\) failed: KeyError: 'agent_group' \("),
        (long_scores, r"writes token_level_rewards of shape \(3, 9\); expected \(3, 2\)"),
        (whole_numbers, r"writes token_level_scores as torch.int64"),
        (a_dict, r"returned dict, no NodeOutput"),
    ],
)
@pytest.mark.parametrize("aside", [False, True])
def test_a_mistake_in_a_node_is_the_users(
    worker: Any, function: Any, complaint: str, aside: bool
) -> None:
    async def run_aside(worker: Any, batch: TensorDict) -> Any:
        return function(worker, batch)

    node = Node("mine", NodeType.COMPUTE, func=run_aside if aside else function)
    if aside:
        complaint = complaint.replace("raises \\(", ".*run_aside \\(")
    with pytest.raises(UserError, match=rf"^the node 'mine' .*{complaint}"):
        Executor(graph_of(node), worker).run_step(drawn())


def test_what_fails_in_the_package_or_the_system_keeps_its_type(worker: Any) -> None:
    def unreachable(worker: Any, batch: TensorDict) -> NodeOutput:
        raise ConnectionRefusedError("no service")

    for function, kind in ((of_package, ValueError), (unreachable, ConnectionRefusedError)):
        with pytest.raises(kind) as raised:
            Executor(graph_of(Node("n", NodeType.COMPUTE, func=function)), worker).run_step(drawn())
        assert not isinstance(raised.value, UserError)


def test_a_filter_empties_masks_from_its_node_on(worker: Any) -> None:
    """The rows stay, so that ranks which leave out other numbers of them walk on together."""

    def before(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"loss_mask": batch["response_mask"].clone()})

    def count(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(metrics={"tokens": float(batch["response_mask"].sum())})

    given = drawn()
    graph = graph_of(
        Node("before", NodeType.COMPUTE, func=before),
        Node("n", NodeType.COMPUTE, func=count, filter_plugin=lambda b: b["x"] > 1),
    )
    done, metrics = Executor(graph, worker).run_step(given)
    assert metrics == {"tokens": 3.0, "filter/n": pytest.approx(2 / 3)}
    assert done["x"].tolist() == [1.0, 2.0, 3.0]
    for mask in ("response_mask", "loss_mask"):
        assert done[mask].tolist() == [[False, False], [True, False], [True, True]]
    # Whoever holds the batch as it was still sees every row.
    assert given["response_mask"].any(dim=1).all()


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (lambda b: b["x"], "returned Tensor of shape"),
        (lambda b: b["x"][:2] > 1, r"returned Tensor of shape \(2,\)"),
        (lambda b: [True, False, True], "returned list"),
        (lambda b: None, "returned NoneType"),
        (lambda b: b["nothing"], "failed: KeyError"),
        (lambda b: sys.exit(1), r"failed: it calls sys\.exit"),
    ],
)
def test_a_filter_that_gives_no_rows_is_named(worker: Any, plugin: Any, said: str) -> None:
    node = Node("n", NodeType.COMPUTE, func=lambda worker, batch: None, filter_plugin=plugin)
    with pytest.raises(UserError, match=rf"node 'n' \(.*{__file__} line \d+\)\) {said}"):
        Executor(graph_of(node), worker).run_step(drawn())


def test_a_filter_before_there_are_samples_is_refused(worker: Any) -> None:
    node = Node(
        "n", NodeType.COMPUTE, func=lambda worker, batch: None, filter_plugin=lambda b: b["x"] > 1
    )
    with pytest.raises(UserError, match="after the one that draws"):
        Executor(graph_of(node), worker).run_step(batch())


def test_two_nodes_that_report_one_metric_are_an_error(worker: Any) -> None:
    def report(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(metrics={"same": 1.0})

    nodes = [Node(name, NodeType.COMPUTE, func=report) for name in "ab"]
    with pytest.raises(ValueError, match=r"two nodes report the metrics \['same'\]"):
        Executor(graph_of(*nodes), worker).run_step(batch())


def test_what_looks_at_a_step_sees_the_batch_before_its_first_update(worker: Any) -> None:
    def field(name: str) -> Any:
        return lambda worker, batch: NodeOutput(fields={name: batch["x"]}, metrics={name: 1.0})

    frozen = {"node_type": NodeType.MODEL_TRAIN, "only_forward_compute": True}
    graph = graph_of(
        Node("before", func=field("before"), **frozen),  # type: ignore[arg-type]
        Node("first", NodeType.MODEL_TRAIN, dependencies=["before"], func=field("first")),
        Node("second", NodeType.MODEL_TRAIN, dependencies=["first"], func=field("second")),
    )
    seen: list[set[Any]] = []
    executor = Executor(graph, worker, before_update=lambda batch, _: seen.append({*batch.keys()}))
    after, _ = executor.run_step(batch())
    assert seen == [{"x", "before"}] and {*after.keys()} == {"x", "before", "first", "second"}
    executor.run_step(batch())
    assert len(seen) == 2


def test_each_policy_has_a_worker_a_batch_and_metrics_of_its_own(worker: Any) -> None:
    """The second policy makes three rows of each; the first reads them, also on the host."""
    second: Any = SimpleNamespace(**vars(worker), name="second")
    worker.name = "first"

    def draw(worker: Any, batch: TensorDict) -> NodeOutput:
        assert worker.name == "second"
        made = TensorDict({"y": batch["x"].repeat_interleave(3)}, batch_size=[9])
        return NodeOutput(batch=made, metrics={"mine/rows": 9.0})

    async def add(worker: Any, batch: TensorDict, batches: Any) -> NodeOutput:
        assert worker.name == "first" and batches[0]["x"].equal(batch["x"])
        return NodeOutput(fields={"sums": batches[1]["y"].reshape(3, 3).sum(dim=1)})

    def change(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={worker.name: batch[next(iter(batch.keys()))]})

    train = NodeType.MODEL_TRAIN
    graph = graph_of(
        Node("draw", NodeType.MODEL_INFERENCE, agent_group=1, func=draw),
        Node("add", NodeType.ENV_INTERACT, dependencies=["draw"], func=add),
        Node("change_second", train, agent_group=1, dependencies=["draw"], func=change),
        Node("again", train, agent_group=1, dependencies=["change_second"], func=change),
        Node("change_first", train, dependencies=["add"], func=change),
    )
    updating: list[tuple[int, int]] = []
    executor = Executor(
        graph,
        worker,
        agents=(worker, second),
        before_update=lambda batch, policy: updating.append((policy, len(batch))),
    )
    first, metrics = executor.run_step(batch())
    assert {*first.keys()} == {"x", "sums", "first"} and first["sums"].tolist() == [3.0, 6.0, 9.0]
    assert {*executor.batches[1].keys()} == {"y", "second"} and len(executor.batches[1]) == 9
    assert metrics == {"agent1/mine/rows": 9.0}
    assert updating == [(1, 9), (0, 3)]


def test_nodes_can_be_left_out(worker: Any) -> None:
    async def aside(worker: Any, batch: TensorDict) -> NodeOutput:
        raise AssertionError("is left out")

    def doubled(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"twice": 2 * batch["x"]})

    graph = graph_of(
        Node("aside", NodeType.ENV_INTERACT, func=aside),
        Node("doubled", NodeType.COMPUTE, dependencies=["aside"], func=doubled),
    )
    after, metrics = Executor(graph, worker, runs=lambda node: not node.is_async).run_step(batch())
    assert after["twice"].tolist() == [2.0, 4.0, 6.0] and metrics == {}
