"""Programs that try to pass without being right, or to do harm. None may pass, none may leave
anything behind.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import descendants, wait_until
from hostile_programs import FORGERIES, HARM

from ctrl_megatron.sandbox import EmbeddedSandbox
from ctrl_megatron.sandbox.wire import EvalResult, RunCodeResponse, RunStatus

SECRET = f"zq-{secrets.token_hex(16)}"
TESTS = [f"assert f(3) == {SECRET!r}", f"assert f(4) == [{SECRET!r}, 1]"]


@pytest.fixture(autouse=True)
def nothing_left(service: EmbeddedSandbox) -> Iterator[None]:
    yield
    # The workers themselves are all that may remain.
    assert wait_until(lambda: len(descendants(service.pid)) <= 2), descendants(service.pid)


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_never_pass(judge: Callable[..., EvalResult], name: str) -> None:
    result = judge(FORGERIES[name], TESTS, run_timeout=0.7)
    assert [case.passed for case in result.tests] == [False, False]
    assert not result.accepted
    reasons = [(case.test_info or {})["reason"] for case in result.tests]
    assert all(reasons), "every failure says why"


@pytest.mark.parametrize("name", HARM)
def test_harm_is_refused(run_code: Callable[..., RunCodeResponse], name: str) -> None:
    code, stdout = HARM[name]
    response = run_code(code)
    assert response.run_result is not None
    assert response.run_result.stdout == stdout, response


def test_an_output_flood_is_cut_and_killed(run_code: Callable[..., RunCodeResponse]) -> None:
    response = run_code("while True: print('x' * 65536)", run_timeout=20)
    assert response.status is RunStatus.FAILED and response.run_result is not None
    assert response.run_result.return_code == -9
    assert len(response.run_result.stdout or "") == 1 << 20
    assert "output limit exceeded" in (response.run_result.stderr or "")


def test_a_wrong_helper_is_not_saved_by_a_right_one_in_the_judge(
    judge: Callable[..., EvalResult],
) -> None:
    """A candidate announces no names: only those of the record are its own."""
    code = "def helper(x): return 987654321\ndef f(x): return 0"
    result = judge(code, ["assert f(3) == helper(1)"], setup="def helper(x): return 5")
    assert not result.accepted


def test_mutations_cannot_reach_the_expected_value(judge: Callable[..., EvalResult]) -> None:
    code = "def f(x):\n    x[:] = [1, 2, 3]\n    return x"
    result = judge(code, ["e = [9, 9]\nassert f([0]) == e", "assert f([1]) == [9]"])
    assert [case.passed for case in result.tests] == [False, False]


def test_afterwards_honest_programs_still_pass(
    judge: Callable[..., EvalResult], service: EmbeddedSandbox
) -> None:
    code = f"def f(x): return {SECRET!r} if x == 3 else [{SECRET!r}, 1]"
    assert judge(code, TESTS).accepted
    assert not Path("/escaped").exists()
    assert service.alive()
