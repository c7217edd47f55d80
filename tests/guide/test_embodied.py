"""The filter and the reward of episodes in a simulated world, and the example's world."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.algorithms.progress import progress_rewards
from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row, row_from_record
from ctrl_megatron.errors import UserError
from ctrl_megatron.guide.embodied import ProgressReward, embodied_srpo_pipeline, success_rate_within
from ctrl_megatron.steps.worker import DAGWorker
from examples.embodied import GridWorld, embed, problems

WON = [True, False, False, False, True, True]


def batch_of(won: list[bool], **fields: Any) -> TensorDict:
    batch = TensorDict({"success": torch.tensor(won), **fields}, batch_size=[len(won)])
    batch["uid"] = NonTensorStack(*"aabbcc"[: len(won)])
    batch["problem_id"] = NonTensorStack(*[f"row/{n}" for n in range(len(won))])
    batch["trajectory"] = NonTensorStack(*[f"{n},0" for n in range(len(won))])
    return batch


def test_groups_are_kept_by_their_share_of_successes() -> None:
    batch = batch_of(WON)
    assert success_rate_within(0.0, 1.0)(batch).all()
    assert success_rate_within(0.1, 0.9)(batch).tolist() == [True, True, False, False, False, False]
    assert success_rate_within(0.5, 1.0)(batch).tolist() == [True, True, False, False, True, True]


def vectors(trajectories: Any) -> torch.Tensor:
    return torch.tensor([[float(x) for x in text.split(",")] for text in trajectories])


@pytest.mark.parametrize("rank", [0, 1])
def test_rewards_are_those_of_all_data_ranks_together(rank: int) -> None:
    """The rows of a task on both ranks; each of them has a part of its successes."""
    halves = [batch_of(WON)[:2], batch_of(WON)[2:]]
    points = [
        (vectors(h["trajectory"]).double(), h["success"].tolist(), ["t"] * len(h)) for h in halves
    ]
    worker: Any = SimpleNamespace(
        groups=SimpleNamespace(
            gather_data_ranks=lambda own: points,
            place=SimpleNamespace(dp=rank),
            sum_over_data=lambda totals: totals,
        ),
        train=SimpleNamespace(row=lambda id_: Row(id=id_, problem_id="t")),
    )
    worker.global_means = lambda values: DAGWorker.global_means(worker, values)
    output = ProgressReward(vectors)(worker, halves[rank])
    whole = progress_rewards(torch.cat([p[0] for p in points]), torch.tensor(WON), ["t"] * 6)
    assert output.fields["score"].tolist() == pytest.approx(whole.split([2, 4])[rank].tolist())


def test_wrong_embeddings_and_fields_are_named() -> None:
    worker: Any = SimpleNamespace(train=SimpleNamespace(row=lambda id_: Row(id=id_)))
    with pytest.raises(UserError, match=r"dag\.options\.embedding: .* returned .*\[3\].* for 6"):
        ProgressReward(lambda texts: torch.zeros(3))(worker, batch_of(WON))
    bare = batch_of(WON).exclude("success")
    with pytest.raises(UserError, match=r"dag\.options\.environment: .* lack the field success"):
        success_rate_within(0.0, 1.0)(bare)


def test_the_graph_of_the_guide() -> None:
    given = {"environment": "examples.embodied:GridWorld", "embedding": "examples.embodied:embed"}
    config = load_config(None, [], "none")
    graph = embodied_srpo_pipeline(config, **given)
    assert graph.graph_id == "embodied_grpo_training_pipeline"
    order = graph.get_topological_sort()
    assert order[:4] == ["rollout_actor", "embodied_sampling", "data_rebalance", "compute_reward"]
    assert order[-2:] == ["actor_update", "report_weight_sync"]
    with pytest.raises(UserError, match=r"dag\.options\.lower and dag\.options\.upper: are 0\.9"):
        embodied_srpo_pipeline(config, **given, lower=0.9, upper=0.1)


def test_the_examples_world() -> None:
    record, lengths = problems(seed=1, count=5)[0], set[int]()
    row = row_from_record(record, "here", "prompt")

    async def act(actions: list[str]) -> Any:
        world = GridWorld(None, row, 0)
        assert await world.reset() == row.prompt
        for action in actions:
            seen = await world.step(action)
            lengths.add(embed([seen.fields["trajectory"]]).shape[1])
        await world.close()
        return seen

    x, y, goal_x, goal_y = (int(row[name]) for name in ("x", "y", "goal_x", "goal_y"))
    way = ["right" if goal_x > x else "left"] * abs(goal_x - x)
    way += ["up" if goal_y > y else "down"] * abs(goal_y - y)
    found = asyncio.run(act(way))
    assert found.done and found.score == 1.0 and found.fields["success"] is True
    lost = asyncio.run(act(["nonsense", *way[:-1]]))
    assert not lost.done and lost.score == 0.0 and len(lengths) == 1
    # An episode that comes near is nearer to a successful one than one that does not move.
    trajectories = [
        seen.fields["trajectory"] for seen in (found, lost, asyncio.run(act(["x"] * 5)))
    ]
    right, near, far = embed(trajectories)
    assert (right - near).norm() < (right - far).norm()
