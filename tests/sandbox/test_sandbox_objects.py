"""Objects, classes and functions that cross between tests and program: what plain Python answers,
the sandbox answers too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.datasets.functions import read_function_tests
from ctrl_megatron.sandbox.wire import EvalResult

Judge = Callable[..., EvalResult]

VECTOR = """
class Vec:
    DIM = 2
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vec(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return Vec(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __eq__(self, other): return isinstance(other, Vec) and vars(self) == vars(other)
    def __hash__(self): return hash((self.x, self.y))
    def __repr__(self): return f"Vec({self.x}, {self.y})"
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def __iter__(self): return iter((self.x, self.y))
    def __bool__(self): return bool(self.x or self.y)
    def __lt__(self, other): return abs(self) < abs(other)
    def __getitem__(self, i): return (self.x, self.y)[i]
    @staticmethod
    def zero(): return Vec(0, 0)
    @property
    def norm(self): return abs(self)
"""
VECTOR_TESTS = [
    "assert Vec(1, 2) + Vec(3, 4) == Vec(4, 6)",
    "assert Vec(1, 2) * 2 == Vec(2, 4) == 2 * Vec(1, 2)",
    "assert repr(Vec(1, 2)) == str(Vec(1, 2)) == f'{Vec(1, 2)}' == 'Vec(1, 2)'",
    "assert abs(Vec(3, 4)) == 5 == Vec(3, 4).norm",
    "assert list(Vec(1, 2)) == [1, 2]",
    "x, y = Vec(1, 2)\nassert (x, y) == (1, 2)",
    "assert not Vec(0, 0) and Vec(1, 0)",
    "assert Vec.zero() == Vec(0, 0) and Vec.DIM == 2",
    "assert len({Vec(1, 2), Vec(1, 2)}) == 1",
    "assert {Vec(1, 2): 'a'}[Vec(1, 2)] == 'a'",
    "assert sorted([Vec(3, 0), Vec(1, 0)]) == [Vec(1, 0), Vec(3, 0)]",
    "assert max(Vec(1, 0), Vec(3, 0)).x == 3",
    "assert isinstance(Vec(1, 2) + Vec(1, 1), Vec) and not isinstance(5, Vec)",
    "assert Vec(1, 2) != 5 and Vec(1, 2) in [5, Vec(1, 2)]",
    "v = Vec(1, 2)\nv.x = 7\nassert v.x == 7 and v[0] == 7 and vars(v) == {'x': 7, 'y': 2}",
    "assert type(Vec(1, 2)).__name__ == 'Vec'",
    "assert list(zip(Vec(1, 2), [5, 6])) == [(1, 5), (2, 6)]",
    "import copy\nv = Vec(1, 2)\nw = copy.deepcopy(v)\nw.x = 9\nassert v.x == 1 and w.x == 9",
    "a = Vec(1, 2)\nb = a\na.x = 4\nassert b is a and b.x == 4",
    "assert hasattr(Vec(1, 2), 'norm') and not hasattr(Vec(1, 2), 'other')",
]
BAG = """
class Bag:
    def __init__(self, items=()): self.items = list(items)
    @classmethod
    def of(cls, *items): return cls(items)
    def add(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, item): self.items[i] = item
    def __delitem__(self, i): del self.items[i]
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return self.items == (other.items if isinstance(other, Bag) else other)
"""
BAG_TESTS = [
    "bag = Bag()\nbag.add(5)\nassert len(bag) == 1 and bag[0] == 5 and list(bag) == [5]",
    "bag = Bag().add(5)\nassert bag and not Bag()",
    "assert 5 in Bag.of(5) and 6 not in Bag([5])",
    "assert Bag.of(1, 2).items == [1, 2] and Bag([1]) == Bag([1]) and Bag([1]) != Bag([2])",
    "bag = Bag([1, 2])\nassert bag[1:] == [2]\nbag[0] = 9\ndel bag[1]\nassert bag.items == [9]",
    "assert list(reversed(Bag([1, 2]))) == [2, 1]",
]
GENERATORS = """
def naturals():
    n = 0
    while True:
        yield n
        n += 1
def upto(n): yield from range(n)
def breaks():
    yield 1
    raise ValueError('over')
def total():
    t = 0
    while True: t += (yield t) or 0
"""
RIGHT: dict[str, tuple[str, Any, list[str]]] = {
    "a class with operators": (VECTOR, "Vec", VECTOR_TESTS),
    "a container": (BAG, "Bag", BAG_TESTS),
    "a class that a function could be, too": (
        "class Version:\n    def __init__(s, t): s.t = [int(x) for x in t.split('.')]\n"
        "    def __lt__(s, o): return s.t < o.t\n    def __eq__(s, o): return s.t == o.t\n"
        "    def __len__(s): return len(s.t)\n    def __str__(s): return '.'.join(map(str, s.t))\n"
        "    def __iter__(s): return iter(s.t)\n    def __getitem__(s, i): return s.t[i]",
        "Version",
        [
            "assert Version('1.2') < Version('1.10') and Version('1.2') == Version('1.2')",
            "assert len(Version('1.2')) == 2 and str(Version('1.2')) == '1.2'",
            "assert list(Version('1.2')) == [1, 2] and Version('1.2')[0] == 1",
            "assert 2 in Version('1.2') and Version('1.2') != Version('1.3')",
        ],
    ),
    "a context manager": (
        "class T:\n    def __init__(s): s.log = []\n"
        "    def __enter__(s): s.log.append('in'); return s\n"
        "    def __exit__(s, kind, *_): s.log.append('out'); return kind is ValueError",
        "T",
        [
            "with T() as t:\n    assert t.log == ['in']\nassert t.log == ['in', 'out']",
            "with T() as t:\n    raise ValueError\nassert t.log == ['in', 'out']",
        ],
    ),
    "objects that are called": (
        "class Adder:\n    def __init__(s, n): s.n = n\n    def __call__(s, x): return x + s.n",
        "Adder",
        ["assert Adder(2)(3) == 5", "a = Adder(1)\nassert list(map(a, [1])) == [2] and a.n == 1"],
    ),
    "a class of one of data": (
        "class Stack(list):\n    def push(s, x): s.append(x)\n    def peek(s): return s[-1]",
        "Stack",
        ["s = Stack()\ns.push(1)\nassert s.peek() == 1 and s == [1] and len(s) == 1 == s.pop()"],
    ),
    "attributes that strings have": (
        "class Trie:\n    def __init__(s): s.words = set()\n    def insert(s, w): s.words.add(w)\n"
        "    def startswith(s, p): return any(w.startswith(p) for w in s.words)",
        "Trie",
        ["t = Trie()\nt.insert('ab')\nassert t.startswith('a') and not t.startswith('b')"],
    ),
    "in-place operators": (
        "class Sum:\n    def __init__(s): s.t = 0\n    def __iadd__(s, x): s.t += x; return s\n"
        "    def total(s): return s.t",
        "Sum",
        ["a = Sum()\na += 5\na += 6\nassert a.total() == 11"],
    ),
    "base classes": (
        "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n"
        "    def area(s): ...\nclass Square(Shape):\n    def __init__(s, a): s.a = a\n"
        "    def area(s): return s.a**2",
        ["Square", "Shape"],
        [
            "assert Square(3).area() == 9 and isinstance(Square(1), Shape)",
            "assert issubclass(Square, Shape)",
            "try:\n    Shape()\nexcept TypeError:\n    pass\nelse:\n    assert False",
        ],
    ),
    "exceptions of the program": (
        "class TooLittle(Exception):\n    def __init__(s, need):\n"
        "        super().__init__(f'need {need}')\n        s.need = need\n"
        "class Account:\n    def __init__(s, b): s.balance = b\n    def withdraw(s, n):\n"
        "        if n > s.balance: raise TooLittle(n - s.balance)\n        s.balance -= n",
        ["Account", "TooLittle"],
        [
            "a = Account(5)\na.withdraw(3)\nassert a.balance == 2",
            "try:\n    Account(1).withdraw(3)\nexcept TooLittle as e:\n"
            "    assert e.need == 2 and str(e) == 'need 2'\nelse:\n    assert False",
        ],
    ),
    "a function's objects": (
        "from dataclasses import dataclass\nfrom enum import Enum\n"
        "from collections import namedtuple\nT = namedtuple('T', 'x count')\n"
        "@dataclass\nclass P:\n    x: int\n    def twice(s): return 2 * s.x\n"
        "class Color(Enum):\n    RED = 1\ndef p(): return P(1)\ndef t(): return T(1, 2)\n"
        "def c(): return Color.RED\ndef m(): return __import__('re').match('a(b)', 'ab')",
        ["p", "t", "c", "m"],
        [
            "assert p().x == 1 and p().twice() == 2 and str(p()) == 'P(x=1)'",
            "assert t().x == 1 and t() == (1, 2) and t().count == 2 and t()._asdict()['x'] == 1",
            "assert c().name == 'RED' and c().value == 1 and c() is c()",
            "assert m().group(1) == 'b'",
        ],
    ),
    "enumerations and records": (
        "from enum import Enum, IntEnum\nfrom dataclasses import dataclass\n"
        "class Color(Enum):\n    RED = 1\n    BLUE = 2\n"
        "class Level(IntEnum):\n    LOW = 1\n    HIGH = 2\n"
        "@dataclass(order=True)\nclass P:\n    x: int\n    y: int = 2\n"
        "def f(): return Color.RED\ndef g(): return P(1)",
        ["f", "g", "Color", "Level", "P"],
        [
            "assert Color.RED.value == 1 and Color(1) is Color.RED and Color['RED'].name == 'RED'",
            "assert len(Color) == 2 and [c.name for c in Color] == ['RED', 'BLUE']",
            "assert f() == Color.RED and f() is Color.RED and f() != Color.BLUE",
            "assert Level.LOW < Level.HIGH and Level.LOW == 1 and Level.LOW.name == 'LOW'",
            "assert g() == P(1, 2) and P(1) < P(2) and str(P(1)) == 'P(x=1, y=2)'",
        ],
    ),
    "data of every kind": (
        "import datetime\nfrom collections import *\nfrom decimal import Decimal\n"
        "from fractions import Fraction\ndef f(k):\n    return {\n"
        "        'deque': deque([1]), 'counter': Counter('aab'), 'missing': defaultdict(list),\n"
        "        'decimal': Decimal('1.50'), 'fraction': Fraction(1, 3), 'complex': 1 + 2j,\n"
        "        'date': datetime.datetime(2024, 1, 2), 'bytes': b'x', 'range': range(3),\n"
        "        'type': int, 'slice': slice(1, 2)}[k]",
        "f",
        [
            "assert f('deque').popleft() == 1 and f('counter').most_common(1) == [('a', 2)]",
            "d = f('missing')\nassert d['x'] == [] and type(d).__name__ == 'defaultdict'",
            "assert str(f('decimal')) == '1.50' and f('fraction') * 3 == 1",
            "assert f('date').year == 2024 and f('bytes') == b'x' and f('complex').imag == 2",
            "assert list(f('range')) == [0, 1, 2] and f('type') == int and f('type') is int",
            "assert [1, 2, 3][f('slice')] == [2]",
        ],
    ),
    "generators": (
        GENERATORS,
        ["naturals", "upto", "breaks", "total"],
        [
            "from itertools import islice\nassert list(islice(naturals(), 5)) == [0, 1, 2, 3, 4]",
            "assert sum(upto(20_000)) == 199_990_000 and list(upto(0)) == []",
            "g = breaks()\nassert next(g) == 1\ntry:\n    next(g)\nexcept ValueError:\n    pass\n"
            "else:\n    assert False",
            "g = naturals()\nfor x in g:\n    if x > 40: break\nassert next(g) == 42",
            "g = total()\nnext(g)\nassert g.send(5) == 5 and g.send(6) == 11",
            "assert [x for x, _ in zip(naturals(), 'abc')] == [0, 1, 2]",
        ],
    ),
    "an iterator that begins again": (
        "class Count:\n    def __init__(s, n): s.n = n\n    def __iter__(s): s.i = 0; return s\n"
        "    def __next__(s):\n        if s.i >= s.n: raise StopIteration\n        s.i += 1\n"
        "        return s.i",
        "Count",
        ["c = Count(2)\nassert list(c) == [1, 2] and list(c) == [1, 2]"],
    ),
    "functions of the test": (
        "import functools\ndef f(g, xs): return [g(x) for x in xs]\n"
        "def twice(g):\n    @functools.wraps(g)\n    def w(*a): return g(*a) * 2\n    return w\n"
        "def fix(g, n): return g(g, n)\ndef inc(x): return x + 1\n"
        "class Emitter:\n    def __init__(s): s.h = []\n    def on(s, g): s.h.append(g)\n"
        "    def emit(s, v):\n        for g in s.h: g(v)",
        ["f", "twice", "fix", "inc", "Emitter"],
        [
            "assert f(lambda x: x * 2, [1, 2]) == [2, 4] and f(str, [1]) == ['1']",
            "seen = []\nf(seen.append, [1, 2])\nassert seen == [1, 2]",
            "@twice\ndef g(x): return x + 1\nassert g(3) == 8 and g.__name__ == 'g'",
            "def g(x): raise KeyError('q')\ntry:\n    f(g, [1])\nexcept KeyError as e:\n"
            "    assert e.args == ('q',)\nelse:\n    assert False",
            "assert fix(lambda s, n: 0 if n == 0 else inc(s(s, n - 1)), 4) == 4",
            "got = []\ne = Emitter()\ne.on(got.append)\ne.on(lambda v: got.append(v * 2))\n"
            "e.emit(3)\nassert got == [3, 6]",
            "from functools import reduce\nassert reduce(lambda a, b: a + inc(b), [1, 2]) == 4",
        ],
    ),
    "iterators of the test": (
        "def f(it, n): return [next(it) for _ in range(n)]",
        "f",
        [
            "import itertools\nassert f(itertools.count(5), 3) == [5, 6, 7]",
            "assert f(iter('ab'), 2) == ['a', 'b']",
        ],
    ),
    "arguments that are changed": (
        "def f(a, b=None):\n    a.append(3); a[0][0] = 9\n    if b is not None: b['k'] = {1}\n"
        "def swap(g): g[0], g[1] = g[1], g[0]\ndef fill(d): d['a'].append(1)\n"
        "class Foo:\n    def g(s, a): a.sort()",
        ["f", "swap", "fill", "Foo"],
        [
            "a = [[1], 2]\nrow = a[0]\nf(a)\nassert a == [[9], 2, 3] and row == [9]",
            "a, b = [[1]], {}\nf(a, b=b)\nassert b == {'k': {1}}",
            "xs = [3, 1]\nFoo().g(xs)\nassert xs == [1, 3]",
            "xs = [3, 1]\ng = Foo().g\nassert g(xs) is None and xs == [1, 3]",
            "g = [[1], [2]]\na = g[0]\nswap(g)\nassert g == [[2], [1]] and a == [1] and g[1] is a",
            "import collections\nd = collections.defaultdict(list)\nfill(d)\nassert d['a'] == [1]",
        ],
    ),
    "a changed argument beside a result": (
        "def f(n):\n    k = 0\n    for x in list(n):\n        if k == 0 or n[k - 1] != x:\n"
        "            n[k] = x; k += 1\n    return k",
        "f",
        [
            "nums = [1, 1, 2]\nk = f(nums)\nassert k == 2\nassert nums[:k] == [1, 2]",
            "nums = [1, 1, 2]\nassert f(nums) == 2 and nums[:2] == [1, 2]",
        ],
    ),
    "output and input": (
        "import sys\ndef f(x):\n    print('a', x)\n    print('e', file=sys.stderr)\n    return x\n"
        "def g(): return int(input()) + int(input())",
        ["f", "g"],
        [
            "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n"
            "    print('mine')\n    r = f(3)\nassert b.getvalue() == 'mine\\na 3\\n' and r == 3",
            "import io, sys\nsys.stdout, old = io.StringIO(), sys.stdout\nf(1)\n"
            "out, sys.stdout = sys.stdout.getvalue(), old\nassert out == 'a 1\\n'",
            "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stderr(b):\n"
            "    f(3)\nassert b.getvalue() == 'e\\n'",
            "from unittest.mock import patch\n"
            "with patch('builtins.input', side_effect=['1', '2']):\n    assert g() == 3",
            "import io, sys\nsys.stdin, old = io.StringIO('4\\n5\\n'), sys.stdin\nr = g()\n"
            "sys.stdin = old\nassert r == 9",
        ],
    ),
    "the end of the program, as asked": (
        "import sys\ndef f(x): sys.exit(x)",
        "f",
        [
            f"try:\n    f({code!r})\nexcept SystemExit as e:\n    assert e.code == {code!r}\n"
            "else:\n    assert False"
            for code in (3, "no")
        ],
    ),
    "a million integers": (
        "def f(n): return list(range(n))",
        "f",
        ["assert f(1_000_000) == list(range(1_000_000))"],
    ),
}


def verdicts(result: EvalResult) -> list[tuple[str, str]]:
    """Tests that failed, and why."""
    found = [(case.test_info or {}, case.passed) for case in result.tests]
    return [(info["test"], info["reason"]) for info, passed in found if not passed]


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(judge: Judge, name: str) -> None:
    code, entry, tests = RIGHT[name]
    for test in tests:
        exec(compile(f"{code}\n{test}", "plain", "exec", dont_inherit=True), {})
    assert verdicts(judge(code, tests, entry_point=entry)) == []


def test_a_program_cannot_say_that_its_object_equals_the_tests_data(judge: Judge) -> None:
    """The answer no counts: it helps no program."""
    tests = ["assert Bag([1]) == [1]", "assert not Bag([1]) != [1]", "assert Bag([1]) != [2]"]
    for test in tests:
        exec(f"{BAG}\n{test}", {})
    found = verdicts(judge(BAG, tests, entry_point="Bag"))
    reason = "cannot be judged: the program's Bag says that it equals the test's data"
    assert found == [(test, reason) for test in tests[:2]]


LATCH = """
import threading
class Latch:
    def __init__(self): self.event = threading.Event()
    def wait(self): return self.event.wait(5)
    def open(self): self.event.set()
"""
WAIT_IN_A_THREAD = """
import threading
latch, seen = Latch(), []
thread = threading.Thread(target=lambda: seen.append(latch.wait()))
thread.start()
latch.open()
thread.join(5)
assert seen == [True]
"""


def test_threads_of_a_test_call_the_program_at_once(judge: Judge) -> None:
    assert verdicts(judge(LATCH, [WAIT_IN_A_THREAD] * 40, entry_point="Latch")) == []


LISTS = """
from typing import Optional
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
def list_node(values):
    head = None
    for value in reversed(values): head = ListNode(value, head)
    return head
def values_of(head):
    found = []
    while head and len(found) < 5000: found.append(head.val); head = head.next
    return found
"""
SOLUTION = "class Solution:\n    def f(self, head):\n"
WALK = (
    "        p = None\n        while head: head.next, p, head = p, head, head.next\n"
    "        return p\n"
)
OWN_NODE = "class ListNode:\n    def __init__(s, val=0, next=None): s.val = val; s.next = next\n"


@pytest.fixture
def judge_lists(client: SandboxClient, on_loop: BackgroundLoop) -> Judge:
    """Judge method ``f`` by a test that uses what the prompt defines."""

    def run(code: str, test: str) -> EvalResult:
        data = {"test_list": [test], "entry_point": "Solution().f", "prompt": LISTS + SOLUTION}
        request = submission(code, dataset_type="HumanEvalDataset", provided_data=data)
        return on_loop(client.submit(request))

    return run


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (SOLUTION + "        return head.next", "values_of(candidate(list_node([1, 2]))) == [2]"),
        (SOLUTION + WALK, "values_of(candidate(head=list_node([1, 2, 3]))) == [3, 2, 1]"),
        (OWN_NODE + SOLUTION + WALK, "values_of(candidate(list_node([1, 2]))) == [2, 1]"),
        (SOLUTION + WALK, "values_of(candidate(list_node(list(range(3000)))))[0] == 2999"),
        (SOLUTION + "        return list_node([1, 2])", "values_of(candidate(None)) == [1, 2]"),
        (SOLUTION + "        return [h.val for h in head]", "candidate([list_node([4])]) == [4]"),
        (
            SOLUTION + "        return ListNode(head.val + 1)",
            "isinstance(candidate(ListNode(1)), ListNode)",
        ),
        (
            SOLUTION + "        head.next = head\n        return head",
            "len(values_of(candidate(ListNode(1)))) == 5000",
        ),
    ],
)
def test_objects_of_a_prompts_class_cross_with_all_that_they_hold(
    judge_lists: Judge, code: str, test: str
) -> None:
    assert verdicts(judge_lists(code, f"assert {test}")) == []
    wrong = SOLUTION + "        return None"
    assert not judge_lists(wrong, f"assert {test}").accepted


def test_objects_of_the_tests_keep_their_identity_and_are_changed_in_place(
    judge_lists: Judge,
) -> None:
    same = "h = list_node([1, 2])\nassert candidate(h) is h.next and candidate(h) == h.next"
    assert judge_lists(SOLUTION + "        return head.next", same).accepted
    change = "h = list_node([1, 2])\ncandidate(h)\nassert values_of(h) == [1]"
    assert judge_lists(SOLUTION + "        head.next = None", change).accepted
    assert not judge_lists(SOLUTION + "        pass", change).accepted


def test_a_result_beyond_the_bound_cannot_be_judged(judge: Judge) -> None:
    result = judge("def f(): return 'x' * (33 << 20)", ["assert len(f()) == 33 << 20"])
    assert [reason for _, reason in verdicts(result)] == [
        "cannot be judged: the returned value takes more than 33554432 bytes"
    ]


def test_helpers_of_a_prompt_are_there_for_tests_of_every_kind() -> None:
    data = {
        "test_list": ["assert values_of(Solution().f(list_node([1]))) == [1]"],
        "entry_point": "Solution().f",
        "prompt": LISTS + SOLUTION,
    }
    problem = read_function_tests(data)
    assert "def list_node" in problem.setup and problem.classes == ("ListNode",)
    with pytest.raises(ValueError, match="which nothing defines"):
        read_function_tests({**data, "prompt": ""})
