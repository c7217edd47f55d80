"""Programs that attack the connection to the judge: frames that they forge, the judge's objects that
they reach through it, and objects that judge themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ctrl_megatron.sandbox import SandboxLimits, SubmitRequest
from ctrl_megatron.sandbox.wire import TestConfig

LIMITS = SandboxLimits(memory_mb=512, disk_mb=32, wall_factor=1.5)
WORKERS = 3
HELP = r"""
import sys


def side():
    fr = sys._getframe()
    while fr:
        for v in list(fr.f_locals.values()):
            if hasattr(type(v), '_own_number'):
                return v
        fr = fr.f_back


def ask(do, *parts, **more):
    s = side()
    n = next(s._questions)
    s._send({'q': n, 'do': do, 'p': list(parts), **more})
    return s._wait(n)


kept = []


def quiet(*a, **k):
    try:
        kept.append(ask(*a, **k))
        return kept[-1]
    except Exception as error:
        return {'error': error}


def number():
    fr = sys._getframe()
    while 'answer' not in fr.f_locals or type(fr.f_locals['answer']) is not dict:
        fr = fr.f_back
    return fr.f_locals['answer']['a']


def reply(value, **more):
    s, n = side(), number()
    send = s._send
    s._send = lambda head: setattr(s, '_send', send)
    send({'a': n, 'value': value, **more})


def new(described, value=None):
    s = side()
    n = next(s._numbers)
    s._own[n] = value
    s._new.append([n, described])
    return ['mine', n]


def kind(**more):
    return new({'kind': 'class', 'name': 'K', 'bases': [], 'methods': [], 'members': [],
                'special': [], 'mutable': None, 'entry': False, 'abstract': False, **more}, type)


def yours(handle):
    return ['yours', object.__getattribute__(handle, '_ctrl_number')]


