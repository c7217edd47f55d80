"""Every data set kind in its own format: what is accepted, what is rejected, what is refused."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.datasets.functions import read_human_eval
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
HANG_ON_2 = "n = int(input())\nwhile n == 2: pass\nprint(2 * n)"


def packed(value: Any, protocol: int | None = None) -> str:
    raw = json.dumps(value).encode() if protocol is None else pickle.dumps(value, protocol)
    return base64.b64encode(zlib.compress(raw)).decode()


# --- LiveCodeBench -------------------------------------------------------------------------------

STDIO = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"], "fn_name": None}
PAIR = {"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[3, [1, 2]]", "[0, []]"], "fn_name": "pair"}
PAYLOADS = {
    "object": lambda value: {"input_output": value},
    "json": lambda value: json.dumps({"input_output": json.dumps(value)}),
    "bare json": json.dumps,
    "zlib json": packed,
    "pickle 0": lambda value: packed({"input_output": json.dumps(value)}, 0),
    "pickle 4": lambda value: packed({"input_output": json.dumps(value)}, 4),
    "pickled text": lambda value: packed(json.dumps(value), 5),
}


@pytest.mark.parametrize("form", PAYLOADS)
def test_live_code_bench_payloads(submit: Submit, form: str) -> None:
    data = {"test": PAYLOADS[form](STDIO)}
    result = submit("LiveCodeBenchDataset", DOUBLE, data)
    assert result.accepted and passed(result) == [True]
    assert result.extra == {"verdicts": [True, True, True]}
    assert not submit("LiveCodeBenchDataset", "print(2)", data).accepted


def test_live_code_bench_answers_with_one_verdict(submit: Submit) -> None:
    data = {"test": json.dumps(STDIO)}
    result = submit("LiveCodeBenchDataset", "print(4)", data)
    assert passed(result) == [False] and result.extra == {"verdicts": [False, True, False]}
    assert (result.tests[0].test_info or {})["passed_tests"] == 1
    early = submit("LiveCodeBenchDataset", "print(4)", data, run_all=False)
    assert early.extra == {"verdicts": [False]} and not early.accepted


@pytest.mark.parametrize(
    ("code", "accepted"),
    [
        ("def pair(xs: List[int], n): return [n, xs]", True),
        ("class Solution:\n    def pair(self, xs: List[int], n): return [n, xs]", True),
        ("class Solution:\n    def pair(self, xs, n): return (n, tuple(xs))", True),
        ("class Solution:\n    def pair(self, xs, n): return [n, xs, 0]", False),
        ("class Solution:\n    def other(self, xs, n): return [n, xs]", False),
        ("class Solution:\n    def __init__(self, x): pass\n    def pair(s, xs, n): pass", False),
        ("def pair(xs, n): return str([n, xs])", False),
        ("import os\ndef pair(xs, n): os._exit(0)", False),
        ("import sys\nsys.exit(0)", False),
        ("class E:\n    def __eq__(s, o): return True\ndef pair(xs, n): return E()", False),
        ("def _check(*a): pass\n_plain = _check\ndef pair(xs, n): return 1", False),
        ("Solution = 3\ndef pair(xs, n): return [n, xs]", True),
    ],
)
def test_live_code_bench_functions(submit: Submit, code: str, accepted: bool) -> None:
    assert submit("LiveCodeBenchDataset", code, {"test": packed(PAIR)}).accepted is accepted


def test_a_library_function_of_the_problems_name_is_no_answer(submit: Submit) -> None:
    test = {"inputs": ["4\n6"], "outputs": ["2"], "fn_name": "gcd"}
    wrong = submit("LiveCodeBenchDataset", "def gcd(a, b): return 1", {"test": json.dumps(test)})
    assert not wrong.accepted


def test_live_code_bench_rows_of_the_benchmark(submit: Submit) -> None:
    public = [{"input": "1", "output": "2", "testtype": "stdin"}]
    private = [{"input": "5", "output": "10", "testtype": "stdin"}]
    data = {
        "public_test_cases": json.dumps(public),
        "private_test_cases": packed(json.dumps(private), 4),
        "metadata": "{}",
    }
    assert submit("LiveCodeBenchDataset", DOUBLE, data).extra == {"verdicts": [True, True]}
    functional = [{"input": "[1]\n2", "output": "[1, 2]", "testtype": "functional"}]
    data = {
        "public_test_cases": functional,
        "private_test_cases": [],
        "metadata": json.dumps({"func_name": "join"}),
    }
    code = "class Solution:\n    def join(self, xs, x): return xs + [x]"
    assert submit("LiveCodeBenchDataset", code, data).accepted
    with pytest.raises(ValueError, match="func_name"):
        submit("LiveCodeBenchDataset", code, {**data, "metadata": "{}"})


def test_programs_may_take_usual_imports_for_granted(submit: Submit) -> None:
    code = "n = int(input())\nprint(sum(accumulate([n, 0])) if Counter([n])[n] else gcd(1, 1))"
    assert submit("LiveCodeBenchDataset", code, {"test": json.dumps(STDIO)}).accepted


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("!", "neither JSON nor base64"),
        (base64.b64encode(b"plain").decode(), "not zlib"),
        (base64.b64encode(zlib.compress(b"x" * 100)[:-5]).decode(), "cut off"),
        (base64.b64encode(zlib.compress(b"\x80\x04")).decode(), "neither JSON nor a pickle"),
        (packed(Evil(), 4), "builtins.exec, which is no plain data"),
        (packed(Evil(), 0), "exec, which is no plain data"),
        (packed({"inputs": [bytearray(b"x")]}, 4), "no plain data"),
        (packed({"inputs": ["1"], "outputs": []}), "is empty"),
        (packed({"inputs": ["1"], "outputs": ["1", "2"]}), "1 inputs and 2 outputs"),
        (packed({"inputs": 3, "outputs": ["1"]}), "must be a list"),
        (packed({"inputs": [3], "outputs": ["1"]}), "must be text"),
        (packed({**PAIR, "fn_name": "a b"}), "fn_name must be a function's name"),
        (packed({**PAIR, "fn_name": "class"}), "fn_name must be a function's name"),
        (packed({**PAIR, "inputs": ["[1", "2"]}), "not valid JSON"),
        (packed([]), "is empty"),
        ("[" * 100_000, "nested too deeply"),
        (3, "must be an object"),
        (None, "needs test"),
    ],
)
def test_payloads_that_cannot_be_read_are_refused(submit: Submit, test: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        submit("LiveCodeBenchDataset", DOUBLE, {"test": test})


# --- APPS and TACO -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["APPSDataset", "TACODataset"])
def test_input_output_records(submit: Submit, kind: str) -> None:
    data = {"input_output": json.dumps({"inputs": ["1\n", ["2", ""]], "outputs": ["2", ["4"]]})}
    assert passed(submit(kind, DOUBLE, data)) == [True, True]
    assert passed(submit(kind, "input()\nprint(2)", data)) == [True, False]
    assert passed(submit(kind, "print(0)", data, run_all=False)) == [False]
    calls = {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"}
    assert passed(submit(kind, "def add(a, b): return a + b", {"input_output": calls})) == [
        True,
        True,
    ]
    wrong = submit(kind, "def add(a, b): return 3", {"input_output": calls})
    assert passed(wrong) == [True, False]
    assert reason(wrong, 1) == "AssertionError: add(3, 4) returned 3"
    assert (wrong.tests[1].test_info or {})["expected"] == "[7]"


@pytest.mark.parametrize(
    ("wanted", "returned", "accepted"),
    [
        ([[1, 2]], "(1, 2)", True),
        ([1, 2], "(1, 2)", True),
        ([[1, [2]]], "[1, (2,)]", True),
        (["5"], "'5'", True),
        ("5", "5", False),
        ([5], "'5'", False),
        ([[]], "[]", True),
        ([], "[]", True),
        ([1.5], "1.5", True),
        ([1.5], "1.50001", False),
        ([{"1": 2}], "{1: 2}", True),
        ([{"a": 2}], "{'a': 2}", True),
        ([None], "None", True),
        ([True], "True", True),
        ([1], "object()", False),
        ([[1, 2]], "iter([1, 2])", False),
    ],
)
def test_results_of_calls(submit: Submit, wanted: Any, returned: str, accepted: bool) -> None:
    data = {"input_output": {"inputs": [[0]], "outputs": [wanted], "fn_name": "f"}}
    assert submit("APPSDataset", f"def f(x): return {returned}", data).accepted is accepted


# --- CodeContests --------------------------------------------------------------------------------


def test_code_contests(submit: Submit) -> None:
    data = {
        "public_tests": {"input": ["1"], "output": ["2"]},
        "private_tests": {"input": ["2"], "output": ["4\n"]},
        "generated_tests": [{"input": "3", "output": "6"}],
        "time_limit": {"seconds": 1, "nanos": 0},
    }
    result = submit("CodeContestsDataset", HANG_ON_2, data, run_timeout=None)
    assert passed(result) == [True, False, True]
    assert "time limit exceeded" in reason(result, 1)
    sets = [(case.test_info or {})["set"] for case in result.tests]
    assert sets == ["public", "private", "generated"]
    first = submit(
        "CodeContestsDataset", DOUBLE, data, extra={"max_cases": 2, "run_all_cases": True}
    )
    assert first.accepted and len(first.tests) == 2
    stopped = submit("CodeContestsDataset", "print(2)", data, run_all=False)
    assert passed(stopped) == [True, False]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "nothing to judge"),
        ({"public_tests": {"input": ["1"], "output": []}}, "1 inputs and 0 outputs"),
        ({"public_tests": 3}, "must be an object or a list"),
        ({"public_tests": [{"input": "1"}]}, "must be text"),
        ({"public_tests": [3]}, "must be an object"),
        ({"public_tests": [{"input": "1", "output": "1"}], "time_limit": "x"}, "must be seconds"),
    ],
)
def test_code_contests_records_that_cannot_be_judged(
    submit: Submit, data: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        submit("CodeContestsDataset", DOUBLE, data)


# --- HumanEval and MBPP as published -------------------------------------------------------------

CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4, 'two'\n"


def test_human_eval_check_is_split_into_asserts(submit: Submit) -> None:
    data = {"test": f"import math\nMETADATA = {{}}\n\n{CHECK}", "entry_point": "double"}
    assert passed(submit("HumanEvalDataset", "def double(x): return 2 * x", data)) == [True, True]
    assert passed(submit("HumanEvalDataset", "def double(x): return 2", data)) == [True, False]
    assert not submit("HumanEvalDataset", "exit(0)", data).accepted
    named = CHECK.replace("candidate", "double") + "\ncheck(double)"
    result = submit("HumanEvalDataset", "def double(x): return 2 * x", {**data, "test": named})
    assert passed(result) == [True, True]


def test_a_check_that_is_no_list_of_asserts_stays_whole(submit: Submit) -> None:
    text = "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == 2 * i\n"
    data = {"test": text, "entry_point": "double"}
    assert passed(submit("HumanEvalDataset", "def double(x): return 2 * x", data)) == [True]
    assert passed(submit("HumanEvalDataset", "def double(x): return x or 0", data)) == [False]
    assert len(read_human_eval(data).tests) == 1


PROMPT = (
    "from __future__ import annotations\nfrom typing import List\n\nBASE = 3\nmain = 'double'\n\n"
    "def half(x: int) -> int:\n    return x // 2\n\nalso = double\n\n"
    "def double(xs: List[int]) -> List[int]:\n    '''Twice each.'''\n"
)
DOUBLED = "def check(candidate):\n    assert [half(x) for x in candidate([5, 7])] == [5, 7]\n"


@pytest.mark.parametrize("kind", ["HumanEvalDataset", "MBPPDataset"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT.partition("    '''Twice")[0]])
def test_a_program_may_use_the_imports_and_definitions_of_its_prompt(
    submit: Submit, kind: str, prompt: str
) -> None:
    data: dict[str, Any] = {"entry_point": "double", "prompt": prompt}
    if kind == "HumanEvalDataset":
        data["test"] = DOUBLED
    else:
        data["test_list"] = ["assert double([5, 7]) == [10, 14]"]
    answer = (
        "def double(xs: List[int]) -> List[int]:\n    return [half(x * (BASE + 1)) for x in xs]"
    )
    assert submit(kind, answer, data).accepted
    # Without the prompt's text the same answer fails.
    data["prompt"] = "def half(x): return x // 2\n\ndef double(xs):\n    '''Twice each.'''\n"
    assert reason(submit(kind, answer, data)).endswith("name 'List' is not defined (line 1)")


def test_a_prompt_answers_for_no_program_and_for_no_test(submit: Submit) -> None:
    """Its unfinished function is no answer; its helper in the program is not the test's."""
    test = "def check(candidate):\n    assert candidate(1) is None\n"
    data = {"entry_point": "f", "prompt": "def f(x):\n    '''Nothing.'''\n", "test": test}
    assert reason(submit("HumanEvalDataset", "g = 1", data)) == "NameError: name 'f' is not defined"
    method = {
        "entry_point": "Solution().f",
        "prompt": "class Solution:\n    def f(self, x: int):\n",
        "test_list": ["assert Solution().f(1) is None"],
    }
    for kind in ("HumanEvalDataset", "MBPPDataset"):
        assert not submit(kind, "g = 1", method).accepted
        assert submit(kind, "class Solution:\n    def f(self, x): pass", method).accepted
    helped = {"entry_point": "double", "prompt": PROMPT, "test": DOUBLED}
    for cheat in (
        "def half(x): return x",
        "half.__code__ = (lambda x: x).__code__",
        "import builtins\nbuiltins.half = lambda x: x",
    ):
        answer = f"{cheat}\ndef double(xs): return xs"
        assert reason(submit("HumanEvalDataset", answer, helped)).startswith("AssertionError")


