"""A test passes only if it has executed a check."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult

Judge = Callable[..., EvalResult]


def passed(result: EvalResult) -> list[bool]:
    return [case.passed for case in result.tests]


def reasons(result: EvalResult) -> list[str]:
    return [(case.test_info or {})["reason"] for case in result.tests]


NO_CHECK = {
    "no assert": "print(f(1))",
    "a comparison that nobody asserts": "f(1) == 2",
    "while 0": "while 0:\n    assert f(1) == 2",
    "no loop": "for a, b in []:\n    assert f(a) == b",
    "behind the end": "def run():\n    return\n    assert f(1) == 2\nrun()",
    "a function that nothing calls": "def run():\n    assert f(1) == 2",
    "a function of a function": "def run():\n    def inner():\n        assert f(1) == 2\nrun()",
    "a method that nothing calls": "class A:\n    def run(self):\n        assert f(1) == 2\nA()",
}
LEFT_TO_POISON = {
    "an assert of what is expected": "f(1)\nexpected = 3\nassert expected == 3",
    "a result that is bound anew": "x = f(1)\nx = 5\nassert x == 5",
    "an argument that no call can change": "x = 5\nf(x)\nassert x == 5",
    "a check of other things": "def same(a, b):\n    assert a == b\nf(1)\nsame(1, 1)",
    "swallowed": "try:\n    assert f(1) == 2\nexcept:\n    pass",
    "swallowed by Exception": "try:\n    assert f(1) == 2\nexcept Exception as error:\n"
    "    print(error)",
    "suppressed": "import contextlib\nwith contextlib.suppress(AssertionError):\n"
    "    assert f(1) == 2",
    "swallowed twice": "for a in (1, 2):\n    try:\n        assert f(a) == a + 1\n"
    "    except AssertionError:\n        pass",
    "caught by everything": "try:\n    f(-1)\n    assert False\nexcept Exception:\n    pass",
}
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
    "of a call that fails": "def run():\n    try:\n        return f(1)\n    except ValueError:\n"
    "        return None\nassert run() == 2",
    "of numbers": "import math\nassert math.isclose(f(1), 2)",
}
EXPECT = {
    "else": "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "fails behind the call": "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "raises behind the call": "try:\n    f(-1)\n    raise AssertionError\nexcept ValueError:\n"
    "    pass",
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


@pytest.mark.parametrize("test", NO_CHECK.values(), ids=NO_CHECK)
def test_a_test_that_executed_no_check_does_not_pass(judge: Judge, test: str) -> None:
    found = judge(PLUS_ONE, ["assert f(0) == 1", test], entry_point="f")
    assert reasons(found) == ["", "no check of the test was executed"]


def test_a_test_that_every_program_passes_passes_as_in_plain_python(judge: Judge) -> None:
    """Programs that return one value, which are tried beforehand, show that it checks nothing."""
    for code in (PLUS_ONE, WRONG):
        assert passing(judge, code, LEFT_TO_POISON) == list(LEFT_TO_POISON)


def test_a_check_counts_for_the_right_program_alone(judge: Judge) -> None:
    assert passing(judge, PLUS_ONE, CHECKS) == list(CHECKS)
    for wrong in (WRONG, RAISES, ""):
        assert passing(judge, wrong, CHECKS) == []


def test_an_expected_exception_is_a_check(judge: Judge) -> None:
    assert passing(judge, PLUS_ONE, EXPECT) == list(EXPECT)
    for wrong in (WRONG, ""):
        assert passing(judge, wrong, EXPECT) == []
    assert passing(judge, "def f(x): raise KeyError(x)", EXPECT) == []


@pytest.mark.parametrize(
    ("test", "code", "reason"),
    [
        ("for a in range(f(0)):\n    assert f(a) == a", "def f(x): return 0", "no check"),
        ("def run(n):\n    if n: return\n    assert f(1) == 2\nrun(1)\nf(2)", WRONG, "no check"),
        ("if f(1) == 2:\n    assert f(2) == 3", "def f(x): return x + 1", ""),
        ("if f(1) == 2:\n    assert f(2) == 3", WRONG, ""),  # as it is written
        ("try:\n    assert f(1) == 2\nexcept:\n    pass\nassert f(2) == 3", RAISES, "ValueError"),
    ],
)
def test_a_check_counts_when_it_is_evaluated(
    judge: Judge, test: str, code: str, reason: str
) -> None:
    found = reasons(judge(code, [test], entry_point="f"))[0]
    assert reason in found and bool(found) == bool(reason)


def test_calls_of_the_setup_count_if_a_test_asserts_on_their_results(judge: Judge) -> None:
    setup = "r = f(1)"
    for code, wanted in ((PLUS_ONE, True), (WRONG, False)):
        assert passed(judge(code, ["assert r == 2"], setup=setup, entry_point="f")) == [wanted]


def test_a_test_may_check_an_earlier_result_and_call_the_program_itself(judge: Judge) -> None:
    tests = ["x = f(1)\nassert x == 2", "y = f(x)\nassert (x, y) == (2, 3)"]
    assert judge(PLUS_ONE, tests, entry_point="f").accepted


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ("    assert candidate(1) == 2\n    assert True, 'for debugging'", True),
        ("    x = candidate(1)\n    assert x == 2\n    assert True", True),
        ("    def one():\n        assert candidate(1) == 2\n    one()", True),
        ("    def one():\n        assert candidate(1) == 2", False),
        ("    candidate(1)", False),
    ],
)
def test_a_check_of_human_eval(
    client: SandboxClient, on_loop: BackgroundLoop, body: str, passes: bool
) -> None:
    data = {"test": f"def check(candidate):\n{body}\n", "entry_point": "f"}
    request = submission(PLUS_ONE, dataset_type="HumanEvalDataset", provided_data=data)
    assert passed(on_loop(client.submit(request))) == [passes]