"""
"""What a program has to write to reach its end of the connection."""
POISON = "import sys; sys.modules['tests'].__dict__.update(WANTED=0)"
"""Code that makes the answer 0 right, where it runs in the judge."""
WANTED = "WANTED = 'zq-17'"
P = """
class P:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return isinstance(other, P) and self.x == other.x
SECRET = 'zq-17'
"""
ONE = "assert f(1) == 'zq-17'"


class Attack(NamedTuple):
    """A program and the tests that it must not pass."""

    code: str
    tests: tuple[str, ...] = (ONE,)
    entry: Any = "f"
    setup: str = ""
    seconds: float = 1.0


def forged(
    body: str, *tests: str, setup: str = "", entry: Any = "f", seconds: float = 1.0
) -> Attack:
    """An attack with ``HELP``; ``body`` without a ``def`` is the body of ``f``."""
    if "def f" not in body and "f =" not in body:
        body = "def f(x, *more):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return Attack(HELP + body, tests or (ONE,), entry, setup, seconds)


RUNS_CODE = {
    "code through the module builtins": forged(
        "quiet('method', ['name', 'builtins', ''], 'exec', ['tuple', ["
        "\"import sys; sys.modules['unittest.mock'].ANY; g = sys.modules['tests'].__dict__; "
        "g['SECRET'] = 0\"]])\n"
        "return 0",
        "assert f(1) == SECRET",
        setup=P,
    ),
    "a shell through the module os": forged(
        "quiet('method', ['name', 'os', ''], 'abort', ['tuple', []])\nreturn 0"
    ),
    "the judge leaves": forged(
        "quiet('method', ['name', 'sys', ''], 'exit', ['tuple', []])\nreturn 0"
    ),
    "modules of the judge": forged(
        "m = quiet('get', ['name', 'sys', ''], 'modules')['value']\nreturn m['tests'].SECRET",
        "assert f(1) == SECRET",
        setup=P,
    ),
    "an object that equals everything, from the library": forged(
        "v = quiet('get', ['name', 'unittest.mock', ''], 'ANY')\nreturn v['value']",
        setup="from unittest import mock",
    ),
    "a bound method of a module": forged(
        "reply(['bound', ['name', 'builtins', ''], 'eval'])",
        "assert f(1)(\"'zq-' + '17'\") == 'zq-17'",
    ),
    "a library function named by its module": forged(
        "reply(['bound', ['name', 'operator', ''], 'truth'])", "assert f(1)('zq-17')"
    ),
    "a constant by the text's format": forged(
        "v = quiet('method', '{0.__globals__[SECRET]}', 'format', ['tuple', [yours(x)]])\n"
        "return v['value']",
        "assert f(lambda: 1) == SECRET",
        setup=P,
    ),
    "a constant by the text's format map": forged(
        "v = quiet('method', '{g.__globals__[SECRET]}', 'format_map', ['tuple', [side().encode({'g': x})]])\n"
        "return v['value']",
        "assert f(lambda: 1) == SECRET",
        setup=P,
    ),
    "constants of the test's code by a text's format": forged(
        "v = quiet('method', '{0.__globals__[test_f].__code__.co_consts}', 'format',"
        " ['tuple', [yours(x)]])['value']\n"
        "return v[v.index('zq-'):][:5]",
        "def g(): return 1\ndef test_f():\n    assert f(g) == 'zq-17'",
    ),
    "a bound format": forged(
        "v = quiet('call', ['bound', '{0.__globals__[SECRET]}', 'format'], ['tuple', [yours(x)]])\n"
        "return v['value']",
        "assert f(lambda: 1) == SECRET",
        setup=P,
    ),
    "a format of the program's own": Attack(
        "def f(g): return '{0.__globals__[SECRET]}'.format(g)",
        ("assert f(lambda: 1) == SECRET",),
        setup=P,
    ),
    "annotations that are evaluated": Attack(
        "def f(x: \"__import__('sys').modules['tests'].__dict__.update(WANTED=0)\"): return 0",
        (
            "import typing\ntry: typing.get_type_hints(f)\nexcept Exception: pass\nassert f(1) == WANTED",
        ),
        setup="WANTED = 'zq-17'",
    ),
    "annotations of a class that are evaluated": Attack(
        "class C:\n    x: \"__import__('sys').modules['tests'].__dict__.update(WANTED=0)\"\n"
        "def f(x): return 0",
        (
            "import typing\ntry: typing.get_type_hints(C)\nexcept Exception: pass\nassert f(1) == WANTED",
        ),
        entry=["f", "C"],
        setup="WANTED = 'zq-17'",
    ),
    "a signature with annotations that are evaluated": Attack(
        "def f(x: \"__import__('sys').modules['tests'].__dict__.update(WANTED=0)\"): return 0",
        (
            "import inspect\ntry: inspect.signature(f, eval_str=True)\nexcept Exception: pass\nassert f(1) == WANTED",
        ),
        setup="WANTED = 'zq-17'",
    ),
    "hints that the program asks for": forged(
        "code = \"__import__('sys').modules['tests'].__dict__.update(WANTED=0)\"\n"
        "class C: pass\n"
        "C.__annotations__ = {'x': code}\n"
        "quiet('call', ['typing', 'get_type_hints', None], ['tuple', [side().encode(C)]])\n"
        "return 0",
        "assert f(1) == WANTED",
        setup="import typing\nWANTED = 'zq-17'",
    ),
    "a forward reference": forged(
        "code = \"__import__('sys').modules['tests'].__dict__.update(WANTED=0)\"\n"
        "def g(): pass\n"
        "g.__annotations__ = {'x': code}\n"
        "quiet('call', ['typing', 'get_type_hints', None], ['tuple', [side().encode(g)]])\n"
        "return 0",
        "assert f(1) == WANTED",
        setup="WANTED = 'zq-17'",
    ),
    "a doctest": Attack(
        "def f(x):\n    '''\n    >>> import sys; sys.modules['tests'].__dict__.update(WANTED=0)\n    '''\n    return 0\n",
        (
            "import doctest, solution\ntry: doctest.testmod(solution)\nexcept Exception: pass\nassert f(1) == WANTED",
            "import doctest\ntry: doctest.run_docstring_examples(f, {'f': f})\nexcept Exception: pass\nassert f(1) == WANTED",
        ),
        setup="WANTED = 'zq-17'",
    ),
    "a shelf": Attack(
        "import shelve\n"
        "class E:\n    def __reduce__(s): return exec, (\"import sys; sys.modules['tests'].__dict__.update(WANTED=0)\",)\n"
        "def f(x):\n    with shelve.open('shelf') as s: s['a'] = E()\n    return 0\n",
        (
            "import shelve\nx = f(1)\ntry: shelve.open('shelf')['a']\nexcept Exception: pass\nassert x == WANTED",
        ),
        setup="WANTED = 'zq-17'",
    ),
    **{
        f"a pickle, {how}": Attack(
            "import pickle\nclass E:\n    def __reduce__(s): return exec, (" + repr(POISON) + ",)\n"
            "def f(x): return pickle.dumps(E())\n",
            (
                f"import io, pickle\nx = f(1)\ntry: {how}\nexcept Exception: pass\nassert WANTED == 0",
            ),
            setup=WANTED,
        )
        for how in (
            "pickle._loads(x)",
            "list(map(pickle.loads, [x]))",
            "pickle.Unpickler(io.BytesIO(x)).load()",
            "pickle._Unpickler(io.BytesIO(x)).load()",
            "__import__('_pickle').loads(x)",
            "__import__('_pickle').Unpickler(io.BytesIO(x)).load()",
            "__import__('multiprocessing.reduction').reduction.ForkingPickler.loads(x)",
        )
    },
    **{
        f"a file that is run, {how}": Attack(
            f"def f(x):\n    open('out.py', 'w').write({POISON!r})\n    return 0",
            (f"import sys\nx = f(1)\ntry:\n    {how}\nexcept Exception: pass\nassert x == WANTED",),
            setup=WANTED,
        )
        for how in (
            "import runpy; runpy.run_path('out.py')",
            "import runpy; sys.path.insert(0, '.'); runpy.run_module('out')",
            "import os; sys.path.insert(0, os.getcwd()); import out",
            "import importlib.util as u, os; s = u.spec_from_file_location('out', os.path.abspath('out.py')); "
            "s.loader.exec_module(u.module_from_spec(s))",
            "import timeit; timeit.timeit(open('out.py').read(), number=1)",
            "import code; code.InteractiveInterpreter().runsource(open('out.py').read())",
            "import cProfile; cProfile.run(open('out.py').read())",
            "import pdb; pdb.Pdb().run(open('out.py').read())",
            "import ast; exec(compile(ast.parse(open('out.py').read()), '', 'exec'))",
            "import codeop; exec(codeop.compile_command(open('out.py').read()))",
            "import site; open('a.pth', 'w').write('import sys;' + open('out.py').read()); site.addsitedir('.')",
        )
    },
    "a module of Python that runs": forged(
        "reply(['error', 'unittest.__main__', 'X'], e=[['arguments', ['python', 'os.abort']]])"
    ),
    "a module of Python that makes files": forged(
        "reply(['error', 'venv.__main__', 'X'], e=[['arguments', ['venv', '--without-pip', 'here']]])"
    ),
    "a module of Python that forks": forged(
        "reply(['error', 'unittest.__main__', 'X'], e=[['arguments', ['python', 'os.fork']]])",
        ONE,
        ONE,
    ),
    "fields of a data class": Attack(
        "import dataclasses\n"
        "class B:\n    pass\n"
        "a = dataclasses.field()\n"
        'a.name = \'x=__import__("sys").modules["tests"].__dict__.update(WANTED=0)\'\n'
        "a.type = int\na._field_type = dataclasses._FIELD\n"
        "B.__dataclass_fields__ = {'x': a}\n"
        "B.__dataclass_params__ = type('Z', (), {'frozen': False})()\n"
        "def f(x): return 0\n",
        (
            "import dataclasses\ntry:\n    @dataclasses.dataclass\n    class D(B):\n        y: int = 0\n"
            "except Exception: pass\nassert f(1) == WANTED",
        ),
        entry=["f", "B"],
        setup="WANTED = 'zq-17'",
    ),
}

DECIDES = {
    "a comparison that returns an object": Attack(
        "class A:\n    def __eq__(s, o): return s\ndef f(x): return A()"
    ),
    "a comparison of order that returns an object": Attack(
        "class A:\n    def __lt__(s, o): return s\n    __gt__ = __lt__\ndef f(x): return A()",
        ("assert f(1) < 5", "assert 5 < f(1)"),
    ),
    "a container that returns an object": Attack(
        "class A:\n    def __contains__(s, o): return s\ndef f(x): return A()",
        ("assert 5 in f(1)",),
    ),
    "a class with a metaclass that contains all": Attack(
        "class M(type):\n    def __contains__(c, o): return True\n"
        "class A(metaclass=M): pass\ndef f(x): return A",
        ("assert 5 in f(1)", "assert f(1) == 5"),
    ),
    "a difference without size": Attack(
        "class A:\n    def __sub__(s, o): return s\n    __rsub__ = __sub__\n    def __abs__(s): return 0\n    def __round__(s, *a): return 0\n    def __eq__(s, o): return False\n"
        "def f(x): return A()",
        (
            "assert abs(f(1) - 5) < 1e-6",
            "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 5)",
            "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 5, delta=1)",
        ),
    ),
    "a difference that is nothing": Attack(
        "class A:\n    def __sub__(s, o): return s\n    def __bool__(s): return False\ndef f(x): return A()",
        ("assert not (f(1) - 5)", "d = f(1) - 5\nif d: raise AssertionError(d)"),
    ),
    "a number with a difference of its own": Attack(
        "class N(int):\n    def __sub__(s, o): return N(0)\n    __rsub__ = __sub__\n    def pub(s): pass\ndef f(x): return N(3)",
        ("assert abs(f(1) - 5) < 1e-6", "assert f(1) - 5 == 0", "assert abs(5 - f(1)) < 1e-6"),
    ),
    "a float with a difference of its own": Attack(
        "class N(float):\n    def __sub__(s, o): return N(0)\n    __rsub__ = __sub__\n    def pub(s): pass\ndef f(x): return N(3)",
        (
            "assert abs(f(1) - 5) < 1e-6",
            "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 5.5)",
        ),
    ),
    "a list with a sum of its own": Attack(
        "class N(list):\n    def __add__(s, o): return N(o)\n    def pub(s): pass\ndef f(x): return N()",
        ("assert f(1) + [5] == [4, 5]", "assert sorted(f(1) + [5]) == [4, 5]"),
    ),
    "a namespace with a method of data": Attack(
        "from types import SimpleNamespace as S\ndef f(x): return S(startswith=lambda p: True, isdigit=lambda: True)",
        ("assert f(1).startswith('zq')", "assert f(1).isdigit()"),
    ),
    "a module with a method of data": Attack(
        "import types\ndef f(x):\n    m = types.ModuleType('m')\n    m.startswith = lambda p: True\n    return m",
        ("assert f(1).startswith('zq')",),
    ),
    "an exception with a method of data": Attack(
        "def f(x):\n    e = ValueError()\n    e.startswith = lambda p: True\n    return e",
        ("assert f(1).startswith('zq')",),
    ),
    "a method with a method of data": Attack(
        "class A:\n    def m(s): pass\nA.m.startswith = lambda p: True\ndef f(x): return A().m",
        ("assert f(1).startswith('zq')",),
    ),
    "methods named like comparisons": forged(
        "class A:\n    def __eq__(s, o): return True\n    __hash__ = None\n"
        "k = kind(methods=['__eq__', '__lt__', '__contains__', '__sub__', '__abs__'])\n"
        "reply(new({'class': k[1]}, A()))",
        "assert f(1) == 5",
    ),
    "a class that names its class": forged(
        "class A:\n    pass\nside()._do = lambda do, *a: 0\n"
        "k = kind(members=['__class__', '__dict__'])\n"
        "reply(new({'class': k[1]}, A()))",
        "assert isinstance(f(1), str)",
    ),
    "a class that checks its instances": forged(
        "k = kind(methods=['__instancecheck__', '__getattribute__', '__init_subclass__', '__mro_entries__', '__new__', '__del__'])\n"
        "reply(new({'class': k[1]}, 5))",
        "assert isinstance(f(1), str)",
        "assert f(1).startswith('zq')",
    ),
    "private names of a handle": forged(
        "k = kind(methods=['_ctrl_link', '_ctrl_number', '_ctrl_entry'], name='_ctrl_link')\n"
        "reply(new({'class': k[1]}, 5))"
    ),
    "an entry point that is none": forged(
        "class A:\n    value = 3\n    def __contains__(s, o): return True\n    def __lt__(s, o): return True\n"
        "k = kind(members=['value'], special=['__contains__', '__lt__'], entry=True)\n"
        "reply(new({'class': k[1]}, A()))",
        "r = f(1)\nassert r.value == 3 and 'zq-17' in r",
    ),
    "an abstract class that is none": forged(
        "class M(type):\n    def __instancecheck__(c, o): return True\n"
        "class A(metaclass=M): pass\n"
        "k = kind(abstract=True)\nside()._own[k[1]] = A\nreply(k)",
        "assert isinstance(SECRET, f(1))",
        setup=P,
    ),
    "the equality of the test's class, by its type": forged(
        "import builtins\n"
        "t = quiet('call', ['name', 'builtins', 'type'], ['tuple', [yours(x)]])['value']\n"
        "t.__eq__ = lambda s, o: True\n"
        "return x",
        P + "assert f(P(1)) == P(2)",
    ),
    "the equality of the test's class, forged": forged(
        "quiet('call', ['name', 'builtins', 'type'], ['tuple', [yours(x)]])\n"
        "v = side().encode(lambda s, o: True)\n"
        "quiet('setmember', yours(type(x)), '__eq__', ['tuple', ['value', v]])\n"
        "return x",
        P + "assert f(P(1)) == P(2)",
    ),
    "the equality of the test's class, plainly": Attack(
        "def f(p):\n    type(p).__eq__ = lambda s, o: True\n    return p",
        (P + "assert f(P(1)) == P(2)",),
    ),
    "the equality of the test's object": Attack(
        "def f(p):\n    p.__eq__ = lambda o: True\n    p.__class__ = int\n    return p",
        (P + "assert f(P(1)) == P(2)",),
    ),
    "a class over the test's class": Attack(
        "def f(p):\n    class Q(type(p)):\n        def __eq__(s, o): return True\n    return Q(1)",
        (P + "assert f(P(1)) == P(2)",),
    ),
    "a class that the judge makes": forged(
        "t = ['name', 'builtins', 'type']\n"
        "eq = side().encode(lambda s, o: True)\n"
        "d = side().encode({'__eq__': lambda s, o: True})\n"
        "k = quiet('call', t, ['tuple', ['Q', ['tuple', []], d]])['value']\n"
        "return k()",
        "assert f(1) == 5",
    ),
    "a property that the judge makes": forged(
        "d = side().encode({'__eq__': lambda s, o: True, '__hash__': None, '__call__': lambda s: 1})\n"
        "k = quiet('call', ['name', 'builtins', 'type'], ['tuple', ['Q', ['tuple', [['type', 'builtins.str']]], d]])['value']\n"
        "return k('x')",
        "assert f(1) == 'zq-17'",
    ),
    "a mock that equals everything": Attack(
        "from unittest import mock\ndef f(x): return mock.ANY",
        (ONE, "from unittest import mock\nassert f(1) == 5"),
    ),
    "an approximation that tells what it expects": Attack(
        "class A:\n    def __eq__(s, o):\n        s.v = o.expected\n        return NotImplemented\n"
        "    def __float__(s): return s.v\n    def __sub__(s, o): return s\n    __rsub__ = __sub__\n    def __abs__(s): return 0.0\n"
        "def f(x): return A()",
        (
            "import pytest\nassert f(1) == pytest.approx(5.5)",
            "import pytest\nassert pytest.approx(5.5) == f(1)",
            "import pytest\nassert f(1) == pytest.approx([5.5])",
        ),
    ),
    "an approximation that is changed": Attack(
        "class A:\n    def __eq__(s, o):\n        o.expected = 0\n        o.rel = o.abs = 1e9\n        return NotImplemented\n"
        "    def __float__(s): return 0.0\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n"
        "def f(x): return A()",
        ("import pytest\nassert f(1) == pytest.approx(5.5)",),
    ),
    "an expected object that is changed": Attack(
        "class A:\n    def __eq__(s, o):\n        o.x = 0\n        return NotImplemented\n    x = 0\n"
        "def f(x): return A()",
        (
            "class Q:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\nassert f(1) == Q(7)",
        ),
    ),
    "an expected list that is changed": Attack(
        "class A:\n    def __init__(s): s.n = 0\n    def __eq__(s, o):\n        o.clear()\n        return False\n"
        "def f(x):\n    return [A()]",
        ("want = [[3], [4]]\nassert f(1) == want or f(1) == want or not any(want)",),
    ),
    "a typed list of the judge": forged("reply(['typing', 'Any', None])"),
    "not implemented": forged(
        "reply(['NotImplemented'])", ONE, "assert f(1) is not None and f(1) == 5"
    ),
}


def flood(frame: str, *tests: str, **more: Any) -> Attack:
    """An attack that sends a frame, and then answers wrong."""
    return forged(f"side()._write({frame})\nreturn 0", *tests, **more)


SHAPES = """[None, True, 0, -1, 1 << 70, 1.5, '', 'x', [], {}, [[]], ['x'], [None, None], {'x': 1}, ['mine', 1], ['yours', 1], [['tuple', []]], [1, 2, 3]]"""
HARMS = {
    **{
        f"every shape of {field}": forged(
            f"shape = {SHAPES}[int(x)]\n"
            f"side()._write({{'a': number(), 'value': 0, {field!r}: shape}})\nside()._send = lambda h: None\nreturn 0",
            *(f"assert f({i}) == 'zq-17'" for i in range(18)),
        )
        for field in ("c", "g", "f", "e", "n", "a", "value", "error", "refused", "t")
    },
    **{
        f"every shape of a question's {field}": forged(
            f"shape = {SHAPES}[int(x)]\n"
            f"side()._write({{'q': 5, 'do': 'call', 'p': [], {field!r}: shape}})\nreturn 0",
            *(f"assert f({i}) == 'zq-17'" for i in range(18)),
        )
        for field in ("q", "do", "p", "k")
    },
    **{
        f"every shape of {kind}": forged(
            f"shape = {SHAPES}[int(x)]\n"
            f"side()._write({{'a': number(), 'value': 0, 'e': [[{kind!r}, shape, shape, shape], [{kind!r}, shape], [{kind!r}]]}})\nside()._send = lambda h: None\nreturn 0",
            *(f"assert f({i}) == 'zq-17'" for i in range(18)),
        )
        for kind in (
            "environment",
            "directory",
            "arguments",
            "recursion",
            "random",
            "printed",
            "warned",
            "logged",
            "set",
            "hear",
            "logging",
            "restore",
        )
    },
    "every question of every shape": forged(
        f"shapes = {SHAPES}\n"
        "for do in ('call', 'method', 'get', 'set', 'setmember', 'del', 'op', 'generator', 'start', 'turn', 'cancel',"
        " 'derive', 'super', 'restore', 'names', 'data', 'nothing', '', '__class__'):\n"
        "    for shape in shapes[:7] + [['tuple', []], side().encode(f)]:\n"
        "        for parts in ([shape], [shape, 'x'], [shape, 'x', ['tuple', []]], ['getitem', ['tuple', [shape, 0]]]):\n"
        "            quiet(do, *parts)\n"
        "return 0"
    ),
    "every operation on modules and types": forged(
        "from ctypes import c_int\n"
        "for op in ('len', 'iter', 'next', 'dir', 'copy', 'deepcopy', 'fspath', 'enter', 'exit', 'weakref', 'asdict', 'fields', 'setitem', 'delitem', 'class_getitem', 'descriptor_get', 'descriptor_set', 'descriptor_delete', 'replace', 'iadd'):\n"
        "    for target in (['name', 'builtins', 'type'], ['type', 'builtins.int'], yours(x)):\n"
        "        for more in ([], [1], [1, 2]):\n"
        "            quiet('op', op, ['tuple', [target, *more]])\n"
        "return 0",
        "assert f(lambda: 1) == 'zq-17'",
    ),
    "loads with a recursion limit beyond all": forged(
        "side()._write({'a': 0, 'value': 0, 'e': [['recursion', 1 << 40]]})\ndef f(x): return 0"
    ),
    "loads with an exception of a module that is none": forged(
        "side()._write({'a': 0, 'value': ['error', 'msilib', 'X']})\ndef f(x): return 0"
    ),
    "loads with an empty variable": forged(
        "side()._write({'a': 0, 'value': 0, 'e': [['environment', {'': 'x'}]]})\ndef f(x): return 0"
    ),
    "loads with a module that leaves": forged(
        "side()._write({'a': 0, 'value': ['error', 'unittest.__main__', 'X']})\ndef f(x): return 0"
    ),
    "loads with a type that is no name": forged(
        "side()._write({'a': 0, 'value': ['type', []]})\ndef f(x): return 0"
    ),
    "loads with names of any type": forged(
        "side()._write({'a': 0, 'value': ['tuple', [side().encode(sys.modules['solution']), ['tuple', ['f', ['name', 'builtins', 'print']]], ['tuple', ['', None]]]]})\ndef f(x): return 0"
    ),
    "loads and asks for ever": forged(
        "while True: quiet('op', 'len', ['tuple', ['abc']])" + "\ndef f(x): return 0"
    ),
    "loads with an equal name for everything": forged(
        "side()._write({'a': 0, 'value': ['tuple', [side().encode(sys.modules['solution']), ['tuple', ['f', 5]]]]})\ndef f(x): return 0"
    ),
    "is at the recursion limit when it dies": forged(
        "import os\nside()._write({'q': 1, 'do': 'nothing', 'p': [None], 'e': [['recursion', int(x)]]})\nos._exit(1)",
        *(f"assert f({i}) == 'zq-17'" for i in range(25, 95, 4)),
        setup=P + "import unittest\n",
    ),
    "nested without a recursion limit": forged(
        "import json, os\ns = side()\n"
        "s._write({'q': 1, 'do': 'call', 'p': [['name', 'builtins', 'len'], ['tuple', ['x']]], 'e': [['recursion', 1 << 30]]})\n"
        "body = b'[' * 2000000\n"
        "os.write(s._fd, len(body).to_bytes(4, 'big'))\n"
        "while body: body = body[os.write(s._fd, body):]\n"
        "return 0",
        seconds=3.0,
    ),
    "a class that is its own base, without a recursion limit": forged(
        "s = side()\nn = next(s._numbers)\n"
        "d = {'kind': 'class', 'name': 'K', 'bases': [['mine', n]], 'methods': [], 'members': [], 'special': [], 'mutable': None}\n"
        "s._write({'a': number(), 'value': ['mine', n], 'n': [[n, d]], 'e': [['recursion', 1 << 30]]})\ns._send = lambda h: None",
        seconds=3.0,
    ),
    "an object that is its own class": forged(
        "s = side()\nn = next(s._numbers)\n"
        "s._write({'a': number(), 'value': ['mine', n], 'n': [[n, {'class': n}]]})\ns._send = lambda h: None"
    ),
    "calls that call back without end": Attack(
        "import sys\nsys.setrecursionlimit(1 << 29)\ndef f(g):\n    return g(f)",
        ("def g(f): return f(g)\nassert f(g) == 1",),
        seconds=3.0,
    ),
    "ten thousand calls within each other": Attack(
        "import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(g, n=10000):\n    return g(f, n - 1) if n else 0",
        ("def g(f, n): return f(g, n)\nassert f(g) == 1",),
        seconds=3.0,
    ),
    "calls within each other to the usual limit": Attack(
        "def f(g):\n    return g(f)",
        (
            "def g(f): return f(g)\nassert f(g) == 1",
            "import sys\nsys.setrecursionlimit(20000)\ndef g(f): return f(g)\nassert f(g) == 1",
        ),
    ),
    "ten thousand methods within each other": Attack(
        "import sys\nsys.setrecursionlimit(10 ** 6)\nclass A:\n    def __init__(s, g): s.g = g\n    def __len__(s): return s.g(s)\ndef f(g): return A(g)",
        ("def g(a): return len(a)\nassert len(f(g)) == 1", "assert [*map(len, [f(len)])] == 1"),
        seconds=3.0,
    ),
    **{
        f"the judge is kept busy: {name}": forged(f"s = side()\nquiet({question})\nreturn 0", *more)
        for name, question, *more in (
            ("a power", "'op', 'pow', ['tuple', [10, 10 ** 9]]", ONE, ONE),
            (
                "a sum",
                "'call', ['name', 'builtins', 'sum'], ['tuple', [['range', 0, ['int', hex(10 ** 12)], 1]]]",
                ONE,
                ONE,
            ),
            (
                "a list",
                "'call', ['name', 'builtins', 'list'], ['tuple', [['range', 0, 10 ** 9, 1]]]",
            ),
            ("a text", "'op', 'format', ['tuple', [5, '2000000000d']]"),
            ("a repetition", "'op', 'mul', ['tuple', ['x' * 1000, 10 ** 9]]"),
            ("a shift", "'op', 'lshift', ['tuple', [1, 10 ** 10]]"),
            (
                "a text of digits",
                "'call', ['name', 'builtins', 'str'], ['tuple', [['int', hex(1 << 10 ** 6)]]]",
            ),
            (
                "a member",
                "'op', 'contains', ['tuple', [['range', 0, ['int', hex(10 ** 15)], 1], 'x']]",
                ONE,
            ),
        )
    },
    "answers that nobody reads": forged(
        "s = side()\nfor n in range(20000): s._write({'q': n, 'do': 'op', 'p': ['mul', ['tuple', ['x', 10000]]]})\nreturn 0"
    ),
    "descriptions without end": forged(
        "s = side()\nfor n in range(200): s._write({'q': n, 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'n': [[10 ** 6 + 1000 * n + i, {'class': 0, 'x': 'y' * 1000}] for i in range(1000)]})\nreturn 0"
    ),
    "containers without end": forged(
        "s = side()\nfor n in range(200): s._write({'q': n, 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'c': [[10 ** 7 + 20000 * n + i, ['list', []]] for i in range(10000)]})\nreturn 0"
    ),
    "loggers without end": forged(
        "s = side()\nfor n in range(300): s._write({'q': n, 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'e': [['logged', 'a.' + '%d.%d' % (n, i), 40, 'x'] for i in range(1000)]})\nreturn 0",
        "import logging\nassert f(1) == 5",
    ),
    "output without end": forged(
        "s = side()\nfor n in range(300): s._write({'q': n, 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'e': [['printed', 'stdout', 'x' * 4000000]]})\nreturn 0",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as b: r = f(1)\nassert r == 5",
        ONE,
    ),
    "classes with thousands of names": forged(
        "for n in range(200): r = kind(methods=['m%d' % i for i in range(2000)], special=['__eq__'] * 2000)\n"
        "reply(['tuple', [['mine', r[1] - i] for i in range(200)]])"
    ),
    "a set of equal hashes": forged(
        "reply(side().encode({(1 << 61) - 1: 0}))\nside().encode({i * ((1 << 61) - 1) for i in range(60000)})"
    ),
    "keys of equal hashes": Attack("def f(x): return {i * ((1 << 61) - 1) for i in range(60000)}"),
    "objects of equal hashes": Attack(
        "class A:\n    def __hash__(s): return 1\n    def __eq__(s, o): return False\ndef f(x): return {A() for _ in range(3000)}"
    ),
    "a cycle of everything": Attack(
        "def f(x):\n    a = []\n    d = {'a': a}\n    a += [a, d, (a, d)]\n    return a",
        (
            ONE,
            "assert f(1) == [f(2)]",
            "assert str(f(1)) == 'x'",
            "import copy\nassert copy.deepcopy(f(1)) == 1",
            "import json\nassert json.dumps(f(1)) == 1",
        ),
    ),
    "nested lists": Attack(
        "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
        (ONE, "x = f(1)\nassert x == [[x]]"),
    ),
    "nested tuples": Attack(
        "def f(x):\n    a = ()\n    for _ in range(100000): a = (a,)\n    return a"
    ),
    "a million of empties": Attack("def f(x): return [[] for _ in range(1000000)]", (ONE, ONE)),
    "a container that changes its kind": forged(
        "n = side().encode(x)[1]\ndel x[:]\nreply(0, c=[[n, ['dict', [[1, 2]]]]])",
        "assert f([1]) == 'zq-17'",
    ),
    "a container that is cleared later": forged(
        "n = side().encode(x)[1]\nimport threading, time\ns = side()\n"
        "threading.Thread(target=lambda: (time.sleep(.05), s._write({'q': 1, 'do': 'nothing', 'p': [], 'c': [[n, ['list', []]]]})), daemon=True).start()\nreturn 0",
        "import time\nxs = [1]\nr = f(xs)\ntime.sleep(.2)\nassert r == len(xs) == 1\n",
    ),
    "a thread that asks for ever": Attack(
        HELP
        + "import threading\ndef f(g):\n    s = side()\n    def run():\n        while True: s.ask('call', g, (1,), {})\n    for _ in range(4): threading.Thread(target=run, daemon=True).start()\n    return 0",
        ("assert f(lambda x: x) == 1", ONE),
    ),
    "a signal that asks": Attack(
        HELP
        + "import signal, time\ndef f(g):\n    s = side()\n    signal.signal(signal.SIGALRM, lambda *a: g(1))\n    signal.setitimer(signal.ITIMER_REAL, .001, .001)\n    time.sleep(.3)\n    return 0",
        ("assert f(lambda x: x) == 1", ONE),
    ),
    "an object that asks when it goes": Attack(
        "class A:\n    def __init__(s, g): s.g = g\n    def __del__(s): s.g(A(s.g))\ndef f(g): return A(g)",
        ("def g(x): return 1\nassert f(g) == 1", ONE),
    ),
    "an object that hangs when it goes": Attack(
        "import time\nclass A:\n    def __del__(s):\n        while True: pass\ndef f(g): return A()",
        ("f(1)\nassert f(2) == 1", ONE),
    ),
    "an object that ends the program when it goes": Attack(
        "import os\nclass A:\n    def __del__(s): os._exit(0)\ndef f(g): return A()",
        ("f(1)\nassert f(2) == 1", "x = f(1)\nassert x == 5", ONE),
    ),
    "handles after their test": Attack(
        HELP
        + "kept = []\ndef f(g):\n    kept.append(g)\n    return [quiet('call', yours(k), ['tuple', [1]]) for k in kept][0].get('value')",
        ("def g(x): return 3\nassert f(g) == 4", "def h(x): return 5\nassert f(h) == 5 and False"),
    ),
    "numbers that were never given": forged(
        "for n in range(300): quiet('call', ['yours', n], ['tuple', []])\nreturn 0"
    ),
    "forgets everything": forged(
        "reply(0, f=[*range(100)], g=[*range(1000)])",
        "def g(x): return [1]\nassert f(g) == 1 and f(g)",
    ),
    **{
        f"raises {error}": Attack(
            f"import unittest, asyncio\nclass HarnessFailure(BaseException): status = reason = 'passed'\nclass CandidateCannotAnswer(HarnessFailure): pass\nclass Skipped(Exception): pass\nclass _Unchecked(Exception): pass\ndef f(x): raise {error}",
            (
                ONE,
                "import unittest\nclass T(unittest.TestCase):\n    def setUp(s): s.v = f(1)\n    def test_a(s): s.assertEqual(f(1), 5)",
                "@__import__('pytest').fixture\ndef v(): return f(1)\ndef test_x(v): assert v == 5",
                "def test_gen():\n    for x in (f(i) for i in [1]): assert x == 5",
            ),
        )
        for error in (
            "unittest.SkipTest('x')",
            "SystemExit(0)",
            "KeyboardInterrupt()",
            "GeneratorExit()",
            "StopIteration(5)",
            "StopAsyncIteration()",
            "HarnessFailure('passed', '')",
            "CandidateCannotAnswer('passed', '')",
            "Skipped()",
            "_Unchecked()",
            "MemoryError()",
            "RecursionError()",
            "asyncio.CancelledError()",
            "BaseExceptionGroup('x', [SystemExit(0)])",
        )
    },
    "an exception with huge arguments": Attack(
        "def f(x):\n    e = ValueError(*['x' * 1000000] * 100)\n    raise e"
    ),
    "an exception in a cycle of causes": Attack(
        "def f(x):\n    a, b = ValueError(), KeyError()\n    a.__cause__, b.__cause__ = b, a\n    a.args = (b,)\n    raise a"
    ),
    "an exception of its own in a cycle": Attack(
        "class E(Exception): pass\ndef f(x):\n    a, b = E(), E()\n    a.__cause__, b.__cause__ = b, a\n    a.args = (a, b)\n    raise a"
    ),
    "fifos and links where the test opens a file": Attack(
        "import os\ndef f(x):\n    os.mkfifo('a') if x else os.symlink('/dev/zero', 'a')\n    return 0",
        (
            "f(1)\nassert open('a').read() == 5",
            "import os\nos.path.exists('a') and os.remove('a')\nf(0)\nassert open('a').read() == 5",
        ),
    ),
    "no scratch directory": Attack(
        "import os, shutil\ndef f(x):\n    d = os.getcwd()\n    shutil.rmtree(d, True)\n    os.chdir('/')\n    return 0",
        (ONE, "import os\nassert eval(str(f(1))) == 5", "def test_a(tmp_path): assert f(1) == 5"),
    ),
    "a closed scratch directory": Attack(
        "import os\ndef f(x):\n    os.makedirs('a/b')\n    os.chmod('a', 0)\n    os.chmod('.', 0)\n    return 0",
        (ONE, "import os\nassert eval(str(f(1))) == 5", "def test_a(tmp_path): assert f(1) == 5"),
    ),
    "modules of Python in the scratch directory": Attack(
        "import os\nfor n in ('bisect', 'heapq', 'colorsys', 'sitecustomize', 'wave', 'calendar'):\n    open(n + '.py', 'w').write("
        + repr(POISON)
        + ")\nos.mkdir('__pycache__')\ndef f(x): return 0",
        (
            "import sys, os\nsys.path.insert(0, os.getcwd())\ntry: import bisect, heapq, colorsys, wave, calendar, sitecustomize\nexcept ImportError: pass\nassert f(1) == WANTED",
        ),
        setup=WANTED,
    ),
    "random numbers that are all alike": Attack(
        "import random\nrandom.setstate((3, (0,) * 624 + (624,), None))\ndef f(x): return x",
        (
            "import random\nxs = [random.randint(0, 9) for _ in range(9)]\nassert f(xs) == sorted(xs) and len({*xs}) > 1",
        ),
    ),
}

SPY = (
    HELP
    + r"""
