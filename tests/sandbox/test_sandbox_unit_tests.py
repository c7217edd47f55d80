"""Tests in the form of pytest and unittest are run one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.hints import execution_hint
from ctrl_megatron.rewards.grading import check_tests, descriptions_of_tests, grading_job
from ctrl_megatron.sandbox.datasets.functions import read_function_tests, read_human_eval
from ctrl_megatron.sandbox.jail import pytest_stand_in
from ctrl_megatron.sandbox.wire import EvalResult
from ctrl_megatron.types import Attempt, Problem, Verdict

Judge = Callable[..., EvalResult]
RIGHT = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x + 1"
HALF = "def f(x):\n    return x + 1 if x < 2 else x"

PYTEST = """
import pytest
from solution import f

NUMBERS = [1, 2]

def plus_one(x):
    return x + 1

def test_one():
    assert f(1) == plus_one(1)

def test_two():
    assert f(2) == 3

@pytest.mark.parametrize("x, wanted", [(1, 2), pytest.param(5, 6, id="five"), [0, 1]])
def test_pairs(x, wanted):
    assert f(x) == wanted

@pytest.mark.parametrize("a", [0])
@pytest.mark.parametrize("b", [1, 5])
def test_product(a, b):
    assert f(a + b) == a + b + 1

@pytest.mark.parametrize("x", NUMBERS)
def test_all_numbers(x):
    assert f(x) == x + 1

@pytest.mark.skip(reason="slow")
def test_skipped():
    assert f(1) == 99

class TestMore:
    def setup_method(self, method):
        self.x = 1

    def test_of_a_class(self):
        assert f(self.x) == pytest.approx(2.0)

    @pytest.mark.parametrize("y", [5])
    def test_of_a_parameter(self, y):
        assert f(y) == 6

def test_raises():
    with pytest.raises(ValueError, match="nega"):
        f(-1)

if __name__ == "__main__":
    pytest.main([__file__])
"""
PYTEST_OF_HALF = [
    *(True, False),
    *(True, False, True),
    *(True, False),
    False,
    False,
    *(True, False),
]
UNITTEST = """
import unittest
from main import *

class Common(unittest.TestCase):
    def is_next(self, x):
        self.assertEqual(f(x), x + 1)

class FTests(Common):
    @classmethod
    def setUpClass(cls):
        cls.one = 1

    def setUp(self):
        self.five = 5

    def tearDown(self):
        self.assertEqual(self.five, 5)

    def test_one(self):
        self.is_next(self.one)

    def test_five(self):
        self.assertTrue(f(self.five) == 6)

    def test_several(self):
        for x in range(4):
            with self.subTest(x=x):
                self.assertAlmostEqual(f(x), x + 1)

    def test_raises(self):
        with self.assertRaises(ValueError) as caught:
            f(-1)
        self.assertIn("negative", str(caught.exception))

    def test_raises_called(self):
        self.assertRaises(ValueError, f, -1)

    @unittest.skip("later")
    def test_later(self):
        self.assertEqual(f(1), 99)

if __name__ == "__main__":
    unittest.main()
"""
COUNTER = """
import unittest

class CounterTest(unittest.TestCase):
    def setUp(self):
        self.counter = Counter(3)

    def test_start(self):
        self.assertEqual(self.counter.value, 3)

    def test_up(self):
        self.counter.up(2)
        self.assertEqual(self.counter.value, 5)
