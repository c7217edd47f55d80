"""Section 10.3 of siiRL's guide: settings of one's own are options of the pipeline.

The guide adds fields and groups to siiRL's classes of arguments, in five steps. Here they are
parameters of the function that builds the pipeline, with their types and defaults, and
``options.yaml`` sets them in ``dag.options``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tensordict import TensorDict

from ctrl_megatron.pipeline import NodeOutput, Pipeline, TaskGraph


def build(
    *,
    max_retry_count: int = 3,
    enable_feature: bool = False,
    feature_threshold: float = 0.5,
    feature_config: dict[str, Any] | None = None,
) -> TaskGraph:
    """A graph of one node that reports its settings."""
    settings = {
        "max_retry_count": max_retry_count,
        "threshold": feature_threshold if enable_feature else None,
        "entries": len(feature_config or {}),
    }
    return Pipeline("options").add_node("my_function", partial(my_function, settings)).build()


def my_function(settings: dict[str, Any], batch: TensorDict) -> NodeOutput:
    """The settings that are numbers, as metrics."""
    known = {f"guide/{name}": float(value) for name, value in settings.items() if value is not None}
    return NodeOutput(metrics=known)
