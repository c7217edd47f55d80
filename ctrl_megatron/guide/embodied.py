"""Episodes of an agent that acts in a simulated world, under the name of siiRL's guide.

Source: SRPO (arXiv 2511.15605). A failed episode earns a reward for its distance to the successful
episodes of its task, measured between embeddings of what happened in them
(``algorithms.progress``), and the update is GRPO's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms.progress import progress_rewards
from ctrl_megatron.config import Config
from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.errors import UserError, convert_user_code_errors, describe_location
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import NodeFunction, as_node_function, node
from ctrl_megatron.graph.graph import Pipeline, TaskGraph
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole, NodeType
from ctrl_megatron.steps.batch import data_rows_of
from ctrl_megatron.steps.ctrl import DRAWS, add_update_nodes, place_scores, token_rewards
from ctrl_megatron.steps.episodes import Episodes, episodes_report, unsupported_setting_error
from ctrl_megatron.steps.guide_worker import chain_node_functions
from ctrl_megatron.steps.sampling import balance
from ctrl_megatron.steps.worker import DAGWorker

SUCCESS, TRAJECTORY = "success", "trajectory"
"""Fields of the last observation of every episode: whether it reached its goal, and a text from
which the embedding is computed."""
Embedding = Callable[[Sequence[str]], torch.Tensor]
"""Takes n trajectories; returns (n, D) floating, one vector for each."""


def embodied_srpo_pipeline(
    config: Config,
    *,
    environment: str,
    embedding: str,
    turns: int = 16,
    turn_tokens: int | None = None,
    lower: float = 0.0,
    upper: float = 1.0,
) -> TaskGraph:
    """Episodes in the environment, a filter, rewards of progress, and GRPO's update.

    ``environment`` is the import path of an ``episodes.EnvironmentMaker`` whose observations have
    the fields ``success`` (bool) and ``trajectory`` (text), ``embedding`` that of an ``Embedding``.
    Only groups whose share of successes is from ``lower`` to ``upper`` are trained on. ``turns``
    and ``turn_tokens`` as in ``environment_pipeline``.
    """
    if not 0 <= lower <= upper <= 1:
        raise UserError(
            f"are {lower:g} and {upper:g}",
            key="dag.options.lower and dag.options.upper",
            remedy="give shares of successes from 0 to 1, the smaller one first",
        )
    make = import_callable(environment, "dag.options.environment")
    episodes = Episodes(
        make=as_node_function(make),
        turns=turns,
        turn_tokens=turn_tokens,
        fields=(SUCCESS, TRAJECTORY),
    )
    if error := unsupported_setting_error(config, episodes):
        raise error
    pipeline = Pipeline(
        "embodied_grpo_training_pipeline",
        "act in a world, filter, reward progress, update",
        report=episodes_report(config, episodes),
    )
    add, embed = pipeline.add_node, import_callable(embedding, "dag.options.embedding")
    reward = node(writes=("score",))(ProgressReward(embed))
    add("rollout_actor", episodes.node(), **DRAWS)
    add(
        "embodied_sampling",
        success_rate,
        ["rollout_actor"],
        filter_plugin=success_rate_within(lower, upper),
    )
    add("data_rebalance", balance, ["embodied_sampling"], node_type=NodeType.COMPUTE)
    add("compute_reward", reward, ["data_rebalance"], node_role=NodeRole.REWARD)
    add_update_nodes(pipeline, config, drawn="compute_reward", judged=["compute_reward"])
    return pipeline.build()


def success_rate_within(lower: float, upper: float) -> Callable[[TensorDict], torch.Tensor]:
    """A filter that keeps the groups whose share of successes is from ``lower`` to ``upper``."""

    def keeps(batch: TensorDict) -> torch.Tensor:
        won = dict[str, list[bool]]()
        for uid, success in zip(texts(batch["uid"]), _successes(batch), strict=True):
            won.setdefault(uid, []).append(success)
        kept = {uid for uid, own in won.items() if lower <= sum(own) / len(own) <= upper}
        return torch.tensor([uid in kept for uid in texts(batch["uid"])])

    return keeps


def _successes(batch: TensorDict) -> list[bool]:
    """The field of the environment. UserError where the batch has none."""
    if not {SUCCESS, TRAJECTORY} <= {str(name) for name in batch.keys()}:  # noqa: SIM118
        raise UserError(
            f"the environment's observations lack the field {SUCCESS} or {TRAJECTORY}",
            key="dag.options.environment",
            remedy="write both into Observation.fields",
        )
    return batch[SUCCESS].bool().tolist()


@node(writes=("response_mask",))
def success_rate(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Reports the share of successful episodes, before the filter. Collective."""
    won = torch.tensor(_successes(batch)).float()
    return NodeOutput(metrics=worker.global_means({"embodied/success_rate": won}))


def progress_reward(embedding: Embedding) -> NodeFunction[..., NodeOutput]:
    """A node that does the work of ``ProgressReward`` and puts the rewards on their tokens, as the
    guide's ``compute_reward`` does."""
    progress = node(writes=("score",))(ProgressReward(embedding))
    return chain_node_functions(progress, place_scores, token_rewards)


class ProgressReward:
    """The node that writes ``score`` (B,) float32: ``algorithms.progress_rewards``, in which rows
    with the same ``problem_id`` column are a task, over the episodes of all data ranks.
    """

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding

    def __call__(self, worker: DAGWorker, batch: TensorDict) -> NodeOutput:
        """Collective. UserError for an embedding of another shape."""
        own = (
            self._embedded(texts(batch[TRAJECTORY])),
            _successes(batch),
            self._tasks(worker, batch),
        )
        parts = worker.groups.gather_data_ranks(own)
        points, won = torch.cat([part[0] for part in parts]), [s for part in parts for s in part[1]]
        success, tasks = torch.tensor(won), [task for part in parts for task in part[2]]
        rewards = progress_rewards(points, success, tasks)
        first = sum(len(part[1]) for part in parts[: worker.groups.place.dp])
        mine = rewards[first : first + len(batch)].float()
        failed = mine[~torch.tensor(own[1])]
        metrics = worker.global_means({"embodied/progress": failed})
        return NodeOutput(fields={"score": mine}, metrics=metrics)

    def _embedded(self, trajectories: list[str]) -> torch.Tensor:
        who = f"the embedding {describe_location(self._embedding)}"
        with convert_user_code_errors(f"{who} failed"):
            embeddings = self._embedding(trajectories)
        if getattr(embeddings, "shape", (0,))[:1] != (len(trajectories),) or embeddings.dim() != 2:
            raise UserError(
                f"{who} returned {getattr(embeddings, 'shape', type(embeddings).__name__)} for "
                f"{len(trajectories)} trajectories",
                key="dag.options.embedding",
                remedy="return a tensor with one row for each",
            )
        return embeddings.double()

    @staticmethod
    def _tasks(worker: DAGWorker, batch: TensorDict) -> list[str]:
        return [row.problem_id for row in data_rows_of(worker.train, batch)]
