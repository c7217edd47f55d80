"""A program ends and finds itself as under a fresh CPython, which is the oracle: plain ``python
main.py`` gets the same text and input, and must print the same and exit with the same status.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.sandbox import SandboxClient
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
    + (
        "sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)\n"
        "print(sum(map(int, sys.stdin.readline().split())))"
    ),
    "wrapped, then an error": FAST_STREAMS + "sys.stdout = IOWrapper(sys.stdout)\nprint(5)\n1 / 0",
    "wrapped, then sys.exit": FAST_STREAMS
    + (
        "sys.stdout = IOWrapper(sys.stdout)\nprint(5)\ndef stop():\n"
        "    print(6); sys.exit()\nstop()"
    ),
    "wrapped stderr": FAST_STREAMS
    + "sys.stderr = IOWrapper(sys.stderr)\nprint(5, file=sys.stderr); print(6)",
    "a flush that needs a global": (
        "import sys, os\nclass W:\n    def __init__(s): s.b = []\n"
        "    def write(s, t): s.b.append(t)\n    def flush(s):\n"
        "        os.write(1, ''.join(s.b).encode()); s.b.clear()\nsys.stdout = W()\n"
        "print(7)"
    ),
    "no flush": (
        "import sys\nclass W:\n    def write(s, t): sys.__stdout__.write(t.upper())\n"
        "sys.stdout = W()\nprint('a')"
    ),
    "a flush that raises": (
        "import sys\nclass W:\n    def write(s, t): sys.__stdout__.write(t)\n"
        "    def flush(s): raise KeyError\nsys.stdout = W()\nprint('a')"
    ),
    "a flush that exits": (
        "import sys\nclass W:\n    def write(s, t): sys.__stdout__.write(t)\n"
        "    def flush(s): sys.exit(0)\nsys.stdout = W()\nprint('a')"
    ),
    "bytes at exit": (
        "import atexit, io, sys, os\nout = io.BytesIO()\n"
        "atexit.register(lambda: os.write(1, out.getvalue()))\n"
        "print = lambda *a: out.write(' '.join(map(str, a)).encode() + b'\\n')\n"
        "print(1, 2); print(3)"
    ),
    "text at exit": (
        "import atexit, io, sys\nsys.stdout = out = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(out.getvalue()))\nprint('late')"
    ),
    "text that nobody writes": "import io, sys\nsys.stdout = io.StringIO()\nprint('lost')",
    "fdopen": "import os, sys\nsys.stdout = os.fdopen(1, 'w', 1 << 16)\nprint('a')",
    "fdopen beside": "import os\nout = os.fdopen(1, 'wb', 1 << 16)\nout.write(b'a\\n')\nprint('b')",
    "open(1)": "out = open(1, 'w', closefd=False)\nprint('a', file=out)\ndef f(): return out",
    "reconfigured": (
        "import sys\n"
        "sys.stdout.reconfigure(line_buffering=False, write_through=False, "
        "newline='\\r\\n')\nprint('a')"
    ),
    "TextIOWrapper": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('\u00e9')"
    ),
    "detached": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'latin-1')\nprint('a')"
    ),
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
    "exit in a thread": (
        "import sys, threading\n"
        "t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); print('a')"
    ),
    "large status": "import sys\nsys.exit(256 + 7)",
    "negative status": "import sys\nsys.exit(-1)",
    "huge status": "import sys\nsys.exit(1 << 80)",
    "status True": "import sys\nsys.exit(True)",
    "status of a float": "import sys\nsys.exit(0.0)",
    "quit()": "print('a'); quit()",
    "_exit": "import os\nprint('a', flush=True); print('b'); os._exit(0)",
    "threads print": (
        "import threading, time\nlock = threading.Lock()\ndef f(i):\n"
        "    time.sleep(0.02 * i)\n    with lock: print(i)\n"
        "for i in range(3): threading.Thread(target=f, args=(i,)).start()"
    ),
    "a daemon prints": (
        "import threading, time\ndef f():\n    while True: time.sleep(1)\n"
        "threading.Thread(target=f, daemon=True).start(); print('a')"
    ),
    "atexit fails": "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 'a')",
    "atexit exits": (
        "import atexit, sys\natexit.register(print, 'b')\n"
        "atexit.register(lambda: sys.exit(4))\nprint('a')"
    ),
    "atexit after an error": "import atexit\natexit.register(print, 'a')\nraise KeyError",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('caught', a[0].__name__)\n1 / 0",
    "excepthook fails": "import sys\nsys.excepthook = lambda *a: 1 / 0\nprint('a')\nraise KeyError",
    "excepthook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(0)\nprint('a')\n1 / 0",
    "excepthook deleted": "import sys\ndel sys.excepthook\nprint('a')\n1 / 0",
    "__del__": (
        "class A:\n    def __init__(s, n): s.n = n\n"
        "    def __del__(s): print('del', s.n, K)\nK = 5\na, b = A(1), A(2)\nprint('a')"
    ),
    "__del__ without a cycle": (
        "class A:\n    __del__ = lambda s, p=print: p('del')\na = A()\nprint('a')"
    ),
    "a generator's finally": (
        "def g():\n    try: yield 1\n    finally: print('end', K)\nK = 2\nx = g(); next(x)"
    ),
    "an open file": "f = open('/dev/stdout', 'w')\nf.write('a\\n')\ndef g(): return f",
    "an open file of a patched builtin": (
        "import builtins\nf = open('out.txt', 'w')\ndef p(*a): f.write('x')\n"
        "builtins.print, old = p, print\nprint(1)\nold('a')"
    ),
    "weakref.finalize": (
        "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'gone')\nprint('a')"
    ),
    "an exception group": "raise ExceptionGroup('g', [ValueError(1)])",
    "KeyboardInterrupt caught": (
        "try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: print('a')"
    ),
    "SystemExit caught": "import sys\ntry: sys.exit(1)\nexcept SystemExit as e: print(e.code)",
    "excepthook fails, then atexit": (
        "import atexit, sys\natexit.register(print, 'end')\n"
        "sys.excepthook = lambda *a: {}[0]\n1 / 0"
    ),
    "faults of recursion": "def f(): f()\ntry: f()\nexcept RecursionError: print('deep')",
}
"""Programs by the way in which they end."""


def compare(run_code: Run, folder: Path, code: str) -> None:
    """Run ``code`` under plain CPython and in the sandbox, with the input ``3 4``."""
    path = folder / "main.py"
    path.write_bytes(code.encode())
    own = subprocess.run(
        [sys.executable, str(path)],
        input=b"3 4\n",
        capture_output=True,
        check=False,
        cwd=folder,
        env={},
        timeout=30,
        # A shell starts its background jobs with this signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    response = run_code(code, stdin="3 4\n")
    assert response.run_result is not None
    got = response.run_result
    printed = (own.returncode, own.stdout.decode())
    assert (got.return_code, got.stdout) == printed, (got.stderr, own.stderr)


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_under_cpython(run_code: Run, tmp_path: Path, name: str) -> None:
    compare(run_code, tmp_path, ENDS[name])


FACTS = {
    "main": (
        "import sys\nprint(sorted(globals()), __name__, __doc__, __package__, __spec__)\n"
        "print(type(__loader__).__name__, type(__builtins__).__name__, "
        "__annotations__, __cached__)"
    ),
    "main is a module": (
        "import sys, __main__\n"
        "print(__main__ is sys.modules['__main__'], vars(__main__) is "
        "globals() is locals(), __main__.__file__ == __file__ == sys.argv[0])"
    ),
    "names of files": (
        "import os, sys\n"
        "print(os.path.basename(__file__), len(sys.argv), "
        "os.path.basename(sys.argv[0]), sys.path[0] == "
        "os.path.dirname(os.path.abspath(__file__)), os.getcwd() == sys.path[0])"
    ),
    "annotations": "x: int = 3\nclass A:\n    y: 'B'\nprint(__annotations__, A.__annotations__)",
    "doc": "'''About.'''\nprint(__doc__)",
    "future": (
        "'''d'''\nfrom __future__ import annotations\ndef f(x: Nowhere): pass\n"
        "print(f.__annotations__)"
    ),
    "no future": "def f(x: Nowhere): pass",
    "late future": "x = 1\nfrom __future__ import annotations",
    "limits": (
        "import sys\n"
        "print(sys.getrecursionlimit(), sys.getswitchinterval(), "
        "sys.flags.optimize, sys.flags.utf8_mode, sys.flags.dev_mode, "
        "sys.warnoptions, sys.byteorder, sys.maxsize)"
    ),
    "depth": (
        "import sys\ndef f(n):\n    try: return f(n + 1)\n"
        "    except RecursionError: return n\nprint(f(0))"
    ),
    "depth after a change": (
        "import sys\nsys.setrecursionlimit(300)\nprint(sys.getrecursionlimit())\n"
        "def f(n):\n    try: return f(n + 1)\n    except RecursionError: return n\n"
        "print(f(0))"
    ),
    "wrong limits": (
        "import sys\nfor n in (0, -3, 1.5, 'x', 1 << 40):\n"
        "    try: sys.setrecursionlimit(n)\n"
        "    except Exception as e: print(type(e).__name__, e)"
    ),
    "the largest limit": (
        "import sys\nsys.setrecursionlimit(2**31 - 1)\nprint(sys.getrecursionlimit())\n"
        "sys.setrecursionlimit(10**6)\nprint(sys.getrecursionlimit())"
    ),
    "depth of a generator": (
        "def g(n):\n    if n: yield from g(n - 1)\n    yield n\nprint(sum(g(950)))"
    ),
    "traceback": (
        "import sys, traceback\ndef f(): 1 / 0\ntry: f()\nexcept ZeroDivisionError:\n"
        "    print(traceback.format_exc().replace(__file__, 'F'))"
    ),
    "source": (
        "import inspect\ndef f():\n    return '\u00e9' # \u00e9\nclass A:\n    x = 1\n"
        "print(inspect.getsource(f), inspect.getsource(A), inspect.getmodule(f).__name__)"
    ),
    "streams": (
        "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
        "    print(s.encoding, s.line_buffering, s.write_through, s.isatty(), "
        "s.newlines, s.mode, s.name, s.closed, s.seekable() if s is not "
        "sys.stdin else '', type(s).__name__, s is s.buffer)"
    ),
    "encodings": (
        "import locale, sys, os\n"
        "print(sys.getfilesystemencoding(), sys.getdefaultencoding(), "
        "locale.getpreferredencoding(False), open(__file__).encoding)"
    ),
    "pickle": (
        "import pickle, copy\nclass A:\n    def __init__(s): s.x = 1\n    class B: pass\n"
        "def f(): return 1\n"
        "print(pickle.loads(pickle.dumps(A())).x, "
        "pickle.loads(pickle.dumps(f))(), "
        "type(pickle.loads(pickle.dumps(A.B()))).__qualname__, A.__module__)"
    ),
    "dataclasses": (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
        "from typing import ClassVar, get_type_hints\n@dataclass(order=True)\nclass P:\n"
        "    x: int\n    ys: list[P] = field(default_factory=list)\n"
        "    k: ClassVar[int] = 3\nprint(P(1) < P(2), P(1), get_type_hints(P))"
    ),
    "enum and namedtuple": (
        "import enum\nfrom collections import namedtuple\nclass C(enum.Enum):\n    A = 1\n"
        "P = namedtuple('P', 'x y')\nprint(C.A, repr(C.A), P(1, 2), P.__module__)"
    ),
    "threads": (
        "import threading\nt = threading.main_thread()\n"
        "print(t.name, t is threading.current_thread(), "
        "threading.active_count(), t.ident == threading.get_ident(), "
        "t.native_id == threading.get_native_id(), threading.stack_size())"
    ),
    "signals": (
        "import signal\n"
        "for n in ('SIGINT', 'SIGPIPE', 'SIGALRM', 'SIGTERM', 'SIGCHLD', 'SIGXFSZ'):\n"
        "    h = signal.getsignal(getattr(signal, n)); print(n, getattr(h, "
        "'__name__', h))\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), "
        "signal.getitimer(signal.ITIMER_REAL))"
    ),
    "an alarm": (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: print('ring'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(0.2)"
    ),
    "collector": (
        "import gc\n"
        "print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.garbage, "
        "gc.callbacks)"
    ),
    "names of site": "print(exit, quit, copyright, credits, license, type(help).__name__)",
    "builtins": "import builtins\nprint([n for n in dir(builtins) if n != '_'])",
    "hooks": (
        "import sys, threading\n"
        "print(sys.excepthook is sys.__excepthook__, sys.displayhook is "
        "sys.__displayhook__, sys.gettrace(), sys.getprofile(), "
        "threading.gettrace(), sys.unraisablehook is sys.__unraisablehook__, "
        "sys.breakpointhook is sys.__breakpointhook__)"
    ),
    "no ps1": (
        "import sys\nprint(hasattr(sys, 'ps1'), hasattr(sys, 'last_value'), sys.flags.interactive)"
    ),
    "a module of its own": (
        "open('other.py', 'w').write('x = 5')\nimport other\nimport importlib, runpy\n"
        "print(other.x, runpy.run_path('other.py')['x'], other.__name__)"
    ),
    "import of main": (
        "import importlib, sys\nprint('once')\nif __name__ == '__main__':\n"
        "    import main\n    print(main is sys.modules['__main__'])"
    ),
    "warnings": (
        "import warnings, sys\nprint(len(warnings.filters) > 0)\n"
        "with warnings.catch_warnings(record=True) as w:\n"
        "    warnings.simplefilter('always')\n    warnings.warn('x', DeprecationWarning)\n"
        "print(len(w), w[0].category.__name__)"
    ),
    "decimal": "import decimal\nprint(decimal.getcontext().prec, decimal.getcontext().Emax)",
    "hash and intern": "import sys\nprint(hash(1), hash('') , sys.intern('a') is 'a')",
    "exec and eval": (
        "x = 1\nexec('y = x + 1')\nprint(y, eval('x + y'), sorted(set(locals()) ^ set(globals())))"
    ),
    "stop of a generator": (
        "def g():\n    yield 1\n    return 2\nit = g(); next(it)\ntry: next(it)\n"
        "except StopIteration as e: print(e.value)"
    ),
    "multiprocessing": "import os\ntry: print(os.cpu_count() > 0)\nexcept OSError as e: print(e)",
    "getpass": "import os, sys\nprint(os.environ.get('NOTHING'), os.sep, os.name, sys.platform)",
    "contextvars": "import contextvars\nprint(len(contextvars.copy_context()))",
    "asyncio": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n"
        "    return asyncio.current_task() is not None\nprint(asyncio.run(f()))"
    ),
    "random of a seed": (
        "import random\nrandom.seed(3)\nprint(random.random(), random.sample(range(9), 3))"
    ),
    "input with a prompt": (
        "a = input('? ')\nprint(repr(a))\ntry: input()\nexcept EOFError as e: print(e)"
    ),
    "readlines": "import sys\nprint(sys.stdin.readlines(), sys.stdin.read())",
    "iterated input": (
        "import sys\nfor line in sys.stdin: print(repr(line))\nprint(list(open(0, closefd=False)))"
    ),
    "long integers": "import sys\nprint(len(str(10 ** 4000)), int('1' * 4000) % 97)",
}
"""Programs that print what they find."""
TEXTS = {
    "a byte order mark": "\ufeffprint('a')",
    "a byte order mark and a future": "\ufefffrom __future__ import annotations\nprint('\u00e9')",
    "a mark inside": "print('\ufeff' == chr(0xfeff))",
    "two marks": "\ufeff\ufeffprint(1)",
    "CRLF": "x = '''a\r\nb'''\r\nprint(repr(x))\r\nif x:\r\n\tprint(1)\r\n",
    "CR": "print(1)\rprint(2)\r",
    "tabs": "if 1:\n\tif 2:\n\t\tprint(3)\n",
    "tabs and spaces": "if 1:\n\tprint(1)\n        print(2)\n",
    "form feed": "\fprint(1)\n\f\nprint(2)",
    "null": "print(1)\n\u0000print(2)",
    "null in a text": "print('a\u0000b')",
    "no line end": "if 1:\n    print(1)",
    "a comment last": "print(1)\n    # x",
    "nothing": "",
    "only a comment": "# x",
    "utf-8 declared": "# -*- coding: utf-8 -*-\nprint('\u00e9')",
    "continuation": "x = 1 + \\\n  2\nprint(x)",
    "interpreter line": "#!/usr/bin/env python3\nprint(1)",
    "surrogate pair": "print('\U0001f600', len('\U0001f600'))",
    "identifier forms": "\ufb01 = 1\nprint(fi)",
    "no-break space": "x\u00a0= 1",
    "walrus and match": "match [n := 2]:\n    case [x]: print(x, n)",
    "return outside": "return 1",
    "await outside": "await x",
    "print statement": "print 1",
    "deep": (
        "x = "
        "((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((1))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))\n"
        "print(x)"
    ),
    "too deep": (
        "x = "
        "((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((1))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))))\n"
        "print(x)"
    ),
}
"""Programs by how their text is written."""


@pytest.mark.parametrize("name", [*FACTS, *TEXTS])
def test_a_program_finds_what_it_finds_under_cpython(
    run_code: Run, tmp_path: Path, name: str
) -> None:
    compare(run_code, tmp_path, {**FACTS, **TEXTS}[name])


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("before", ["", "<think>\nSo.\n</think>\n", "Here:\n"])
def test_a_byte_order_mark_before_an_answer(
    client: SandboxClient, on_loop: BackgroundLoop, before: str, fenced: bool
) -> None:
    for marked in ("\ufeffdef f(x):\n    return x", "\ufeff\n\ndef f(x):\n    return x"):
        data = {"test_list": ["assert f(3) == 3"], "entry_point": "f"}
        text = (
            f"{before}```python\n{marked}\n```"
            if fenced
            else before.removeprefix("Here:\n") + marked
        )
        request = submission(text, fenced=False, dataset_type="MBPPDataset", provided_data=data)
        assert on_loop(client.submit(request)).accepted
        assert extract_code(text).strip() == marked[1:].strip()
