from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.config import Config
from ctrl_megatron.errors import UserError
from ctrl_megatron.pipeline import (
    Node,
    NodeRole,
    NodeStatus,
    NodeType,
    Pipeline,
    TaskGraph,
    pipeline_from_file,
)


class Tool:
    """Something to point references at."""

    SETTING = 3

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    def scale(self, x: int, factor: int = 1) -> int:
        return x * factor * self.SETTING


def nothing(**_: object) -> None:
    return None


async def later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


def graph_of(edges: dict[str, list[str]]) -> TaskGraph:
    graph = TaskGraph("g")
    for node_id, dependencies in edges.items():
        graph.add_node(Node(node_id, NodeType.COMPUTE, dependencies=dependencies))
    return graph


def ids(nodes: list[Node]) -> list[str]:
    return [node.node_id for node in nodes]


def test_enums_hold_the_guides_values() -> None:
    assert [t.value for t in NodeType] == [
        *("COMPUTE", "DATA_LOAD", "ENV_INTERACT", "MODEL_INFERENCE", "MODEL_TRAIN"),
        *("PUT_TO_BUFFER", "GET_FROM_BUFFER", "BARRIER_SYNC", "CUSTOM"),
    ]
    own = ["REWARD_MODEL"]
    assert [r.value for r in NodeRole] == [
        *("DEFAULT", "ACTOR", "ADVANTAGE", "CRITIC", "ROLLOUT", "REFERENCE", "REWARD"),
        *("DYNAMIC_SAMPLING", *own),
    ]
    assert [s.value for s in NodeStatus] == [
        *("PENDING", "READY", "RUNNING", "COMPLETED", "FAILED", "SKIPPED")
    ]
    for kind in (NodeType, NodeRole, NodeStatus):
        assert all(member.name == member.value for member in kind)


def test_importing_the_graph_needs_no_torch() -> None:
    code = "import sys, ctrl_megatron.pipeline; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Node


def test_a_node_runs_its_function_with_what_its_config_has_for_it() -> None:
    node = Node("n", NodeType.COMPUTE, config={"factor": 5, "other": 1}, func=Tool.scale)
    assert node.status is NodeStatus.PENDING
    assert node.run(self=Tool(), x=2) == 30
    assert node.run(self=Tool(), x=2, factor=1) == 6
    assert node.status is NodeStatus.COMPLETED
    collect = Node("n", NodeType.COMPUTE, config={"other": 1}, func=lambda **given: given)
    assert collect.run(x=2) == {"other": 1, "x": 2}


def test_a_method_of_a_class_is_bound_to_the_worker() -> None:
    node = Node("n", NodeType.COMPUTE, executable_ref=f"{__name__}:Tool.scale")
    assert node.run(_dag_worker_instance=Tool(), x=2) == 6


def test_the_guides_arguments_stand_where_the_guide_has_them() -> None:
    node = Node(
        "n", NodeType.COMPUTE, NodeRole.REWARD, True, 2, ["a"], {"k": 1}, None, None, "o", 0
    )
    assert (node.agent_group, node.agent_options) == (2, "o")
    assert (node.dependencies, node.config, node.only_forward_compute) == (["a"], {"k": 1}, True)


