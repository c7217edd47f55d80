"""Whole programs that try to do harm, and the output of each when it is prevented."""

from __future__ import annotations

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
