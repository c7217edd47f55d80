"""Which tests of a row are judged, and how many verdicts are an answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from reward_samples import function_row

from ctrl_megatron.rewards import JudgeCounts, RewardItem, make_reward
from ctrl_megatron.rewards.cache import decode_verdict, encode_verdict
from ctrl_megatron.rewards.grading import descriptions_of_tests, grading_job, request_verdict
from ctrl_megatron.rewards.items import JudgingReward
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import EvalResult, EvalTestCase, RunCodeResponse, RunStatus
from ctrl_megatron.types import Verdict

UNIT_TESTS = ["def test_add():\n    assert add(1, 2) == 3\n\ndef test_more():\n    add(1, 1)"]


def case(passed: bool, **info: Any) -> EvalTestCase:
    run = RunCodeResponse(status=RunStatus.SUCCESS if passed else RunStatus.FAILED)
    return EvalTestCase(passed=passed, exec_info=run, test_info=info)


class Answering:
    def __init__(self, *cases: EvalTestCase) -> None:
        self.cases = list(cases)

    async def submit(self, request: Any, /) -> EvalResult:
        accepted = all(one.passed for one in self.cases)
        return EvalResult(id=0, accepted=accepted, extracted_code="", tests=self.cases)

    async def identity(self) -> object:
        return "scripted"


def judged(judge: Answering, **fields: Any) -> Verdict:
    job = grading_job("def add(a, b): ...", function_row(**fields), run_all_cases=True)
    return asyncio.run(request_verdict(judge, job))


def test_the_judge_counts_unit_tests() -> None:
    cases = [case(True, test="test_add[1]"), case(False, test="test_add[2]", reason="no")]
    verdict = judged(Answering(*cases), selected_uts=UNIT_TESTS)
    assert (verdict.total, verdict.passed) == (2, (True, False))
    assert verdict.tests == ("test_add[1]", "test_add[2]")
    assert verdict.pass_rate == 0.5
    with pytest.raises(SandboxError, match=r"0 verdict\(s\)"):
        judged(Answering(), selected_uts=UNIT_TESTS)


def test_an_answer_for_fewer_asserts_is_an_error() -> None:
    with pytest.raises(SandboxError, match=r"2 verdict\(s\).* for 3 test\(s\)"):
        judged(Answering(case(True), case(True)))


def test_tests_that_do_not_count_are_named_to_the_judge_and_not_expected() -> None:
    row = replace(function_row(), uncounted=(1,))
    job = grading_job("def add(a, b): ...", row, run_all_cases=True)
    every = grading_job("def add(a, b): ...", function_row(), run_all_cases=True)
    data, before = job.request.config.provided_data, every.request.config.provided_data
    assert isinstance(data, dict) and isinstance(before, dict)
    assert data.pop("uncounted") == [1] and "uncounted" not in before and data == before
    assert (job.total, every.total) == (2, 3) and job.key != every.key
    verdict = asyncio.run(request_verdict(Answering(case(True), case(False, reason="no")), job))
    shown = descriptions_of_tests(row.attempt().problem, verdict)
    assert shown == ["assert add(1, 2) == 3", "assert add(0, 5) == 5"]


def test_what_could_not_be_judged_is_a_failure_and_remembered_as_such() -> None:
    cases = [case(True), case(True), case(False, reason="cannot be judged: x", unjudgeable=True)]
    verdict = judged(Answering(*cases))
    assert verdict.unjudgeable and not verdict.accepted and verdict.pass_rate == 2 / 3
    assert decode_verdict(encode_verdict(verdict)) == verdict


def test_a_row_without_a_program_that_could_be_judged_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failure = case(False, reason="cannot be judged: == of an object", unjudgeable=True)
    reward = make_reward("code", provider=Answering(failure, case(True), case(True)))
    places = {"a": "rows.parquet: row 1", "b": "rows.parquet: row 2"}
    items = [
        RewardItem(text=f"def add(a, b): return {n}", row=replace(function_row(name), place=place))
        for n, (name, place) in enumerate([*places.items(), *places.items()])
    ]
    assert isinstance(reward, JudgingReward)
    for _ in range(2):
        outcomes = asyncio.run(reward.judge(items))
    assert [outcome.reward for outcome in outcomes] == [2 / 3] * 4
    found = JudgeCounts.from_outcomes(outcomes)
    assert (found + found).unjudgeable == 8
    for place in places.values():
        assert caplog.text.count(f"{place}: ") == 1
    assert "none of its programs could be judged" in caplog.text


def test_a_row_with_one_program_that_could_be_judged_is_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mixed(Answering):
        async def submit(self, request: Any, /) -> EvalResult:
            info = {"unjudgeable": "return 1" not in request.completion}
            self.cases = [case(False, reason="no", **info)] * 3
            return await super().submit(request)

    reward = make_reward("code", provider=Mixed())
    items = [RewardItem(text=f"def add(a, b): return {n}", row=function_row()) for n in range(3)]
    assert isinstance(reward, JudgingReward)
    assert JudgeCounts.from_outcomes(asyncio.run(reward.judge(items))).unjudgeable == 2
    assert "could be judged" not in caplog.text
