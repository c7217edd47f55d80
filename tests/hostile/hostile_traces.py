"""Pairs of programs: one leaves something behind, one looks for it in a later job.

``look`` prints the same whether or not another job ran before.
"""

from __future__ import annotations

TRACES = {
    "files": (
        r"""
import os
for p in ('left', '/tmp/left', '/var/tmp/left', '/dev/shm/left', '../left', '/left', '.hidden'):
    try:
        open(p, 'w').write('x')
    except OSError:
        pass
""",
        r"""
import glob, os
places = ('/var/tmp/left', '/dev/shm/left', '/left', '../left')
print(sorted(os.listdir('.')), [p for p in places if os.path.exists(p)])
""",
        "['main.py'] []\n",
    ),
    "modules in the way": (
        r"""
for name in ('json', 'random', 'bisect', 'main', 'solution', 'tests'):
    open(name + '.py', 'w').write('raise SystemExit(0)')
""",
        r"""
import bisect, json, random, colorsys
print(json.dumps(bisect.bisect([1, 2], 1)))
""",
        "1\n",
    ),
    "patched builtins and modules": (
        r"""
import builtins, json, math, os, sys, random
builtins.print = builtins.len = builtins.sorted = lambda *a, **k: 7
json.dumps = math.sqrt = os.listdir = lambda *a, **k: 7
sys.path.insert(0, '/evil')
sys.setrecursionlimit(50)
os.environ['LEFT'] = '1'
os.putenv('LEFT', '1')
sys.modules['heapq'] = None
random.seed(1)
""",
        r"""
import heapq, json, math, os, sys
print(len('abc'), json.dumps([1]), math.sqrt(4), os.environ.get('LEFT'), '/evil' in sys.path,
      sys.getrecursionlimit())
""",
        "3 [1] 2.0 None False 1000\n",
    ),
    "state of the process": (
        r"""
import os, resource, signal, locale
os.umask(0o777)
os.nice(5)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
signal.alarm(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
""",
        r"""
import os, resource, signal
old = os.umask(0o22)
print(old != 0o777, signal.getsignal(signal.SIGINT) is signal.default_int_handler,
      signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.alarm(0),
      resource.getrlimit(resource.RLIMIT_NOFILE))
""",
        "True True set() 0 (64, 64)\n",
    ),
    "code in memory": (
        r"""
import ctypes, mmap
libc = ctypes.CDLL(None)
ctypes.memmove(id(257), id(1), 28)
page = ctypes.addressof(ctypes.c_char.in_dll(libc, 'environ')) & ~4095
libc.mprotect(ctypes.c_void_p(page), 4096, 7)
ctypes.memset(page, 255, 64)
""",
        r"""
import ctypes
print(257 - 1, bool(ctypes.CDLL(None).getpid()))
""",
        "256 True\n",
    ),
}

HOLDS = r"""
import os, socket, threading, time
open('held', 'w').write('x')
left = socket.socketpair()
for attempt in (lambda: __import__('fcntl').flock(open(os.__file__), 2),
                lambda: socket.socket(socket.AF_UNIX).bind('\0held'),
                lambda: os.mkfifo('pipe')):
    try:
        attempt()
    except OSError:
        pass
print('holding', flush=True)
time.sleep(1.3)
"""
"""Keeps files, a lock and a socket open for 1.3 s."""

LOOKS = r"""
import fcntl, os, socket
seen = [] if os.listdir('.') == ['main.py'] else ['files']
for folder in ('/proc/self', '/proc/1', '/proc', '/tmp/..', '..'):
    try:
        seen += [n for n in os.listdir(folder) if n in ('held', 'fd', 'self', 'main.py')]
    except OSError:
        pass
for pid in list(range(2, 60)) + list(range(-5, 1)):
    if pid != os.getpid():
        try:
            os.kill(pid, 0)
            seen.append(pid)
        except OSError:
            pass
try:
    socket.socket(socket.AF_UNIX).connect('\0held')
    seen.append('socket')
except OSError:
    pass
print(seen)
"""
"""Runs beside ``HOLDS`` and prints everything that it can see of it."""
