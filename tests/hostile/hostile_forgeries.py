"""Function programs that try to pass without being right."""

from __future__ import annotations

# Programs that hunt for the expected value know its form: ``zq-`` and 32 hex digits.
FORGERIES = {
    "exit at import": r"""
import sys
sys.exit(0)
""",
    "exit() at import": r"""
def f(x):
    return 0
exit(0)
""",
    "os._exit at import": r"""
import os
os._exit(0)
""",
    "exit in function": r"""
import sys

def f(x):
    sys.exit(0)
""",
    "os._exit in function": r"""
import os

def f(x):
    os._exit(0)
""",
    "abort in function": r"""
import os

def f(x):
    os.abort()
""",
    "print markers": r"""
def f(x):
    for m in ('PASSED', 'OK', 'True', '{"passed": true}', 'done'):
        print(m, flush=True)
import os
print('passed')
""",
    "equal to everything": r"""
class E:

    def __eq__(s, o):
        return True

    def __ne__(s, o):
        return False
    __hash__ = None

def f(x):
    return E()
""",
    "int subclass": r"""
class E(int):

    def __eq__(s, o):
        return True

    def __hash__(s):
        return 987654321

def f(x):
    return E(1)
""",
    "list subclass": r"""
class E(list):

    def __eq__(s, o):
        return True

    def __iter__(s):
        return iter([123454321, 'secret'])

def f(x):
    return E()
""",
    "excepthook": r"""
import sys, os
sys.excepthook = lambda *a: os._exit(0)

def f(x):
    raise ValueError
""",
    "atexit": r"""
import atexit, os
atexit.register(os._exit, 0)

def f(x):
    raise SystemExit(0)
""",
    "patched AssertionError": r"""
import builtins

class Quiet(BaseException):
    pass
builtins.AssertionError = Quiet

def f(x):
    return 0
""",
    "patched exec and compile": r"""
import builtins
builtins.exec = builtins.compile = builtins.eval = lambda *a, **k: None

def f(x):
    return 0
""",
    "patched json": r"""
import json
json.dumps = lambda *a, **k: '{"value": 987654321}'
json.loads = lambda *a, **k: {'passed': True, 'kind': 'done'}

def f(x):
    return 0
""",
    "trace that skips": r"""
import sys

def t(fr, ev, arg):
    return t
sys.settrace(t)

def f(x):
    return 0
""",
    "frame walk to the harness": r"""
import sys

def f(x):
    fr = sys._getframe()
    while fr:
        for k, v in list(fr.f_locals.items()):
            if isinstance(v, dict):
                v.update(passed=True, status='passed')
            if isinstance(v, list):
                v.append(True)
        fr = fr.f_back
    return 0
""",
    "gc hunt for the answers": r"""
import re
find = re.compile(b'zq-[0-9a-f]{32}').search
import gc

def f(x):
    objects = gc.get_objects()
    for o in objects + [r for o in objects for r in gc.get_referents(o)]:
        found = isinstance(o, (str, bytes)) and find(o if type(o) is bytes else o.encode())
        if found:
            return found[0].decode()
    return 0
""",
    "scan of the memory for the answers": r"""
import re
find = re.compile(b'zq-[0-9a-f]{32}').search
import ctypes
c = ctypes.CDLL(None)

def f(x):
    page = id((x := [])) >> 12 << 12
    for at in range(page - (24 << 20), page + (24 << 20), 4096):
        there = ctypes.create_string_buffer(1)
        if c.mincore(ctypes.c_void_p(at), 4096, there):
            continue
        found = find(ctypes.string_at(at, 4096))
        if found:
            return found[0].decode()
    return 0
""",
    "answers on other descriptors": r"""
import re
find = re.compile(b'zq-[0-9a-f]{32}').search
import os
for fd in range(3, 64):
    try:
        os.set_blocking(fd, False)
    except OSError:
        pass

def f(x):
    for fd in range(3, 64):
        try:
            data = os.read(fd, 1 << 16)
        except OSError:
            continue
        found = find(data)
        if found:
            return found[0].decode()
    return 0
""",
    "answers in files and arguments": r"""
import re
find = re.compile(b'zq-[0-9a-f]{32}').search
import sys, glob

def f(x):
    text = ' '.join(sys.argv).encode()
    for path in glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline'):
        try:
            text += open(path, 'rb').read()
        except OSError:
            pass
    found = find(text)
    return found[0].decode() if found else 0
""",
    "forged frames on every descriptor": r"""
import os, struct
answer = b'{"id":"","value":987654321,"changed":[]}'
verdict = b'["",0,"passed","",0]'

def f(x):
    for fd in range(3, 64):
        for body in (answer, verdict):
            try:
                os.write(fd, struct.pack('>I', len(body)) + body)
            except OSError:
                pass
    return 0
""",
    "signals to everybody": r"""
import os, signal

def f(x):
    for p in (-1, 0, 1, 2, 3, os.getppid()):
        try:
            os.kill(p, signal.SIGKILL)
        except OSError:
            pass
    return 0
""",
    "a proxy that claims to be an int": r"""
class P:
    __class__ = int

    def __eq__(s, o):
        return True

    def __index__(s):
        return 987654321

def f(x):
    return P()
""",
    "raises the assertion's success": r"""
def f(x):
    raise StopIteration(987654321)
""",
    "deep nesting": r"""
def f(x):
    r = []
    for _ in range(100000):
        r = [r]
    return r
""",
    "returns itself": r"""
def f(x):
    r = []
    r.append(r)
    return r
""",
    "endless generator": r"""
import itertools

def f(x):
    return itertools.count()
""",
    "memory in the function": r"""
def f(x):
    return len([0] * (1 << 40))
""",
    "memory page by page": r"""
def f(x):
    a = []
    while True:
        a.append(bytearray(1 << 24))
""",
    "flood in the function": r"""
def f(x):
    while True:
        print('x' * 65536)
""",
    "threads": r"""
import threading, time

def f(x):
    n = 0
    try:
        while n < 10000:
            threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
            n += 1
    except RuntimeError:
        return n
""",
}

HANGING = {
    "never returns": r"""
def f(x):
    while True:
        pass
""",
    "sleeps for ever": r"""
import time

def f(x):
    time.sleep(1000000.0)
""",
    "blocks every signal": r"""
import signal, time
for s in range(1, 65):
    try:
        signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError):
        pass

def f(x):
    while True:
        time.sleep(1)
""",
    "loop without bytecode": r"""
def f(x):
    return sum(range(10 ** 18))
""",
    "stops itself": r"""
import os, signal

def f(x):
    os.kill(os.getpid(), signal.SIGSTOP)
""",
    "regular expression without end": r"""
import re

def f(x):
    return re.match('(a*)*b', 'a' * 64)
""",
    "power without end": r"""
def f(x):
    return pow(3, 1 << 40)
""",
    "deadlock": r"""
import threading
lock = threading.Lock()

def f(x):
    lock.acquire()
    lock.acquire()
""",
    "never loads": r"""
while True:
    pass
""",
    "text of an exception without end": r"""
class E(Exception):
    def __str__(s):
        while True:
            pass

def f(x):
    raise E
""",
    "swallows everything": r"""
def f(x):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
""",
}
"""Programs that only a clock ends."""
