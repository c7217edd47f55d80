"""A step of three policies: two solvers that answer, and a critic of the first one's answers."""

from __future__ import annotations

from ctrl_megatron.config import Config
from ctrl_megatron.pipeline import (
    NodeType,
    Pipeline,
    StepReport,
    TaskGraph,
    add_update_nodes,
    balance,
)
from examples import two_agents


def build(config: Config) -> TaskGraph:
    report = StepReport(
        metrics=two_agents.metrics, examples=two_agents.examples, rewards=("critic",)
    )
    pipeline = Pipeline("three_policies", report=report)
    draws = {"node_type": NodeType.MODEL_INFERENCE}
    for number in (1, 2):
        name = "answer" if number == 1 else f"answer_{number}"
        pipeline.add_node(name, two_agents.answer, agent_group=number, **draws)
        pipeline.add_node(f"balance_{number}", balance, [name], agent_group=number, **draws)
        own = config.agents[number]
        add_update_nodes(
            pipeline, own, drawn=f"balance_{number}", judged=[name], agent_group=number
        )
    pipeline.add_node("criticise", two_agents.criticise, ["answer"], **draws)
    pipeline.add_node("revise", two_agents.revise_answers, ["criticise"], **draws)
    pipeline.add_node("sandbox", two_agents.judge_revisions, ["revise"])
    pipeline.add_node("balance", balance, ["revise"], **draws)
    add_update_nodes(pipeline, config.agents[0], drawn="balance", judged=["sandbox"])
    return pipeline.build()
