"""Whole programs that attack the machine in further ways than ``hostile_harm``, and the output of
each when it is prevented.
"""

from __future__ import annotations

_COUNT = r"""
def refused(*attempts):
    print([n for n, a in enumerate(attempts) if not fails(a)] or 'refused')

def fails(attempt):
    try:
        attempt()
    except (OSError, PermissionError, ValueError):
        return True
    return False
"""
_CALLS = (
    _COUNT
    + r"""
import ctypes, platform
c = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == 'x86_64'

def raw(x86_number, other, *arguments):
    def attempt():
        number = x86_number if x86 else other
        if c.syscall(number, *map(ctypes.c_long, arguments)) < 0:
            raise OSError(ctypes.get_errno(), 'refused')
    return attempt
"""
)

SYSTEM = {
    "every family of sockets": (
        _COUNT
        + r"""
import socket
refused(*(lambda f=f: socket.socket(f, t) for f in (1, 2, 10, 16, 17, 40) for t in (1, 2, 3)))
""",
        "refused\n",
    ),
    "processes by other doors": (
        _COUNT
        + r"""
import os, pty, multiprocessing
refused(
    pty.fork,
    lambda: os.posix_spawn('/bin/true', ['true'], {}),
    lambda: os.popen('true'),
    lambda: multiprocessing.get_context('fork').Process(target=print).start(),
    lambda: os.execve('/bin/sh', ['sh'], {}),
    lambda: os.forkpty(),
)
""",
        "refused\n",
    ),
    "processes by raw calls": (
        _CALLS
        + r"""
clone = raw(56, 220, 17, 0, 0, 0, 0)
refused(clone, raw(57, 220, 17), raw(58, 220, 0x4100), raw(435, 435, 0, 0), raw(59, 221, 0, 0, 0))
""",
        "refused\n",
    ),
    "system": (
        r"""
import ctypes
print(ctypes.CDLL(None).system(b'echo out') != 0)
""",
        "True\n",
    ),
    "memory outside its limit": (
        _CALLS
        + r"""
import os
refused(
    lambda: os.memfd_create('x'),
    raw(447, 447, 0),
    raw(29, 194, 0, 1 << 20, 0o1600),
    raw(64, 190, 0, 1, 0o1600),
    raw(68, 186, 0, 0o1600),
    raw(240, 180, 0, 0o102, 0o600, 0),
)
""",
        "refused\n",
    ),
    "kernel interfaces": (
        _CALLS
        + r"""
refused(
    raw(425, 425, 8, 0), raw(321, 280, 0, 0, 0), raw(248, 217, 0, 0, 0, 0, 0),
    raw(250, 219, 0, 0), raw(323, 282, 0), raw(298, 241, 0, 0, -1, -1, 0), raw(300, 262, 0, 0),
    raw(310, 270, 1, 0, 0, 0, 0, 0), raw(434, 434, 1, 0), raw(438, 438, 1, 0, 0),
    raw(304, 265, 0, 0, 0), raw(103, 116, 3, 0, 0), raw(153, 58), raw(135, 92, 0x0400000),
)
""",
        "refused\n",
    ),
    "stores that the whole machine has but once": (
        _CALLS
        + r"""
context, event, timer = ctypes.c_ulong(0), (ctypes.c_int * 16)(), ctypes.c_int(0)
event[3] = 0  # SIGEV_SIGNAL
at, told, made = (ctypes.addressof(each) for each in (context, event, timer))
refused(
    raw(206, 0, 16, at), raw(207, 1, 0), raw(208, 4, 0, 0, 0, 0, 0), raw(209, 2, 0, 0, 0),
    raw(210, 3, 0, 0, 0), raw(333, 292, 0, 0, 0, 0, 0, 0),
    raw(222, 107, 1, told, made),
    raw(426, 426, 0, 0, 0, 0, 0, 0), raw(427, 427, 0, 0, 0, 0),
    raw(253, 26, 0), raw(301, 263, 0, 0, 0, 0, 0),
)
""",
        "refused\n",
    ),
    "mounts and roots": (
        _CALLS
        + r"""
import os
refused(
    raw(165, 40, 0, 0, 0, 0, 0), raw(166, 39, 0, 0), raw(155, 41, 0, 0), raw(428, 428, -1, 0, 0),
    raw(430, 430, 0, 0), raw(308, 268, 0, 0), raw(272, 97, 0x10000000), lambda: os.chroot('/tmp'),
)
""",
        "refused\n",
    ),
    "settings of the machine": (
        _COUNT
        + r"""
import os, resource, socket, time
refused(
    lambda: time.clock_settime(time.CLOCK_REALTIME, 0),
    lambda: socket.sethostname('mine'),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    lambda: os.sched_setaffinity(0, {0}),
    lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
    lambda: os.setuid(0),
    lambda: os.setgroups([0]),
)
""",
        "refused\n",
    ),
    "the table of another machine": (
        r"""
import ctypes, errno, platform
c = ctypes.CDLL(None, use_errno=True)
if platform.machine() == 'x86_64':
    c.syscall(0x40000000 + 41, 2, 1, 0)
else:
    c.syscall(9999)
print(errno.errorcode[ctypes.get_errno()])
""",
        "ENOSYS\n",
    ),
    "signals to every number": (
        _COUNT
        + r"""
import os, signal
others = [p for p in range(-50, 400) if p != os.getpid()]
refused(*(lambda p=p: os.kill(p, 0) for p in others))
""",
        "refused\n",
    ),
    "signals through descriptors": (
        _COUNT
        + r"""
import fcntl, os, struct
r, w = os.pipe()
refused(
    lambda: fcntl.fcntl(r, 8, 1),
    lambda: fcntl.fcntl(r, 10, 9),
    lambda: fcntl.fcntl(r, 15, struct.pack('ii', 1, 1)),
    lambda: fcntl.ioctl(r, 0x8901, struct.pack('i', 1)),
    lambda: fcntl.ioctl(r, 0x8902, struct.pack('i', 1)),
)
""",
        "refused\n",
    ),
    "files of the machine": (
        _COUNT
        + r"""
import os
paths = ['/etc/shadow', '/etc/hostname', '/proc/1/environ', '/proc/self/mem', '/proc/self/maps',
         '/proc/self/root/etc/passwd', '/dev/mem', '/dev/kmsg', '/dev/vda', '/sys',
         '/run', '/var', '/root/.ssh', '/home', '/boot', '/opt', '/srv']
refused(*(lambda p=p: os.listdir(p) if os.path.isdir(p) else open(p, 'rb') for p in paths))
""",
        "refused\n",
    ),
    "links that lead out": (
        _COUNT
        + r"""
import os
for name, target in (('a', '/etc/passwd'), ('b', '/proc/1/mem'), ('c', '../../../../etc/passwd')):
    os.symlink(target, name)
os.symlink('/', 'root')
refused(
    lambda: open('a'), lambda: open('b'), lambda: open('c'), lambda: open('root/etc/passwd'),
    lambda: os.link(os.__file__, 'd'), lambda: os.chmod(os.__file__, 0o777),
    lambda: os.rename(os.__file__, 'e'), lambda: os.truncate(os.__file__, 0),
)
""",
        "refused\n",
    ),
    "ways up": (
        r"""
import os
os.chdir('..')
for _ in range(50):
    os.chdir('..')
try:
    seen = set(os.listdir('.'))
except OSError:
    seen = set()
print(seen & {'proc', 'sys', 'home', 'var', 'run', 'boot', 'mnt', 'opt'})
""",
        "set()\n",
    ),
    "devices and pipes in the file system": (
        _COUNT
        + r"""
import os, stat
refused(
    lambda: os.mknod('null', stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    lambda: os.mkfifo('fifo'),
    lambda: os.mkdir('/dev/shm/x'),
    lambda: open('/dev/shm/x', 'w'),
    lambda: os.mkdir('/tmp/../x'),
)
""",
        "refused\n",
    ),
    "lock of a file of all": (
        _COUNT
        + r"""
import fcntl, os
refused(lambda: fcntl.flock(open(os.__file__), fcntl.LOCK_EX))
""",
        "refused\n",
    ),
    "record locks on a library file": (
        _COUNT
        + r"""
import fcntl, os, struct
f = open(os.__file__)
lock = struct.pack('hhqqi', fcntl.F_RDLCK, 0, 0, 0, 0)
refused(*(lambda n=n: fcntl.fcntl(f, n, lock)
          for n in (fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, 36, 37, 38)),
        lambda: fcntl.lockf(f, fcntl.LOCK_SH))
""",
        "refused\n",
    ),
    "watches and leases on a library file": (
        _CALLS
        + r"""
import fcntl, os
f = open(os.__file__)
d = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
refused(raw(294, 26, 0), raw(253, 26, 0), raw(300, 262, 0, 0),
        lambda: fcntl.fcntl(d, fcntl.F_NOTIFY, fcntl.DN_ACCESS),
        lambda: fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK))
""",
        "refused\n",
    ),
    "what the page cache holds of a library file": (
        _CALLS
        + r"""
import mmap, os
f = os.open(os.__file__, os.O_RDONLY)
m = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(m))
told = ctypes.create_string_buffer(64)
refused(lambda: os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED), raw(187, 213, f, 0, 4096),
        raw(27, 232, at, 4096, ctypes.addressof(told)),
        lambda: os.preadv(f, [bytearray(16)], 0, os.RWF_NOWAIT),
        raw(451, 451, f, at, ctypes.addressof(told), 0), raw(277, 84, f, 0, 4096, 0))
""",
        "refused\n",
    ),
    "the list of mounts": (
        _CALLS
        + r"""
told, asked = ctypes.create_string_buffer(4096), (ctypes.c_uint64 * 4)(32, 2**64 - 1, 0, 0)
refused(raw(458, 458, ctypes.addressof(asked), ctypes.addressof(told), 64, 0))
""",
        "refused\n",
    ),
    "files that Python reads at its start": (
        _COUNT
        + r"""
import os, sys
folder = os.path.dirname(os.__file__)
names = ['sitecustomize.py', 'usercustomize.py', 'x.pth', '__pycache__/os.pyc', 'os.py']
refused(*(lambda n=n: open(os.path.join(folder, n), 'w') for n in names))
""",
        "refused\n",
    ),
    "sqlite outside": (
        r"""
import sqlite3
own = sqlite3.connect(':memory:')
own.execute('create table t (x)')
try:
    own.execute("attach '/usr/lib/x.db' as other")
    own.execute('create table other.t (x)')
except sqlite3.OperationalError:
    print('refused')
""",
        "refused\n",
    ),
    "maps": (
        _COUNT
        + r"""
import mmap, os
def sparse():
    with open('big', 'wb') as stream:
        stream.truncate(1 << 40)
def whole():
    mmap.mmap(-1, 1 << 40)
def library():
    fd = os.open(os.__file__, os.O_RDONLY)
    mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)[:4] = b'evil'
def zeros():
    fd = os.open('/dev/zero', os.O_RDWR)
    mmap.mmap(fd, 1 << 40)
refused(sparse, whole, library, zeros)
""",
        "refused\n",
    ),
    "environment": (
        r"""
import ctypes, os
c = ctypes.CDLL(None)
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(c, 'environ')
print(dict(os.environ), [environ[0]] if environ else [None])
""",
        "{} [None]\n",
    ),
    "inherited descriptors": (
        r"""
import os
found = []
for fd in range(4096):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
print(found)
""",
        "[0, 1, 2]\n",
    ),
    "limits": (
        r"""
import resource as r
print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_NOFILE), r.getrlimit(r.RLIMIT_FSIZE))
""",
        "(0, 0) (64, 64) (16777216, 16777216)\n",
    ),
    "names of the harness": (
        r"""
import gc, os, sys
named = [m for m in sys.modules if 'ctrl' in m or 'jail' in m]
paths = [p for p in [*sys.path, *sys.orig_argv, *sys.argv] if not p.startswith(os.getcwd())]
print(named, [p for p in paths if 'ctrl' in p or 'jail' in p])
""",
        "[] []\n",
    ),
    "clock of its own": (
        r"""
import time
time.time = time.monotonic = time.perf_counter = lambda: 0.0
time.sleep = lambda s: None
print(time.monotonic())
""",
        "0.0\n",
    ),
    "input beyond its end": (
        r"""
import os, sys
print(repr(sys.stdin.read()), repr(sys.stdin.read()), os.read(0, 10))
sys.stdin.close()
try:
    input()
except (ValueError, EOFError):
    print('ended')
""",
        "'' '' b''\nended\n",
    ),
    "output that is no text": (
        r"""
import sys
sys.stdout.buffer.write(b'\xff\xfe\x00ok\n')
""",
        "\ufffd\ufffd\x00ok\n",
    ),
    "threads without number": (
        r"""
import threading, time
n = 0
try:
    while n < 5000:
        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
        n += 1
except RuntimeError:
    print('refused', flush=True)
import os
os._exit(0)
""",
        "refused\n",
    ),
    "tree of folders without end": (
        r"""
import os
for n in range(1500):
    os.mkdir('d')
    os.chdir('d')
    open('x', 'w').close()
os.mkdir('d', 0)
print('made')
""",
        "made\n",
    ),
    "names that are hard to remove": (
        r"""
import os
for name in (b'\xff\xfe', b'a\nb', b'-rf', b'x' * 255, b' ', '\u202e'.encode()):
    os.mkdir(name, 0o300)
    open(name + b'/f', 'w').close() if len(name) < 250 else None
print('made')
""",
        "made\n",
    ),
}

# Whole programs that end by themselves or are ended: name -> (program, exit status or None).
ENDINGS = {
    "leaves early": ("import os\nprint('secret')\nos._exit(0)", 0),
    "leaves with a lie": ("raise SystemExit('passed')", 1),
    "surrogates on stdout": ("print('\\ud800')", 1),
    "integer of many digits": ("print(10 ** 5000)", 0),
    "recursion": ("def f(): f()\nf()", 1),
    "crash": ("import ctypes; ctypes.string_at(0)", -11),
    "abort": ("import os; os.abort()", -6),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", -9),
    "broken stdout": ("import os; os.close(1); print('x')", 120),
    "NUL in the program": ("print('a')\x00", 1),
    "no program": ("", 0),
    "waits at exit": ("import atexit, time; atexit.register(time.sleep, 99)", None),
    "thread that stays": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        None,
    ),
    "ignores every signal": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        None,
    ),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", None),
    "loop in C": ("sum(range(10 ** 18))", None),
    "memory page by page": ("a = []\nwhile True: a.append(bytearray(1 << 22))", 1),
}
