"""A worker: isolates itself once, imports what programs import, then forks a supervisor per job.

It never reads a job: the supervisor does, after it has forked the process from which candidates
come. Started as ``python -I -S -B -c "...; main(fd)"``; the descriptor is a socket to the service.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import site
import socket
import sys
from typing import Any

from ctrl_megatron.sandbox import isolation
from ctrl_megatron.sandbox.jail import frames, linux, namespaces, program, supervisor
from ctrl_megatron.sandbox.limits import SandboxLimits

_REFUSED, _SUPERVISOR_LOST = 3, 4
_SETUP_BYTES = 1 << 20
_PROGRAMS_IMPORT = """
abc array ast asyncio atexit bisect calendar cmath codecs collections collections.abc contextlib
copy csv dataclasses datetime decimal enum fractions functools gc hashlib heapq inspect io itertools
json linecache locale math numbers operator os pprint queue random re secrets shutil statistics
string struct subprocess sys tempfile textwrap threading time traceback types typing unicodedata
unittest urllib.parse uuid warnings weakref zlib zoneinfo encodings.idna encodings.latin_1
encodings.ascii encodings.utf_16
"""


def main(fd: int) -> None:
    """Serve jobs on the socket ``fd`` until the service closes it or dies."""
    setup = frames.receive(fd, limit=_SETUP_BYTES)
    linux.die_with_parent(setup["service_pid"])
    _first_when_memory_ends()
    try:
        _preload(setup["preload"])
        worker = _isolate(setup)
    except (isolation.IsolationRefused, OSError, ImportError) as error:
        frames.send(fd, {"kind": "refused", "reason": str(error)})
        os._exit(_REFUSED)
    # Changing the user id forgets the parent-death signal.
    linux.die_with_parent()
    _ready(fd, worker)
    _serve(fd, worker)


def _preload(further: list[str]) -> None:
    for name in (*_PROGRAMS_IMPORT.split(), *further):
        importlib.import_module(name)
    # ``-S`` keeps site packages out; programs still expect the names that site adds.
    site.setquit()
    site.sethelper()


def _first_when_memory_ends() -> None:
    """Let the kernel end programs before the service and the trainer; children inherit it."""
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError as error:
        sys.stderr.write(f"sandbox worker: oom_score_adj stays as it is: {error}\n")


def _isolate(setup: dict[str, Any]) -> supervisor.Worker:
    scratch = setup["scratch"]
    if setup["user"] is not None:
        os.chown(scratch, setup["user"], setup["user"])
    confinement = isolation.establish(
        setup["level"],
        staging=setup["staging"],
        user=setup["user"],
        without=tuple(setup["without"]),
    )
    os.environ.clear()
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    limits = SandboxLimits(**setup["limits"])
    worker = supervisor.Worker(confinement=confinement, limits=limits, scratch=scratch)
    directory = namespaces.TMP if worker.isolated else scratch
    os.chdir("/" if worker.isolated else scratch)
    isolation.check_canaries(confinement, directory)
    return worker


def _ready(fd: int, worker: supervisor.Worker) -> None:
    linux.drop_bounding_set()
    # Inherited by every job: no process of the same user may trace us or open our memory.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    os.close(null)
    program.harness_modules()
    gc.collect()
    gc.freeze()
    frames.send(fd, {"kind": "ready", "isolation": worker.confinement.reached.as_dict()})


def _serve(fd: int, worker: supervisor.Worker) -> None:
    control = socket.socket(fileno=os.dup(fd))
    while True:
        select.select([fd], [], [])
        if not control.recv(1, socket.MSG_PEEK):
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            supervisor.run(fd, worker)
        if os.waitpid(pid, 0)[1] != 0:
            # What it left on the wire is unknown; the service starts a fresh worker and repeats the
            # job.
            os._exit(_SUPERVISOR_LOST)
