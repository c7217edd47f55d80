"""A sandbox over HTTP that fails: no program that it did not judge earns a 0."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest
from aiohttp import web
from reward_samples import CORRECT, block, function_row, stdio_row
from scripted_sandbox import Fault, Sandbox, always, serving, three_of_ten

from ctrl_megatron.rewards import JudgeCounts, RewardItem, RewardModelForCritic, RewardSum, Scores
from ctrl_megatron.rewards.grading import RetryPolicy
from ctrl_megatron.sandbox import SandboxClient

ROW = function_row()
NONE = "It looks fine."


def score(
    service: Sandbox, *, patience: RetryPolicy | None = None, programs: int = 20
) -> tuple[Scores, JudgeCounts]:
    """The rewards of twenty critiques of ``programs`` different programs, and of one without a
    judgment.
    """
    texts = [(CORRECT, n % programs) for n in range(20)] + [(NONE, 20)]
    items = [RewardItem(text=block(f"x = {n}"), critique=c, row=ROW) for c, n in texts]

    async def run() -> tuple[Scores, JudgeCounts]:
        async with SandboxClient(address, attempts=3, backoff=0.01, timeout=10) as client:
            tokenizer: Any = None
            critic = RewardModelForCritic(
                [ROW], tokenizer, sandbox=client, show_progress=False, patience=patience
            )
            total = RewardSum({"critic": critic})
            return await total.score(items), total.pop_judge_counts()

    with serving(service) as address:
        return asyncio.run(run())


@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_dead_service_leaves_every_reward_unknown(fault: Fault) -> None:
    service = Sandbox(fault, always)
    scores, judging = score(service, patience=RetryPolicy(retries=1, pause=0.01))
    assert scores.totals == [None] * 20 + [0.0]
    assert (judging.asked, judging.failed) == (20, 20) and judging.error
    # Verdicts that are missing are asked for once in a round, all else as often as the client does.
    assert service.requests == 20 * 2 * (1 if fault == "empty" else 3)


@pytest.mark.parametrize("fault", get_args(Fault))
def test_a_service_that_fails_three_of_ten_requests_is_asked_again(fault: Fault) -> None:
    patience = RetryPolicy(retries=5, pause=0.01)
    scores, judging = score(Sandbox(fault, three_of_ten), patience=patience)
    assert scores.totals == [1.0] * 20 + [0.0]
    assert (judging.asked, judging.failed) == (20, 0)


def test_equal_programs_are_asked_for_and_fail_once() -> None:
    for fails in (always, lambda number: False):
        scores, judging = score(Sandbox("empty", fails), programs=4)
        assert scores.totals == [None if fails is always else 1.0] * 20 + [0.0]
        assert (judging.asked, judging.cached) == (4, 16)
        assert judging.failed == (4 if fails is always else 0)


def test_what_stays_unknown_is_no_zero() -> None:
    lost = Sandbox("empty", lambda number: number < 6)
    scores, judging = score(lost, patience=RetryPolicy(share=0.5, retries=5))
    assert sorted(map(str, scores.totals[:20])) == sorted(["None"] * 6 + ["1.0"] * 14)
    assert scores.totals[20] == 0.0
    assert (judging.asked, judging.failed) == (20, 6)
    assert "0 verdict(s)" in judging.error


class Refusing(Sandbox):
    """Refuses every program on asserts."""

    async def submit(self, request: web.Request) -> web.Response:
        if "test_list" not in (await request.json())["config"]["provided_data"]:
            return await super().submit(request)
        self.requests += 1
        return web.json_response({"detail": "the checker fails on the answer"}, status=400)


def test_a_row_that_the_service_refuses_has_no_reward_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is the row's fault: the others keep theirs, and it does not count as the service's."""
    items = [
        RewardItem(text=block(f"x = {n}"), critique=CORRECT, row=row)
        for n, row in enumerate((ROW, stdio_row(), ROW))
    ]

    async def run(address: str) -> tuple[Scores, JudgeCounts]:
        async with SandboxClient(address, attempts=1) as client:
            critic = RewardModelForCritic([ROW, stdio_row()], None, sandbox=client)
            total = RewardSum({"critic": critic})
            return await total.score(items), total.pop_judge_counts()

    service = Refusing()
    with serving(service) as address:
        scores, judging = asyncio.run(run(address))
    assert scores.totals == [None, 1.0, None]
    assert (judging.asked, judging.failed, judging.refused) == (1, 0, 2)
    assert service.requests == 3
    ours = (record for record in caplog.records if record.name.startswith("ctrl_megatron"))
    (line,) = [record.getMessage() for record in ours]
    assert line.startswith("rows.parquet: row 0: 'add/0' cannot be judged and has no reward: ")
    assert line.endswith("(400): the checker fails on the answer")
