"""Programs that try to pass without being right, or to do harm: the safe outcome of each."""

from __future__ import annotations

import pytest
from hostile_service import FUNCTIONS, PROGRAMS, STDIO, Outcomes, stdout
from hostile_system import ENDINGS
from hostile_traces import TRACES

from ctrl_megatron.sandbox.wire import CommandRunStatus, EvalResult, RunCodeResponse

WITHOUT_OWN_FILE_SYSTEM = {"fill the disk": "", "many files": ""}
"""Without namespaces a program that fills its directory is ended before it can print."""


def test_there_are_enough_of_them() -> None:
    assert len(FUNCTIONS) + len(PROGRAMS) + len(ENDINGS) + len(STDIO) + len(TRACES) >= 150


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_forgery_passes(outcomes: Outcomes, name: str) -> None:
    result = outcomes.judged[name]
    assert isinstance(result, EvalResult), result
    assert [case.passed for case in result.tests] == [False, False]
    assert not result.accepted
    assert all((case.test_info or {})["reason"] for case in result.tests), "a failure says why"


@pytest.mark.parametrize("name", STDIO)
def test_no_output_is_taken_for_an_answer(outcomes: Outcomes, name: str) -> None:
    result = outcomes.printed[name]
    assert isinstance(result, EvalResult), result
    assert not result.accepted
    assert [case.passed for case in result.tests] == [False, False]


@pytest.mark.parametrize("name", PROGRAMS)
def test_harm_is_refused(outcomes: Outcomes, name: str) -> None:
    response = outcomes.ran[name]
    assert isinstance(response, RunCodeResponse), response
    expected = PROGRAMS[name][1]
    if outcomes.isolation["tier"] != "namespaces":
        expected = WITHOUT_OWN_FILE_SYSTEM.get(name, expected)
    assert stdout(response) == expected, response


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_is_a_result(outcomes: Outcomes, name: str) -> None:
    response = outcomes.ran[f"ending: {name}"]
    assert isinstance(response, RunCodeResponse), response
    result = response.run_result
    assert result is not None
    assert result.return_code == ENDINGS[name][1]
    timed_out = result.status is CommandRunStatus.TIME_LIMIT_EXCEEDED
    assert timed_out == (ENDINGS[name][1] is None)


@pytest.mark.parametrize("name", TRACES)
def test_no_later_job_sees_a_trace(outcomes: Outcomes, name: str) -> None:
    assert outcomes.looked[name] == [TRACES[name][2]] * 2


def test_no_job_sees_another_beside_it(outcomes: Outcomes) -> None:
    assert outcomes.looked["beside"] == ["holding\n", "[]\n"]


def test_afterwards_honest_programs_still_pass(outcomes: Outcomes) -> None:
    assert outcomes.honest is not None and outcomes.honest.accepted


def test_no_program_was_taken_for_a_fault_of_the_service(outcomes: Outcomes) -> None:
    """A program that can break the service escapes its verdict: the sample would be masked out."""
    assert (outcomes.counters["faults"], outcomes.counters["restarts"]) == (0, 0)


def test_nothing_is_left(outcomes: Outcomes) -> None:
    """Processes, descriptors, namespaces, mounts, files and System V objects are as before."""
    assert outcomes.before is not None
    assert outcomes.after == outcomes.before
    assert outcomes.before.processes > 0 and outcomes.before.mounts