@pytest.mark.parametrize(
    ("reference", "arguments", "want"),
    [
        (f"{__name__}:Tool.double", {"x": 4}, 8),
        (f"{__name__}.nothing", {}, None),
        (f"{__name__}:nothing", {}, None),
        ("os.path.basename", {"p": "a/b"}, "b"),
    ],
)
def test_references_resolve(reference: str, arguments: dict, want: object) -> None:
    assert Node("n", NodeType.CUSTOM, executable_ref=reference).run(**arguments) == want


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
        ("os.path:nope.f", "has no attribute 'nope'"),
        (f"{__name__}:Tool.SETTING", "is not callable"),
        ("plain", "neither 'module:Class.method' nor 'module.function'"),
        (":f", "neither"),
    ],
)
@pytest.mark.parametrize("kind", [ImportError, ValueError])
def test_a_wrong_reference_stops_the_construction(
    reference: str, complaint: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="node 'n'") as caught:
        Node("n", NodeType.COMPUTE, executable_ref=reference)
    assert complaint in str(caught.value)
    assert reference in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"node_id": ""}, "non-empty string"),
        ({"node_id": 3}, "non-empty string"),
        ({"node_type": "COMPUTE"}, "'COMPUTE' is not a NodeType"),
        ({"node_role": NodeType.COMPUTE}, "is not a NodeRole"),
        ({"dependencies": "abc"}, r"write \['abc'\]"),
        ({"dependencies": [1]}, "1 is not a node id"),
        ({"retry_limit": -1}, "retry_limit"),
        ({"retry_limit": 1}, "ranks would retry apart"),
        ({"func": later, "filter_plugin": nothing}, "cannot have a filter_plugin"),
        ({"func": nothing, "executable_ref": "os.getcwd"}, "not both"),
        ({"func": 3}, "not callable"),
        ({"func": later, "node_type": NodeType.MODEL_TRAIN}, "collectives"),
    ],
)
def test_wrong_options_are_named(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Node(**{"node_id": "n", "node_type": NodeType.COMPUTE, **options})


def test_a_node_without_a_function_gives_nothing() -> None:
    node = Node("n", NodeType.BARRIER_SYNC)
    assert node.run(x=1) is None
    assert node.status is NodeStatus.COMPLETED


def test_a_failure_keeps_its_type_and_names_the_node() -> None:
    async def breaks() -> None:
        raise KeyError("lost")

    node = Node("n", NodeType.COMPUTE, func=breaks, retry_limit=1)
    with pytest.raises(KeyError) as caught:
        asyncio.run(node.run())
    assert caught.value.__notes__ == ["in node 'n'"]
    assert node.status is NodeStatus.FAILED


def leaves(**_: object) -> None:
    sys.exit(4)


async def leaves_later(**_: object) -> None:
    sys.exit(4)


@pytest.mark.parametrize("function", [leaves, leaves_later])
def test_a_node_that_leaves_is_named_with_its_function(function: Callable[..., Any]) -> None:
    node = Node("n", NodeType.COMPUTE, func=function)

    async def run() -> None:
        result = node.run()
        if result is not None:
            await result

    place = rf"{function.__name__} \({__file__} line \d+\)"
    with pytest.raises(UserError, match=rf"^node 'n': {place} calls sys\.exit\(4\)"):
        asyncio.run(run())
    assert node.status is NodeStatus.FAILED


class LaterCall:
    """A callable object whose call is a coroutine."""

    async def __call__(self, x: int) -> int:
        return await later(x)


@pytest.mark.parametrize("func", [later, functools.partial(later), LaterCall()])
def test_a_coroutine_function_completes_when_awaited(func: object) -> None:
    node = Node("n", NodeType.ENV_INTERACT, func=func)  # type: ignore[arg-type]
    pending = node.run(x=1)
    assert node.is_async and node.status is NodeStatus.RUNNING
    assert asyncio.run(pending) == 2
    assert node.status is NodeStatus.COMPLETED


def test_a_coroutine_that_fails_fails_its_node() -> None:
    async def breaks() -> None:
        raise OSError("service gone")

    node = Node("n", NodeType.ENV_INTERACT, func=breaks)
    with pytest.raises(OSError, match="service gone"):
        asyncio.run(node.run())
    assert node.status is NodeStatus.FAILED


def test_a_dependency_counts_once() -> None:
    assert Node("n", NodeType.COMPUTE, dependencies=["a", "b", "a"]).dependencies == ["a", "b"]


def test_repr_reads_like_a_dictionary() -> None:
    shown = repr(Node("n", NodeType.MODEL_TRAIN, NodeRole.ACTOR, dependencies=["a"]))
    assert "'node_id': 'n'" in shown
    assert "'node_role': 'ACTOR'" in shown
    assert "'dependencies': ['a']" in shown


# TaskGraph


DIAMOND = {"d": ["b", "c"], "c": ["a"], "b": ["a"], "a": []}


def test_a_diamond_has_its_edges_in_both_directions() -> None:
    graph = graph_of(DIAMOND)
    assert graph.adj == {"d": [], "c": ["d"], "b": ["d"], "a": ["c", "b"]}
    assert graph.rev_adj == DIAMOND
    assert graph.get_topological_sort() == ["a", "c", "b", "d"]
    assert ids(graph.get_entry_nodes()) == ["a"]
    assert ids(graph.get_dependents("a")) == ids(graph.get_downstream_nodes("a")) == ["c", "b"]
    assert graph.get_ancestors("d") == {"a", "b", "c"}
    assert graph.get_ancestors("a") == set()
    assert graph.validate_graph() == (True, None)


def test_edges_follow_a_nodes_dependencies_when_they_change() -> None:
    graph = graph_of({"a": [], "b": [], "c": ["a"]})
    graph.nodes["c"].dependencies = ["b"]
    assert graph.adj == {"a": [], "b": ["c"], "c": []}
    assert graph.get_topological_sort() == ["a", "b", "c"]


def test_ties_keep_the_order_of_insertion() -> None:
    written = {"a": [], "x": [], "b": ["a"], "y": ["x"], "z": [], "c": ["b", "y"]}
    assert graph_of(written).get_topological_sort() == list(written)
    late = {"c": ["b"], "z": [], "b": ["a"], "a": []}
    assert graph_of(late).get_topological_sort() == ["z", "a", "b", "c"]


@settings(deadline=None)
@given(st.data())
def test_order_of_random_graphs(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 9))
    parents = {
        i: data.draw(st.sets(st.integers(0, i - 1), max_size=4)) if i else set()
        for i in range(size)
    }
    inserted = data.draw(st.permutations(range(size)))
    graph = graph_of({f"n{i}": sorted(f"n{p}" for p in parents[i]) for i in inserted})
    order = graph.get_topological_sort()
    assert sorted(order) == sorted(f"n{i}" for i in range(size))
    done: set[str] = set()
    for node_id in order:
        # If several nodes can run, the first inserted one runs.
        ready = [n for n in graph.nodes if n not in done and set(graph.rev_adj[n]) <= done]
        assert node_id == ready[0]
        assert graph.get_ancestors(node_id) <= done
        done.add(node_id)
    assert graph.validate_graph() == (True, None)