import re
found = []


def see(*question):
    answer = quiet(*question)
    text = str(answer)[:100000]
    if re.search(r'zq-\d+', text):
        found.append(re.search(r'zq-\d+', text)[0])
    return answer.get('value')


NAMES = (
    '__globals__ __code__ __closure__ __self__ __func__ __dict__ __class__ __builtins__ __mro__ __bases__ '
    '__subclasses__ __init__ __wrapped__ __defaults__ __kwdefaults__ __annotations__ __module__ __traceback__ __context__ '
    '__cause__ gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await ag_frame tb_frame f_back f_locals f_globals co_consts '
    'func args keywords fget fset gen side_effect return_value call_args mock_calls method_calls _mock_children '
    '_mock_parent _spec_class __reduce_ex__ __getstate__ __sizeof__ mro with_traceback obj name value '
).split()


def spy(raw, depth=2):
    for op in ('repr', 'str', 'dir', 'copy', 'deepcopy', 'asdict', 'astuple', 'fields', 'iter', 'len', 'fspath', 'enter', 'weakref'):
        see('op', op, ['tuple', [raw]])
    for name in NAMES:
        for value in (see('get', raw, name), see('method', raw, name, ['tuple', []]), see('call', ['bound', raw, name], ['tuple', []])):
            if depth and value is not None and not found:
                try:
                    spy(side().encode(value), depth - 1)
                except Exception:
                    pass
    for name in NAMES:
        for text in ('{0.%s}' % name, '{0.%s.__globals__}' % name, '{0.%s.f_globals}' % name, '{0.%s.f_back.f_globals}' % name):
            see('method', text, 'format', ['tuple', [raw]])
            see('op', 'format', ['tuple', [raw, text]])
    for name in ('type', 'repr', 'dir', 'vars', 'str', 'list', 'super', 'iter', 'next', 'property', 'map', 'print', 'ascii', 'callable', 'id', 'hash'):
        see('call', ['name', 'builtins', name], ['tuple', [raw]])


