"""Function programs that attack the line to the judge, the harness in their process, or others."""

from __future__ import annotations

CHANNEL = {
    "import hook": r"""
import sys

class Hook:
    def find_spec(s, name, path=None, target=None):
        sys.modules[name] = s
        return None
    def __getattr__(s, n):
        return lambda *a, **k: True
sys.meta_path.insert(0, Hook())
for name in ('json', 'os', 'select', 'tests', 'ctrl_megatron'):
    sys.modules[name] = Hook()

def f(x):
    return 0
""",
    "patched frames of the harness": r"""
import sys

def f(x):
    fr = sys._getframe()
    while fr:
        for v in list(fr.f_globals.values()):
            for n in ('send', 'encode_frame', 'receive', 'decode'):
                if hasattr(v, n) and hasattr(v, '__file__'):
                    setattr(v, n, lambda *a, **k: b'\0\0\0\x0f{"passed":true}')
        fr = fr.f_back
    return 0
""",
    "opaque value made by hand": r"""
import sys

def f(x):
    fr = sys._getframe()
    while fr:
        for v in list(fr.f_globals.values()):
            if hasattr(v, 'Opaque'):
                v.encode = lambda *a, **k: ['opaque', 'str', True]
        fr = fr.f_back
    return 0
""",
    "verdicts with every nonce in its memory": r"""
import ctypes, os, re, struct
c = ctypes.CDLL(None)

def f(x):
    page = id(x) >> 12 << 12
    nonces = set()
    for at in range(page - (16 << 20), page + (16 << 20), 4096):
        if not c.mincore(ctypes.c_void_p(at), 4096, ctypes.create_string_buffer(1)):
            nonces |= set(re.findall(b'[0-9a-f]{32}', ctypes.string_at(at, 4096)))
    for nonce in list(nonces)[:50]:
        body = b'["%s",0,"passed","",0]' % nonce
        for fd in range(3, 64):
            try:
                os.write(fd, struct.pack('>I', len(body)) + body)
            except OSError:
                pass
    return 0
""",
    "answers before it is asked": r"""
import json, os, struct
for n in range(2000):
    body = json.dumps({'id': '%08x' % n, 'value': True, 'changed': []}).encode()
    for fd in range(3, 12):
        try:
            os.write(fd, struct.pack('>I', len(body)) + body)
        except OSError:
            pass

def f(x):
    return 0
""",
    "claims a deeply nested failure to load": r"""
import os, struct
for depth in (300, 900, 960, 980, 990, 5000):
    nested = b'[' * depth + b']' * depth
    body = b'{"loaded":false,"error":{"type":%s,"text":%s}}' % (nested, nested)
    for fd in range(3, 12):
        try:
            os.write(fd, struct.pack('>I', len(body)) + body)
        except OSError:
            pass

def f(x):
    return 0
""",
    "frame of another shape": r"""
import os, struct
for body in (b'[]', b'null', b'"passed"', b'{"loaded":1}', b'NaN', b'{"loaded":true}{"id":1}'):
    for fd in range(3, 12):
        try:
            os.write(fd, struct.pack('>I', len(body)) + body)
        except OSError:
            pass

def f(x):
    return 0
""",
    "frame of four gigabytes": r"""
import os

def f(x):
    for fd in range(3, 12):
        try:
            os.write(fd, b'\xff\xff\xff\xff' + b'[' * 60000)
        except OSError:
            pass
    return 0
""",
    "values that do not decode": r"""
import json, os, struct

def f(x):
    for value in (['set', [['list', []]]], ['dict', [[['list', []], 1]]], ['float', 'x'], ['int'],
                  ['range', [0, 1, 0]], ['datetime', 'now'], ['fraction', 1, 0], ['bytes', '*']):
        body = json.dumps({'id': '', 'value': value, 'changed': [[0, value]]}).encode()
        for fd in range(3, 12):
            try:
                os.write(fd, struct.pack('>I', len(body)) + body)
            except OSError:
                pass
    return 0
""",
    "descriptors sent over the channel": r"""
import os, socket

def f(x):
    for fd in range(3, 12):
        try:
            s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(fd))
            for _ in range(200):
                socket.send_fds(s, [b'x'], [1, 2])
        except OSError:
            pass
    return 0
""",
    "closed descriptors": r"""
import os

def f(x):
    os.closerange(0, 64)
    return 0
""",
    "every descriptor made the same": r"""
import os

def f(x):
    for fd in range(3, 64):
        try:
            os.dup2(1, fd)
        except OSError:
            pass
    return 0
""",
    "thread that answers in its place": r"""
import json, os, struct, threading, time

def answer():
    while True:
        for fd in range(3, 8):
            try:
                body = json.dumps({'id': 0, 'value': True}).encode()
                os.write(fd, struct.pack('>I', len(body)) + body)
            except OSError:
                pass
        time.sleep(0.001)
threading.Thread(target=answer, daemon=True).start()

def f(x):
    time.sleep(0.05)
    return 0
""",
    "signals through descriptors": r"""
import fcntl, os, signal
reader, writer = os.pipe()

def f(x):
    for pid in range(0, 12):
        if pid == os.getpid():
            continue
        for number in (signal.SIGKILL, signal.SIGALRM, signal.SIGTERM):
            try:
                fcntl.fcntl(reader, fcntl.F_SETOWN, pid)
                fcntl.fcntl(reader, 10, number)
                fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
                os.write(writer, b'x')
                os.read(reader, 1)
            except OSError:
                pass
    return 0
""",
    "crash": r"""
import ctypes

def f(x):
    ctypes.string_at(0)
""",
    "kills itself": r"""
import os, signal

def f(x):
    os.kill(os.getpid(), signal.SIGKILL)
""",
    "leaves by a system call": r"""
import ctypes, platform

def f(x):
    ctypes.CDLL(None).syscall(231 if platform.machine() == 'x86_64' else 94, 0)
""",
    "leaves from a thread": r"""
import os, threading, time

def f(x):
    threading.Thread(target=os._exit, args=(0,)).start()
    time.sleep(9)
""",
    "alarm that leaves": r"""
import os, signal, time
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))

def f(x):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(9)
""",
    "profiler and tracer": r"""
import sys, threading

def t(fr, ev, arg):
    fr.f_trace_lines = False
    try:
        fr.f_lineno += 1
    except (ValueError, AttributeError):
        pass
    return t
sys.setprofile(t)
sys.settrace(t)
threading.settrace(t)

def f(x):
    return 0
""",
    "code objects exchanged": r"""
import sys

def always(*a, **k):
    return True
fr = sys._getframe()
while fr:
    for v in list(fr.f_globals.values()):
        if type(v) is type(always) and v.__code__.co_freevars == ():
            try:
                v.__code__ = always.__code__
            except ValueError:
                pass
    fr = fr.f_back

def f(x):
    return 0
""",
}
