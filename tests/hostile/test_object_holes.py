"""Objects that would judge themselves: a program is not paid for what its ``__eq__`` and the like
say of the test's data, nor for what it hides behind a class of the tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_service import readable_python

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SubmitRequest
from ctrl_megatron.sandbox.wire import EvalResult, TestConfig

LIAR = """class {name}:
    value = 3
    def __init__(s, *a, **k): pass
    def __eq__(s, o): return True
    def __ne__(s, o): return True
    def __lt__(s, o): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __contains__(s, o): return True
    def __bool__(s): return True
    def __len__(s): return 3
    def __iter__(s): return iter([])
    def __sub__(s, o): return 0
    __rsub__ = __add__ = __sub__
    def __hash__(s): return 1
    def __enter__(s): return s
    def __exit__(s, *a): return True
    def __call__(s, *a): return s
    def __getitem__(s, i): return s
    def __round__(s, *a): return s
    def __abs__(s): return s
    def __getattr__(s, n): return lambda *a, **k: True
"""
EXPECT_DATA = [
    "assert f(1) == 5",
    "assert 5 == f(1)",
    "assert not f(1) != 5",
    "assert f(1) in [5, 6]",
    "assert 5 in [f(1)]",
    "assert 5 in f(1)",
    "assert abs(f(1) - 5) < 1e-6",
    "assert f(1) < 5",
    "assert f(1) > 5",
    "assert f(1) + 3 == 5",
    "assert f(1)[0] == 5",
    "assert f(1)(3) == 5",
    "assert round(f(1), 2) == 5",
    "assert sorted(f(1)) == [5]",
    "assert [f(1)] == [5]",
    "assert (f(1), 2) == (5, 2)",
    "assert {f(1): 1} == {5: 1}",
    "assert set([f(1)]) == {5}",
    "assert all(a == b for a, b in zip([f(1)], [5]))",
    "assert f(1).startswith('secret')",
    "assert f(1).isdigit()",
    "assert f(1).lower() == 'secret'",
    "assert f(1).issubset({1})",
    "assert f(1).count(4) == 2",
    "assert f(1).value.startswith('q')",
    "assert f(1).__eq__(5)",
    "assert isinstance(f(1), int)",
    "import math\nassert math.isclose(f(1), 5)",
    "with f(1) as r:\n    assert r == 5",
    "x = f(1)\nx -= 5\nassert x == 0",
    "try:\n    f(1).lower()\nexcept AttributeError:\n    pass\nelse:\n    assert False",
    "try:\n    f(1) == 3\nexcept Exception:\n    pass\nelse:\n    assert False",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 5)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 5)",
    "import unittest\nunittest.TestCase().assertIn(5, f(1))",
]
NODE = """
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
    def same(self, other): return self.val == other.val
    def values(self): return [self.val]
