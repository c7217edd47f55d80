"""Tests in the form of pytest and unittest are run one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards.grading import descriptions_of_tests, grading_job
from ctrl_megatron.rewards.hints import execution_hint
from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.datasets.functions import read_function_tests
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
PYTEST_OF_HALF = {
    "test_one": True,
    "test_two": False,
    "test_pairs[1-2]": True,
    "test_pairs[five]": False,
    "test_pairs[0-1]": True,
    "test_product[1-0]": True,
    "test_product[5-0]": False,
    "test_all_numbers[1]": True,
    "test_all_numbers[2]": False,
    "TestMore.test_of_a_class": True,
    "TestMore.test_of_a_parameter[5]": False,
    "test_raises": False,
}
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
    [(PYTEST, [*PYTEST_OF_HALF.values()]), (UNITTEST, [True, False, False, False, False])],
    ids=["pytest", "unittest"],
)
def test_each_unit_test_is_a_test(
    judge: Judge, text: str, of_half: list[bool], entry: str | None
) -> None:
    if entry is None and text is UNITTEST:
        entry = "f"  # imports *, which may be anything
    for code, wanted in ((RIGHT, [True] * len(of_half)), (HALF, of_half)):
        assert passed(judge(code, [text], entry_point=entry)) == wanted
    assert not any(passed(judge("", [text], entry_point=entry)))


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
        "import pytest\n@pytest.mark.parametrize('x, y', [pytest.param(*(1, 2))])\n"
        "def test_it(x, y):\n    assert f(x) == y",
        "def now(test):\n    test()\n    return test\n@now\ndef it():\n    assert f(1) == 2",
        "import threading\ngot = []\nthread = threading.Thread(target=lambda: got.append(f(1)))\n"
        "thread.start()\nthread.join()\nassert got == [2]",
    ],
)
def test_the_program_has_many_names(judge: Judge, text: str) -> None:
    for code, wanted in ((RIGHT, [True]), ("def f(x): return 0", [False])):
        assert passed(judge(code, [text], entry_point="f")) == wanted


def test_a_text_of_unit_tests_may_be_the_test_of_human_eval_too(
    client: SandboxClient, on_loop: BackgroundLoop
) -> None:
    data = {"test": PYTEST, "entry_point": "f"}
    request = submission(HALF, dataset_type="HumanEvalDataset", provided_data=data)
    assert passed(on_loop(client.submit(request))) == [*PYTEST_OF_HALF.values()]


FIXTURES = {
    "tmp_path": (
        "def f(path): return path.read_text()",
        "def test_it(tmp_path):\n    (tmp_path / 'a').write_text('x')\n"
        "    assert f(tmp_path / 'a') == 'x'",
    ),
    "capsys": (
        "def f(x): print(x)",
        "def test_it(capsys):\n    f(1)\n    assert capsys.readouterr().out == '1\\n'",
    ),
    "monkeypatch": (
        "import os\ndef f(): return os.environ['KEY']",
        "def test_it(monkeypatch):\n    monkeypatch.setenv('KEY', 'v')\n    assert f() == 'v'",
    ),
    "a fixture": (
        RIGHT,
        "import pytest\n@pytest.fixture\ndef one(): return 1\n"
        "@pytest.fixture\ndef two(one): return one + 1\n"
        "def test_it(one, two):\n    assert f(one) == two",
    ),
    "a fixture that yields": (
        RIGHT,
        "import pytest\nlog = []\n@pytest.fixture\ndef one():\n    yield 1\n"
        "    log.append(f(5))\ndef test_it(one):\n    assert f(one) == 2 and log == []\n"
        "def test_then():\n    assert log == [6]",
    ),
    "a fixture with parameters": (
        RIGHT,
        "import pytest\n@pytest.fixture(params=[1, 5])\ndef one(request): return request.param\n"
        "def test_it(one):\n    assert f(one) == one + 1",
    ),
    "a fixture of every test": (
        RIGHT,
        "import pytest\ngot = []\n@pytest.fixture(autouse=True)\ndef one(): got.append(f(1))\n"
        "def test_it():\n    assert got == [2]",
    ),
    "a fixture that is used": (
        RIGHT,
        "import pytest\ngot = []\n@pytest.fixture\ndef one(): got.append(1)\n"
        "@pytest.mark.usefixtures('one')\ndef test_it():\n    assert f(*got) == 2",
    ),
    "computed parameters": (
        RIGHT,
        "import pytest\n@pytest.mark.parametrize('x', [*range(1), 1])\ndef test_it(x):\n"
        "    assert f(x) == x + 1",
    ),
    "a coroutine": (
        "async def f(x): return x + 1",
        "async def test_it():\n    assert await f(1) == 2",
    ),
    "warns": (
        "import warnings\ndef f(x): warnings.warn('old', DeprecationWarning)",
        "import pytest\ndef test_it():\n"
        "    with pytest.warns(DeprecationWarning, match='old'):\n        f(1)",
    ),
    "warns with a function": (
        "import warnings\ndef f(x):\n    warnings.warn('old')\n    return x",
        "import pytest\ndef test_it():\n    assert pytest.warns(UserWarning, f, 1) == 1",
    ),
    "logs": (
        "import logging\ndef f(x): logging.warning('hey %s', x)",
        "def test_it(caplog):\n    f(1)\n    assert 'hey 1' in caplog.text",
    ),
    "a patch": (
        "import time\ndef f(): return time.time()",
        "from unittest.mock import patch\ndef test_it():\n"
        "    with patch('time.time', return_value=1):\n        assert f() == 1",
    ),
}


@pytest.mark.parametrize(("code", "text"), FIXTURES.values(), ids=FIXTURES)
def test_what_pytest_offers_reaches_the_program(judge: Judge, code: str, text: str) -> None:
    assert judge(code, [text], entry_point="f").accepted
    assert not judge("def f(*_): return 7", [text], entry_point="f").accepted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import pytest\n@pytest.mark.usefixtures('db')\ndef test_it():\n    assert f(1) == 2",
            "the judge does not have the fixture 'db'",
        ),
        (
            "class TestIt:\n    def test_it(self, x):\n        assert f(x) == 2",
            "the judge does not have the fixture 'x'",
        ),
        (
            "import pytest\n@pytest.mark.skip\ndef test_it():\n    assert f(1) == 2",
            "every test of the text is skipped or expected to fail",
        ),
        (
            "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert f(1) == 2",
            "every test of the text is skipped or expected to fail",
        ),
        (
            "import pytest\n@pytest.mark.parametrize('x', range(1001))\ndef test_it(x):\n"
            "    assert f(x) == x + 1\n",
            "the text contains more than 1000 tests",
        ),
    ],
)
def test_unit_tests_that_cannot_be_run_are_not_judged(judge: Judge, text: str, reason: str) -> None:
    (case,) = judge(RIGHT, [text], entry_point="f").tests
    info = case.test_info or {}
    assert not case.passed and info["unjudgeable"] is True
    assert info["reason"] == f"cannot be judged: no test of the text can be run: {reason}"


@pytest.mark.parametrize(
    "skips",
    ["pytest.skip('no')", "pytest.importorskip('no_such_module')", "raise unittest.SkipTest('no')"],
)
def test_a_test_that_skips_itself_has_no_verdict(judge: Judge, skips: str) -> None:
    head = "import pytest, unittest\n"
    other = "def test_b():\n    assert f(1) == 2\n"
    at_once = f"{head}def test_a():\n    {skips}\n    assert f(1) == 3\n{other}"
    assert passed(judge(RIGHT, [at_once], entry_point="f")) == [True]
    asked = f"{head}def test_a():\n    if f(1) == 2: {skips}\n{other}"
    assert passed(judge(RIGHT, [asked], entry_point="f")) == [False, True]


def test_each_unit_test_must_execute_a_check(judge: Judge) -> None:
    text = "def test_it():\n    f(1)\ndef test_that():\n    assert f(1) == 2"
    assert passed(judge(RIGHT, [text], entry_point="f")) == [False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(x): return 2\ndef test_it():\n    assert f(1) == 2", "defines f itself"),
        ("import numpy as np\nassert f(1) == np.array(1)", "imports numpy, which the judge"),
        ("from pandas import Series\nassert f(1) == 2", "imports pandas"),
    ],
)
def test_tests_that_cannot_be_run_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"provided_data.test_list\[0\].*{message}"):
        read_function_tests({"test_list": [text], "entry_point": "f"})


def test_a_verdict_shows_the_unit_test_itself(judge: Judge) -> None:
    result = judge(HALF, ["assert f(1) == 2", PYTEST], entry_point="f")
    texts = [(case.test_info or {})["test"] for case in result.tests]
    assert texts[0] == "assert f(1) == 2"
    assert texts[4] == "def test_pairs(x, wanted):\n    assert f(x) == wanted\n# test_pairs[five]"
    assert [text.rpartition("\n# ")[2] for text in texts[1:]] == [*PYTEST_OF_HALF]


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


def test_the_number_of_unit_tests_is_known_after_a_run() -> None:
    assert grading_job("", row("assert f(1) == 2", PYTEST), run_all_cases=True).total is None
    assert grading_job("", row("assert f(1) == 2"), run_all_cases=True).total == 1


def test_a_hint_shows_the_unit_test_itself(judge: Judge) -> None:
    problem = Problem(
        id="p",
        statement="Write f.",
        prompter_type="mbppplus",
        selected_uts=("assert f(1) == 2", PYTEST),
        entry_point="f",
    )
    result = judge(HALF, list(problem.selected_uts), entry_point="f")
    texts = tuple(str((case.test_info or {})["test"]) for case in result.tests)
    verdict = Verdict(
        passed=tuple(passed(result)),
        total=len(texts),
        detail=tuple(str((case.test_info or {})["reason"]) for case in result.tests),
        tests=texts,
    )
    assert descriptions_of_tests(problem, verdict) == list(texts)
    assert texts[0] == "assert f(1) == 2" and texts[1].startswith(
        "def test_one():\n    assert f(1)"
    )
    attempt = Attempt(id="p/0", problem=problem, solution="")
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