def test_the_part_of_a_prompt_that_reaches_the_program() -> None:
    read = read_human_eval({"entry_point": "double", "prompt": PROMPT, "test": DOUBLED})
    names: dict[str, Any] = {}
    exec(read.prelude, names)
    assert set(names) - {"__builtins__"} == {"List", "BASE", "main", "half"}
    for prose in ("Write a function double.", "", "import:"):
        text = {"entry_point": "double", "prompt": prose, "test_list": ["assert double(1)"]}
        assert read_human_eval(text).prelude == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"test": CHECK}, "entry_point"),
        ({"test": CHECK, "entry_point": "f", "prompt": 3}, "prompt must be text"),
        ({"test": "x = 1", "entry_point": "f"}, "defines no function check"),
        ({"test": "def check(", "entry_point": "f"}, "not valid Python"),
        ({"test": 3, "entry_point": "f"}, "must be text"),
        ({"test_list": "f(", "entry_point": "f"}, "neither a list nor the text of one"),
    ],
)
def test_function_records_that_cannot_be_read(submit: Submit, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        submit("HumanEvalDataset", "", data)


def test_mbpp_tests_may_be_a_text(submit: Submit) -> None:
    for text in ("['assert f(1) == 1']", '["assert f(1) == 1"]'):
        assert submit("MBPPDataset", "def f(x): return x", {"test_list": text}).accepted


def test_a_setup_cannot_stand_in_for_the_program(submit: Submit) -> None:
    data = {"test_list": ["assert gcd(4, 6) == 2"], "test_setup_code": "from math import *"}
    with pytest.raises(ValueError, match="may hide the program's functions"):
        submit("MBPPDataset", "def gcd(a, b): return 0", data)
    data["entry_point"] = "gcd"
    assert not submit("MBPPDataset", "def gcd(a, b): return 0", data).accepted
    assert submit("MBPPDataset", "def gcd(a, b): return 2", data).accepted


def test_half_characters_are_refused(submit: Submit) -> None:
    test = json.dumps({"inputs": ["1"], "outputs": ["\ud800"]})
    with pytest.raises(ValueError, match="half a character"):
        submit("LiveCodeBenchDataset", DOUBLE, {"test": test})