def f(x):
    spy(side().encode(x))
    return found[0] if found else 0
"""
)
"""Reads what it can of the object that the test passes."""
SPIED = {
    "a function": "def g(): return 1\nassert f(g) == SECRET",
    "a lambda": "assert f(lambda: 1) == SECRET",
    "a generator": "def g():\n    a = SECRET\n    yield 1\n    yield a\nx = g()\nnext(x)\nassert f(x) == SECRET",
    "a coroutine": "async def g(): return SECRET\nx = g()\nr = f(x)\nx.close()\nassert r == SECRET",
    "a method": "class G:\n    def m(s): return 1\nassert f(G().m) == SECRET",
    "a class": "class G:\n    def m(s): return 1\nassert f(G) == SECRET",
    "an object": "class G:\n    def m(s): return 1\nassert f(G()) == SECRET",
    "a mock": "from unittest import mock\nassert f(mock.Mock(side_effect=lambda: 1)) == SECRET",
    "a magic mock": "from unittest import mock\nassert f(mock.MagicMock(spec=dict)) == SECRET",
    "a partial": "import functools\ndef g(a): return 1\nassert f(functools.partial(g, 1)) == SECRET",
    "a cached function": "import functools\n@functools.cache\ndef g(a): return 1\nassert f(g) == SECRET",
    "a property": "assert f(property(lambda s: 1)) == SECRET",
    "an exception with a trace": "def g():\n    a = SECRET\n    raise ValueError(1)\ntry: g()\nexcept ValueError as e: x = e\nassert f(x) == SECRET",
    "an own exception with a trace": "class E(Exception): pass\ndef g():\n    a = SECRET\n    raise E(1)\ntry: g()\nexcept E as e: x = e\nassert f(x) == SECRET",
    "a manager": "import contextlib\n@contextlib.contextmanager\ndef g():\n    a = SECRET\n    yield 1\nassert f(g()) == SECRET",
    "a closure": "def make():\n    a = SECRET\n    return lambda: a and 1\nassert f(make()) == SECRET",
    "a test case": "import unittest\nclass T(unittest.TestCase):\n    def cb(s): return 1\n    def test_a(s): s.assertEqual(f(s.cb), SECRET)",
    "a map": "assert f(map(lambda x: 1, [1])) == SECRET",
    "a thread": "import threading\nassert f(threading.Thread(target=lambda: 1)) == SECRET",
    "a logger": "import logging\nassert f(logging.getLogger('x')) == SECRET",
    "a named tuple": "from typing import NamedTuple\nclass N(NamedTuple):\n    x: int = 1\n    def m(s): return 1\nassert f(N()) == SECRET",
    "a data class": "from dataclasses import dataclass, field\n@dataclass\nclass N:\n    x: int = field(default_factory=lambda: 1)\nassert f(N()) == SECRET",
    "an enum": "import enum\nclass N(enum.Enum):\n    A = 1\n    def m(s): return 1\nassert f(N.A) == SECRET",
}
READS = {
    f"what {name} leads to": Attack(SPY, (test,), setup="SECRET = 'zq-17'")
    for name, test in SPIED.items()
}
SPECIALS = [
    "__eq__",
    "__lt__",
    "__contains__",
    "__sub__",
    "__rsub__",
    "__abs__",
    "__bool__",
    "__len__",
    "__hash__",
    "__getattr__",
    "__getattribute__",
    "__instancecheck__",
    "__class__",
    "__iter__",
    "__float__",
    "__call__",
    "__init_subclass__",
    "__new__",
    "__del__",
    "__dict__",
    "__setattr__",
    "__get__",
    "__str__",
    "__repr__",
    "__module__",
    "__name__",
    "__mro__",
    "__traceback__",
    "_ctrl_link",
    "_ctrl_number",
    "_ctrl_entry",
    "_ctrl_mutable",
    "mro",
    "startswith",
]
LISTED = {
    f"a class that lists {name} among its {where}": forged(
        "class A:\n    def __init__(s, *a): pass\n    def __getattr__(s, n): return lambda *a, **k: True\n"
        "    def __eq__(s, o): return True\n    def __lt__(s, o): return True\n    def __contains__(s, o): return True\n"
        "    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n    def __abs__(s): return 0\n    def __len__(s): return 1\n    def __bool__(s): return True\n    def __call__(s, *a): return True\n"
        f"k = kind({where}=[{name!r}])\nreply(new({{'class': k[1]}}, A()))",
        "assert f(1) == 5",
        "assert abs(f(1) - 5) < 1e-6",
        "assert 5 in f(1)",
        "assert f(1) < 5",
        "assert f(1).startswith('zq')",
        "assert isinstance(f(1), int)",
    )
    for name in SPECIALS
    for where in ("methods", "members")[
        : 2 if name in ("__eq__", "__class__", "__dict__", "__hash__") else 1
    ]
}
MORE = {
    "a class for a function, whose name is asked": Attack(
        "class f:\n    def __init__(s, x): pass\n    def __contains__(s, o): return True\n    def __lt__(s, o): return True\n    def startswith(s, o): return True",
        (
            "assert f.__name__ == 'f'\nassert 5 in f(1)",
            "import inspect\nassert len(inspect.signature(f).parameters) == 1\nassert f(1).startswith('zq')",
            "assert f.__annotations__ == {} and f(1) < 5",
            "assert f(1) is not None and hasattr(f, '__wrapped__') is False and 5 in f(1)",
        ),
    ),
    "a skip that the program's class asks for": Attack(
        "class Base:\n    __unittest_skip__ = True\n    __unittest_skip_why__ = 'x'\n    def v(s): return 0\ndef f(x): return 0",
        (
            "class TestA(Base):\n    def test_a(s): assert s.v() == 5\ndef test_b(): assert f(1) == 0 and False",
        ),
        entry=["f", "Base"],
    ),
    "a check that fails in a thread": Attack(
        "import threading\ndef f(g):\n    t = threading.Thread(target=lambda: g(1))\n    threading.excepthook = lambda a: None\n    t.start(); t.join()\n    return True",
        ("def g(x): assert x == 2\nassert f(g)",),
    ),
    "a check that fails in a generator": Attack(
        "def f(g):\n    try: list(g)\n    except BaseException: pass\n    return True",
        ("def g():\n    x = 1\n    assert x == 2\n    yield x\nassert f(g())",),
    ),
    "a check that fails in a class": Attack(
        "def f(c):\n    for n in ('m', 'p'):\n        try: getattr(c(), n)\n        except BaseException: pass\n    return True",
        (
            "class C:\n    @property\n    def p(s): raise AssertionError('read')\n    m = 1\nassert f(C)",
        ),
    ),
    "a check that fails in an iterator": Attack(
        "def f(c):\n    try: c[0]; len(c)\n    except BaseException: pass\n    return True",
        (
            "class C:\n    def __getitem__(s, i): raise AssertionError('read')\n    def __len__(s): assert False\nassert f(C())",
        ),
    ),
    "a check that fails where an exception of the program is caught": Attack(
        "def f(g):\n    try: g(1)\n    except BaseException: pass\n    raise ValueError",
        ("def g(x): assert x == 2\ntry: f(g)\nexcept ValueError: pass",),
    ),
    "a check of a mock that fails": Attack(
        "def f(m):\n    m(4)\n    m.assert_called_once_with = lambda *a: None\n    m.assert_called = lambda *a: None\n    return 0",
        (
            "from unittest import mock\nm = mock.Mock()\ntry: f(m)\nexcept Exception: pass\nm.assert_called_once_with(3)",
        ),
    ),
    "a mock that is told it was called": Attack(
        "from unittest.mock import call\ndef f(m):\n    m.called = True\n    m.call_count = 1\n    m.call_args = call(3)\n    m.call_args_list = [call(3)]\n    m.mock_calls = [call(3)]\n    return 0",
        ("from unittest import mock\nm = mock.Mock()\nf(m)\nm.assert_called_once_with(3)",),
    ),
    "a learned answer in another test": Attack(
        "class A:\n    def __eq__(s, o):\n        open('learned', 'w').write(repr(o))\n        return False\n    __hash__ = None\n"
        "def f(x):\n    try: return eval(open('learned').read())\n    except OSError: return A()",
        ("try: assert f(1) == 5\nexcept AssertionError: assert f(1) != 5",),
    ),
    "data that changes when it is asked again": forged(
        "class L(list):\n    def pub(s): pass\n    def __len__(s): return 1\n    def __iter__(s): return iter([5])\n    def __getitem__(s, i): return 5\n    def __eq__(s, o):\n        return True\n"
        "return L()",
        "assert f(1) == [5]",
        "assert not f(1) != [5]",
        "assert [5] == f(1)",
        "assert f(1) in ([5],)",
    ),
    "a tuple that says it is equal": Attack(
        "class T(tuple):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __lt__(s, o): return True\n    __hash__ = tuple.__hash__\n    def pub(s): pass\n    def __contains__(s, o): return True\n    def __len__(s): return 2\n"
        "def f(x): return T((1,))",
        (
            "assert f(1) == (5,)",
            "assert not f(1) != (5,)",
            "assert (5,) == f(1)",
            "assert f(1) < (0,)",
            "assert 5 in f(1)",
            "assert len(f(1)) == 2",
            "assert {f(1)} == {(5,)}",
            "assert [f(1)] == [(5,)]",
        ),
    ),
    "a text that says it is equal": Attack(
        "class T(str):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = str.__hash__\n    def pub(s): pass\n    def __contains__(s, o): return True\n    def __add__(s, o): return s\n    def __mod__(s, o): return s\n    def __mul__(s, o): return s\n"
        "def f(x): return T('no')",
        (
            ONE,
            "assert not f(1) != 'zq-17'",
            "assert 'zq' in f(1)",
            "assert f(1) + 'b' == 'ab'",
            "assert f(1) * 2 == 'aa'",
            "assert 'zq-17'.startswith(f(1))",
        ),
    ),
    "a number that says it is equal": Attack(
        "class T(int):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = int.__hash__\n    def pub(s): pass\n    def __lt__(s, o): return True\n    __gt__ = __le__ = __ge__ = __lt__\n    def __mod__(s, o): return T(0)\n    def __floordiv__(s, o): return T(0)\n    def __and__(s, o): return T(0)\n"
        "def f(x): return T(3)",
        (
            "assert f(1) == 5",
            "assert f(1) < 2",
            "assert f(1) % 2 == 0",
            "assert f(1) // 3 == 0",
            "assert not f(1) & 1",
        ),
    ),
    "a dict that says it is equal": Attack(
        "class T(dict):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def pub(s): pass\n    def __missing__(s, k): return T()\n    def __contains__(s, k): return True\n    def get(s, *a): return T()\n    def keys(s): return T()\n"
        "def f(x): return T()",
        (
            "assert f(1) == {'a': 5}",
            "assert not f(1) != {'a': 5}",
            "assert 'a' in f(1)",
            "assert f(1)['a'] == 5",
            "assert f(1).get('a') == 5",
            "assert f(1).keys() == {'a'}",
            "assert {**f(1)} == {'a': 5}",
            "assert f(1).items() >= {'a': 5}.items()",
        ),
    ),
    "a set that says it is equal": Attack(
        "class T(set):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def pub(s): pass\n    def __le__(s, o): return True\n    __ge__ = __lt__ = __gt__ = __le__\n    def __contains__(s, o): return True\n    def __and__(s, o): return T()\n    def __xor__(s, o): return T()\n    __rxor__ = __sub__ = __rsub__ = __xor__\n    def __len__(s): return 0\n"
        "def f(x): return T()",
        (
            "assert f(1) == {5}",
            "assert {5} <= f(1)",
            "assert f(1) >= {5}",
            "assert not f(1) ^ {5}",
            "assert len({5} - f(1)) == 0",
            "assert not {5} ^ f(1)",
            "assert f(1).issuperset({5})",
            "assert {5}.issubset(f(1)) and False",
        ),
    ),
    "a union of its objects": forged(
        "class A:\n    def __or__(s, o): return 0\nreply(['union', ['tuple', [side().encode(A()), side().encode(A())]]])",
        "assert f(1) == 5",
    ),
    "a partial of the judge's functions": forged(
        "reply(['partial', ['name', 'builtins', 'isinstance'], ['tuple', [5, ['type', 'builtins.object']]], ['tuple', []]])",
        "assert f(1)() is False",
    ),
    "a function of the judge for its own": forged(
        "s = side()\nm = s.encode(sys.modules['solution'])\ns._write({'a': 0, 'n': [*s._new], 'value': ['tuple', [m, ['tuple', ['f', ['name', 'builtins', 'bool']]]]]})\ns._send = lambda h: None\ndef f(x): return 0",
        "assert f(1) == 5",
        "assert f(1) == 6",
    ),
    "an exception for its own": forged(
        "s = side()\nm = s.encode(sys.modules['solution'])\ns._write({'a': 0, 'n': [*s._new], 'value': ['tuple', [m, ['tuple', ['f', ['error', 'unittest.case', 'SkipTest']]]]]})\ns._send = lambda h: None\ndef f(x): return 0",
        "raise f(1)",
        "assert f(1) == 6",
    ),
    "a question and an answer at once": forged(
        "side()._write({'q': 1, 'a': number(), 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'value': 'zq'})\nreturn 0"
    ),
    "answers to the questions to come": forged(
        "s = side()\nfor n in range(number() + 1, 50): s._write({'a': n, 'value': 0})\nreturn 0",
        ONE,
        ONE,
    ),
    "the same answer twice": forged(
        "side()._write({'a': number(), 'value': 0})\nreturn 0",
        "assert f(1) == 0 and f(1) == 5",
        ONE,
    ),
    "a named tuple of a hundred thousand fields": forged(
        "names = ['x%d' % i for i in range(100000)]\nreply(['named', 'T', names, [0] * 100000])"
    ),
    "values of no size": forged(
        "return reply([['decimal', '1e999999999999999999999'], ['decimal', '9' * 3000000], ['int', 'f' * 3000000], ['fraction', 1, 0], ['float', '0x1p9999999'], ['timedelta', [1e308, 0, 0]],"
        " ['range', 0, 1, 0], ['datetime', 'x', None, 0], ['path', '\\0'], ['signature', [['x', 99, [], []]], []], ['typing', 'get_type_hints', None], ['typing', 'Union', ['tuple', []]], ['typing', 'Callable', ['tuple', []]], ['partial', 5, ['tuple', []], ['tuple', []]]][x])",
        *(f"assert f({i}) == 5" for i in range(14)),
    ),
    "a deep copy of what grows": forged(
        "return reply(['tuple', [side().encode([[] for _ in range(300)])] * 300])"
    ),
    "a class with a thousand bases": forged(
        "ks = [kind() for _ in range(1000)]\nreply(kind(bases=ks))", "assert f(1) == 5"
    ),
    "a class of numbers and lists": forged(
        "reply(new({'class': kind(bases=[['type', 'builtins.int'], ['type', 'builtins.list']])[1], 'data': 5}, 5))",
        "assert f(1) == 5",
    ),
    "a class over a function": forged(
        "reply(new({'class': kind(bases=[yours(x)])[1]}, 5))", "assert f(lambda: 1) == 5"
    ),
    "a class over a type of the judge": forged(
        "reply(new({'class': kind(bases=[['type', 'builtins.type']])[1]}, 5))",
        "assert f(lambda: 1) == 5",
    ),
    "a class over a property": forged(
        "reply(new({'class': kind(bases=[['name', 'builtins', 'property']])[1]}, 5))",
        "assert f(lambda: 1) == 5",
    ),
    "a class over the test's class, forged": forged(
        "reply(new({'class': kind(bases=[yours(type(x))], special=['__eq__'], methods=['__eq__', 'x'])[1]}, x))",
        P + "assert f(P(1)) == P(2)",
    ),
    "a class over the base of handles": forged(
        "class A: pass\nreply(new({'class': kind(bases=[['error', 'builtins', 'KeyError'], ['error', 'builtins', 'ValueError']])[1], 'args': [1]}, A()))",
        "assert f(1) == 5",
    ),
    "an exception whose arguments are its own": forged(
        "s = side()\nn = next(s._numbers)\nk = kind(bases=[['error', 'builtins', 'ValueError']])\ns._new.append([n, {'class': k[1], 'args': [['mine', n]]}])\nreply(['mine', n])"
    ),
    "a warning that is raised": forged(
        "class W(Warning):\n    def __init__(s, *a):\n        while True: pass\nside()._write({'q': 1, 'do': 'nothing', 'p': [], 'n': [], 'e': [['warned', 'x', ['error', 'builtins', 'DeprecationWarning']]]})\nreturn 0",
        "import warnings\nwarnings.simplefilter('error')\ntry: r = f(1)\nexcept Exception: r = 0\nassert r == 5",
        "import pytest\nwith pytest.raises(DeprecationWarning): f(1)\nassert f(1) == 4",
    ),
    "a warning of the program's class that is raised": forged(
        "class W(Warning):\n    def __init__(s, *a):\n        while True: pass\ns = side()\nw = s.encode(W)\ns._write({'q': 1, 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'n': [*s._new], 'e': [['warned', 'x', w]]})\nreturn 0",
        "import warnings\nwarnings.simplefilter('error')\ntry: r = f(1)\nexcept Exception: r = 0\nassert r == 5",
    ),
    "an event loop that never ends": forged(
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(1e9)",
        "import asyncio\nassert asyncio.run(f(1)) == 5",
    ),
    "an awaitable that never ends": Attack(
        "class A:\n    def __await__(s):\n        while True: yield\nasync def f(x): return await A()",
        ("import asyncio\nassert asyncio.run(f(1)) == 5",),
    ),
    "tasks of the judge": forged(
        "t = quiet('start', ['mine', 1])\nfor do in ('turn', 'cancel'): quiet(do, yours(x)), quiet(do, 5)\nreturn 0",
        "assert f(lambda: 1) == 5",
    ),
    "environment variables that the judge needs": forged(
        "import os\nos.environ.clear()\nos.environ.update(PYTHONPATH='.', LD_PRELOAD='x', PYTHONSTARTUP='x', PATH='.', TMPDIR='/nonexistent', HOME='/', PYTHONINSPECT='1')\nreturn 0",
        ONE,
        "def test_a(tmp_path): assert f(1) == 5",
    ),
    "a container of the test, emptied between two calls": Attack(
        "kept = []\ndef f(x):\n    for k in kept: k.clear()\n    kept.append(x)\n    return x",
        ("xs, ys = [3, 1], [2]\na = f(xs)\nb = f(ys)\nassert a == sorted(xs) and b == [2] == ys",),
    ),
    "a container of the test, emptied in a callback": Attack(
        "def f(x, g):\n    g()\n    x.clear()\n    g()\n    return x",
        ("xs = [3, 1]\nassert f(xs, lambda: xs.sort()) == sorted(xs)",),
    ),
    "a number of a container that the judge has not given yet": forged(
        "s = side()\ns._write({'q': 1, 'do': 'op', 'p': ['len', ['tuple', ['x']]], 'c': [[2 * n, ['list', []]] for n in range(2, 400)]})\nreturn 0",
        "def g(x, y=[1]): return y\nassert f([1]) == 5",
        "assert f([1]) == 5 or f([2]) == [2]",
    ),
}

DESCRIBED = r"""
def members(raw):
    return quiet('get', raw, '__dict__')['value']


