"""Special judges and scored subtasks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult

Submit = Callable[..., EvalResult]
needs_gpp = pytest.mark.skipif(not shutil.which("g++"), reason="this machine has no g++")


@pytest.fixture(scope="module")
def submit(client: SandboxClient, on_loop: BackgroundLoop) -> Submit:
    def call(kind: str, code: str, data: Any, **config: Any) -> EvalResult:
        request = submission(code, dataset_type=kind, provided_data=data, **config)
        return on_loop(client.submit(request))

    return call


def passed(result: EvalResult) -> list[bool]:
    return [case.passed for case in result.tests]


def reason(result: EvalResult, index: int = 0) -> str:
    return (result.tests[index].test_info or {})["reason"]


DOUBLE = "print(2 * int(input()))"
STDIO = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"], "fn_name": None}
PAIR = {"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[3, [1, 2]]", "[0, []]"], "fn_name": "pair"}

# --- special judges ------------------------------------------------------------------------------

ANY_FACTORS = """
import sys
n = int(open(sys.argv[1]).read())
a, b = map(int, open(sys.argv[3]).read().split())
assert open(sys.argv[2]).read().strip()
sys.exit(0 if a * b == n and 1 < a < n else "no factors")
"""


def checked(code: str, **more: Any) -> dict[str, Any]:
    return {
        "test": [{"input": {"stdin": "12"}, "output": {"stdout": "3 4"}}],
        "checker": {"code": code, **more} if more else code,
    }


@pytest.mark.parametrize(
    ("program", "accepted", "why"),
    [
        ("print(2, 6)", True, ""),
        ("print(3, 4)", True, ""),
        ("print(1, 12)", False, "rejected by the checker: no factors"),
        ("print('words')", False, "rejected by the checker: ValueError"),
        ("print(2, 6)\nexit(1)", False, "exit status 1"),
        ("while True: pass", False, "time limit exceeded"),
    ],
)
def test_special_judge(submit: Submit, program: str, accepted: bool, why: str) -> None:
    seconds = 0.5 if why == "time limit exceeded" else 10.0
    result = submit("CommonOJDataset", program, checked(ANY_FACTORS), run_timeout=seconds)
    assert result.accepted is accepted
    assert why in reason(result)


@pytest.mark.parametrize(
    ("said", "accepted"),
    [("1", True), ("1.0 well", True), ("", True), ("0.5", False), ("0", False), ("0 wrong", False)],
)
def test_a_checkers_score(submit: Submit, said: str, accepted: bool) -> None:
    assert submit("CommonOJDataset", "print()", checked(f"print({said!r})")).accepted is accepted


def test_a_checker_that_is_broken_is_the_records_fault(submit: Submit) -> None:
    with pytest.raises(ValueError, match="fails on the reference answer"):
        submit("CommonOJDataset", "print(1)", checked("raise SystemExit(7)"))
    breaks = "import sys, os\nif 'x' in open('output.txt').read(): os._exit(9)"
    result = submit("CommonOJDataset", "print('x')", checked(breaks))
    assert not result.accepted and "broke on this output" in reason(result)


@needs_gpp
def test_a_checker_in_cpp_with_its_own_order(submit: Submit, service: EmbeddedSandbox) -> None:
    if service.isolation["tier"] != "namespaces":
        pytest.skip("C++ needs namespaces")
    code = (
        "#include <fstream>\nint main(int n, char** v) { std::ifstream out(v[2]), ans(v[3]);\n"
        "int a, b, c, d; out >> a >> b; ans >> c >> d; return a * b == c * d ? 0 : 1; }"
    )
    record = checked(code, language="cpp", order=["input", "output", "answer"])
    assert submit("CommonOJDataset", "print(6, 2)", record).accepted
    assert not submit("CommonOJDataset", "print(6, 3)", record).accepted
    broken = checked("int main() {", language="cpp")
    with pytest.raises(ValueError, match="checker: compilation failed"):
        submit("CommonOJDataset", "print(6, 3)", broken)


def test_checker_records_that_cannot_be_used(submit: Submit) -> None:
    for checker, message in (
        (3, "must be an object"),
        ({"code": 3}, "checker.code must be text"),
        ({"code": "", "language": "rust"}, "'rust' is not supported"),
        ({"code": "", "order": ["input"]}, "each once"),
        ({"code": "", "run_timeout": 0}, "positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            submit("CommonOJDataset", "print()", {**checked(""), "checker": checker})


# --- IOI -----------------------------------------------------------------------------------------

OLYMPIAD: dict[str, Any] = {
    "tests": {
        "a1": {"input": "1", "output": "2"},
        "a2": {"input": "2", "output": "4"},
        "b1": {"input": "3", "output": "6"},
    },
    "subtasks": [
        {"name": "small", "points": 30, "tests": ["a1", "a2"]},
        {"name": "all", "points": 70, "tests": ["a1", "a2", "b1"]},
    ],
}


@pytest.mark.parametrize(
    ("code", "score", "names"),
    [
        (DOUBLE, 100, ["a1", "a2", "b1"]),
        ("n = int(input()); print(2 * n if n < 3 else 0)", 30, ["a1", "a2", "b1"]),
        ("n = int(input()); print(2 * n if n > 1 else 0)", 0, ["a1", "a2", "b1"]),
    ],
)
def test_subtasks_are_scored(submit: Submit, code: str, score: float, names: list[str]) -> None:
    result = submit("IOIDataset", code, OLYMPIAD)
    assert result.extra is not None
    assert (result.extra["score"], result.extra["max_score"]) == (score, 100)
    assert result.accepted == (score == 100)
    assert [(case.test_info or {})["name"] for case in result.tests] == names


def test_a_subtask_stops_at_its_first_zero(submit: Submit) -> None:
    result = submit(
        "IOIDataset", "n = int(input()); print(2 * n * (n != 1))", OLYMPIAD, run_all=False
    )
    assert [(case.test_info or {})["name"] for case in result.tests] == ["a1"]
    assert result.extra is not None and result.extra["score"] == 0


def test_partial_scores_of_a_checker_count_by_the_least(submit: Submit) -> None:
    checker = "import sys\nprint(float(open(sys.argv[3]).read()) / 10)"
    result = submit("IOIDataset", "print(10 - 2 * int(input()))", {**OLYMPIAD, "checker": checker})
    assert result.extra is not None
    assert [item["score"] for item in result.extra["subtasks"]] == pytest.approx([18, 28])
    assert not result.accepted


@needs_gpp
def test_grader_files_are_compiled_with_the_program(
    submit: Submit, service: EmbeddedSandbox
) -> None:
    if service.isolation["tier"] != "namespaces":
        pytest.skip("C++ needs namespaces")
    grader = (
        '#include "double.h"\n#include <cstdio>\n'
        'int main() { int n; scanf("%d", &n); printf("%d", twice(n)); }'
    )
    data = {**OLYMPIAD, "grader_files": {"grader.cpp": grader, "double.h": "int twice(int n);"}}
    code = '```cpp\n#include "double.h"\nint twice(int n) { return 2 * n; }\n```'
    options: dict[str, Any] = {"language": "cpp", "compile_timeout": 60.0, "fenced": False}
    assert submit("IOIDataset", code, data, **options).accepted
    with pytest.raises(ValueError, match="grader_files need language cpp"):
        submit("IOIDataset", DOUBLE, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests": 3}, "must be an object"),
        ({"tests": {"a": {"input": 3}}}, "must be text"),
        ({"subtasks": []}, "nothing to judge"),
        ({"subtasks": [{"points": 1, "tests": ["zz"]}]}, "names no test"),
        ({"subtasks": [{"points": 0, "tests": ["a1"]}]}, "positive number"),
        ({"subtasks": [{"points": 1, "tests": []}]}, "nothing to judge"),
        ({"grader_files": {"../x": ""}}, "outside the program's directory"),
        ({"grader_files": {"main.cpp": ""}}, "main.cpp"),
        ({"time_limit": -1}, "positive number"),
    ],
)
def test_olympiad_records_that_cannot_be_judged(
    submit: Submit, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        submit("IOIDataset", DOUBLE, {**OLYMPIAD, **change})


def test_half_characters_are_refused(submit: Submit) -> None:
    with pytest.raises(ValueError, match="half a character"):
        submit("IOIDataset", DOUBLE, {**OLYMPIAD, "tests": json.dumps({"\ud800": {}})})
