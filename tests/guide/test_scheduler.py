"""Splitting of graphs, workers of each part, and groups of ranks, as siiRL's scheduler has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.guide.scheduler import (
    ProcessGroupManager,
    TaskScheduler,
    apportion,
    discover_and_split_parallel_paths,
    estimate_graph_model_params,
    get_all_ancestors,
    get_all_downstream_nodes_recursive,
)
from ctrl_megatron.pipeline import Node, NodeType, TaskGraph

TRAIN = NodeType.MODEL_TRAIN


def graph(name: str, edges: Mapping[str, str], kind: NodeType = NodeType.COMPUTE) -> TaskGraph:
    """``edges``: node -> the letters of its dependencies, separated by blanks."""
    made = TaskGraph(name)
    for node_id, after in edges.items():
        made.add_node(Node(node_id, kind, dependencies=after.split()))
    return made


def sized(name: str, params: Any) -> TaskGraph:
    made = TaskGraph(name)
    made.add_node(Node(f"{name}_train", TRAIN, config={"model_params": params}))
    return made


@pytest.mark.parametrize(
    ("edges", "paths"),
    [
        ({}, []),
        ({"A": "", "B": "A", "C": "B"}, ["ABC"]),
        ({"A": "", "B": "A", "C": "A", "D": "B C"}, ["ABD", "ACD"]),
        ({"S": "", "A": "S", "B": "S"}, ["SA", "SB"]),
        ({"S": "", "A": "S", "B": "S", "C": "S", "E": "A B C"}, ["SAE", "SBE", "SCE"]),
        ({"A": "", "B": "A", "E": "A", "F": "E", "C": "B F", "D": "C"}, ["ABCD", "AEFCD"]),
        (
            {"X": "", "Y": "", "M": "X Y", "P": "", "Z": "M P", "J": "Z", "K": "Z"},
            ["XMZJ", "XMZK", "YMZJ", "YMZK", "PZJ", "PZK"],
        ),
    ],
)
def test_a_graph_is_split_into_its_paths(edges: dict[str, str], paths: list[str]) -> None:
    parts = discover_and_split_parallel_paths(whole := graph("g", edges))
    assert ["".join(part.get_topological_sort()) for part in parts] == paths
    names = ["g"] if len(paths) == 1 else [f"g_split_{n}" for n in range(1, len(paths) + 1)]
    assert [part.graph_id for part in parts] == names
    assert {node: list(of.dependencies) for node, of in whole.nodes.items()} == {
        node: after.split() for node, after in edges.items()
    }


def test_relatives_include_the_node_itself() -> None:
    diamond = graph("g", {"A": "", "B": "A", "C": "A", "D": "B C"})
    assert get_all_ancestors(diamond, "D") == {*"ABCD"} and get_all_ancestors(diamond, "x") == set()
    assert get_all_downstream_nodes_recursive(diamond, "B") == {"B", "D"}
    assert get_all_downstream_nodes_recursive(diamond, "x") == set()


def test_sizes_are_those_of_models_or_the_number_of_nodes() -> None:
    assert estimate_graph_model_params(sized("a", "70B")) == 70e9
    assert estimate_graph_model_params(sized("a", "1.5m")) == 1.5e6
    assert estimate_graph_model_params(sized("a", 3)) == 3
    assert estimate_graph_model_params(graph("g", {"A": "", "B": "A"})) == 2
    assert estimate_graph_model_params(graph("g", {"A": "", "B": "A"}, TRAIN)) == 0
    with pytest.raises(ValueError, match=r"'a_train': model_params='big' is no size"):
        estimate_graph_model_params(sized("a", "big"))


@pytest.mark.parametrize(
    ("sizes", "workers", "strategy", "found"),
    [
        ({"a": 300, "b": 200, "c": 100}, 10, "param_aware", {"a": 5, "b": 3, "c": 2}),
        ({"a": 300, "b": 200, "c": 100}, 10, "even", {"a": 4, "b": 3, "c": 3}),
        ({"a": 1000, "b": 1, "c": 1}, 4, "param_aware", {"a": 2, "b": 1, "c": 1}),
        ({"b": 0, "a": 0}, 3, "param_aware", {"a": 2, "b": 1}),
    ],
)
def test_workers_are_shared_in_proportion_or_evenly(
    sizes: dict[str, float], workers: int, strategy: str, found: dict[str, int]
) -> None:
    assert apportion(sizes, workers, strategy) == found


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    st.integers(0, 40),
    st.sampled_from(["even", "param_aware"]),
)
def test_every_worker_is_given_and_every_task_has_one(
    sizes: list[int], more: int, strategy: str
) -> None:
    named = {str(n): float(size) for n, size in enumerate(sizes)}
    found = apportion(named, len(sizes) + more, strategy)
    assert sum(found.values()) == len(sizes) + more and min(found.values()) >= 1
    if strategy == "param_aware":
        larger = sorted(named, key=lambda name: -named[name])
        assert sum(sizes) == 0 or all(found[a] >= found[b] for a, b in pairwise(larger))


def assigned(scheduler: TaskScheduler, graphs: Sequence[TaskGraph], **how: Any) -> list[str]:
    found = scheduler.schedule_and_assign_tasks(graphs, **how)
    assert list(found) == list(range(scheduler.num_workers))
    return ["-" if part is None else part.graph_id for part in found.values()]


def test_graphs_get_workers_of_one_machine_and_the_emptiest_first() -> None:
    assert assigned(TaskScheduler(2, 2), []) == ["-"] * 4
    two = [graph("a", {"A": ""}), graph("b", {"B": ""})]
    assert assigned(TaskScheduler(2, 2), two, apportion_strategy="even") == ["a", "a", "b", "b"]
    assert assigned(TaskScheduler(2, 1), two) == ["a", "b"]
    branches = graph("g", {"A": "", "B": "A", "E": "A", "F": "E", "C": "B F", "D": "C"})
    found = assigned(TaskScheduler(1, 4), [branches])
    assert sorted(found) == ["g_split_1"] * 2 + ["g_split_2"] * 2
    apart = assigned(TaskScheduler(2, 2), two, consider_node_cohesion=False)
    assert apart == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("machines", "gpus", "how", "said"),
    [
        (1, 1, {}, "2 irreducible graphs need 2 workers, and there are 1"),
        (1, 2, {"apportion_strategy": "fair"}, "unknown strategy 'fair'"),
        (0, 2, {}, "must be positive"),
        (2, 0, {}, "must be positive"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    machines: int, gpus: int, how: dict[str, Any], said: str
) -> None:
    two = [graph("a", {"A": ""}), graph("b", {"B": ""})]
    with pytest.raises(ValueError, match=said):
        TaskScheduler(machines, gpus).schedule_and_assign_tasks(two, **how)


def test_nodes_with_the_same_ranks_share_a_group() -> None:
    def of(name: str, *nodes: str) -> TaskGraph:
        return graph(name, dict.fromkeys(nodes, ""), TRAIN)

    one, other = of("one", "shared", "left"), of("other", "shared", "right")
    other.add_node(Node("host", NodeType.COMPUTE))
    manager = ProcessGroupManager(5, {0: one, 1: one, 2: other, 3: other, 4: None})
    assert manager.node_ranks_mapping == {"shared": [0, 1, 2, 3], "left": [0, 1], "right": [2, 3]}
    spec = {"process_group_1": [0, 1], "process_group_2": [0, 1, 2, 3], "process_group_3": [2, 3]}
    assert manager.process_group_spec == spec
    assert manager.node_process_group_mapping["right"] == "process_group_3"
    assert manager.node_type_process_group_mapping["MODEL_TRAIN"] == {*spec}
    assert manager.subgraph_node_type_pg_mapping["one"]["MODEL_TRAIN"] == {
        "process_group_1",
        "process_group_2",
    }
    assert manager.get_group_spec("process_group_1") == {"ranks": [0, 1]}
    assert manager.get_group_spec("other") is None and len(manager.get_all_specs()) == 3
    hosts = ProcessGroupManager(4, {2: other}, {NodeType.COMPUTE})
    assert hosts.node_ranks_mapping == {"host": [2]}


def test_16_workers_with_shared_nodes_make_a_group_of_each_set_in_order() -> None:
    graphs = [
        graph(f"g{n}", {"all": "", f"pair{n // 2}": "", f"own{n}": ""}, TRAIN) for n in range(4)
    ]
    manager = ProcessGroupManager(16, {rank: graphs[rank // 4] for rank in range(16)})
    found = list(manager.process_group_spec.values())
    assert len(found) == 7 and found == sorted(found)
    assert [*range(16)] in found and [*range(8, 16)] in found and [12, 13, 14, 15] in found


@pytest.mark.parametrize("types", [[TRAIN], {"MODEL_TRAIN"}])
def test_wrong_types_of_nodes_are_refused(types: Any) -> None:
    with pytest.raises(ValueError, match="set of NodeType"):
        ProcessGroupManager(1, {}, types)
    with pytest.raises(ValueError, match="must be positive"):
        ProcessGroupManager(0, {})
