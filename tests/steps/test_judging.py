"""A judge that fails: its programs are judged again, counted, and end the step if they are many."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import ServiceFault
from ctrl_megatron.rewards import JudgeCounts, RewardOutcome, RewardSum
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.grading import CachedJudge, GradingJob, RetryPolicy
from ctrl_megatron.rewards.items import RewardItem, Rewards
from ctrl_megatron.sandbox.client import SandboxError, SandboxSilent
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest, TestConfig
from ctrl_megatron.steps.worker import RolloutWorker
from ctrl_megatron.types import Verdict

PASSED = Verdict(passed=(True,), total=1)


class Service:
    """A judge that fails for the programs whose number is in ``failing``, in the first rounds."""

    def __init__(self, failing: set[int], rounds: int) -> None:
        self.failing, self.rounds, self.calls = failing, rounds, list[int]()

    async def identity(self) -> object:
        return "service"

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        number = int(request.id)
        self.calls.append(number)
        if number in self.failing and self.calls.count(number) <= self.rounds:
            raise SandboxError("connection refused")
        return EvalResult.model_validate(
            {"id": number, "accepted": True, "extracted_code": "", "tests": [_test()]}
        )


def _test() -> dict[str, Any]:
    info = {"status": "Success", "message": ""}
    return {"passed": True, "exec_info": info}


def jobs(count: int) -> list[GradingJob]:
    return [
        GradingJob(
            request=SubmitRequest(dataset="d", id=i, completion="x", config=TestConfig()),
            total=1,
            key=str(i),
        )
        for i in range(count)
    ]


def grade(service: Service, patience: RetryPolicy, count: int = 10) -> list[bool]:
    judge = CachedJudge(service, VerdictCache(), patience)
    answers = asyncio.run(judge.grade_all([*jobs(count), None], 4))
    assert answers.pop() is None
    return [answer is not None and answer.verdict is not None for answer in answers]


def test_programs_that_were_not_judged_are_judged_again_and_only_those() -> None:
    service = Service({1, 2, 3}, rounds=2)
    assert all(grade(service, RetryPolicy(share=0.2, retries=3, pause=0.001)))
    assert sorted(service.calls) == sorted([*range(10), *[1, 2, 3] * 2])


def test_a_share_that_is_allowed_is_not_judged_again() -> None:
    service = Service({1, 2}, rounds=1)
    assert grade(service, RetryPolicy(share=0.2, retries=3, pause=0.001)).count(False) == 2
    assert len(service.calls) == 10


def test_retries_end() -> None:
    service = Service(set(range(10)), rounds=99)
    assert not any(grade(service, RetryPolicy(share=0.2, retries=2, pause=0.001)))
    assert len(service.calls) == 30


def test_a_silent_judge_is_not_asked_again() -> None:
    class Silent(Service):
        async def submit(self, request: SubmitRequest, /) -> EvalResult:
            self.calls.append(int(request.id))
            raise SandboxSilent("no sign of life for 640 s")

    service = Silent(set(), rounds=0)
    assert not any(grade(service, RetryPolicy(share=0.2, retries=3, pause=0.001)))
    assert len(service.calls) == 10


class Judged:
    """A reward function that runs programs, with given outcomes."""

    def __init__(self, outcomes: list[RewardOutcome]) -> None:
        self.outcomes = outcomes

    async def judge(self, items: Any) -> list[RewardOutcome]:
        return self.outcomes

    async def __call__(self, items: Any) -> Rewards:
        raise AssertionError("its outcomes say more")


def outcome(kind: str) -> RewardOutcome:
    if kind == "judged":
        return RewardOutcome(reward=1.0, verdict=PASSED)
    if kind == "masked":
        return RewardOutcome(reward=None, verdict=PASSED, copying="mask")
    if kind == "failed":
        return RewardOutcome(reward=None, error="gone")
    if kind == "cached":
        return RewardOutcome(reward=1.0, verdict=PASSED, cached=True)
    return RewardOutcome(reward=0.0)


def workers(*counts: JudgeCounts, limit: float = 0.2) -> list[Any]:
    """One worker per data rank, whose rewards have counted that."""
    ranks: list[Any] = []
    for counted in counts:
        rewards = RewardSum({"code": Judged([])})
        rewards.judging = counted
        rank: Any = SimpleNamespace(
            config=load_config(None, [f"reward.max_failed_share={limit}"], "none"),
            rewards=rewards,
            groups=SimpleNamespace(
                broadcast_from_leader=lambda value: value,
                gather_data_ranks=lambda value: list(counts),
            ),
        )
        rank.count_judge_requests = lambda rank=rank: RolloutWorker.count_judge_requests(rank)
        ranks.append(rank)
    return ranks


@given(st.lists(st.sampled_from(["judged", "masked", "failed", "cached", "none"])))
def test_every_sample_is_judged_or_failed_or_had_nothing_to_judge(kinds: list[str]) -> None:
    rewards = RewardSum({"code": Judged([outcome(kind) for kind in kinds])})
    scores = asyncio.run(rewards.score([RewardItem(text="") for _ in kinds]))
    counted = rewards.pop_judge_counts()
    assert counted.failed == kinds.count("failed")
    assert counted.cached == kinds.count("cached")
    assert counted.asked == len(kinds) - kinds.count("none") - counted.cached
    assert [total is None for total in scores.totals] == [k in ("masked", "failed") for k in kinds]
    assert rewards.judging == JudgeCounts()


def test_the_share_is_that_of_all_ranks() -> None:
    # Rank 0 alone is below the limit, rank 1 above it; together they are above.
    both = workers(
        JudgeCounts(asked=10, failed=1, error="a"), JudgeCounts(asked=10, failed=4, error="b")
    )
    for worker in both:
        with pytest.raises(ServiceFault, match=r"^5 of 20 programs .*max_failed_share=0\.2: b\."):
            RolloutWorker.judged_rate_metrics(worker)


@pytest.mark.parametrize("other", ["none", "cached"])
def test_what_needs_no_judge_does_not_hide_a_dead_service(other: str) -> None:
    # 90 critiques contain no judgment, or their verdicts are known; the others are not judged.
    kinds = [other] * 90 + ["failed"] * 10
    counted = JudgeCounts.from_outcomes([outcome(kind) for kind in kinds])
    (worker,) = workers(counted)
    with pytest.raises(ServiceFault, match=r"^10 of 10 programs could not be judged"):
        RolloutWorker.judged_rate_metrics(worker)


def test_the_rate_is_reported_once_and_only_where_there_was_something_to_judge() -> None:
    (worker,) = workers(JudgeCounts(asked=10, failed=1, error="a"))
    judged, unjudgeable = "reward/judged_rate", "reward/unjudgeable_rate"
    assert RolloutWorker.judged_rate_metrics(worker) == {judged: pytest.approx(0.9), unjudgeable: 0}
    assert worker.rewards.judging == JudgeCounts()
    (worker,) = workers(JudgeCounts(asked=10, failed=1, cached=10, unjudgeable=5, error="a"))
    assert RolloutWorker.judged_rate_metrics(worker) == {
        judged: pytest.approx(0.95),
        unjudgeable: 0.25,
    }
    (idle,) = workers(JudgeCounts())
    assert RolloutWorker.judged_rate_metrics(idle) == {}
