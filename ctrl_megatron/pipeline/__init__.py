"""The names that a user's pipeline imports; ``graph``, ``steps`` and ``guide`` define them.

The built-in pipelines and their parts load torch and Megatron; these names are imported when they
are first used, so that declaring a graph needs neither library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctrl_megatron.graph.declarations import always, node
from ctrl_megatron.graph.graph import Pipeline, StepReport, TaskGraph
from ctrl_megatron.graph.node import Node, NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole, NodeStatus, NodeType
from ctrl_megatron.guide.data_coordinator import DataCoordinator, SampleInfo
from ctrl_megatron.guide.graph_file import pipeline_from_file
from ctrl_megatron.guide.scheduler import (
    ProcessGroupManager,
    TaskScheduler,
    discover_and_split_parallel_paths,
)

if TYPE_CHECKING:
    from ctrl_megatron.graph.columns import texts
    from ctrl_megatron.guide.embodied import (
        embodied_srpo_pipeline,
        progress_reward,
        success_rate,
        success_rate_within,
    )
    from ctrl_megatron.steps.batch import (
        fields_from_rows,
        fields_of_samples,
        make_batch,
        samples_of,
    )
    from ctrl_megatron.steps.chain import judge, revise, with_decoded_text
    from ctrl_megatron.steps.co_train import co_train_pipeline
    from ctrl_megatron.steps.ctrl import add_update_nodes, ctrl_pipeline
    from ctrl_megatron.steps.episodes import (
        Environment,
        Episodes,
        Observation,
        environment_pipeline,
    )
    from ctrl_megatron.steps.grpo import (
        coupled_grpo_pipeline,
        dapo_pipeline,
        grpo_pipeline,
        ppo_pipeline,
    )
    from ctrl_megatron.steps.guide_worker import DAGWorker
    from ctrl_megatron.steps.performance import step_performance
    from ctrl_megatron.steps.repair import repair_pipeline
    from ctrl_megatron.steps.rounds import ctrl_rounds_pipeline
    from ctrl_megatron.steps.sample import (
        Sample,
        critique_columns,
        revision_columns,
        reward_columns,
        verdict_columns,
    )
    from ctrl_megatron.steps.sampling import balance, draw_samples, gather_samples

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
    "Sample",
    "SampleInfo",
    "StepReport",
    "TaskGraph",
    "TaskScheduler",
    "add_update_nodes",
    "always",
    "balance",
    "co_train_pipeline",
    "coupled_grpo_pipeline",
    "critique_columns",
    "ctrl_pipeline",
    "ctrl_rounds_pipeline",
    "dapo_pipeline",
    "discover_and_split_parallel_paths",
    "draw_samples",
    "embodied_srpo_pipeline",
    "environment_pipeline",
    "fields_from_rows",
    "fields_of_samples",
    "gather_samples",
    "grpo_pipeline",
    "judge",
    "make_batch",
    "node",
    "pipeline_from_file",
    "ppo_pipeline",
    "progress_reward",
    "repair_pipeline",
    "revise",
    "revision_columns",
    "reward_columns",
    "samples_of",
    "step_performance",
    "success_rate",
    "success_rate_within",
    "texts",
    "verdict_columns",
    "with_decoded_text",
]


_LATER = {
    "texts": "graph.columns",
    **dict.fromkeys(
        ("fields_from_rows", "fields_of_samples", "make_batch", "samples_of"), "steps.batch"
    ),
    **dict.fromkeys(
        ("Sample", "critique_columns", "revision_columns", "reward_columns", "verdict_columns"),
        "steps.sample",
    ),
    **dict.fromkeys(("add_update_nodes", "ctrl_pipeline"), "steps.ctrl"),
    **dict.fromkeys(("judge", "revise", "with_decoded_text"), "steps.chain"),
    **dict.fromkeys(("balance", "draw_samples", "gather_samples"), "steps.sampling"),
    **dict.fromkeys(
        ("coupled_grpo_pipeline", "dapo_pipeline", "grpo_pipeline", "ppo_pipeline"), "steps.grpo"
    ),
    "step_performance": "steps.performance",
    "DAGWorker": "steps.guide_worker",
    **dict.fromkeys(
        ("Environment", "Episodes", "Observation", "environment_pipeline"), "steps.episodes"
    ),
    **dict.fromkeys(
        ("embodied_srpo_pipeline", "progress_reward", "success_rate", "success_rate_within"),
        "guide.embodied",
    ),
    "co_train_pipeline": "steps.co_train",
    "repair_pipeline": "steps.repair",
    "ctrl_rounds_pipeline": "steps.rounds",
}
"""Name -> the module of this package that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ctrl_megatron.{_LATER[name]}"), name)
