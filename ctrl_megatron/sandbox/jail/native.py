"""Programs that are not Python, in the jail of a job: a compiler, its binaries, a shell.

Three profiles. ``binary`` may execute one program and start threads, like a Python program, and
sees no tools. ``compiler`` and ``shell`` may also start processes, which only a pid namespace
bounds: where there is none but Landlock holds, they are refused by the service.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Literal, NoReturn

Profile = Literal["binary", "compiler", "shell"]
PATH = "/usr/local/bin:/usr/bin:/bin"
_TOOLS = ("/usr/bin", "/bin", "/usr/include", "/usr/libexec", "/etc/alternatives")
_LOCAL = ("/usr/local/bin", "/usr/local/include", "/usr/local/lib", "/usr/local/libexec")
_STACK_BYTES = 64 << 20
_NOT_EXECUTED = 127


def starts_processes(profile: str) -> bool:
    """Whether a program of this profile may fork."""
    return profile != "binary"


def tool_paths() -> tuple[str, ...]:
    """Directories with compilers and shells, of those that exist; ``/usr/local`` only where the
    compiler lives there.
    """
    local = _LOCAL if os.access("/usr/local/bin/g++", os.X_OK) else ()
    return tuple(path for path in (*_TOOLS, *local) if os.path.isdir(path))


def run(directory: str, profile: str, command: list[str]) -> NoReturn:
    """Become ``command`` in ``directory`` with standard streams as they are; never returns.

    A first word without a slash is looked up on ``PATH``; one in ``directory`` is made executable.
    """
    os.setsid()
    os.chdir(directory)
    # The interpreter ignores both; a program expects to be ended by them.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if profile == "binary":
        _deep_stack()
    environment = {"PATH": PATH, "HOME": directory, "TMPDIR": directory, "LC_ALL": "C.UTF-8"}
    try:
        if command[0].startswith("./"):
            os.chmod(command[0], 0o700)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be executed here: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(_NOT_EXECUTED)


def _deep_stack() -> None:
    """Compiled programs may recurse deeper than the usual 8 MiB allow."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
