"""Declares a pipeline node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ctrl_megatron.pipeline.node import Node, NodePlace, NodeRole, NodeType
from ctrl_megatron.pipeline.task_graph import TaskGraph


class Pipeline:
    """``Pipeline(id).add_node(...).add_node(...).build()``."""

    def __init__(self, pipeline_id: str, description: str = "") -> None:
        self.pipeline_id, self.description = pipeline_id, description
        self._nodes: dict[str, Node] = {}

    def add_node(
        self,
        node_id: str,
        func: str | Callable[..., Any],
        deps: Sequence[str] | None = None,
        *,
        node_type: NodeType = NodeType.COMPUTE,
        node_role: NodeRole = NodeRole.DEFAULT,
        only_forward_compute: bool = False,
        config: dict[str, Any] | None = None,
        place: NodePlace = NodePlace.TRAIN,
    ) -> Pipeline:
        """Add a node that runs ``func`` (callable or import path) after ``deps``; chainable.

        ``deps`` may name nodes that are added later. Raises ValueError for an id that this pipeline
        has already and for what ``Node`` refuses.
        """
        if node_id in self._nodes:
            raise ValueError(f"pipeline {self.pipeline_id!r} already has a node {node_id!r}")
        self._nodes[node_id] = Node(
            node_id,
            node_type,
            node_role,
            only_forward_compute,
            deps,
            config,
            executable_ref=func if isinstance(func, str) else None,
            func=None if isinstance(func, str) else func,
            place=place,
        )
        return self

    def build(self) -> TaskGraph:
        """The validated graph; ValueError names the pipeline and what is wrong with it."""
        if not self._nodes:
            raise ValueError(f"pipeline {self.pipeline_id!r} has no nodes")
        graph = TaskGraph(self.pipeline_id)
        for node in self._nodes.values():
            graph.add_node(node)
        valid, reason = graph.validate_graph()
        if not valid:
            raise ValueError(f"pipeline {self.pipeline_id!r}: {reason}")
        return graph
