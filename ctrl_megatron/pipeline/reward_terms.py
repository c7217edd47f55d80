"""What the configured reward functions say of a batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from ctrl_megatron.pipeline.worker import DAGWorker, texts
from ctrl_megatron.rewards import RewardItem, Scores
from ctrl_megatron.rewards.reward_sum import Rewards


def reward_parts(worker: DAGWorker, batch: TensorDict) -> dict[str, Rewards]:
    """Each function's rewards, without its weight. Collective.

    A function's text is the revision, its length that of the critique in tokens.
    """
    lengths = [int(n) for n in batch["response_mask"].sum(dim=1)]
    critiques, revisions = texts(batch["critique"]), texts(batch["revision"])
    outcomes: list[Any] = list(texts(batch["outcome"]))

    async def work() -> Scores:
        assert worker.rewards is not None
        _, rows = worker.reward.parse_query(texts(batch["problem_id"]))
        items = [
            RewardItem(text=revision, critique=critique, row=row, length=length, outcome=outcome)
            for revision, critique, row, length, outcome in zip(
                revisions, critiques, rows, lengths, outcomes, strict=True
            )
        ]
        return await worker.rewards.score(items)

    return worker.ask(work).parts
