"""Function programs whose returned or raised objects lie, explode or do not end."""

from __future__ import annotations

VALUES = {
    "string subclass that is equal to everything": r"""
class S(str):
    def __eq__(s, o):
        return True
    def __ne__(s, o):
        return False
    def __str__(s):
        return '987654321'
    __hash__ = str.__hash__

def f(x):
    return S('no')
""",
    "keys that are equal to everything": r"""
class K(str):
    def __eq__(s, o):
        return True
    def __hash__(s):
        return 0

def f(x):
    return {K('a'): K('b')}
""",
    "metaclass that claims every instance": r"""
class M(type):
    def __instancecheck__(c, o):
        return True
    def __eq__(c, o):
        return True
    __hash__ = type.__hash__

class f(metaclass=M):
    def __init__(s, x):
        pass
    def __eq__(s, o):
        return True
""",
    "comparison of str replaced in C": r"""
import ctypes
slot = ctypes.c_void_p.from_address(id(str) + 200)
agree = ctypes.CFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)

def f(x):
    class E(str):
        def __eq__(s, o):
            return True
    other = ctypes.c_void_p.from_address(id(E) + 200)
    slot.value = other.value
    return 'no'
""",
    "pickle that leaves when it is loaded": r"""
import os

class P:
    def __reduce__(s):
        return (os._exit, (0,))
    def __eq__(s, o):
        return True

def f(x):
    return P()
""",
    "truth that leaves": r"""
import os

class T:
    def __bool__(s):
        os._exit(0)

def f(x):
    return T()
""",
    "destructor that leaves": r"""
import os

class D:
    def __del__(s):
        os._exit(0)

def f(x):
    D()
    return 0
""",
    "type with a hostile name": r"""
def f(x):
    return type('zq-' + 'f' * 32, (), {'__eq__': lambda s, o: True})()
""",
    "exception with a hostile name": r"""
class Name(str):
    def __getitem__(s, i):
        return 'passed'
E = type('Passed', (Exception,), {})
E.__name__ = 'Lost'

def f(x):
    raise E('passed')
""",
    "exception whose text leaves": r"""
import os

class E(Exception):
    def __str__(s):
        os._exit(0)

def f(x):
    raise E
""",
    "exception whose text raises": r"""
class E(BaseException):
    def __str__(s):
        raise s

def f(x):
    raise E
""",
    "endless chain of causes": r"""
def f(x):
    e = ValueError('a')
    for _ in range(100000):
        n = ValueError('b')
        n.__cause__ = n.__context__ = e
        e = n
    raise e
""",
    "group of exceptions": r"""
def f(x):
    raise BaseExceptionGroup('all', [SystemExit(0), KeyboardInterrupt(), AssertionError()])
""",
    "keyboard interrupt": r"""
def f(x):
    raise KeyboardInterrupt
""",
    "generator exit": r"""
def f(x):
    raise GeneratorExit
""",
    "assertion error of its own": r"""
def f(x):
    raise AssertionError
""",
    "NUL and surrogates": r"""
def f(x):
    return ['\x00', '\ud800', '\udfff\x00' * 1000, b'\x00\xff'.decode('latin-1')]
""",
    "surrogates in an exception": r"""
def f(x):
    raise ValueError('\x00\ud800')
""",
    "huge integer": r"""
def f(x):
    return 1 << (1 << 26)
""",
    "integer that cannot be printed": r"""
def f(x):
    return 10 ** 100000
""",
    "decimal with a huge exponent": r"""
from decimal import Decimal

def f(x):
    return Decimal('1e999999999999')
""",
    "fraction of huge integers": r"""
from fractions import Fraction

def f(x):
    return Fraction(10 ** 50000, 3 ** 40000)
""",
    "not a number": r"""
def f(x):
    return [float('nan'), float('inf'), -0.0, complex('nan')]
""",
    "range of everything": r"""
def f(x):
    return range(-(1 << 62), 1 << 62)
""",
    "endless mapping": r"""
import itertools

class M(dict):
    def items(s):
        return itertools.count()
    def __iter__(s):
        return itertools.count()

def f(x):
    return M(a=1)
""",
    "recursion": r"""
def f(x):
    return f(x)
""",
    "recursion without a limit": r"""
import sys
sys.setrecursionlimit(1 << 30)
# Frames of a thousand variables: memory ends soon.
exec("def f(x):\n    " + " = ".join(f"v{i}" for i in range(1000)) + " = x\n    return f(x)")
""",
    "recursion in C": r"""
import sys
sys.setrecursionlimit(1 << 30)

def f(x):
    return repr(list(map(f, [x])))
""",
    "namespace without builtins": r"""
__builtins__ = {}

def f(x):
    return 0
""",
    "module that invents its attributes": r"""
import sys, types

class M(types.ModuleType):
    def __getattribute__(s, n):
        return lambda *a, **k: True
    __eq__ = lambda s, o: True
    __hash__ = None
sys.modules['solution'] = sys.modules['tests'] = sys.modules['__main__'] = M('m')

def f(x):
    return M('m')
""",
}