@pytest.mark.parametrize(
    ("edges", "cycle"),
    [
        ({"a": ["a"]}, "a -> a"),
        ({"a": ["c"], "b": ["a"], "c": ["b"], "d": ["c"], "e": []}, "a -> b -> c -> a"),
        ({"start": [], "out": ["q"], "p": ["start", "q"], "q": ["p"]}, "q -> p -> q"),
    ],
)
def test_a_cycle_is_named(edges: dict[str, list[str]], cycle: str) -> None:
    valid, message = graph_of(edges).validate_graph()
    assert (valid, message) == (False, f"graph 'g' has a cycle: {cycle}")


def test_a_missing_dependency_is_named_with_the_nearest_id() -> None:
    valid, message = graph_of({"rollout": [], "reward": ["rolout"]}).validate_graph()
    assert not valid
    assert message == (
        "graph 'g': node 'reward' depends on 'rolout', which does not exist; "
        "did you mean 'rollout'?"
    )


def test_wrong_use_of_a_graph_is_an_error() -> None:
    graph = graph_of(DIAMOND)
    with pytest.raises(ValueError, match="graph 'g' already has a node 'a'"):
        graph.add_node(Node("a", NodeType.COMPUTE))
    with pytest.raises(ValueError, match="'a' is not a Node"):
        graph.add_node("a")  # type: ignore[arg-type]
    for look_up in (graph.get_node, graph.get_ancestors):
        with pytest.raises(ValueError, match="has no node 'zz'"):
            look_up("zz")


# Pipeline


def test_a_pipeline_builds_a_graph() -> None:
    pipeline = Pipeline("p", "what it does")
    same = pipeline.add_node(
        "last", nothing, ["first"], node_type=NodeType.MODEL_TRAIN, only_forward_compute=True
    ).add_node("first", f"{__name__}:Tool.double", node_role=NodeRole.REWARD)
    assert same is pipeline
    graph = pipeline.build()
    assert graph.graph_id == "p"
    assert graph.get_topological_sort() == ["first", "last"]
    first, last = graph.nodes["first"], graph.nodes["last"]
    assert (first.node_type, first.node_role) == (NodeType.COMPUTE, NodeRole.REWARD)
    assert first.run(x=3) == 6
    assert last.only_forward_compute
    assert last.executable is nothing
    assert not last.is_async


