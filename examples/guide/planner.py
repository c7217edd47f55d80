"""Sections 4.1 and 4.3 to 4.6 of siiRL's guide: a graph, its questions, and who runs what.

python -m examples.guide.planner
"""

from __future__ import annotations

from ctrl_megatron.pipeline import (
    Node,
    NodeRole,
    NodeStatus,
    NodeType,
    Pipeline,
    ProcessGroupManager,
    TaskGraph,
    TaskScheduler,
    discover_and_split_parallel_paths,
)


def two_rewards() -> TaskGraph:
    """Section 4.1: nodes by callable or by path, in a chain of calls."""
    return (
        Pipeline("two_rewards", "one draw, two judges")
        .add_node("draw", func="ctrl_megatron.pipeline:DAGWorker.generate", deps=[])
        .add_node("length", func=length, deps=["draw"])
        .add_node("style", func=length, deps=["draw"])
        .add_node("train", func=length, deps=["length", "style"], node_type=NodeType.MODEL_TRAIN)
        .build()
    )


def length(batch: object) -> None:
    """Stands for work on the batch."""


def one_node() -> Node:
    """Section 4.3: every argument of a node."""
    return Node(
        node_id="rollout_actor",
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT,
        only_forward_compute=False,
        agent_group=0,
        dependencies=[],
        config={"model_params": "7B"},
        executable_ref="ctrl_megatron.pipeline:DAGWorker.generate",
        filter_plugin=None,
        agent_options=None,
        retry_limit=0,
    )


def described(graph: TaskGraph) -> str:
    """Section 4.4: what a graph answers."""
    valid, reason = graph.validate_graph()
    assert valid and reason is None
    assert all(node.status is NodeStatus.PENDING for node in graph.nodes.values())
    order = " ".join(graph.get_topological_sort())
    entries = ", ".join(node.node_id for node in graph.get_entry_nodes())
    after = ", ".join(node.node_id for node in graph.get_downstream_nodes("draw"))
    return f"{order}; begins with {entries}; after draw: {after}; {graph.adj} {graph.rev_adj}"


def planned(graph: TaskGraph) -> dict[int, str]:
    """Sections 4.5 and 4.6: worker -> the graph that siiRL's scheduler would give it."""
    scheduler = TaskScheduler(num_physical_nodes=2, gpus_per_node=2)
    given = scheduler.schedule_and_assign_tasks(
        [graph],
        apportion_strategy="even",
        consider_node_cohesion=True,
        consider_node_load=True,
    )
    groups = ProcessGroupManager(scheduler.num_workers, given, {NodeType.MODEL_TRAIN})
    assert groups.get_all_specs()
    paths = {path.graph_id for path in discover_and_split_parallel_paths(graph)}
    assert {one.graph_id for one in given.values() if one} == paths
    return {worker: one.graph_id for worker, one in given.items() if one}


if __name__ == "__main__":
    print(one_node())
    print(described(two_rewards()))
    print(planned(two_rewards()))