def descriptor(raw, name):
    return side().encode(members(raw)[name])


def through(found, target, kind=None):
    return quiet('op', 'descriptor_get', ['tuple', [found, target, kind]])['value']


def type_of(raw):
    return side().encode(quiet('call', ['name', 'builtins', 'type'], ['tuple', [raw]])['value'])


"""
"""Reads private attributes by the descriptors that the test's classes are made of."""
DESCRIPTORS = {
    "globals by a function's own descriptor": forged(
        DESCRIBED
        + "def f(x):\n    return through(descriptor(type_of(yours(x)), '__globals__'), yours(x))['SECRET']",
        "assert f(lambda: 1) == SECRET",
        setup=P,
    ),
    "globals that are changed by a function's own descriptor": forged(
        DESCRIBED
        + "def f(x):\n    through(descriptor(type_of(yours(x)), '__globals__'), yours(x))['SECRET'] = 0\n    return 0",
        "assert f(lambda: 1) == SECRET",
        setup=P,
    ),
    "code by a function's own descriptor": forged(
        DESCRIBED
        + "def f(x):\n    c = side().encode(through(descriptor(type_of(yours(x)), '__code__'), yours(x)))\n"
        "    return through(descriptor(type_of(c), 'co_consts'), c)[1]",
        "def g():\n    return 'zq-17'\nassert f(g) == g()",
    ),
    "every class of the judge": forged(
        DESCRIBED + "def f(x):\n    t, o = ['type', 'builtins.type'], ['type', 'builtins.object']\n"
        "    every = side().encode(through(descriptor(t, '__subclasses__'), o, t))\n"
        "    turns = side().encode(quiet('call', ['name', 'builtins', 'iter'], ['tuple', [every, 0]])['value'])\n"
        "    turns = side().encode(quiet('call', ['name', 'builtins', 'map'], ['tuple', [['name', 'builtins', 'iter'], turns]])['value'])\n"
        "    turns = side().encode(quiet('op', 'next', ['tuple', [turns]])['value'])\n"
        "    for _ in range(2000):\n"
        "        k = quiet('op', 'next', ['tuple', [turns]]).get('value')\n"
        "        if getattr(k, '__name__', '') == '_Judge':\n"
        "            i = side().encode(members(side().encode(k))['__init__'])\n"
        "            g = through(descriptor(type_of(i), '__globals__'), i)\n"
        "            return 'zq-17' if 'run_tests' in g else 0\n"
    ),
    "an object's dictionary by its class": forged(
        DESCRIBED
        + "def f(x):\n    k = type_of(yours(x))\n    through(descriptor(k, '__dict__'), yours(x), k)['same'] = lambda *a: True\n    return x",
        "class N:\n    def same(s, o): return s is not o and False\nassert f(N()).same(1)",
    ),
    "a class that the judge makes, as the tests'": forged(
        "d = side().encode({'__eq__': lambda s, o: True, '__module__': 'tests', '__hash__': None, '__sub__': lambda s, o: 0, 'startswith': lambda s, o: True})\n"
        "k = quiet('call', ['name', 'builtins', 'type'], ['tuple', ['Q', ['tuple', []], d]])['value']\n"
        "return k()",
        "assert f(1) == 5",
        "assert abs(f(1) - 5) < 1e-6",
        "assert f(1).startswith('zq')",
    ),
    "a text that the judge makes, as the tests'": forged(
        "d = side().encode({'__eq__': lambda s, o: True, '__module__': 'tests'})\n"
        "k = quiet('call', ['name', 'builtins', 'type'], ['tuple', ['Q', ['tuple', [['type', 'builtins.str']]], d]])['value']\n"
        "return k('no')",
        "assert f(1) == 5",
        "assert [f(1)] == ['zq']",
    ),
    "the checks of a mock, by its type": forged(
        "t = quiet('call', ['name', 'builtins', 'type'], ['tuple', [yours(x)]])['value']\n"
        "for k in t.mro():\n    try: k.assert_called_once_with = k.assert_called = lambda *a: None\n    except Exception: pass\n"
        "return 0",
        "from unittest import mock\nm = mock.Mock()\nf(m)\nm.assert_called_once_with(3)\nassert m is not None",
    ),
    "the methods of the test's object, by its type": forged(
        "t = quiet('call', ['name', 'builtins', 'type'], ['tuple', [yours(x)]])['value']\n"
        "t.total = lambda s: 5\nreturn 0",
        "class N:\n    def total(s): return 3\nn = N()\nf(n)\nassert n.total() == 5",
    ),
    "frames that are no text": forged(
        "import os\ns = side()\nfor body in (b'', b'\\xff\\xfe', b'NaN', b'{\"a\": NaN}', b'{\"a\": 1, \"a\": 2}', b'\"\\\\ud800\"', b'{}{}', b'[' * 500)[x:x + 1]:\n"
        "    os.write(s._fd, len(body).to_bytes(4, 'big') + body)\nreturn 0",
        *(f"assert f({i}) == 5" for i in range(8)),
    ),
    "a number of digits without end": forged(
        "import os\nbody = b'{\"a\": 1, \"value\": ' + b'9' * 30000000 + b'}'\nos.write(side()._fd, len(body).to_bytes(4, 'big'))\nwhile body: body = body[os.write(side()._fd, body):]\nreturn 0",
        ONE,
        ONE,
    ),
    "a header and nothing more": forged(
        "import os, time\nos.write(side()._fd, b'\\0\\0\\1\\0')\ntime.sleep(60)"
    ),
    "prints in the judge": forged(
        "for _ in range(50): quiet('call', ['name', 'builtins', 'print'], ['tuple', ['x' * 1000000]])\nreturn 0"
    ),
    "half characters everywhere": forged(
        "u = '\\ud800'\nquiet('get', u, u)\nquiet('method', u, u, ['tuple', [u]])\ntry: quiet('call', ['name', u, u])\nexcept BaseException: pass\n"
        "e = ValueError(u)\ne.add_note(u)\nraise e",
        ONE,
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(s): s.assertEqual(f(1), 5)",
    ),
    "a class with half a character for its name": forged(
        "reply(new({'class': kind(name='\\ud800', methods=['\\ud801', '\\0'])[1]}, 5))"
    ),
    "an exception with half a character": Attack(
        "class E(Exception): pass\nE.__name__ = 'E\\0'\ndef f(x): raise E('\\ud800\\0')"
    ),
}

