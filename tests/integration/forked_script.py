"""A shell script of a user's, whose Python programs are forks of a process that has imported what
they need: a journey of ten commands would spend most of its time with imports.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from forked_ranks import fork_context
from preloaded import wait_for_command
from tiny_run import REPOSITORY

_COMMANDS = REPOSITORY / "ctrl_megatron/commands"
_STAND_IN = f"""#!{sys.executable} -ISs
import json, os, signal, socket, sys
name = os.path.basename(sys.argv[0])
module = "ctrl_megatron.commands." + name.removeprefix("ctrl-").replace("-", "_")
args = sys.argv[1:] if name == "python" else ["-m", module, *sys.argv[1:]]
told = {{"args": args, "env": dict(os.environ), "cwd": os.getcwd(), "pass_fds": []}}
told["group"] = os.getpgrp()
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ["FORKED_COMMANDS"])
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps(told).encode())
server.shutdown(socket.SHUT_WR)
answer = server.makefile()
pid = int(answer.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(int(answer.read() or 1))
"""


class Shell:
    """Runs scripts in ``folder``, which looks like the root of a checkout."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self._address = folder, address

    def run(
        self, script: Path, environment: Mapping[str, str], killed_at: str | None = None
    ) -> str:
        """Run the script and return its output; it must end with 0.

        ``killed_at`` is ``PROGRAM MODULE:NAME NTH``: when that program of the script begins the nth
        call of the function of that name, SIGKILL takes the script's process group and, where it is
        another one, that of the process that makes the call.
        """
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        given = {**os.environ, "PATH": path, "FORKED_COMMANDS": self._address}
        given |= {"OMP_NUM_THREADS": "1", **environment}
        given |= {"KILLED_AT": killed_at} if killed_at else {}
        # A file: orphans of a killed script may hold its output longer than it takes to go on.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ["bash", str(script)],
                cwd=self.folder,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                process.wait(280)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        assert process.returncode == (-signal.SIGKILL if killed_at else 0), said[-8000:]
        return said


@contextmanager
def forked_shell(folder: Path) -> Iterator[Shell]:
    """A shell in ``folder``; its commands end with the block."""
    for name in ("tools", "examples", "ctrl_megatron"):
        (folder / name).symlink_to(REPOSITORY / name)
    names = [f"ctrl-{path.stem.replace('_', '-')}" for path in _COMMANDS.glob("*.py")]
    (folder / "bin").mkdir()
    for name in ("python", *names):
        stand_in = folder / "bin" / name
        stand_in.write_text(_STAND_IN)
        stand_in.chmod(0o755)
    address = str(folder / "commands")
    ready, told = fork_context().Pipe()
    server = fork_context().Process(target=_serve, args=(address, told))
    server.start()
    try:
        ready.recv()
        yield Shell(folder, address)
    finally:
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGKILL)
        server.join()
        shutil.rmtree(folder / "bin")


def _serve(address: str, ready: object) -> None:
    """One command after the other, each in a fork of this process."""
    os.setpgid(0, 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        ready.send(True)  # type: ignore[attr-defined]
        while True:
            asked, _ = listener.accept()
            with asked:
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    # Ranks, or the engine of a command that starts none; each rank an engine.
                    wait_for_command(asked, (2, 1))
                with suppress(BrokenPipeError):  # whoever waited was killed too
                    asked.sendall(f"{pid}\n".encode())
                _, status = os.waitpid(pid, 0)
                with suppress(BrokenPipeError):
                    asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
