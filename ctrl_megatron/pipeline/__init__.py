"""Pipelines as task graphs, and the training loop that walks them.

The built-in pipelines load torch and Megatron; they are imported when they are asked for, so that
declaring a graph needs neither.
"""

from typing import TYPE_CHECKING, Any

from ctrl_megatron.pipeline.graph import (
    Node,
    NodePlace,
    NodeRole,
    NodeStatus,
    NodeType,
    Pipeline,
    StepReport,
    TaskGraph,
)

if TYPE_CHECKING:
    from ctrl_megatron.pipeline.ctrl import ctrl_pipeline
    from ctrl_megatron.pipeline.executor import NodeOutput
    from ctrl_megatron.pipeline.grpo import grpo_pipeline

__all__ = [
    "Node",
    "NodeOutput",
    "NodePlace",
    "NodeRole",
    "NodeStatus",
    "NodeType",
    "Pipeline",
    "StepReport",
    "TaskGraph",
    "ctrl_pipeline",
    "grpo_pipeline",
]


def __getattr__(name: str) -> Any:
    if name == "NodeOutput":
        from ctrl_megatron.pipeline.executor import NodeOutput

        return NodeOutput
    if name == "ctrl_pipeline":
        from ctrl_megatron.pipeline.ctrl import ctrl_pipeline

        return ctrl_pipeline
    if name == "grpo_pipeline":
        from ctrl_megatron.pipeline.grpo import grpo_pipeline

        return grpo_pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
