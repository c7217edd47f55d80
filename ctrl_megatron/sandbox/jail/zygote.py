"""The start of a worker process: it isolates itself, imports the modules that programs import, then
divides into a supervisor, which reads jobs, and a fork server, which never sees one.

It is started as ``python -s -P -S -B -c "...; main(fd)"`` with a fixed hash seed; the descriptor is
a socket to the service.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import site
import socket
import sys
from dataclasses import asdict
from typing import Any

from ctrl_megatron.problems.long_integers import INTEGER_DIGITS
from ctrl_megatron.sandbox.jail import frames, isolation, linux, namespaces, program
from ctrl_megatron.sandbox.jail.fork_server import ForkServer, serve_forks
from ctrl_megatron.sandbox.jail.isolation import Confinement
from ctrl_megatron.sandbox.jail.supervisor import serve_jobs
from ctrl_megatron.sandbox.limits import SandboxLimits

_REFUSED = 3
_SETUP_BYTES = 1 << 20
_PROGRAMS_IMPORT = """
abc array bisect cmath collections collections.abc contextlib copy dataclasses datetime decimal enum
fractions functools heapq io itertools json math numbers operator os queue random re statistics
string struct sys textwrap threading time traceback types typing warnings
"""
"""Modules that solutions of programming problems import. The list is short, because every page of
the fork server's memory is added to the page tables of every job."""


def main(fd: int) -> None:
    """Serve jobs on the socket ``fd`` until the service closes it or dies."""
    setup = frames.receive(fd, limit=_SETUP_BYTES)
    sys.set_int_max_str_digits(INTEGER_DIGITS)
    linux.die_with_parent(setup["service_pid"])
    try:
        # If memory runs out, the kernel ends programs before the service and the trainer. Children
        # inherit the value.
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError as error:
        sys.stderr.write(f"sandbox worker: oom_score_adj stays as it is: {error}\n")
    try:
        for name in (*_PROGRAMS_IMPORT.split(), *setup["preload"]):
            importlib.import_module(name)
        # ``-S`` keeps site packages out, but programs expect the names that ``site`` adds.
        site.setquit()
        site.sethelper()
        site.setcopyright()
        confinement, process = _isolate(setup)
    except (isolation.IsolationRefused, OSError, ImportError) as error:
        # The service may have ended: it stops at the first refusal of any worker.
        with contextlib.suppress(frames.PeerGone):
            frames.send(fd, {"kind": "refused", "reason": str(error)})
        os._exit(_REFUSED)
    # A change of the user id resets the parent-death signal.
    linux.die_with_parent()
    _prepare()
    _divide(fd, confinement, process)


def _isolate(setup: dict[str, Any]) -> tuple[Confinement, int | None]:
    # Of the service's umask, programs would see files that they cannot read.
    os.umask(0o022)
    scratch = setup["scratch"]
    if setup["user"] is not None:
        os.chown(scratch, setup["user"], setup["user"])
    confinement, process = isolation.isolate_worker(
        setup["level"],
        limits=SandboxLimits(**setup["limits"]),
        scratch=scratch,
        staging=setup["staging"],
        user=setup["user"],
        without=tuple(setup["without"]),
    )
    os.environ.clear()
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    os.chdir("/" if confinement.isolated else scratch)
    isolation.check_canaries(confinement, namespaces.TMP if confinement.isolated else scratch)
    return confinement, process


def _prepare() -> None:
    linux.drop_bounding_set()
    # Inherited by every job: no process of the same user may trace it or read its memory.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    os.close(null)
    program.harness_modules()
    gc.collect()
    gc.freeze()


def _divide(fd: int, confinement: Confinement, process: int | None) -> None:
    """Fork the fork server before this process sees a job, and become the supervisor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid, own = (
        (os.fork(), None) if process is None else namespaces.fork_pid_namespace_owner(process)
    )
    if pid == 0:
        ours.close()
        os.close(fd)
        serve_forks(theirs, confinement, own)
    theirs.close()
    linux.drop_capabilities()
    reached = {"level": confinement.report.level, **asdict(confinement.report)}
    frames.send(fd, {"kind": "ready", "isolation": reached})
    serve_jobs(fd, ForkServer(ours, pid), confinement)
