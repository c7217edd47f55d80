"""Runs a whole program in its jail: an init process (pid 1) that reaps child processes, and the
program itself, which is Python code as ``__main__`` of a fresh interpreter or a command (compiler,
binary, shell).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import io
import operator
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import files, frames, linux
from ctrl_megatron.sandbox.jail.isolation import Confinement

PATH = "/usr/local/bin:/usr/bin:/bin"
"""Search path of commands."""
_MAIN = "main.py"
_BINARY_STACK = 64 << 20
PYTHON_STACK = 120 << 20
"""Bytes of stack for recursion through C functions, such as 25,000 nested calls of ``sorted`` with
a key. Deeper recursion crashes the interpreter. The kernel keeps 128 MiB free for a stack."""
_NOT_EXECUTED = 127
_BYTE_ORDER_MARK = "\ufeff"
_DEEPEST = 1 << 30
"""Recursion limits above it are as good as none, and close to the largest that there is."""
_LOOK_SECONDS = 0.01
"""Shortest interval between two looks at the program's processor time."""
_NOT_FLUSHED = 120
"""The interpreter's exit status if a standard stream could not be flushed at its end."""
_STREAMS = (
    ("stdin", "r", "strict"),
    ("stdout", "w", "strict"),
    ("stderr", "w", "backslashreplace"),
)
_DESCRIPTORS = {
    **{f"/dev/{name}": number for number, (name, *_) in enumerate(_STREAMS)},
    **{
        f"{folder}/{number}": number
        for folder in ("/dev/fd", "/proc/self/fd")
        for number in range(3)
    },
}
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)
_OS_OPEN = os.open
_HARNESS: list[str] = []
_HIDDEN: list[types.ModuleType | None] = []


def run_init(
    confinement: Confinement, spec: int, report: int, stdin: int, stdout: int, stderr: int
) -> None:
    """Be pid 1 of one job: start the program, reap processes, report exit status and files; never
    returns.
    """
    try:
        linux.close_all_but(2, spec, report, stdin, stdout, stderr)
        job = frames.receive_spec(spec)
        directory = confinement.enter_job_directory(job)
        pid = os.fork()
        if pid == 0:
            _become(confinement, directory, job, (stdin, stdout, stderr))
        linux.close_all_but(2, report)
        status = _wait(pid, job["seconds"])
        fetched = {}
        if job["fetch"] and confinement.isolated:
            # Processes that the program started must not change files while they are read.
            _end_others()
            fetched = files.read_files_as_base64(directory, job["fetch"])
        frames.send(report, {"exit": status, "files": fetched})
    finally:
        os._exit(0)


def _become(
    confinement: Confinement, directory: str, job: dict[str, Any], streams: tuple[int, int, int]
) -> None:
    try:
        linux.die_with_parent()
        linux.set_standard_streams(*streams)
        linux.close_all_but(2)
        native = job["native"]
        confinement.confine(
            directory,
            memory_mb=job["memory_mb"],
            cpu_seconds=job["seconds"],
            profile=native["profile"] if native else None,
        )
        os.setsid()
        os.chdir(directory)
        if native:
            _run_command(directory, native["profile"], native["command"])
        _run_python(directory, job["code"], job["prelude"])
    finally:
        os._exit(1)


def _wait(program: int, seconds: float) -> int:
    """Reap processes until the program has ended, and kill it after ``seconds`` of processor time.
    Returns its wait status.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        left = seconds - linux.cpu_seconds(program)
        if left <= 0:
            os.kill(program, signal.SIGKILL)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            return status
        if not ended:
            signal.sigtimedwait([signal.SIGCHLD], max(left, _LOOK_SECONDS))


def _end_others() -> None:
    """Kill all other processes of this pid namespace; the caller is its first process."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _run_command(directory: str, profile: str, command: list[str]) -> NoReturn:
    """Execute a command; a first word without a slash is searched on ``PATH``."""
    # The interpreter ignores both signals, but other programs expect to be ended by them.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if profile == "binary":
        # Compiled programs may need more stack than the usual 8 MiB.
        linux.allow_stack(_BINARY_STACK)
    environment = {"PATH": PATH, "HOME": directory, "TMPDIR": directory, "LC_ALL": "C.UTF-8"}
    try:
        if command[0].startswith("./"):
            os.chmod(command[0], 0o700)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be executed here: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(_NOT_EXECUTED)


def harness_modules() -> list[str]:
    """The imported modules of this package by name, remembered for ``mimic_fresh_interpreter``."""
    _HARNESS[:] = [name for name in sys.modules if name.startswith("ctrl_megatron")]
    return _HARNESS


def mimic_fresh_interpreter(output: type[io.FileIO] = io.FileIO) -> dict[str, Any]:
    """Make this process look like a fresh interpreter. Returns the raw files of class ``output``
    that stdout and stderr write to.

    The program gets new standard streams and sees no module of this package. Its random state is
    new since the fork. Its integers may have any length.
    """
    files = _open_streams(output)
    _forget_harness()
    _count_depth_anew()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    sys.set_int_max_str_digits(0)
    return files


