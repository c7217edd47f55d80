"""stdin/stdout problems: whole submissions."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.wire import CommandRunStatus, EvalResult

Judge = Callable[..., EvalResult]


def test_capitals_count_unless_the_problem_says_otherwise(judge_stdio: Judge) -> None:
    assert not judge_stdio("print('yes')", [("", "YES")]).accepted
    data = {"test": [{"input": {"stdin": ""}, "output": {"stdout": "YES"}}], "ignore_case": True}
    assert judge_stdio("print('yes')", [], provided_data=data).accepted
    with pytest.raises(ValueError, match="ignore_case must be true or false"):
        judge_stdio("print('yes')", [], provided_data={**data, "ignore_case": 1})


def test_the_lax_rule_is_for_comparing_services(judge_stdio: Judge) -> None:
    cases = [("", "YES 12"), ("", str(2**2000))]
    lax = judge_stdio("print('yes 12')", cases[:1], extra={"compatibility": "sandbox_fusion"})
    assert lax.accepted and lax.extra == {"compatibility": "sandbox_fusion"}
    assert judge_stdio(
        "print('inf')", cases[1:], extra={"compatibility": "sandbox_fusion"}
    ).accepted
    assert not judge_stdio("print('inf')", cases[1:]).accepted
    with pytest.raises(ValueError, match="compatibility must be"):
        judge_stdio("print()", cases, extra={"compatibility": "lax"})


ADD = "a, b = map(int, input().split())\nprint(a + b)"


def test_verdicts_per_case(judge_stdio: Judge) -> None:
    result = judge_stdio(ADD, [("1 2", "3"), ("1 2", "4"), ("5 5", "10\n")])
    assert [case.passed for case in result.tests] == [True, False, True]
    assert not result.accepted
    info = result.tests[1].test_info or {}
    assert info["reason"] == "line 1 differs: '3', expected '4'"


def test_prefix_without_run_all_cases(judge_stdio: Judge) -> None:
    result = judge_stdio(ADD, [("1 2", "3"), ("1 2", "4"), ("5 5", "10")], run_all=False)
    assert [case.passed for case in result.tests] == [True, False]


def test_right_output_with_a_failing_exit_is_not_accepted(judge_stdio: Judge) -> None:
    result = judge_stdio("print(3)\nraise SystemExit(1)", [("", "3")])
    assert not result.accepted
    assert "exit status 1" in (result.tests[0].test_info or {})["reason"]


def test_early_clean_exit_is_judged_by_its_output(judge_stdio: Judge) -> None:
    assert judge_stdio("print(3)\nexit()", [("", "3")]).accepted
    assert not judge_stdio("exit()", [("", "3")]).accepted


def test_time_limit(judge_stdio: Judge) -> None:
    result = judge_stdio("while True: pass", [("", "3")], run_timeout=0.4)
    run = result.tests[0].exec_info.run_result
    assert run is not None and run.status is CommandRunStatus.TIME_LIMIT_EXCEEDED
    assert not result.accepted


def test_the_main_guard_runs(judge_stdio: Judge) -> None:
    assert judge_stdio(
        "if __name__ == '__main__':\n    print(input()[::-1])", [("abc", "cba")]
    ).accepted


def test_truncated_output_never_passes(judge_stdio: Judge) -> None:
    code = "print('x' * (1 << 20) + 'y' * (4 << 20))"
    result = judge_stdio(code, [("", "x" * (1 << 20))])
    assert not result.accepted
    assert (result.tests[0].test_info or {})["reason"] == "output limit exceeded"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ([], "empty"),
        ("[]", "empty"),
        ("{", "test is not valid JSON"),
        ([{"input": {}}], "not a list of stdin/stdout cases"),
        (3, "not a list of stdin/stdout cases"),
    ],
)
def test_bad_tests_are_refused(judge_stdio: Judge, test: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge_stdio("", [], provided_data={"test": test})


def test_tests_may_be_a_json_text(judge_stdio: Judge) -> None:
    text = json.dumps([{"input": {"stdin": "2 2"}, "output": {"stdout": "4"}}])
    assert judge_stdio(ADD, [], provided_data={"test": text}).accepted


def test_language_is_required(judge_stdio: Judge) -> None:
    with pytest.raises(ValueError, match="language is missing"):
        judge_stdio(ADD, [("1 2", "3")], language=None)


@pytest.mark.parametrize(
    "code",
    [
        "out = open(1, 'w')\nout.write('42\\n')",
        "import sys, io\nout, sys.stdout = sys.stdout, io.StringIO()\nout.write('42\\n')",
        "import sys, io\nout = io.TextIOWrapper(sys.stdout.buffer)\nout.write('42\\n')",
        "import sys\nprint(42)\nsys.stdout.close()",
        "import sys\nprint(42)\nsys.stdout.flush()\nsys.stdout = None",
        "class Last:\n    def __del__(self): print(42)\nkept = Last()",
        "class Last:\n    def __del__(self): print(42)\nlast = Last()\nlast.own = last",
    ],
)
def test_output_at_the_end_of_a_program_counts(judge_stdio: Judge, code: str) -> None:
    result = judge_stdio(code, [("", "42")])
    assert result.accepted, reasons(result)


@pytest.mark.parametrize(
    "code",
    [
        "import os, io\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
        "for line in iter(input, b''): total = sum(map(int, line.split()))\nprint(total)",
        "import os\nprint(sum(map(int, os.read(0, 10**7).split())))",
        "import mmap\ntext = mmap.mmap(0, 0, prot=mmap.PROT_READ)\n"
        "print(sum(map(int, text.readline().split())))",
        "print(sum(map(int, open(0).read().split())))",
    ],
)
def test_input_is_a_file(judge_stdio: Judge, code: str) -> None:
    """Longer than a pipe's buffer."""
    result = judge_stdio(code, [("1 " * 100_000, "100000")])
    assert result.accepted, reasons(result)


def test_a_long_expected_output_can_be_given(judge_stdio: Judge) -> None:
    code = "for number in range(300_000): print(number)"
    right = "\n".join(map(str, range(300_000)))
    assert len(right) > 1 << 20
    assert judge_stdio(code, [("", right)]).accepted
    assert not judge_stdio(code, [("", right[:-1])]).accepted
    (case,) = judge_stdio(code, [("", "0")]).tests
    assert (case.test_info or {})["reason"] == "output limit exceeded"


def test_the_input_cannot_be_changed(judge_stdio: Judge) -> None:
    code = (
        "import os\n"
        "for change in (lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 0)):\n"
        "    try: change()\n"
        "    except OSError: print('refused')\n"
    )
    assert judge_stdio(code, [("3", "refused\nrefused")]).accepted


def test_after_two_time_outs_later_cases_are_not_run(judge_stdio: Judge) -> None:
    """Whatever was under way beside them: verdicts follow from the order of the cases alone."""
    code = "number = int(input())\nwhile number in (1, 3, 5): pass\nprint(number)"
    cases = [(str(number), str(number)) for number in range(40)]
    result = judge_stdio(code, cases, run_timeout=0.5)
    assert [case.passed for case in result.tests] == [True, False, True] + [False] * 37
    unseen = ["not run: 2 tests timed out before"] * 36
    late = "time limit exceeded"
    assert [text.partition(" (")[0] for text in reasons(result)] == ["", late, "", late, *unseen]
    statuses = [run.status for case in result.tests if (run := case.exec_info.run_result)]
    assert statuses.count(CommandRunStatus.TIME_LIMIT_EXCEEDED) == 2


def reasons(result: EvalResult) -> list[str]:
    return [(case.test_info or {})["reason"] for case in result.tests]
