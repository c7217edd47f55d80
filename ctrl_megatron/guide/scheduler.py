"""siiRL's planning of graphs over GPUs, with the names of its guide (sections 4.5 and 4.6). Pure.

A run of this package places roles, not branches (``placement``), and walks branches in one graph.
These functions say what siiRL's scheduler would give to which GPU.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.node import MODEL_TYPES, Node
from ctrl_megatron.graph.siirl_names import NodeType

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "": 1.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMB]?)", re.IGNORECASE)


# Graphs


def discover_and_split_parallel_paths(src_task_graph: TaskGraph) -> list[TaskGraph]:
    """The graph's paths from an entry to an exit, each as a graph ``ID_split_NUMBER``; a graph that
    is one path is returned as it is, and an empty one gives no path.
    """
    return list(_split(src_task_graph))


def _split(graph: TaskGraph) -> Iterator[TaskGraph]:
    if not graph.nodes:
        return
    below = graph.adj
    paths = (path for entry in graph.get_entry_nodes() for path in _paths([entry.node_id], below))
    if max(map(len, below.values())) <= 1 and len(graph.get_entry_nodes()) == 1:
        yield graph
        return
    for number, path in enumerate(paths, 1):
        part = TaskGraph(f"{graph.graph_id}_split_{number}", graph.report)
        for place, node_id in enumerate(path):
            node = copy.copy(graph.nodes[node_id])
            node.dependencies = path[place - 1 : place] if place else []
            part.add_node(node)
        yield part


def _paths(begun: list[str], below: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    after = below[begun[-1]]
    if not after:
        yield begun
    for node_id in after:
        yield from _paths([*begun, node_id], below)


def get_all_ancestors(graph: TaskGraph, node_id: str) -> set[str]:
    """The node and all nodes that must have run before it; empty for an unknown one."""
    return {node_id, *graph.get_ancestors(node_id)} if node_id in graph.nodes else set()


def get_all_downstream_nodes_recursive(graph: TaskGraph, start_node_id: str) -> set[str]:
    """The node and all nodes that depend on it; empty for an unknown one."""
    return {other for other in graph.nodes if start_node_id in get_all_ancestors(graph, other)}


def estimate_graph_model_params(task_graph: TaskGraph) -> float:
    """Parameters of the nodes that run a model: their ``config["model_params"]``, a number or a
    text such as 70B, 500M, 100K; a node without it counts 0. A graph without such nodes has as many
    as it has nodes. ValueError for a text that is no size.
    """
    models = [node for node in task_graph.nodes.values() if node.node_type in MODEL_TYPES]
    return sum(map(_params, models)) if models else float(len(task_graph.nodes))


def _params(node: Node) -> float:
    given = node.config.get("model_params", 0)
    found = _SIZE.fullmatch(str(given))
    if found is None:
        raise ValueError(
            f"node {node.node_id!r}: model_params={given!r} is no size such as 70B, 500M or 100K"
        )
    return float(found[1]) * _UNITS[found[2].upper()]


# Workers


def apportion(sizes: Mapping[str, float], workers: int, strategy: str) -> dict[str, int]:
    """Workers of every task, at least one each. ``even`` differs by one at most, the first tasks by
    name having more; ``param_aware`` gives the rest in proportion to the sizes, by largest
    remainder, and is ``even`` where no task has a size. ValueError for another strategy and for
    more tasks than workers.
    """
    if strategy not in ("even", "param_aware"):
        raise ValueError(f"unknown strategy {strategy!r}; take even or param_aware")
    if len(sizes) > workers:
        raise ValueError(
            f"{len(sizes)} irreducible graphs need {len(sizes)} workers, and there are {workers}"
        )
    total, names = sum(sizes.values()), sorted(sizes)
    if strategy == "even" or total <= 0:
        return {name: (workers + len(sizes) - 1 - n) // len(sizes) for n, name in enumerate(names)}
    names.sort(key=lambda name: -sizes[name])
    shares = {name: max(1, int(workers * sizes[name] / total)) for name in names}
    while (left := workers - sum(shares.values())) != 0:
        # The farther below its proportion, the earlier a task gets one.
        gap = {name: workers * sizes[name] / total - shares[name] for name in names}
        if left > 0:
            shares[max(names, key=lambda name: gap[name])] += 1
        else:
            taken = (name for name in reversed(names) if shares[name] > 1)
            shares[min(taken, key=lambda name: gap[name])] -= 1
    return shares


class TaskScheduler:
    """Gives each GPU of equal machines one irreducible graph."""

    def __init__(self, num_physical_nodes: int, gpus_per_node: int) -> None:
        """ValueError for numbers below 1."""
        if num_physical_nodes < 1 or gpus_per_node < 1:
            raise ValueError(
                f"machines and GPUs must be positive, got {num_physical_nodes} and {gpus_per_node}"
            )
        self.num_physical_nodes, self.gpus_per_node = num_physical_nodes, gpus_per_node
        self.num_workers = num_physical_nodes * gpus_per_node
        self._reset()

    def _reset(self) -> None:
        self.worker_to_graph_assignment: dict[int, TaskGraph | None] = dict.fromkeys(
            range(self.num_workers)
        )
        self.node_active_worker_count: dict[int, int] = defaultdict(int)
        self.node_free_gpus = {
            machine: list(range(machine * self.gpus_per_node, (machine + 1) * self.gpus_per_node))
            for machine in range(self.num_physical_nodes)
        }

    def schedule_and_assign_tasks(
        self,
        original_task_graphs: Sequence[TaskGraph],
        apportion_strategy: str = "param_aware",
        consider_node_cohesion: bool = True,
        consider_node_load: bool = True,
        *,
        size_estimator: Callable[[TaskGraph], float] = estimate_graph_model_params,
    ) -> dict[int, TaskGraph | None]:
        """Worker -> its graph; None for every worker where there are no graphs.

        With cohesion a graph's workers share machines as far as these have room; with load the
        machine with the fewest workers comes first; then the lowest rank. ValueError as for
        ``apportion``, and for two graphs of one name.
        """
        self._reset()
        most = self.num_workers + 1
        parts = [part for graph in original_task_graphs for part in islice(_split(graph), most)]
        graphs = {part.graph_id: part for part in parts}
        if len(graphs) < len(parts):
            raise ValueError("two of the graphs have the same graph_id")
        if not graphs:
            return self.worker_to_graph_assignment
        sizes = {name: size_estimator(graph) for name, graph in graphs.items()}
        workers = apportion(sizes, self.num_workers, apportion_strategy)
        for name in sorted(graphs, key=lambda name: (-workers[name], -sizes[name])):
            used: set[int] = set()
            for _ in range(workers[name]):
                machine = min(
                    (one for one, free in self.node_free_gpus.items() if free),
                    key=lambda one: (
                        consider_node_cohesion and bool(used) and one not in used,
                        self.node_active_worker_count[one] if consider_node_load else 0,
                        one,
                    ),
                )
                used.add(machine)
                self.node_active_worker_count[machine] += 1
                rank = self.node_free_gpus[machine].pop(0)
                self.worker_to_graph_assignment[rank] = graphs[name]
        return self.worker_to_graph_assignment


class ProcessGroupManager:
    """The sets of ranks that run the same node: a group for each different set."""

    def __init__(
        self,
        total_num_workers: int,
        ranks_taskgraph_mapping: Mapping[int, TaskGraph | None],
        relevant_node_types_param: set[NodeType] | None = None,
    ) -> None:
        """``relevant_node_types_param`` are the types of nodes that communicate, by default those
        that run a model. ValueError for no workers, and for anything but a set of types.
        """
        if total_num_workers < 1:
            raise ValueError(f"the number of workers must be positive, is {total_num_workers}")
        types = relevant_node_types_param
        if types is None:
            types = {*MODEL_TYPES}
        if not isinstance(types, set) or not all(isinstance(one, NodeType) for one in types):
            raise ValueError(f"relevant_node_types_param must be a set of NodeType, is {types!r}")
        self.total_num_workers, self.relevant_node_types = total_num_workers, types
        self.ranks_taskgraph_mapping = dict(ranks_taskgraph_mapping)
        ranks: dict[str, set[int]] = defaultdict(set)
        nodes: dict[str, Node] = {}
        graphs: dict[str, TaskGraph] = {}
        for rank, graph in self.ranks_taskgraph_mapping.items():
            if graph is None:
                continue
            graphs.setdefault(graph.graph_id, graph)
            for node in graph.nodes.values():
                if node.node_type in types:
                    nodes.setdefault(node.node_id, node)
                    ranks[node.node_id].add(rank)
        self.node_ranks_mapping = {node_id: sorted(found) for node_id, found in ranks.items()}
        """Node -> its ranks, ascending."""
        different = sorted({tuple(found) for found in self.node_ranks_mapping.values()})
        names = {found: f"process_group_{n}" for n, found in enumerate(different, 1)}
        self.process_group_spec = {name: list(found) for found, name in names.items()}
        """Group -> its ranks; names count in the order of the ranks."""
        self.node_process_group_mapping = {
            node_id: names[tuple(found)] for node_id, found in self.node_ranks_mapping.items()
        }
        self.node_type_process_group_mapping: dict[str, set[str]] = defaultdict(set)
        for node_id, group in self.node_process_group_mapping.items():
            self.node_type_process_group_mapping[nodes[node_id].node_type.value].add(group)
        self.subgraph_node_type_pg_mapping: dict[str, dict[str, set[str]]] = {}
        """Graph -> type of node -> its groups."""
        for graph_id, graph in graphs.items():
            of_type: dict[str, set[str]] = defaultdict(set)
            for node_id in graph.nodes:
                if node_id in nodes:
                    kind = nodes[node_id].node_type.value
                    of_type[kind].add(self.node_process_group_mapping[node_id])
            if of_type:
                self.subgraph_node_type_pg_mapping[graph_id] = dict(of_type)

    def get_group_spec(self, group_name: str) -> dict[str, list[int]] | None:
        """``{"ranks": [...]}`` of a group; None for an unknown one."""
        ranks = self.process_group_spec.get(group_name)
        return None if ranks is None else {"ranks": ranks}

    def get_all_specs(self) -> dict[str, dict[str, list[int]]]:
        return {name: {"ranks": ranks} for name, ranks in self.process_group_spec.items()}
