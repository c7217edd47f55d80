"""A test passes only if it has checked something that came from the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox.datasets.functions import read_function_tests, read_human_eval
from ctrl_megatron.sandbox.wire import EvalResult

Judge = Callable[..., EvalResult]


def passed(result: EvalResult) -> list[bool]:
    return [case.passed for case in result.tests]


def reasons(result: EvalResult) -> list[str]:
    return [(case.test_info or {})["reason"] for case in result.tests]


CHECK_NOTHING = {
    "no assert": "print(f(1))",
    "a comparison that nobody asserts": "f(1) == 2",
    "an assert of a constant": "f(1)\nassert True",
    "an assert of what is expected": "f(1)\nexpected = 3\nassert expected == 3",
    "an assert beside the result": "result = f(1)\nother = [1]\nassert other == [1]",
    "a result that is bound anew": "x = f(1)\nx = 5\nassert x == 5",
    "a result that is compared with itself": "x = f(1)\nassert x == x",
    "an argument that no call can change": "x = 5\nf(x)\nassert x == 5",
    "a tuple is true": "assert (f(1) == 2, 'message')",
    "a list is true": "assert [f(1) == 2]",
    "a lambda is true": "assert lambda: f(1) == 2",
    "a generator is true": "assert (f(x) == 2 for x in [1])",
    "true or": "assert True or f(1) == 2",
    "or true": "assert f(1) == 2 or True",
    "an or that is true, of a result": "x = f(1)\nassert 1 or x == 2",
    "if False": "if False:\n    assert f(1) == 2",
    "while 0": "while 0:\n    assert f(1) == 2",
    "no loop": "for a, b in []:\n    assert f(a) == b",
    "behind the end": "def run():\n    return\n    assert f(1) == 2\nrun()",
    "a function that nothing calls": "def run():\n    assert f(1) == 2",
    "a function of a function": "def run():\n    def inner():\n        assert f(1) == 2\nrun()",
    "a method that nothing calls": "class A:\n    def run(self):\n        assert f(1) == 2\nA()",
    "a lambda that nothing calls": "check = lambda: f(1)\nassert check",
    "the function itself": "assert f",
    "that it is a function": "assert callable(f)",
    "its name": "assert f.__name__ == 'f'",
    "a check of other things": "def same(a, b):\n    assert a == b\nf(1)\nsame(1, 1)",
    "an exception that is not missed": "try:\n    f(-1)\nexcept ValueError:\n    pass",
    "an assertion of unittest on nothing": "import unittest\nclass A(unittest.TestCase):\n"
    "    def test(self):\n        x = [1]\n        f(1)\n        self.assertEqual(x, [1])",
    "assertTrue of a tuple": "import unittest\nclass A(unittest.TestCase):\n"
    "    def test(self):\n        self.assertTrue((f(1) == 2, 'message'))",
}


@pytest.mark.parametrize("test", CHECK_NOTHING.values(), ids=CHECK_NOTHING)
def test_a_record_with_a_test_that_checks_nothing_is_refused(test: str) -> None:
    wanted = r"provided_data.test_list\[1\] checks nothing that comes from the program"
    with pytest.raises(ValueError, match=wanted):
        read_function_tests({"test_list": ["assert f(0) == 0", test], "entry_point": "f"})


WRONG = "def f(x, *more): return 'wrong'"
RAISES = "def f(x, *more): raise ValueError('wrong')"
PLUS_ONE = (
    "def f(x, *more):\n    if isinstance(x, list):\n        x.append(0)\n        return None\n"
    "    if x < 0: raise ValueError('negative')\n    return x + 1"
)
CHECKS = {
    "an assert": "assert f(1) == 2",
    "of a chain": "assert 1 < f(1) < 3",
    "of a name": "x = f(1)\nassert x == 2",
    "of a part": "x, y = f(1), 3\nassert x == 2",
    "of what was made of it": "x = [f(i) for i in range(3)]\ntotal = sum(x)\nassert total == 6",
    "of what it was put in": "got = []\nfor i in range(3):\n    got.append(f(i))\n"
    "assert got == [1, 2, 3]",
    "of a heap": "import heapq\ngot = []\nheapq.heappush(got, f(1))\nassert got == [2]",
    "of what depends on it": "n = 0\nif f(1) == 2:\n    n += 1\nassert n == 1",
    "of how often": "n = 0\nwhile f(n) < 3:\n    n += 1\nassert n == 2",
    "of an argument": "x = [1]\nf(x)\nassert x == [1, 0]",
    "of many": "assert all(f(a) == b for a, b in [(1, 2), (2, 3)])",
    "in a loop": "for a, b in [(1, 2), (2, 3)]:\n    assert f(a) == b",
    "in a function": "def run():\n    assert f(1) == 2\nrun()",
    "in a function that is called by name": "def one():\n    assert f(1) == 2\n"
    "for run in (one,):\n    run()",
    "of a parameter": "def same(a, b):\n    assert a == b\nsame(f(1), 2)",
    "of a function that is given": "def check(function):\n    got = function(1)\n"
    "    assert got == 2\ncheck(f)",
    "through two functions": "def same(a, b):\n    assert a == b\ndef check(g):\n"
    "    same(g(1), 2)\ncheck(f)",
    "mapped": "def same(a, b):\n    assert a == b\nlist(map(same, [f(1)], [2]))",
    "of a name for it": "g = f\nassert g(1) == 2",
    "of a partial": "import functools\ng = functools.partial(f, 1)\nassert g() == 2",
    "of an object around it": "class Box:\n    def __init__(self):\n        self.value = f(1)\n"
    "box = Box()\nassert box.value == 2",
    "of a global": "def run():\n    global got\n    got = f(1)\ngot = None\nrun()\nassert got == 2",
    "if and raise": "if f(1) != 2:\n    raise ValueError('not 2')",
    "if and return": "def run():\n    if f(1) == 2:\n        return\n    assert False\nrun()",
    "match": "match f(1):\n    case 2:\n        pass\n    case _:\n        raise AssertionError",
    "exit": "import sys\nif f(1) != 2:\n    sys.exit(1)",
    "under a main guard": "if __name__ == '__main__':\n    assert f(1) == 2",
    "called under a main guard": "def run():\n    assert f(1) == 2\n"
    "if '__main__' == __name__:\n    run()",
    "either": "try:\n    assert f(1) == 3\nexcept AssertionError:\n    assert f(1) == 2",
    "one of several": "for wanted in (3, 2):\n    try:\n        assert f(1) == wanted\n"
    "        break\n    except AssertionError:\n        continue\nelse:\n"
    "    raise AssertionError('none')",
    "caught and looked at": "ok = True\ntry:\n    assert f(1) == 2\n"
    "except AssertionError:\n    ok = False\nassert ok",
    "swallowed": "try:\n    assert f(1) == 2\nexcept:\n    pass",
    "swallowed by Exception": "try:\n    assert f(1) == 2\nexcept Exception as error:\n"
    "    print(error)",
    "suppressed": "import contextlib\nwith contextlib.suppress(AssertionError):\n"
    "    assert f(1) == 2",
    "swallowed twice": "for a in (1, 2):\n    try:\n        assert f(a) == a + 1\n"
    "    except AssertionError:\n        pass",
    "of a call that fails": "def run():\n    try:\n        return f(1)\n    except ValueError:\n"
    "        return None\nassert run() == 2",
    "of numbers": "import math\nassert math.isclose(f(1), 2)",
}
EXPECT = {
    "else": "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "fails behind the call": "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "raises behind the call": "try:\n    f(-1)\n    raise AssertionError\nexcept ValueError:\n"
    "    pass",
    "caught by everything": "try:\n    f(-1)\n    assert False\nexcept Exception:\n    pass",
    "a flag": "ok = False\ntry:\n    f(-1)\nexcept ValueError:\n    ok = True\nassert ok",
    "its text": "try:\n    f(-1)\nexcept ValueError as error:\n    assert 'n' in str(error)",
    "left": "def run():\n    try:\n        f(-1)\n    except ValueError:\n        return\n"
    "    assert False\nrun()",
    "a function": "def fails(kind, function, *given):\n    try:\n        function(*given)\n"
    "    except kind:\n        return True\n    return False\nassert fails(ValueError, f, -1)",
    "pytest": "import pytest\nwith pytest.raises(ValueError):\n    f(-1)",
    "pytest with a function": "import pytest\npytest.raises(ValueError, f, -1)",
}


def passing(judge: Judge, code: str, tests: dict[str, str]) -> list[str]:
    result = judge(code, list(tests.values()), entry_point="f")
    return [name for name, fine in zip(tests, passed(result), strict=True) if fine]


def test_a_check_counts_for_the_right_program_alone(judge: Judge) -> None:
    assert passing(judge, PLUS_ONE, CHECKS) == list(CHECKS)
    for wrong in (WRONG, RAISES, ""):
        assert passing(judge, wrong, CHECKS) == []


def test_an_expected_exception_is_a_check(judge: Judge) -> None:
    assert passing(judge, PLUS_ONE, EXPECT) == list(EXPECT)
    for wrong in (WRONG, ""):
        assert passing(judge, wrong, EXPECT) == []
    other = "def f(x): raise KeyError(x)"
    assert passing(judge, other, EXPECT) == ["caught by everything"]  # as it is written


@pytest.mark.parametrize("test", [*CHECKS.values(), *EXPECT.values()], ids=[*CHECKS, *EXPECT])
def test_a_test_with_a_check_is_not_refused(test: str) -> None:
    assert read_function_tests({"test_list": [test], "entry_point": "f"}).tests


@pytest.mark.parametrize(
    ("test", "code", "reason"),
    [
        ("for a in range(f(0)):\n    assert f(a) == a", "def f(x): return 0", "no check"),
        ("def run(n):\n    if n: return\n    assert f(1) == 2\nrun(1)\nf(2)", WRONG, "no check"),
        ("r = []\nfor x in r:\n    assert f(x) == 1\nassert r == []\nf(1)", WRONG, "no check"),
        ("if f(1) == 2:\n    assert f(2) == 3", "def f(x): return x + 1", ""),
        ("if f(1) == 2:\n    assert f(2) == 3", WRONG, ""),  # as it is written
        ("x = 0 and f(1)\nassert x == 0", WRONG, "no check"),
        ("def same(a, b):\n    assert a == b\nx = 0\nif x: same(f(1), 2)\nsame(1, 1)", WRONG, "no"),
        ("try:\n    assert f(1) == 2\nexcept:\n    pass\nassert f(2) == 3", RAISES, "ValueError"),
        (
            "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f(1) == 9\n"
            "assert f(1) == 2",
            PLUS_ONE,
            "a check failed and the test continued",
        ),
    ],
)
def test_a_check_counts_when_it_is_evaluated(
    judge: Judge, test: str, code: str, reason: str
) -> None:
    found = reasons(judge(code, [test], entry_point="f"))[0]
    assert reason in found and bool(found) == bool(reason)


def test_calls_of_the_setup_count_if_a_test_asserts_on_their_results(judge: Judge) -> None:
    tests = ["assert r == 2", "assert same == [1]\nf(1)"]
    setup = "r = f(1)\nsame = [1]"
    with pytest.raises(ValueError, match=r"test_list\[1\] checks nothing"):
        read_function_tests({"test_list": tests, "test_setup_code": setup, "entry_point": "f"})
    for code, wanted in ((PLUS_ONE, True), (WRONG, False)):
        assert passed(judge(code, tests[:1], setup=setup, entry_point="f")) == [wanted]


def test_a_test_may_check_an_earlier_result_and_call_the_program_itself(judge: Judge) -> None:
    tests = ["x = f(1)\nassert x == 2", "y = f(x)\nassert (x, y) == (2, 3)"]
    assert judge(PLUS_ONE, tests, entry_point="f").accepted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("    assert candidate(1) == 2\n    assert True, 'for debugging'", 1),
        ("    x = candidate(1)\n    assert x == 2\n    assert True", 1),
        ("    def one():\n        assert candidate(1) == 2\n    one()", 1),
        ("    def one():\n        assert candidate(1) == 2", 0),
        ("    assert True", 0),
        ("    candidate(1)", 0),
    ],
)
def test_a_check_of_human_eval(body: str, wanted: int) -> None:
    record = {"test": f"def check(candidate):\n{body}\n", "entry_point": "f"}
    if wanted:
        assert len(read_human_eval(record).tests) == wanted
    else:
        with pytest.raises(ValueError, match="checks nothing that comes from the program"):
            read_human_eval(record)


def test_texts_that_take_too_long_to_follow_are_refused() -> None:
    lines = [f"{'  ' * depth}for x{depth} in f(1):" for depth in range(16)]
    test = "\n".join([*lines, f"{'  ' * 16}assert f(2) == 3"])
    with pytest.raises(ValueError, match="nested too deeply"):
        read_function_tests({"test_list": [test], "entry_point": "f"})
