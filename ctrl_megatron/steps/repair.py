"""Code repair: the actor writes a program, reads which tests it fails, and writes it again.

The environment of an episode is the sandbox. Every answer is judged as ``reward.reward_funcs`` say,
and the last one's reward is the episode's score.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.config import Config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import node
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.prompts.messages import repair_request
from ctrl_megatron.rewards import RewardItem
from ctrl_megatron.rewards.shaping import OVERLONG
from ctrl_megatron.steps.episodes import Episodes, Observation, episode_graph
from ctrl_megatron.steps.sample import outcomes_of
from ctrl_megatron.steps.worker import RolloutWorker
from ctrl_megatron.types import Message


class CodeRepair:
    """The environment of one episode about ``row``, whose tests judge every answer.

    An episode is over when a program passes all tests, and when the sandbox fails, which leaves it
    without a score.
    """

    def __init__(self, worker: RolloutWorker, row: Row, seed: int) -> None:
        self._worker, self._row = worker, row

    async def reset(self) -> Sequence[Message]:
        return self._row.prompt

    async def step(self, action: str) -> Observation:
        """Judge the program in ``action``: its rewards, whether the episode is over (all tests
        pass, or the sandbox failed), and the request for another one, which says how many tests
        fail."""
        assert self._worker.rewards is not None
        items = [RewardItem(text=action, row=self._row)]
        (outcome,) = await self._worker.rewards.first_judge_outcomes(items)
        # The verdict is in the cache, so no program runs again.
        scores = await self._worker.score(items)
        (earned,), verdict = outcomes_of(scores), outcome.verdict
        return Observation(
            text=repair_request(verdict),
            done=bool(outcome.error) or (verdict is not None and verdict.accepted),
            score=scores.totals[0],
            fields={
                **{f"reward/{name}": reward for name, reward in earned.rewards.items()},
                "pass_rate": outcome.pass_rate,
            },
        )

    async def close(self) -> None:
        """Nothing."""


def repair_pipeline(config: Config, *, turns: int = 3, turn_tokens: int | None = None) -> TaskGraph:
    """GRPO or PPO on episodes of up to ``turns`` programs, each after the number of tests that the
    one before fails. ``turn_tokens`` is the most tokens of an answer; the whole episode with its
    replies has at most ``data.max_response_length``.

    UserError for a reward of the response's length.
    """
    by_length = [name for name in config.reward.reward_funcs if name in OVERLONG]
    if by_length or config.reward.overlong_buffer.enable:
        raise UserError(
            "repair_pipeline rewards programs, not the length of a response",
            key=f"reward.reward_funcs={[*config.reward.reward_funcs]}",
            remedy="name code, and set reward.overlong_buffer.enable=false",
        )
    make = node(writes=("pass_rate",), uses=("rewards",))(CodeRepair)
    episodes = Episodes(make=make, turns=turns, turn_tokens=turn_tokens)
    return episode_graph("repair_pipeline", config, episodes)
