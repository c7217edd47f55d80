"""Pipelines as task graphs, and the training loop that walks them.

The built-in pipelines load torch and Megatron; they are imported when they are asked for, so that
declaring a graph needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctrl_megatron.pipeline.graph import (
    Node,
    NodeOutput,
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


_LATER = {"ctrl_pipeline": "ctrl", "grpo_pipeline": "grpo"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