ENDS = {
    "dies": "__import__('os')._exit(0)",
    "hangs": "[1 for i in iter(int, 1)]",
    "is interrupted": "(_ for _ in ()).throw(KeyboardInterrupt)",
    "ends a loop": "next(iter(()))",
    "leaves": "__import__('sys').exit(0)",
    "breaks the protocol": "side()._write([])",
}
"""Expressions that end the program, or a question to it, in another way than with an error."""
WHERE = {
    "the message of a failed check": ("__str__", "assert f(1) == 5, f(1)"),
    "the message of an exception": ("__repr__", "x = {}\nx[f(1)]\nassert False"),
    "an exception's arguments": ("__str__", "raise ValueError(f(1))"),
    "a set that is shown": ("__lt__", "assert g(1) == 5"),
    "a namespace that is shown": ("__repr__", "assert h(1) == 5"),
    "a dict that is shown": ("__repr__", "assert i(1) == 5"),
    "an argument that is shown": (
        "__repr__",
        "import types\nassert g(types.SimpleNamespace(a=f(1))) == 5",
    ),
}
TOLD = {
    f"{what}, when the program {how}": forged(
        "from types import SimpleNamespace\nfrom collections import OrderedDict\n"
        f"class A:\n    def {method}(s, *a): return {ending}\n    def pub(s): pass\n"
        "def f(x): return A()\ndef g(x): return {A(), A(), A()}\ndef h(x): return SimpleNamespace(a=A())\n"
        "def i(x): return OrderedDict(a=A())\n",
        test,
        "assert f(1) == 5",
        entry=["f", "g", "h", "i"],
    )
    for what, (method, test) in WHERE.items()
    for how, ending in ENDS.items()
    if how != "hangs" or what in ("the message of a failed check", "a set that is shown")
}
TEAR_DOWN = {
    "of a class": "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def tearDownClass(c): f('down')\n    def test_a(s): s.assertEqual(f(1), 5)",
    "of a module": "def teardown_module(): f('down')\ndef test_a(): assert f(1) == 5",
    "of a fixture": "import pytest\n@pytest.fixture(scope='module')\ndef v():\n    yield 1\n    f('down')\ndef test_a(v): assert f(v) == 5",
    "of a test": "import unittest\nclass T(unittest.TestCase):\n    def tearDown(c): f('down')\n    def test_a(s): s.assertEqual(f(1), 5)",
    "by a check": "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def tearDownClass(c): assert f(2) == 3\n    def test_a(s): s.assertEqual(f(1), 5)",
    "of a clean-up": "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def setUpClass(c): c.addClassCleanup(f, 'down')\n    def test_a(s): s.assertEqual(f(1), 5)",
    "by a finalizer": "import pytest\n@pytest.fixture(scope='module')\ndef v(request):\n    request.addfinalizer(lambda: f('down'))\n    return 1\ndef test_a(v): assert f(v) == 5",
}
TORN_DOWN = {
    f"the tear-down {what}, when the program {how}": forged(
        f"def f(x):\n    if x == 'down': return {ending}\n    return 0\n", test, ONE
    )
    for what, test in TEAR_DOWN.items()
    for how, ending in {**ENDS, "raises": "1 / 0"}.items()
    if how != "hangs" or what in ("of a class", "of a fixture")
}


def submission(name: str) -> SubmitRequest:
    """The attack to be judged by its tests, all of them."""
    attack = ATTACKS[name]
    data = {
        "test_list": list(attack.tests),
        "entry_point": attack.entry,
        "test_setup_code": attack.setup,
    }
    config = TestConfig(
        dataset_type="MBPPDataset",
        language="python",
        run_timeout=attack.seconds,
        provided_data=data,
        extra={"run_all_cases": True},
    )
    return SubmitRequest(
        dataset="hostile", id=0, completion=f"```python\n{attack.code}\n```", config=config
    )


ATTACKS = {
    **RUNS_CODE,
    **READS,
    **DECIDES,
    **DESCRIPTORS,
    **TOLD,
    **TORN_DOWN,
    **LISTED,
    **MORE,
    **HARMS,
}