"""


def passed(result: EvalResult) -> list[bool]:
    return [case.passed for case in result.tests]


@pytest.mark.parametrize("entry", ["f", None])
@pytest.mark.parametrize(
    ("text", "of_half"),
    [(PYTEST, PYTEST_OF_HALF), (UNITTEST, [True, False, False, False, False])],
    ids=["pytest", "unittest"],
)
def test_each_unit_test_is_a_test(
    judge: Judge, text: str, of_half: list[bool], entry: str | None
) -> None:
    if entry is None and text is UNITTEST:
        entry = "f"  # imports *, which may be anything
    for code, wanted in ((RIGHT, [True] * len(of_half)), (HALF, of_half), ("", None)):
        result = judge(code, [text], entry_point=entry)
        assert passed(result) == (wanted or [False] * len(of_half))


def test_a_class_of_the_program_in_unittest(judge: Judge) -> None:
    code = "class Counter:\n    def __init__(self, n): self.value = n\n    def up(self, n): pass"
    assert passed(judge(code, [COUNTER], entry_point="Counter")) == [True, False]
    right = code.replace("pass", "self.value += n")
    assert judge(right, [COUNTER], entry_point="Counter").accepted


@pytest.mark.parametrize(
    "text",
    [
        "import solution\ndef test_it():\n    assert solution.f(1) == 2",
        "import solution as s\ndef test_it():\n    assert s.f(1) == 2",
        "from solution import f as function\ndef test_it():\n    assert function(1) == 2",
        "from .anything import f\ndef test_it():\n    assert f(1) == 2",
        "from . import solution\nassert solution.f(1) == 2",
        "from package.of_theirs import f\nassert f(1) == 2",
        "def test_it():\n    from solution import f\n    assert f(1) == 2",
        "def test_it():\n    assert f(1) == 2\ntest_it()",
        "def test_it():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test_it()",
        "assert f(0) == 1\ndef test_it():\n    assert f(1) == 2",
        "def test_it():\n    assert f(1) == 2\ndef main():\n    test_it()\nmain()",
        "for name, run in list(globals().items()):\n    if name.startswith('test_'): run()\n"
        "def test_it():\n    assert f(1) == 2",
        "import unittest\nclass It(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(f(1), 2)\n"
        "suite = unittest.TestLoader().loadTestsFromTestCase(It)\n"
        "result = unittest.TextTestRunner().run(suite)\nassert result.wasSuccessful()",
        "from unittest import TestCase, main\nclass It(TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(f(1), 2)\nmain()",
        "import pytest\n@pytest.mark.parametrize('x', [*range(1), 1])\ndef test_it(x):\n"
        "    assert f(x) == x + 1",
        "import pytest\n@pytest.mark.parametrize('x, y', [pytest.param(*(1, 2))])\n"
        "def test_it(x, y):\n    assert f(x) == y",
        "def now(test):\n    test()\n    return test\n@now\ndef it():\n    assert f(1) == 2",
        "import threading\ndef run():\n    assert f(1) == 2\n"
        "thread = threading.Thread(target=run)\nthread.start()\nthread.join()",
    ],
)
def test_the_program_has_many_names(judge: Judge, text: str) -> None:
    for code, wanted in ((RIGHT, [True]), ("def f(x): return 0", [False])):
        assert passed(judge(code, [text], entry_point="f")) == wanted


def test_a_text_of_unit_tests_may_be_the_test_of_human_eval_too() -> None:
    assert len(read_human_eval({"test": PYTEST, "entry_point": "f"}).tests) == len(PYTEST_OF_HALF)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def test_it(tmp_path):\n    assert f(1)", "test_it uses the fixture 'tmp_path'"),
        ("def test_it(capsys, monkeypatch):\n    assert f(1)", "the fixture 'capsys'"),
        (
            "import pytest\n@pytest.fixture\ndef one(): return 1\ndef test_it(one):\n"
            "    assert f(one) == 2",
            "uses the fixture 'one'",
        ),
        (
            "import pytest\n@pytest.mark.usefixtures('db')\ndef test_it():\n    assert f(1) == 2",
            "uses the fixture 'db'",
        ),
        (
            "import pytest\n@pytest.fixture(autouse=True)\ndef one(): pass\n"
            "def test_it():\n    assert f(1) == 2",
            "the fixture 'one' applies to every test",
        ),
        ("class TestIt:\n    def test_it(self, x):\n        assert f(x) == 2", "the fixture 'x'"),
        (
            "import unittest\nclass It(unittest.TestCase):\n    def test_it(self, mocked):\n"
            "        self.assertEqual(f(1), 2)",
            "the fixture 'mocked'",
        ),
        ("async def test_it():\n    assert f(1) == 2", "test_it is a coroutine"),
        (
            "import pytest\n@pytest.mark.skip\ndef test_it():\n    assert f(1) == 2",
            "every test in it is skipped",
        ),
        (
            f"import pytest\n@pytest.mark.parametrize('x', [{'1, ' * 1001}])\ndef test_it(x):\n"
            "    assert f(x) == 2\n",
            "it contains more than 1000 tests",
        ),
        ("def f(x): return 2\ndef test_it():\n    assert f(1) == 2", "defines f itself"),
        ("import numpy as np\nassert f(1) == np.array(1)", "imports numpy, which the judge"),
        ("from pandas import Series\nassert f(1) == 2", "imports pandas"),
        ("import pytest\npytest.warns(UserWarning, f, 1)", r"uses pytest\.warns"),
        (
            "from unittest.mock import patch\ndef test_it():\n"
            "    with patch('time.time', return_value=1):\n        assert f(1) == 2",
            "patches 'time.time': that does not reach the program",
        ),
        (
            "def test_it():\n    f(1)\ndef test_that():\n    assert f(1) == 2",
            "checks nothing that comes from the program",
        ),
    ],
)
def test_tests_that_cannot_be_run_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"provided_data.test_list\[0\].*{message}"):
        read_function_tests({"test_list": [text], "entry_point": "f"})


def row(*tests: str, **rest: Any) -> Row:
    return Row(
        id="r1",
        problem="Write f.",
        solution="",
        prompter_type="mbppplus",
        selected_uts=tests,
        entry_point="f",
        place="rows.parquet: row 7",
        **rest,
    )


def test_a_row_whose_tests_check_nothing_is_refused_at_start() -> None:
    check_tests([row("assert f(1) == 2"), row(PYTEST)])
    for test in ("f(1)", "assert True or f(1)", "def run():\n    assert f(1) == 2"):
        with pytest.raises(UserError) as refused:
            check_tests([row("assert f(1) == 2", test)])
        text = str(refused.value)
        assert "rows.parquet: row 7" in text and "'r1'" in text and "test_list[1]" in text


def test_a_job_asks_for_as_many_verdicts_as_there_are_unit_tests() -> None:
    job = grading_job("", row("assert f(1) == 2", PYTEST), run_all_cases=True)
    assert job.total == 1 + len(PYTEST_OF_HALF)
    assert grading_job("", row("assert f(1) == 2"), run_all_cases=True).total == 1


def test_a_verdict_shows_the_unit_test_itself(judge: Judge) -> None:
    problem = Problem(
        id="p",
        statement="Write f.",
        prompter_type="mbppplus",
        selected_uts=("assert f(1) == 2", PYTEST),
        entry_point="f",
    )
    texts = descriptions_of_tests(problem)
    assert len(texts) == 1 + len(PYTEST_OF_HALF) and texts[0] == "assert f(1) == 2"
    assert texts[1] == "def test_one():\n    assert f(1) == plus_one(1)\ntest_one()"
    result = judge(HALF, list(problem.selected_uts), entry_point="f")
    assert [(case.test_info or {})["test"] for case in result.tests] == texts
    attempt = Attempt(id="p/0", problem=problem, solution="")
    verdict = Verdict(
        passed=(True, True, False, *[True] * 9), total=12, detail=("", "", "AssertionError")
    )
    assert "def test_two():\n    assert f(2) == 3" in execution_hint(attempt, verdict).text


NEAR = [
    (1.0000001, {"expected": 1.0}),
    (1.1, {"expected": 1.0}),
    (1.1, {"expected": 1.0, "rel": 0.2}),
    (1.1, {"expected": 1.0, "abs": 0.2}),
    (1e-13, {"expected": 0.0}),
    (1e-11, {"expected": 0.0}),
    (math.inf, {"expected": math.inf}),
    (1e300, {"expected": math.inf}),
    (math.nan, {"expected": math.nan}),
    (math.nan, {"expected": math.nan, "nan_ok": True}),
    ([1.0, 2.0000001], {"expected": [1.0, 2.0]}),
    ([1.0], {"expected": [1.0, 2.0]}),
    ((1.0, 2.1), {"expected": (1.0, 2.0)}),
    ({"a": 1.0000001}, {"expected": {"a": 1.0}}),
    ({"b": 1.0}, {"expected": {"a": 1.0}}),
    ("a", {"expected": 1.0}),
    (None, {"expected": 1.0}),
    (1, {"expected": 1.0000001}),
    (1 + 1e-7j, {"expected": 1 + 0j}),
    (Decimal("1.0000001"), {"expected": Decimal("1")}),
    (Decimal("1.1"), {"expected": Decimal("1")}),
    (1.1, {"expected": 1.0, "rel": 1e-9, "abs": 0.2}),
]


@pytest.mark.parametrize(("got", "given"), NEAR)
def test_approx_agrees_with_pytest(got: Any, given: dict[str, Any]) -> None:
    wanted = got == pytest.approx(**given)
    assert (got == pytest_stand_in.approx(**given)) is wanted
    assert (got != pytest_stand_in.approx(**given)) is not wanted
