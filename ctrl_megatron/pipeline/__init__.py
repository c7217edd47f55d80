"""Pipelines as task graphs, and the training loop that walks them."""

from ctrl_megatron.pipeline.builder import Pipeline
from ctrl_megatron.pipeline.node import Node, NodePlace, NodeRole, NodeStatus, NodeType
from ctrl_megatron.pipeline.task_graph import TaskGraph

__all__ = ["Node", "NodePlace", "NodeRole", "NodeStatus", "NodeType", "Pipeline", "TaskGraph"]