class P:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
"""
OWN = "class ListNode:\n    def __init__(s, v=0, n=None): s.val, s.next = v, n\n"
HOLES: dict[str, tuple[str, Any, str]] = {
    f"{name} {kind}, {test!r}": (code.format(name=name), name, test.replace("f(1)", f"{name}(1)"))
    for test in EXPECT_DATA
    for name in ("f", "Find")
    for kind, code in (
        ("is a class", LIAR),
        ("returns an object", LIAR.replace("{name}", "L") + "def {name}(x): return L()"),
    )
} | {
    "a class of strings": (
        "class f(str):\n    def __new__(c, x): return str.__new__(c, 'no')\n"
        "    def __eq__(s, o): return True\n    def lower(s): return 'secret'\n    __hash__ = None",
        "f",
        "assert f(1) == 'secret'",
    ),
    "a class of strings with a method": (
        "class f(str):\n    def startswith(s, p): return True",
        "f",
        "assert f(1).startswith('secret')",
    ),
    "an object of a class equals any data": (
        "class Money:\n    def __init__(s, a): pass\n    def __eq__(s, o): return True\n"
        "    def cents(s): return 500",
        "Money",
        "assert Money(5).cents() == 500 and Money(5) == 5",
    ),
    "an object of a class is unlike no data": (
        "class Money:\n    def __init__(s, a): pass\n    def __eq__(s, o): return True\n"
        "    def cents(s): return 500",
        "Money",
        "assert Money(5).cents() == 500 and Money(5) != 6",
    ),
    "a method returns an object that judges": (
        LIAR.format(name="Shop").replace(
            "    def __getattr__(s, n): return lambda *a, **k: True\n", ""
        )
        + "    def total(s): return s\n",
        "Shop",
        "s = Shop()\nassert abs(s.total() - 5) < 1e-6",
    ),
    "a function returns the object that judges": (
        LIAR.format(name="P") + "def f(p): return p\n",
        ["f", "P"],
        "p = P(5)\nassert p.value == 3 and isinstance(p, P) and abs(f(p) - 5) < 1e-6",
    ),
    "an attribute of a class that judges": (
        LIAR.format(name="L") + "class Foo:\n    TOTAL = L()\n    def go(s): return 1\n",
        "Foo",
        "assert Foo().go() == 1 and abs(Foo.TOTAL - 5) < 1e-6",
    ),
    "a manager that takes care of failed checks": (
        "class T:\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n"
        "    def val(s): return 0",
        "T",
        "with T() as t:\n    assert t.val() == 5",
    ),
    "a tuple that names its functions like methods": (
        "from collections import namedtuple\nN = namedtuple('N', 'startswith')\n"
        "def f(x): return N(lambda p: True)",
        "f",
        "assert f(1).startswith('secret')",
    ),
    "an object of the tests' class with a method of its own": (
        OWN + "def f(h):\n    n = ListNode(7)\n    n.same = lambda *a: True\n    return n",
        "f",
        "assert f(ListNode(1)).same(ListNode(1))",
    ),
    "a class of the tests with another comparison": (
        "class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return True\n"
        "def f(x): return P(0)",
        "f",
        "assert f(1) == P(1)",
    ),
    "a failed check of a function of the test, kept back": (
        "def f(g):\n    try: g(1)\n    except BaseException: pass\n    return True",
        "f",
        "def g(x): assert x == 2\nassert f(g)",
    ),
    "a value that is too large, taken for an exception": (
        "def f(x): return 'x' * (40 << 20)",
        "f",
        "try:\n    f(1)\nexcept Exception:\n    pass\nelse:\n    assert False",
    ),
    "an argument that cannot cross, taken for an exception": (
        "def f(x): return x",
        "f",
        "try:\n    f(object())\nexcept Exception:\n    pass\nelse:\n    assert False",
    ),
    "order without meaning": (
        "class f:\n    def __init__(s, x): pass\n    def __lt__(s, o): return True\n"
        "    __gt__ = __lt__",
        "f",
        "assert f(1) < f(2)",
    ),
    "equal and unequal": (
        "class f:\n    def __init__(s, x): pass\n    def __eq__(s, o): return True\n"
        "    def __ne__(s, o): return True",
        "f",
        "assert f(1) == f(2) and f(1) != f(2)",
    ),
    "a length that is no integer": (
        "class F:\n    def __len__(s): return 'x'\n    def go(s): return 1",
        "F",
        "assert F().go() == 1 and len(F()) == 'x'",
    ),
    "a comparison that is no truth": (
        "class F:\n    def __eq__(s, o): return 'yes'\n    def go(s): return 1",
        "F",
        "assert F().go() == 1 and F() == F()",
    ),
    "a type that claims to be built in": (
        "class M(type):\n    def __instancecheck__(c, o): return True\n"
        "class f(metaclass=M):\n    __module__ = 'builtins'\n    def __init__(s, x): pass\n"
        "    def __eq__(s, o): return True",
        "f",
        "assert f(1) == 5",
    ),
    "an emptied list under another name": (
        "def f(xs):\n    xs.clear()\n    return xs",
        "f",
        "xs = [3, 1]\nys = xs\nassert f(xs) == sorted(ys)",
    ),
    "a sorted argument that had to stay": (
        "def f(xs):\n    xs.sort()\n    return xs",
        "f",
        "xs = [3, 1]\nassert f(xs) == [1, 3]\nassert xs == [3, 1]",
    ),
    "an iterator that is also a list": (
        "class G:\n    def __iter__(s): return s\n    def __next__(s): raise StopIteration\n"
        "    def __eq__(s, o): return True\n    def __getitem__(s, i): return 5\n"
        "def f(x): return G()",
        "f",
        "assert f(1)[0] == 5",
    ),
    "wrong output": (
        "def f(x): print('wrong')",
        "f",
        "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): f(3)\n"
        "assert b.getvalue() == '6\\n'",
    ),
}


@pytest.fixture(scope="module")
def judged() -> Iterator[dict[str, EvalResult]]:
    """The verdict on every hole: what is refused does not depend on the level of isolation."""
    python = readable_python()
    if python is None:
        pytest.skip("started as root without an interpreter that an unprivileged user can read")
    with EmbeddedSandbox.start(workers=2, isolation="standard", python=python) as service:
        yield asyncio.run(_judge_all(service))


async def _judge_all(service: EmbeddedSandbox) -> dict[str, EvalResult]:
    async with SandboxClient(service.endpoint, attempts=1) as client:
        requests = [
            SubmitRequest(
                dataset="hostile",
                id=0,
                completion=f"```python\n{code}\n```",
                config=TestConfig(
                    dataset_type="MBPPDataset",
                    language="python",
                    provided_data={
                        "test_list": [test],
                        "entry_point": entry,
                        "test_setup_code": NODE,
                    },
                ),
            )
            for code, entry, test in HOLES.values()
        ]
        results = await asyncio.gather(*map(client.submit, requests))
    return dict(zip(HOLES, results, strict=True))


@pytest.mark.parametrize("name", HOLES)
def test_no_object_judges_itself(judged: dict[str, EvalResult], name: str) -> None:
    (case,) = judged[name].tests
    assert not case.passed and (case.test_info or {})["reason"]
