"""A problem has one budget of workers' time: at its end the program has failed, waiting does not
use it, and honest problems beside slow ones are judged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from no_wait import run_without_waiting
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.config.algorithm import Sandbox
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits
from ctrl_megatron.sandbox.__main__ import main
from ctrl_megatron.sandbox.client.sandbox_client import SandboxSilent
from ctrl_megatron.sandbox.service import problem_clock
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.wire import EvalResult

BUDGET = 1.0
OVER = "the problem's time is over"
Submit = Callable[..., EvalResult]


@pytest.fixture(scope="module")
def brief() -> Iterator[EmbeddedSandbox]:
    with EmbeddedSandbox.start(
        workers=2,
        limits=SandboxLimits(problem_seconds=BUDGET, max_problem_seconds=60.0, wall_factor=1.0),
    ) as running:
        yield running


@pytest.fixture
def submit(brief: EmbeddedSandbox, on_loop: BackgroundLoop) -> Submit:
    def call(code: str, kind: str, data: dict[str, Any], **config: Any) -> EvalResult:
        async def ask() -> EvalResult:
            async with SandboxClient(brief.endpoint, attempts=1) as client:
                request = submission(
                    code, dataset_type=kind, provided_data=data, **{"run_timeout": 0.5, **config}
                )
                return await client.submit(request)

        return on_loop(ask())

    return call


def cases(count: int, **more: Any) -> dict[str, Any]:
    return {
        "test": [{"input": {"stdin": str(n)}, "output": {"stdout": str(n)}} for n in range(count)]
    } | more


def reasons(result: EvalResult) -> list[str]:
    return [str((case.test_info or {})["reason"]) for case in result.tests]


SLOW = "import time\ntime.sleep(0.3)\nprint('wrong')"


def test_a_slow_wrong_program_of_many_cases_fails_within_its_budget(submit: Submit) -> None:
    result = submit(SLOW, "CommonOJDataset", cases(60))
    assert len(result.tests) == 60 and not result.accepted
    assert not any(case.passed for case in result.tests)
    assert any(case.timed_out for case in result.tests)
    seconds = [
        c.exec_info.run_result.execution_time or 0.0 for c in result.tests if c.exec_info.run_result
    ]
    assert sum(seconds) <= BUDGET + 0.5
    assert reasons(result)[-1] == f"not run: {OVER}"


def test_tests_that_passed_before_the_end_stay_passed(submit: Submit) -> None:
    late = "import time\nn = int(input())\nprint(n)\nif n > 1: time.sleep(0.4)"
    result = submit(late, "CommonOJDataset", cases(12))
    passed = [case.passed for case in result.tests]
    assert passed[:2] == [True, True] and not all(passed)
    asserts = {"test_list": [f"assert f({n}) == {n}" for n in range(12)], "entry_point": "f"}
    code = "import time\ndef f(n):\n    if n > 3: time.sleep(0.4)\n    return n"
    result = submit(code, "MBPPDataset", asserts)
    passed = [case.passed for case in result.tests]
    assert len(passed) == 12 and passed[:4] == [True] * 4 and not passed[-1]
    assert reasons(result)[-1] == f"not run: {OVER}"
    assert all(case.timed_out for case in result.tests if not case.passed)


@pytest.mark.parametrize("run_all", [True, False])
def test_functions_have_the_same_budget(submit: Submit, run_all: bool) -> None:
    tests = {"test_list": [f"assert f({n}) == {n}" for n in range(40)], "entry_point": "f"}
    right = "import time\ndef f(n):\n    time.sleep(0.2)\n    return n"
    began = time.monotonic()
    result = submit(right, "MBPPDataset", tests, run_all=run_all)
    assert not result.accepted and OVER in reasons(result)[-1]
    assert time.monotonic() - began < 5
    assert (len(result.tests) == 40) is run_all


def test_cases_in_turn_have_the_same_budget(submit: Submit) -> None:
    right = "import time\ntime.sleep(0.3)\nprint(input())"
    result = submit(right, "CommonOJDataset", cases(40), run_all=False)
    assert not result.accepted and reasons(result)[-1] == OVER
    assert 2 <= len(result.tests) <= 5


def test_a_checker_spends_the_same_budget(submit: Submit) -> None:
    checker = "import time\ntime.sleep(0.4)"
    result = submit("print(input())", "CommonOJDataset", cases(20, checker=checker))
    assert not result.accepted and any(case.timed_out for case in result.tests)
    assert sum(case.passed for case in result.tests) <= 3


def test_a_checker_that_is_out_of_time_on_an_output_is_no_lasting_verdict(submit: Submit) -> None:
    checker = {
        "code": "import time\nif 'x' in open('output.txt').read(): time.sleep(9)",
        "run_timeout": 0.4,
    }
    result = submit("print('x')", "CommonOJDataset", cases(1, checker=checker), run_timeout=0.4)
    (case,) = result.tests
    assert not case.passed and case.timed_out and not case.exec_info.timed_out


def test_subtasks_have_one_budget_together(submit: Submit) -> None:
    named = {f"{n}": {"input": str(n), "output": str(n)} for n in range(20)}
    subtasks = [
        {"points": 50, "tests": [str(n) for n in range(10 * k, 10 * k + 10)]} for k in (0, 1)
    ]
    result = submit(SLOW, "IOIDataset", {"tests": named, "subtasks": subtasks})
    assert not result.accepted and (result.extra or {})["score"] == 0


def test_a_request_may_name_its_own_budget(submit: Submit) -> None:
    right = "import time\ntime.sleep(0.25)\nprint(input())"
    more = {"run_all_cases": True, "problem_seconds": 30}
    assert submit(right, "CommonOJDataset", cases(8), extra=more).accepted
    less = {"run_all_cases": True, "problem_seconds": 0.2}
    result = submit(right, "CommonOJDataset", cases(2), extra=less)
    assert not any(case.passed for case in result.tests) and OVER in reasons(result)[0]
    for wrong in (0, -1, 61, "5", True):
        with pytest.raises(ValueError, match=r"extra\.problem_seconds must be in \(0, 60\]"):
            submit(right, "CommonOJDataset", cases(1), extra={"problem_seconds": wrong})
    # One test may take its whole time, whatever the service's budget is.
    assert submit(
        "import time\ntime.sleep(1.4)\nprint(0)", "CommonOJDataset", cases(1), run_timeout=4.0
    ).accepted


def test_honest_programs_beside_slow_ones_are_all_judged(brief: EmbeddedSandbox) -> None:
    """Slow programs of 24 seconds beside as many honest ones; the client waits for a silent service
    for less time than all of them need.
    """
    pairs, workers = 9, 2
    honest = [f"n = int(input())\nprint(n)\n# {number}" for number in range(pairs)]
    slow = [f"{SLOW}\n# {number}" for number in range(pairs)]

    async def scenario() -> tuple[list[EvalResult], list[EvalResult], int]:
        async with SandboxClient(brief.endpoint, timeout=3.0, attempts=2) as client:

            def judged(code: str, count: int) -> asyncio.Task[EvalResult]:
                request = submission(
                    code,
                    dataset_type="CommonOJDataset",
                    provided_data=cases(count),
                    run_timeout=0.5,
                )
                return asyncio.create_task(client.submit(request))

            first = [judged(code, 80) for code in slow]
            await asyncio.sleep(0.2)
            second = [judged(code, 5) for code in honest]
            return [await t for t in first], [await t for t in second], client.counters.retries

    began = time.monotonic()
    bad, good, retries = asyncio.run(scenario())
    wall = time.monotonic() - began
    assert [result.accepted for result in good] == [True] * pairs
    assert not any(case.passed for result in bad for case in result.tests)
    assert retries == 0
    # Without the budget the slow ones alone take a minute.
    assert wall < 24 * pairs / workers / 2


def test_requests_that_advance_in_step_are_all_judged(brief: EmbeddedSandbox) -> None:
    """None of them finishes within the time for which the client bears a silent service, although
    jobs do.
    """
    honest = "print(input())"

    async def scenario(count: int, silence: float) -> tuple[list[EvalResult], list[float]]:
        ends = list[float]()
        async with SandboxClient(brief.endpoint, silence=silence, attempts=2) as client:

            async def judged(code: str, tests: int) -> EvalResult:
                data = cases(tests)
                request = submission(
                    code, dataset_type="CommonOJDataset", provided_data=data, run_timeout=0.5
                )
                result = await client.submit(request)
                ends.append(time.monotonic() - began)
                return result

            began = time.monotonic()
            slow = [judged(f"{SLOW}\n# {number}", 20) for number in range(count)]
            return await asyncio.gather(*slow, judged(honest, 3)), ends

    silence = 4.0
    try:
        (*bad, good), ends = asyncio.run(scenario(20, silence))
    except SandboxSilent:
        # A machine so busy that no job ends within these seconds.
        silence = 20.0
        (*bad, good), ends = asyncio.run(scenario(100, silence))
    assert good.accepted and not any(case.passed for result in bad for case in result.tests)
    assert sorted(ends)[1] > silence


@pytest.fixture
def loop_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The time of the running loop, which the tested clock reads too."""

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(problem_clock, "time", SimpleNamespace(monotonic=now))
    return now


