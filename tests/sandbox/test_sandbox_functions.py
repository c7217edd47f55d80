"""``/submit`` for function problems: asserts run in the judge, functions in the candidate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.datasets.functions import read_function_tests
from ctrl_megatron.sandbox.limits import ANSWER_BYTES
from ctrl_megatron.sandbox.wire import CommandRunStatus, EvalResult, RunStatus

Judge = Callable[..., EvalResult]


def passed(result: EvalResult) -> list[bool]:
    return [case.passed for case in result.tests]


def reasons(result: EvalResult) -> list[str]:
    return [(case.test_info or {})["reason"] for case in result.tests]


def test_one_verdict_per_assert(judge: Judge) -> None:
    result = judge(
        "def f(x): return abs(x)", ["assert f(2) == 2", "assert f(-3) == 4", "assert f(0) == 0"]
    )
    assert passed(result) == [True, False, True]
    assert not result.accepted
    assert reasons(result) == ["", "AssertionError: f(-3) returned 3", ""]
    statuses = [case.exec_info.status for case in result.tests]
    assert statuses == [RunStatus.SUCCESS, RunStatus.FAILED, RunStatus.SUCCESS]
    assert result.extracted_code == "def f(x): return abs(x)\n"
    assert result.id == 7


def test_accepted_when_everything_passes(judge: Judge) -> None:
    assert judge("def f(x): return x", ["assert f(1) == 1", "assert f([2]) == [2]"]).accepted


def test_stops_at_the_first_failure_unless_all_are_wanted(judge: Judge) -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 0", "assert f(3) == 3"]
    assert passed(judge("def f(x): return x", tests, run_all=False)) == [True, False]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(x:\n  pass", "SyntaxError"),
        ("raise RuntimeError('at load')", "failed to load: RuntimeError: at load (line 1)"),
        ("exit(0)", "failed to load: SystemExit"),
        ("def g(x): return x", "NameError: name 'f' is not defined"),
        ("def f(x): raise KeyError('k')", "KeyError"),
        ("def f(x): return g(x)\ndef g(x): return 1 / 0", "ZeroDivisionError"),
        ("def f(x): return f(x)", "RecursionError"),
        ("def f(): return 1", "TypeError"),
        ("", "NameError"),
        ("def f(x): return object()", "returned <object object>"),
        ("def f(x): return 'x' * (33 << 20)", "more than"),
    ],
)
def test_wrong_programs_fail_with_the_reason(judge: Judge, code: str, reason: str) -> None:
    result = judge(code, ["assert f(1) == 1", "assert f(2) == 2"])
    assert passed(result) == [False, False]
    assert all(reason in text for text in reasons(result)), reasons(result)


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        ("import json\njson.loads('{')", "ValueError"),
        ("b'\\xff'.decode()", "ValueError"),
        ("b'\\xff'.decode()", "UnicodeDecodeError"),
        ("next(iter([]))", "StopIteration"),
        ("raise StopAsyncIteration", "StopAsyncIteration"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise StopIteration(x)", "(KeyError, StopIteration)"),
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import statistics\nstatistics.mean([])", "ValueError"),
        ("class Own(LookupError): pass\nraise Own(x)", "LookupError"),
        ("class Own(Exception): pass\nraise Own(x)", "Exception"),
        ("raise StopIteration", "Exception"),
        ("{}['k']", "KeyError"),
    ],
)
def test_an_exception_arrives_as_its_builtin_base(judge: Judge, raised: str, caught: str) -> None:
    body = "\n    ".join(raised.split("\n"))
    test = f"try:\n    f(1)\nexcept {caught}:\n    pass\nelse:\n    assert False"
    result = judge(f"def f(x):\n    {body}", [test, test.replace(caught, "MemoryError")])
    assert passed(result) == [True, False], reasons(result)


def test_an_exception_that_ends_loops_is_raised_only_where_a_test_names_it(judge: Judge) -> None:
    names = (
        "try:\n    f(0)\n    assert False\nexcept StopIteration as end:\n    assert end.value == 5"
    )
    silent = "assert all(map(f, [1, 2]))"
    right = "def f(x):\n    if not x: raise StopIteration(5)\n    return x"
    wrong = "def f(x): raise StopIteration(5)"
    assert passed(judge(right, [names, silent])) == [True, True]
    assert passed(judge(wrong, [names, silent])) == [True, False]


def test_the_text_of_an_exception_is_its_own(judge: Judge) -> None:
    test = "try:\n    f('k')\nexcept KeyError as error:\n    assert str(error) == repr('k')"
    assert judge("def f(x): return {}[x]", [f"{test}\nelse:\n    assert False"]).accepted


RAISES = "try:\n    f({})\nexcept {}:\n    pass\nelse:\n    assert False"
BIG = "def f(x): return 'x' * (5 << 20)" if ANSWER_BYTES < 5 << 20 else "f = 3"


@pytest.mark.parametrize(
    ("code", "test", "entry_point", "reason"),
    [
        ("", RAISES.format(-1, "Exception"), "f", "NameError: name 'f' is not defined"),
        ("", RAISES.format("'a'", "(TypeError, NameError)"), "f", "NameError"),
        ("", "try:\n    f(1)\n    assert False\nexcept:\n    pass", "f", "NameError"),
        (
            "",
            "try:\n    f(1)\n    assert False\nexcept BaseException as e:\n    e",
            "f",
            "NameError",
        ),
        ("import os", RAISES.format(-1, "NameError"), "f", "NameError: name 'f' is not defined"),
        ("f = 3", RAISES.format(-1, "TypeError"), "f", "no check"),
        ("class Solution: pass", RAISES.format(1, "Exception"), "Solution().f", "NameError"),
        (BIG, RAISES.format(1, "Exception"), "f", ""),
        (
            "def f(x): return object()",
            "try:\n    assert f(1) == 2\nexcept TypeError:\n    pass\nelse:\n    assert False",
            "f",
            "object",
        ),
    ],
)
def test_a_failure_of_the_harness_is_no_exception_of_the_function(
    judge: Judge, code: str, test: str, entry_point: str, reason: str
) -> None:
    result = judge(code, [test], entry_point=entry_point)
    assert passed(result) == [False]
    assert reason in reasons(result)[0], reasons(result)


def test_an_exception_of_the_functions_own_code_is_due(judge: Judge) -> None:
    code = "def g(): return missing\ndef f(x): return {0: g, 1: int, 2: [].pop}[x]()"
    code += "\ndef late(x): yield 1 / x"
    tests = [RAISES.format(0, "NameError"), RAISES.format(2, "IndexError")]
    assert judge(code, tests, entry_point="f").accepted
    missing = "try:\n    f(1).count\n    assert False\nexcept AttributeError:\n    pass"
    assert judge("class Box: pass\ndef f(x): return Box()", [missing], entry_point="f").accepted
    lazy = "try:\n    list(late(0))\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False"
    assert judge(code, [lazy], entry_point="late").accepted


@pytest.mark.parametrize("code", ["pass", "from math import *"])
def test_a_function_of_the_setup_is_no_answer(judge: Judge, code: str) -> None:
    setup, tests = "from math import gcd as f", ["assert f(4, 6) == 2"]
    result = judge(code, tests, setup=setup, entry_point="f")
    assert reasons(result) == ["NameError: name 'f' is not defined"]
    with pytest.raises(ValueError, match="the tests name no function of the program"):
        judge(code, tests, setup=setup)


def test_a_test_that_times_out_does_not_take_the_others_along(judge: Judge) -> None:
    code = "def f(x):\n    while x == 1: pass\n    return x"
    result = judge(
        code, ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2"], run_timeout=1.5
    )
    assert passed(result) == [True, False, True]
    slow = result.tests[1].exec_info.run_result
    assert slow is not None and slow.status is CommandRunStatus.TIME_LIMIT_EXCEEDED
    assert slow.return_code is None


def test_after_two_time_outs_the_rest_is_not_run(judge: Judge) -> None:
    code = "def f(x):\n    while x: pass\n    return x"
    tests = [f"assert f({x}) == {x}" for x in (1, 2, 0, 3)]
    result = judge(code, tests, run_timeout=0.3)
    assert passed(result) == [False] * 4
    assert "not run" in reasons(result)[3]


def test_a_comparison_that_never_ends_is_a_time_out(judge: Judge) -> None:
    result = judge("def f(): return 10**12", ["assert sum(range(f())) == 1"], run_timeout=0.3)
    assert passed(result) == [False]
    assert "time limit exceeded (" in reasons(result)[0]


def test_in_place_changes_of_arguments_come_back(judge: Judge) -> None:
    code = "def f(a, b, c):\n    a.append(1); b['k'] = (2,); c.add(3); a[0].pop()"
    tests = [
        "a, b, c = [[0]], {}, set()\nf(a, b, c)\nassert (a, b, c) == ([[], 1], {'k': (2,)}, {3})"
    ]
    assert judge(code, tests).accepted


def test_types_cross_exactly(judge: Judge) -> None:
    code = "def f(x): return x\ndef g(x): return type(x).__name__"
    values = ["(1, [2])", "{1: {2}}", "1.5", "float('inf')", "b'x'", "2**200", "1j", "None", "True"]
    values += ["...", "[" * 90 + "]" * 90]
    tests = [
        f"assert f({v}) == {v} and type(f({v})) is type({v}) and g({v}) == type({v}).__name__"
        for v in values
    ]
    assert passed(judge(code, tests, entry_point=["f", "g"])) == [True] * len(values)


def test_lists_are_not_tuples_and_generators_are_not_lists(judge: Judge) -> None:
    code = "def f(x): return (i for i in x)\ndef g(x): return list(x)"
    tests = ["assert list(f([1])) == [1]", "assert f([1]) == [1]", "assert g((1,)) == (1,)"]
    assert passed(judge(code, tests, entry_point=["f", "g"])) == [True, False, False]


def test_setup_runs_in_the_judge_and_only_its_imports_reach_the_program(judge: Judge) -> None:
    setup = "import math\nEXPECTED = 3\ndef same(a, b): return math.isclose(a, b)"
    code = "def f(x): return math.sqrt(x)\ndef g(): return 'EXPECTED' in globals()"
    tests = ["assert same(f(9), EXPECTED)", "assert g() is False"]
    assert judge(code, tests, setup=setup, entry_point=["f", "g"]).accepted


def test_human_eval_style_candidate_is_the_entry_point(judge: Judge) -> None:
    assert judge("def f(x): return x", ["assert candidate(4) == 4"], entry_point="f").accepted


def test_a_function_named_like_a_builtin(judge: Judge) -> None:
    tests = ["assert sum(10, 15) == 6", "assert sum(1, 1) == 1"]
    assert passed(judge("def sum(a, b): return 6 if a > 1 else 1", tests)) == [True, True]
    assert passed(judge("def other(a, b): return 6", tests)) == [False, False]


def test_redefining_builtins_that_the_test_uses_changes_nothing(judge: Judge) -> None:
    code = "def sorted(x): return [1, 2]\nlen = abs = set = sorted\ndef f(): return [7]"
    tests = ["assert sorted(f()) == [1, 2]", "assert len(f()) == 2", "assert set(f()) == [1, 2]"]
    assert passed(judge(code, tests)) == [False] * 3


def test_expected_exceptions_are_raised_in_the_test(judge: Judge) -> None:
    code = "class Own(Exception): pass\ndef f(x):\n    if x: raise ValueError('no')\n    raise Own"
    catch = "try:\n    f({})\nexcept {}:\n    pass\nelse:\n    assert False"
    tests = [catch.format(1, "ValueError"), catch.format(0, "ValueError")]
    assert passed(judge(code, tests)) == [True, False]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"test_list": []}, "non-empty list"),
        ({}, "non-empty list"),
        ({"test_list": [1]}, "non-empty list"),
        ({"test_list": ["assert f("]}, r"test_list\[0\] is not valid Python"),
        ({"test_list": ["assert f()"], "test_setup_code": "def"}, "test_setup_code is not valid"),
        ({"test_list": ["assert f()"], "entry_point": "f g"}, "entry_point must be"),
        ({"test_list": ["assert len(sorted([])) == 0"]}, "give provided_data.entry_point"),
        ({"test_list": ["assert True"]}, "give provided_data.entry_point"),
        ({"test_list": ["f(2)\nassert 4 == 4"], "entry_point": "f"}, "assert constants only"),
    ],
)
def test_records_that_cannot_be_judged_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_function_tests(data)


@pytest.mark.parametrize(
    ("tests", "setup"),
    [
        (["assert f(1) == 1", "assert True"], ""),
        (["check(f)\nassert True"], "def check(f): assert f(1) == 1"),
        (["try: f(1)\nexcept ValueError: pass\nelse: assert False"], ""),
        (["if f(1) != 1: raise AssertionError\nassert True"], ""),
    ],
)
def test_asserts_of_constants_beside_a_check_are_read(tests: list[str], setup: str) -> None:
    data = {"test_list": tests, "test_setup_code": setup, "entry_point": "f"}
    assert read_function_tests(data).tests == tuple(tests)


def test_stubs_follow_from_the_record() -> None:
    tests = read_function_tests(
        {
            "test_list": [
                "xs = [h(y) for y in range(3)]\nassert all(map(lambda z: f(z) == len(xs), xs))",
                "import os.path\nassert os.path.join(g(1), 'a') == helper()",
            ],
            "test_setup_code": "from math import pi as p\nimport cmath\ndef helper(): return k(p)",
            "entry_point": ["f", "g", "h", "k"],
        }
    )
    assert tests.stubs == ("f", "g", "h", "k")
    assert tests.prelude == "from math import pi as p\nimport cmath"


NODE = "class Node:\n    def __init__(s, x): s.x, s.left, s.right = x, None, None\n"
HEIGHT = NODE + "def height(n): return 0 if n is None else 1 + max(height(n.left), height(n.right))"


def test_objects_of_the_program_may_be_made_changed_and_given_back(judge: Judge) -> None:
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)"
    tests = ["assert height(root) == 3", "assert height(root.left) == 2", "assert root.x == 1"]
    assert judge(HEIGHT, tests, setup=setup).accepted
    assert passed(judge(NODE + "def height(n): return 3", tests, setup=setup)) == [
        True,
        False,
        True,
    ]
    pairs = ["assert longest([Pair(1, 2), Pair(3, 4)], 2) == 2"]
    code = "class Pair(object):\n    def __init__(s, a, b): s.a, s.b = a, b\n"
    assert judge(code + "def longest(p, n): return sum(q.a < q.b for q in p)", pairs).accepted


def test_objects_of_the_setup_are_made_again_for_a_program_that_was_started_again(
    judge: Judge,
) -> None:
    code = HEIGHT + "\ndef dies(): import os; os._exit(1)"
    tests = ["assert dies() is None", "assert height(root) == 1"]
    entries = ["dies", "height", "Node"]
    verdicts = judge(code, tests, setup="root = Node(1)", entry_point=entries)
    assert passed(verdicts) == [False, True]


@pytest.mark.parametrize("entry", ["double", "Solution().double", "Solution", None])
def test_methods_of_a_solution(judge: Judge, entry: str | None) -> None:
    code = "class Solution:\n    def double(self, x, *, k=2): return x * k"
    tests = ["assert Solution().double(2) == 4", "assert Solution().double(2, k=3) == 6"]
    assert judge(code, tests, entry_point=entry).accepted
    assert passed(judge(code.replace("k=2", "k=5"), tests, entry_point=entry)) == [False, True]


def test_a_method_may_stand_for_the_candidate(judge: Judge) -> None:
    code = "class Solution:\n    def double(self, x): return x * 2"
    assert judge(code, ["assert candidate(2) == 4"], entry_point="Solution().double").accepted


def test_functions_that_are_results_may_be_called(judge: Judge) -> None:
    code = "def adder(n): return lambda x: x + n"
    tests = ["assert adder(2)(3) == 5", "add = adder(1)\nassert [add(x) for x in (1, 2)] == [2, 3]"]
    assert judge(code, tests).accepted
    assert passed(judge("def adder(n): return lambda x: x", tests)) == [False, False]