def _open_streams(output: type[io.FileIO]) -> dict[str, Any]:
    """Open text streams on the descriptors 0, 1 and 2, with the names that the interpreter gives
    its own.
    """
    files: dict[str, Any] = {}
    for number, (name, mode, errors) in enumerate(_STREAMS):
        raw: Any = output(number, mode, closefd=False)
        raw.name = f"<{name}>"
        files[name] = raw
        buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        # Never closed: it is used until the program ends.
        stream: Any = io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=name == "stderr")
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if not os.path.exists("/dev/fd/0"):
        io.open = builtins.open = _open
        os.open = _os_open
    return files


def _opening(system: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``open`` so that it knows the names of the streams (``/dev/stdin`` and so on) where
    there is no /proc. The new descriptor shares the file position, as it does for a pipe.
    """

    @functools.wraps(system)
    def opening(file: Any, *arguments: Any, **named: Any) -> Any:
        text = os.fsdecode(file) if isinstance(file, (bytes, os.PathLike)) else file
        number = _DESCRIPTORS.get(text) if isinstance(text, str) else None
        if number is None:
            return system(file, *arguments, **named)
        own = os.dup(number)
        if system is _OS_OPEN:
            return own
        stream = system(own, *arguments, **named)
        buffer = getattr(stream, "buffer", stream)
        getattr(buffer, "raw", buffer).name = text
        return stream

    return opening


_open, _os_open = _opening(open), _opening(os.open)


def _forget_harness() -> None:
    """Remove this package's modules from ``sys.modules``."""
    # The list was made before the fork: reading all modules here would copy memory that is shared
    # with the fork server. The modules are kept, because deleting them would copy as much.
    _HIDDEN.extend(sys.modules.pop(name, None) for name in _HARNESS or harness_modules())


def _count_depth_anew() -> None:
    """Let the recursion limit count from the program's first frame, as far as it can see."""
    get, set_ = sys.getrecursionlimit, sys.setrecursionlimit
    harness, frame = 0, sys._getframe()
    while frame is not None:
        harness, frame = harness + 1, frame.f_back

    @functools.wraps(get)
    def getrecursionlimit() -> int:
        limit = get()
        return limit if limit > _DEEPEST else limit - harness

    @functools.wraps(set_)
    def setrecursionlimit(limit: int, /) -> None:
        number = operator.index(limit)
        set_(number + harness if 0 < number <= _DEEPEST else number)

    sys.getrecursionlimit, sys.setrecursionlimit = getrecursionlimit, setrecursionlimit
    setrecursionlimit(get())


def _run_python(directory: str, code: str, prelude: str) -> NoReturn:
    """Execute ``code`` and exit as Python does. ``prelude`` runs before it in the same module, so
    that line numbers of ``code`` stay.
    """
    path = os.path.join(directory, _MAIN)
    linux.allow_stack(PYTHON_STACK)
    mimic_fresh_interpreter()
    sys.argv, sys.path[:0] = [path], [directory]
    sys.orig_argv = [sys.executable, path]
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __builtins__=builtins,
        __annotations__={},
        __cached__=None,
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = module
    status = _execute(module, path, code, prelude)
    del module
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            finish()
        except BaseException:
            traceback.print_exc()
    flushed = _flush()
    _take_down()
    _flush()
    os._exit(status if flushed else _NOT_FLUSHED)


def _flush() -> bool:
    """Flush the streams, also those that the program put in place of its own. Returns whether
    everything could be written.
    """
    flushed = True
    for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            flushed = False
    return flushed


def _take_down() -> None:
    """Delete the program's objects: files are flushed, and ``__del__`` may print.

    The streams are the interpreter's own again before anything is deleted, because a stream of the
    program may need what is deleted.
    """
    for name, *_ in _STREAMS:
        setattr(sys, name, getattr(sys, f"__{name}__", None))
    for held in gc.get_objects():
        if issubclass(type(held), _WRITERS):
            # The collector may finalise the file before the buffer that writes to it.
            with contextlib.suppress(Exception):
                held.flush()
    sys.modules.pop("__main__", None)
    gc.collect()


def _execute(module: types.ModuleType, path: str, code: str, prelude: str) -> int:
    try:
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as stream:
            stream.write(code)
        if prelude:
            exec(compile(prelude, "prelude.py", "exec", dont_inherit=True), module.__dict__)
        text = code.removeprefix(_BYTE_ORDER_MARK)
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        return _exit_status(stop)
    except BaseException as error:
        # The first frame belongs to this function.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        _flush()
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except SystemExit as stop:
            return _exit_status(stop)
        except BaseException:
            traceback.print_exc()
        return 1
    return 0


def _exit_status(stop: SystemExit) -> int:
    """The status with which the interpreter ends; it prints a code that is no integer."""
    if stop.code is None or isinstance(stop.code, int):
        code = stop.code or 0
        return code & 0xFF if -1 << 63 <= code < 1 << 63 else 0xFF
    print(stop.code, file=sys.stderr)
    return 1