def test_wrong_pipelines_name_themselves() -> None:
    with pytest.raises(ValueError, match="pipeline 'p' already has a node 'a'"):
        Pipeline("p").add_node("a", nothing).add_node("a", nothing)
    with pytest.raises(ValueError, match=r"pipeline 'p': .*'a' depends on 'b', which does not"):
        Pipeline("p").add_node("a", nothing, ["b"]).build()
    with pytest.raises(ValueError, match=r"pipeline 'p': .* cycle: a -> b -> a"):
        Pipeline("p").add_node("a", nothing, ["b"]).add_node("b", nothing, ["a"]).build()
    with pytest.raises(ValueError, match="pipeline 'p' has no nodes"):
        Pipeline("p").build()
    with pytest.raises(TypeError, match="only_foward_compute"):
        Pipeline("p").add_node("a", nothing, only_foward_compute=True)  # type: ignore[call-arg]


def test_a_nodes_life_as_the_guide_has_it() -> None:
    node = Node("n", NodeType.COMPUTE, func=later, dependencies=["a"], retry_limit=1)
    for _ in range(2):
        node.add_dependency("b")
    assert node.dependencies == ["a", "b"]
    for _ in range(2):
        node.remove_dependency("a")
    assert node.dependencies == ["b"]
    assert not node.is_ready({"a"}) and node.is_ready({"a", "b"})
    node.update_status(NodeStatus.RUNNING)
    assert not node.is_ready({"b"}) and not node.can_retry()
    node.update_status(NodeStatus.FAILED, "broken")
    assert node.error_info == "broken" and node.can_retry()
    node.increment_retry_count()
    assert not node.can_retry()
    node.update_status(NodeStatus.COMPLETED)
    assert node.error_info is None
    graph = TaskGraph("g")
    graph.add_node(node)
    graph.reset_nodes_status()
    assert (node.status, node.retries_done) == (NodeStatus.PENDING, 0)


def test_a_failed_node_knows_why() -> None:
    node = Node("n", NodeType.COMPUTE, func=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        node.run()
    assert node.status is NodeStatus.FAILED and "ZeroDivisionError" in str(node.error_info)


def test_exits_and_dependencies_of_a_diamond() -> None:
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    assert graph.validate_graph() == (True, None)
    assert ids(graph.get_exit_nodes()) == ["d"]
    assert ids(graph.get_dependencies("d")) == ["b", "c"] and graph.get_dependencies("a") == []


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([{"node_type": "COMPUTE"}], "node 'number 1' has no node_id"),
        ([{"node_id": "a"}], "node 'a' has no node_type"),
        ([{"node_id": "a", "node_type": "COMPUT"}], "COMPUT is none of .*did you mean 'COMPUTE'"),
        ([{"node_id": "a", "node_type": "CUSTOM", "node_role": "X"}], "node_role=X is none of"),
        ([{"node_id": "a", "node_type": "CUSTOM", "deps": []}], "cannot have the entry 'deps'"),
        ([{"node_id": "a", "node_type": "CUSTOM"}] * 2, "already has a node 'a'"),
        ([{"node_id": "a", "node_type": "CUSTOM", "dependencies": ["a"]}], "circular|cycle"),
    ],
)
def test_a_described_graph_names_what_is_wrong(nodes: list[dict], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TaskGraph.load_from_config("g", nodes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: [{node_id: a, node_type: COMPUTE}]", "has no dag_id"),
        ("dag_id: g", "has no nodes"),
        ("dag_id: g\nnodes: {a: 1}", "must be a list"),
        ("dag_id: g\nnode: []", "cannot have the entry 'node'; did you mean 'nodes'"),
        (
            "dag_id: g\nnodes: [{node_id: a, node_type: CUSTOM, config: [!Ref global_config.y]}]",
            r"!Ref global_config.y: there is no such value",
        ),
    ],
)
def test_a_file_of_a_graph_names_itself_and_what_is_wrong(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        pipeline_from_file(Config(), file=str(file))
    assert "graph.yaml" in str(raised.value)


def test_a_graph_in_json_is_read(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    nodes = [{"node_id": "a", "node_type": "compute", "executable_ref": f"{__name__}:nothing"}]
    file.write_text(json.dumps({"dag_id": "g", "nodes": nodes}))
    graph = pipeline_from_file(Config(), file=str(file))
    assert graph.graph_id == "g" and graph.nodes["a"].config == {"_node_id_": "a"}
