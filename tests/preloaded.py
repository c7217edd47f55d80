"""Python programs started as forks of a process that has imported what they need.

A training run starts a launcher, ranks and an engine, and each imports torch, most of them Megatron
or transformers: that is most of what a run of a few steps costs. Here ``subprocess.Popen`` hands
such a command to a process that was forked beforehand, while its parent had no thread; everything
else, from the descriptors and the environment to the exit code, is as if Python had been started.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from forked_ranks import fork_context

REPOSITORY = Path(__file__).parents[1]
_PROGRAMS = {
    "tools/train_rl.py": "rank",
    "ctrl_megatron.commands.train_rl": "rank",
    "ctrl_megatron.commands.train_sft": "rank",
    "ctrl_megatron.rollout.server": "engine",
}
_ABOVE_ALL = 512
"""No process here has so many descriptors open."""
_spares: list[tuple[int, socket.socket]] = []


def reserve(count: int, *below: int) -> None:
    """Fork ``count`` processes that wait for a command; each reserves ``below`` before it begins.

    Call it before this process starts a thread. Commands of ``_PROGRAMS`` go to them from now on,
    in processes that ``subprocess`` and torch's launcher start; further ones start as ever. Spares
    end with this process.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = subprocess_handler.Popen = Preloaded  # type: ignore[misc]
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            while _spares:
                _spares.pop()[1].close()
            wait_for_command(theirs, below)
        theirs.close()
        _spares.append((pid, ours))


def _living_spare() -> tuple[int, socket.socket] | None:
    """The next spare that nothing has killed meanwhile, as a drill of kills may."""
    while _spares:
        pid, commands = _spares.pop(0)
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            return pid, commands
        commands.close()
    return None


class Preloaded(subprocess.Popen):
    """A ``Popen`` whose process has been forked already, as long as there are spares."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: tuple[int, ...],
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        *pipes_and_rest: Any,
    ) -> None:
        stdin, _, _, stdout, _, stderr, *_ = pipes_and_rest
        foreseen = set(_PROGRAMS) & set(args) and not {"vllm", "sglang"} & set(args)
        spare = None if shell or not foreseen else _living_spare()
        if spare is None:
            super()._execute_child(  # type: ignore[misc]
                *(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo),
                *(creationflags, shell, *pipes_and_rest),
            )
            return
        self.pid, commands = spare
        self._child_created = True
        streams = [own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        told = {"args": args[1:], "env": dict(env or os.environ), "cwd": str(cwd or os.getcwd())}
        with commands:
            socket.send_fds(commands, [b"."], [*streams, *pass_fds])
            commands.sendall(json.dumps({**told, "pass_fds": list(pass_fds)}).encode())
        self._close_pipe_fds(*pipes_and_rest[:6])  # type: ignore[attr-defined]


class ForkedProgram:
    """``python ARGS`` in the repository, as a fork of the tests' fork server."""

    def __init__(
        self,
        args: list[str],
        log: Path,
        *,
        below: tuple[int, ...],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        given = (args, str(log), below, dict(environ or {}))
        self._process = fork_context().Process(target=_main, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As in ``subprocess``."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As in ``subprocess``."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """As in ``subprocess``."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._process.exitcode


def _main(args: list[str], log: str, below: tuple[int, ...], environ: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(environ)
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT)
    for fd, wanted in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, wanted)
    os.chdir(REPOSITORY)
    raise SystemExit(run_program(args, below))


def wait_for_command(parent: socket.socket, below: tuple[int, ...]) -> None:
    """The life of a spare: ``parent`` sends descriptors and a command; does not return."""
    # A drill that kills ranks and engines by their names passes it over.
    Path("/proc/self/comm").write_text("spare")
    # Until then it is in the group of its parent, which launchers signal as a whole.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, descriptors, _, _ = socket.recv_fds(parent, 1, 32)
    if not descriptors:
        os._exit(0)
    signal.signal(signal.SIGTERM, before)
    with parent, parent.makefile("rb") as file:
        told = json.load(file)
    if "group" in told:
        os.setpgid(0, told["group"])
        told["env"]["SCRIPT_GROUP"] = str(told["group"])
    else:
        os.setsid()
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE_ALL) for fd in descriptors]
    os.closerange(3, _ABOVE_ALL)
    for fd, wanted in zip(above, [0, 1, 2, *told["pass_fds"]], strict=True):
        os.dup2(fd, wanted)
        os.close(fd)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    code = 1
    try:
        code = run_program(told["args"], below)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_program(args: list[str], below: tuple[int, ...] = ()) -> int:
    """Run ``[-u] FILE ...`` or ``[-u] -m MODULE ...`` here; its exit code."""
    args = [arg for arg in args if arg != "-u"]
    name = args[args[0] == "-m"]
    if name in _PROGRAMS:
        # What process lists show; a fork keeps its parent's command line.
        title = f"{_PROGRAMS[name]} {os.environ.get('RANK', '')}".strip()
        Path("/proc/self/comm").write_text(title)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    program, *moment = os.environ.get("KILLED_AT", "?").split()
    if program in name:
        _at(*moment, act=_die)
    if (place := os.environ.get("STOPPED_AT")) and os.environ.get("RANK") == "0":
        _at(*place.split(), act=_ask_to_stop)
    if below and os.environ.get("LOCAL_RANK", "0") == "0":
        # Engines are started by the first rank of a host.
        reserve(*below)
    try:
        if args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv = args
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _die() -> None:
    """Kill the script and this process's group."""
    if (script := int(os.environ["SCRIPT_GROUP"])) != os.getpgrp():
        os.killpg(script, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)


def _ask_to_stop() -> None:
    """Send SIGTERM to this rank's launcher, and give it time to pass the signal on."""
    print(f"stop asked at {time.time():.2f}", flush=True)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.3)


def _at(place: str, nth: str, *, act: Callable[[], None]) -> None:
    """Let the ``nth`` call of ``module:name`` begin with ``act``."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, import_module(module))
    function, calls = getattr(owner, name), count(1)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == int(nth):
            act()
        return function(*arguments, **options)

    setattr(owner, name, called)


if __name__ == "__main__":
    # ``python preloaded.py RANKS ENGINES ARGS`` is ``python ARGS`` with so many spares.
    sys.path.insert(0, str(REPOSITORY))
    import imported_once  # noqa: F401

    ranks, engines, *arguments = sys.argv[1:]
    raise SystemExit(run_program(arguments, (int(ranks), int(engines))))
