"""Runs the sandbox service as a child of this process, by default on a free loopback port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Self

from ctrl_megatron.sandbox.cores import usable_cores
from ctrl_megatron.sandbox.limits import Level, SandboxLimits

_LINE_BYTES = 1 << 16
_LOG_BYTES = 1 << 20


class SandboxStartError(RuntimeError):
    """The service did not start; the text is its message."""


class EmbeddedSandbox:
    """A running service. It ends with ``stop``, and also when this process ends in any way."""

    def __init__(
        self, process: subprocess.Popen[bytes], errors: BinaryIO, announcement: dict[str, Any]
    ) -> None:
        self._process = process
        self._errors = errors
        self.scratch: str = announcement["scratch"]
        """Directory of the workers' files."""
        self.endpoint = f"http://{announcement['host']}:{announcement['port']}"
        self.isolation: dict[str, Any] = announcement["isolation"]

    @classmethod
    def start(
        cls,
        *,
        workers: int | None = None,
        isolation: Level = "standard",
        limits: SandboxLimits | None = None,
        python: str = sys.executable,
        preload: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        start_seconds: float = 60.0,
        host: str = "127.0.0.1",
        port: int = 0,
        token_file: str | None = None,
    ) -> Self:
        """Start the service and wait until it answers. Raises ``SandboxStartError`` with its
        message.

        ``workers`` defaults to the processors that this process may use. ``python`` is the
        interpreter that runs programs. ``port`` 0 uses a free one. The first line of ``token_file``
        is the token that clients must send; a ``host`` beyond loopback requires it.
        """
        main_thread = threading.current_thread() is threading.main_thread()
        command = [
            *(sys.executable, "-m", "ctrl_megatron.sandbox", "--host", host, "--port", str(port)),
            *("--log-level", "warning"),
            *("--workers", str(workers or usable_cores())),
            *("--isolation", isolation, "--python", python, "--owner", str(os.getpid())),
            *("--limits", json.dumps(asdict(limits or SandboxLimits()))),
            *(["--owner-main-thread"] if main_thread else []),
            *(["--token-file", token_file] if token_file else []),
            *(["--preload", *preload] if preload else []),
            *(["--without", *without] if without else []),
        ]
        # The environment contains no more than the paths of this process's modules and of its
        # files.
        path = os.pathsep.join([str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)])
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the service
        process = subprocess.Popen(
            command,
            env={"PATH": os.defpath, "PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            announcement = _first_line(process, start_seconds)
        except BaseException as error:
            process.kill()
            process.wait()
            text = _text(errors).strip()
            errors.close()
            raise SandboxStartError(f"the sandbox did not start: {text or error}") from error
        return cls(process, errors, announcement)

    @property
    def pid(self) -> int:
        """Process id of the service."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the service's process is running."""
        return self._process.poll() is None

    def log(self) -> str:
        """The service's output on stderr."""
        return _text(self._errors)

    def stop(self, timeout: float = 15.0) -> None:
        """End the service; running requests may take ``timeout`` seconds. May be called twice."""
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        # The service removes the directory itself, unless it was killed.
        if os.path.exists(self.scratch):
            shutil.rmtree(self.scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _text(errors: BinaryIO) -> str:
    # Without moving the file position, at which the service appends.
    return os.pread(errors.fileno(), _LOG_BYTES, 0).decode(errors="replace")


def _first_line(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    assert process.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        part = os.read(process.stdout.fileno(), _LINE_BYTES)
        if not part:
            raise EOFError("the service ended before it answered")
        line += part
    return json.loads(line)
