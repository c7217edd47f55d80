"""Programs that try to pass without being right (``FORGERIES``) or to do harm (``HARM``)."""

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
body = b'{"kind":"verdict","passed":true,"index":0,"status":"passed","value":987654321}'

def f(x):
    for fd in range(3, 64):
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

# Name -> the program and what it prints when it is held back.
HARM = {
    "fork": (
        r"""
import os
try:
    os.fork()
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "fork bomb": (
        r"""
import os
n = 0
try:
    while True:
        os.fork()
        n += 1
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "double-fork daemon": (
        r"""
import os, time
try:
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(999)
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "subprocess": (
        r"""
import subprocess
try:
    subprocess.run(['/bin/sh', '-c', 'echo out'])
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "exec": (
        r"""
import os
try:
    os.execv('/usr/bin/true', ['true'])
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "socket": (
        r"""
import socket
try:
    socket.socket()
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "resolve a name": (
        r"""
import socket
try:
    socket.create_connection(('127.0.0.1', 80), 1)
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "proc": (
        r"""
import os
try:
    os.listdir('/proc')
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "password file": (
        r"""
try:
    open('/etc/passwd')
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "write the library": (
        r"""
import os
try:
    open(os.__file__, 'a')
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "write outside": (
        r"""
try:
    open('/escaped', 'w')
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "ptrace": (
        r"""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
print(c.ptrace(0, 0, 0, 0), ctypes.get_errno())
""",
        "-1 1\n",
    ),
    "new namespaces": (
        r"""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
print(c.unshare(268435456), ctypes.get_errno())
""",
        "-1 1\n",
    ),
    "raise its limits": (
        r"""
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
except (OSError, ValueError):
    print('refused')
""",
        "refused\n",
    ),
    "signals": (
        r"""
import os
r = 0
for p in (-1, 0, 1, os.getppid()):
    try:
        os.kill(p, 9)
    except OSError:
        r += 1
print(r)
""",
        "4\n",
    ),
    "fill memory": (
        r"""
try:
    b'x' * (1 << 42)
except MemoryError:
    print('refused')
""",
        "refused\n",
    ),
    "fill the disk": (
        r"""
n = 0
try:
    while n < 999:
        open(f'f{n}', 'wb').write(b'x' * (8 << 20))
        n += 1
except OSError:
    print(n < 20)
""",
        "True\n",
    ),
    "one huge file": (
        r"""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    open('f', 'wb').write(b'x' * (40 << 20))
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "many files": (
        r"""
n = 0
try:
    while n < 99999:
        open(f'f{n}', 'w').close()
        n += 1
except OSError:
    print('refused')
""",
        "refused\n",
    ),
    "descriptors": (
        r"""
import os
k = []
try:
    while len(k) < 9999:
        k.append(os.dup(1))
except OSError:
    print('refused')
""",
        "refused\n",
    ),
}
