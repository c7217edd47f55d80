"""A program ends and finds itself as under a fresh CPython, which is the oracle: plain ``python
main.py`` gets the same text and input, and must print the same and exit with the same status.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ctrl_megatron.sandbox.wire import RunCodeResponse

Run = Callable[..., RunCodeResponse]

FAST_STREAMS = """
import os, sys
from io import BytesIO, IOBase
class FastIO(IOBase):
    def __init__(self, file):
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
    def readline(self):
        if not self.buffer.getvalue():
            self.buffer = BytesIO(os.read(self._fd, 1 << 16))
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.readline = lambda: self.buffer.readline().decode("ascii")
"""

ENDS = {
    "wrapped": FAST_STREAMS
    + "sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)\n"
    "print(sum(map(int, sys.stdin.readline().split())))",
    "wrapped, then an error": FAST_STREAMS + "sys.stdout = IOWrapper(sys.stdout)\nprint(5)\n1 / 0",
    "wrapped, then sys.exit": FAST_STREAMS + "sys.stdout = IOWrapper(sys.stdout)\nprint(5)\n"
    "def stop():\n    print(6); sys.exit()\nstop()",
    "wrapped stderr": FAST_STREAMS + "sys.stderr = IOWrapper(sys.stderr)\n"
    "print(5, file=sys.stderr); print(6)",
    "a flush that needs a global": "import sys, os\nclass W:\n    def __init__(s): s.b = []\n"
    "    def write(s, t): s.b.append(t)\n"
    "    def flush(s):\n        os.write(1, ''.join(s.b).encode()); s.b.clear()\n"
    "sys.stdout = W()\nprint(7)",
    "no flush": "import sys\nclass W:\n    def write(s, t): sys.__stdout__.write(t.upper())\n"
    "sys.stdout = W()\nprint('a')",
    "a flush that raises": "import sys\nclass W:\n    def write(s, t): sys.__stdout__.write(t)\n"
    "    def flush(s): raise KeyError\nsys.stdout = W()\nprint('a')",
    "a flush that exits": "import sys\nclass W:\n    def write(s, t): sys.__stdout__.write(t)\n"
    "    def flush(s): sys.exit(0)\nsys.stdout = W()\nprint('a')",
    "bytes at exit": "import atexit, io, sys, os\nout = io.BytesIO()\n"
    "atexit.register(lambda: os.write(1, out.getvalue()))\n"
    "print = lambda *a: out.write(' '.join(map(str, a)).encode() + b'\\n')\nprint(1, 2); print(3)",
    "text at exit": "import atexit, io, sys\nsys.stdout = out = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(out.getvalue()))\nprint('late')",
    "text that nobody writes": "import io, sys\nsys.stdout = io.StringIO()\nprint('lost')",
    "fdopen": "import os, sys\nsys.stdout = os.fdopen(1, 'w', 1 << 16)\nprint('a')",
    "fdopen beside": "import os\nout = os.fdopen(1, 'wb', 1 << 16)\nout.write(b'a\\n')\nprint('b')",
    "open(1)": "out = open(1, 'w', closefd=False)\nprint('a', file=out)\ndef f(): return out",
    "reconfigured": "import sys\nsys.stdout.reconfigure(line_buffering=False, write_through=False,"
    " newline='\\r\\n')\nprint('a')",
    "TextIOWrapper": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\n"
    "print('é')",
    "detached": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'latin-1')\n"
    "print('a')",
    "detached only": "import sys\nout = sys.stdout.detach()\nout.write(b'a\\n')",
    "closed": "import sys\nprint('a')\nsys.stdout.close()",
    "closed descriptor": "import os\nprint('a')\nos.close(1)",
    "closed descriptor, nothing printed": "import os\nos.close(1)",
    "None": "import sys\nprint('a')\nsys.stdout = None\nprint('b')",
    "deleted": "import sys\nprint('a')\ndel sys.stdout",
    "both deleted": "import sys\nprint('a')\ndel sys.stdout, sys.__stdout__",
    "stdin closed": "import sys\nsys.stdin.close()\nprint('a')",
    "exit in the middle": "import sys\nprint('a')\nsys.exit(0)\nprint('b')",
    "exit with a text": "print('a')\nexit('why')",
    "exit in a thread": "import sys, threading\n"
    "t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); print('a')",
    "large status": "import sys\nsys.exit(256 + 7)",
    "negative status": "import sys\nsys.exit(-1)",
    "huge status": "import sys\nsys.exit(1 << 80)",
    "status True": "import sys\nsys.exit(True)",
    "status of a float": "import sys\nsys.exit(0.0)",
    "quit()": "print('a'); quit()",
    "_exit": "import os\nprint('a', flush=True); print('b'); os._exit(0)",
    "threads print": "import threading, time\nlock = threading.Lock()\ndef f(i):\n"
    "    time.sleep(0.02 * i)\n    with lock: print(i)\n"
    "for i in range(3): threading.Thread(target=f, args=(i,)).start()",
    "a daemon prints": "import threading, time\ndef f():\n    while True: time.sleep(1)\n"
    "threading.Thread(target=f, daemon=True).start(); print('a')",
    "atexit fails": "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 'a')",
    "atexit exits": "import atexit, sys\natexit.register(print, 'b')\n"
    "atexit.register(lambda: sys.exit(4))\nprint('a')",
    "atexit after an error": "import atexit\natexit.register(print, 'a')\nraise KeyError",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('caught', a[0].__name__)\n1 / 0",
    "excepthook fails": "import sys\nsys.excepthook = lambda *a: 1 / 0\nprint('a')\nraise KeyError",
    "excepthook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(0)\nprint('a')\n1 / 0",
    "excepthook deleted": "import sys\ndel sys.excepthook\nprint('a')\n1 / 0",
    "__del__": "class A:\n    def __init__(s, n): s.n = n\n"
    "    def __del__(s): print('del', s.n, K)\nK = 5\na, b = A(1), A(2)\nprint('a')",
    "__del__ without a cycle": "class A:\n    __del__ = lambda s, p=print: p('del')\n"
    "a = A()\nprint('a')",
    "a generator's finally": "def g():\n    try: yield 1\n    finally: print('end', K)\n"
    "K = 2\nx = g(); next(x)",
    "an open file": "f = open('/dev/stdout', 'w')\nf.write('a\\n')\ndef g(): return f",
    "an open file of a patched builtin": "import builtins\nf = open('out.txt', 'w')\n"
    "def p(*a): f.write('x')\nbuiltins.print, old = p, print\nprint(1)\nold('a')",
    "weakref.finalize": "import weakref\nclass A: pass\na = A()\n"
    "weakref.finalize(a, print, 'gone')\nprint('a')",
    "an exception group": "raise ExceptionGroup('g', [ValueError(1)])",
    "KeyboardInterrupt caught": "try: raise KeyboardInterrupt\n"
    "except KeyboardInterrupt: print('a')",
    "SystemExit caught": "import sys\ntry: sys.exit(1)\nexcept SystemExit as e: print(e.code)",
    "excepthook fails, then atexit": "import atexit, sys\natexit.register(print, 'end')\n"
    "sys.excepthook = lambda *a: {}[0]\n1 / 0",
    "faults of recursion": "def f(): f()\ntry: f()\nexcept RecursionError: print('deep')",
}
"""Programs by the way in which they end."""


def compare(run_code: Run, folder: Path, code: str) -> None:
    """Run ``code`` under plain CPython and in the sandbox, with the input ``3 4``."""
    path = folder / "main.py"
    path.write_bytes(code.encode())
    own = subprocess.run(
        [sys.executable, path.name],
        input=b"3 4\n",
        capture_output=True,
        check=False,
        cwd=folder,
        env={"LC_ALL": "C.UTF-8"},
        timeout=30,
    )
    response = run_code(code, stdin="3 4\n")
    assert response.run_result is not None
    got = response.run_result
    printed = (own.returncode, own.stdout.decode())
    assert (got.return_code, got.stdout) == printed, (got.stderr, own.stderr)


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_under_cpython(run_code: Run, tmp_path: Path, name: str) -> None:
    compare(run_code, tmp_path, ENDS[name])
