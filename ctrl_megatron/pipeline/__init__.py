"""Pipelines as task graphs, and the training loop that runs them.

The built-in pipelines and their parts load torch and Megatron; these names are imported when they
are first used, so that declaring a graph needs neither library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctrl_megatron.pipeline import node_fields, node_keys
from ctrl_megatron.pipeline.data_coordinator import DataCoordinator, SampleInfo
from ctrl_megatron.pipeline.graph import (
    Node,
    NodeOutput,
    Pipeline,
    StepReport,
    TaskGraph,
)
from ctrl_megatron.pipeline.graph_file import pipeline_from_file
from ctrl_megatron.pipeline.scheduler import (
    ProcessGroupManager,
    TaskScheduler,
    discover_and_split_parallel_paths,
)
from ctrl_megatron.pipeline.siirl_names import NodeRole, NodeStatus, NodeType

if TYPE_CHECKING:
    from ctrl_megatron.pipeline.batch import columns, make_batch, texts
    from ctrl_megatron.pipeline.chain import critiques_of, judge, read_critique, revise
    from ctrl_megatron.pipeline.ctrl import add_update_nodes, ctrl_pipeline
    from ctrl_megatron.pipeline.embodied import embodied_srpo_pipeline
    from ctrl_megatron.pipeline.episodes import (
        Environment,
        Episodes,
        Observation,
        environment_pipeline,
    )
    from ctrl_megatron.pipeline.grpo import (
        coupled_grpo_pipeline,
        dapo_pipeline,
        grpo_pipeline,
        ppo_pipeline,
    )
    from ctrl_megatron.pipeline.guide_worker import DAGWorker
    from ctrl_megatron.pipeline.performance import step_performance
    from ctrl_megatron.pipeline.repair import repair_pipeline
    from ctrl_megatron.pipeline.sampling import balance, draw_samples

__all__ = [
    "DAGWorker",
    "DataCoordinator",
    "Environment",
    "Episodes",
    "Node",
    "NodeOutput",
    "NodeRole",
    "NodeStatus",
    "NodeType",
    "Observation",
    "Pipeline",
    "ProcessGroupManager",
    "SampleInfo",
    "StepReport",
    "TaskGraph",
    "TaskScheduler",
    "add_update_nodes",
    "balance",
    "columns",
    "coupled_grpo_pipeline",
    "critiques_of",
    "ctrl_pipeline",
    "dapo_pipeline",
    "discover_and_split_parallel_paths",
    "draw_samples",
    "embodied_srpo_pipeline",
    "environment_pipeline",
    "grpo_pipeline",
    "judge",
    "make_batch",
    "node_fields",
    "node_keys",
    "pipeline_from_file",
    "ppo_pipeline",
    "read_critique",
    "repair_pipeline",
    "revise",
    "step_performance",
    "texts",
]


_LATER = {
    **dict.fromkeys(("add_update_nodes", "ctrl_pipeline"), "ctrl"),
    **dict.fromkeys(("columns", "make_batch", "texts"), "batch"),
    **dict.fromkeys(("critiques_of", "judge", "read_critique", "revise"), "chain"),
    **dict.fromkeys(("balance", "draw_samples"), "sampling"),
    **dict.fromkeys(
        ("coupled_grpo_pipeline", "dapo_pipeline", "grpo_pipeline", "ppo_pipeline"), "grpo"
    ),
    "step_performance": "performance",
    "DAGWorker": "guide_worker",
    **dict.fromkeys(("Environment", "Episodes", "Observation", "environment_pipeline"), "episodes"),
    "embodied_srpo_pipeline": "embodied",
    "repair_pipeline": "repair",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