def test_the_clock_runs_as_fast_as_jobs_run_beside_each_other(
    loop_time: Callable[[], float],
) -> None:
    async def scenario() -> None:
        clock, stopped = ProblemClock(0.4), list[float]()

        async def job() -> None:
            with clock.counting_time(lambda: stopped.append(loop_time())):
                await asyncio.sleep(0.3)

        await asyncio.gather(job(), job())
        assert clock.is_over and clock.seconds_left == 0
        assert stopped == pytest.approx([0.2, 0.2])

    run_without_waiting(scenario)


def test_the_clock_stops_while_nothing_runs_or_a_worker_fails(
    loop_time: Callable[[], float],
) -> None:
    async def scenario() -> None:
        clock, stopped = ProblemClock(0.4), list[float]()
        await asyncio.sleep(0.5)
        with (
            pytest.raises(ZeroDivisionError),
            clock.counting_time(lambda: stopped.append(loop_time())),
        ):
            await asyncio.sleep(0.1)
            raise ZeroDivisionError
        assert clock.seconds_left == pytest.approx(0.4)
        clock.spend(0.3)
        assert clock.seconds_left == pytest.approx(0.1) and not stopped

    run_without_waiting(scenario)


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "soon"])
def test_an_option_that_is_no_budget_is_refused(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert main(["--problem-seconds", wrong]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "problem-seconds" in printed.err


def test_the_key_and_the_service_have_one_default() -> None:
    assert Sandbox().problem_seconds == SandboxLimits().problem_seconds


def test_a_problem_has_processor_time_and_a_multiple_of_it_by_the_clock(
    loop_time: Callable[[], float],
) -> None:
    async def scenario() -> None:
        clock = ProblemClock(0.2, 3.0)
        with clock.counting_time(lambda: None):
            await asyncio.sleep(0.3)
        assert clock.seconds_left == pytest.approx(0.2)
        clock.spend(0.15)
        assert clock.seconds_left == pytest.approx(0.05) and not clock.is_over
        clock.spend(0.1)
        assert clock.is_over

    run_without_waiting(scenario)
