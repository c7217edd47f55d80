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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from ctrl_megatron.sandbox.cores import usable_cores
from ctrl_megatron.sandbox.limits import Level, SandboxLimits

_LINE_BYTES = 1 << 16
_LOG_BYTES = 1 << 20
_LOOK_SECONDS = 0.2


class SandboxStartError(RuntimeError):
    """The service did not start; the text is its message."""


class EmbeddedSandbox:
    """A running service. It ends with ``stop``, and also when this process ends in any way."""

    def __init__(
        self, process: subprocess.Popen[bytes], errors: BinaryIO, start_seconds: float
    ) -> None:
        self._process, self._errors = process, errors
        self._token_file: IO[str] | None = None
        """Exists until the service has read it."""
        self._start_seconds, self._late = start_seconds, time.monotonic() + start_seconds
        self.scratch = ""
        """Directory of the workers' files. This and the next two are known once it is ready."""
        self.endpoint = ""
        self.isolation: dict[str, Any] = {}

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
        token: str | None = None,
        wait: bool = True,
    ) -> Self:
        """Start the service and wait until it answers. Raises ``SandboxStartError`` with its
        message. With ``wait=False`` it returns at once, and ``wait_ready`` waits.

        ``workers`` defaults to the processors that this process may use. ``python`` is the
        interpreter that runs programs. ``port`` 0 uses a free one. ``token`` is what clients must
        send; a ``host`` beyond loopback requires it.
        """
        file = None if token is None else _written(token)
        main_thread = threading.current_thread() is threading.main_thread()
        command = [
            *(sys.executable, "-m", "ctrl_megatron.sandbox", "--host", host, "--port", str(port)),
            *("--log-level", "warning"),
            *("--workers", str(workers or usable_cores())),
            *("--isolation", isolation, "--python", python, "--owner", str(os.getpid())),
            *("--limits", json.dumps(asdict(limits or SandboxLimits()))),
            *(["--owner-main-thread"] if main_thread else []),
            *(["--token-file", file.name] if file else []),
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
        service = cls(process, errors, start_seconds)
        service._token_file = file
        if wait:
            service.wait_ready()
        return service

    def wait_ready(self) -> None:
        """Return when the service answers. Raises ``SandboxStartError`` with its message, also
        where ``stop`` ends it meanwhile.
        """
        try:
            announcement = self._first_line()
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            text = self.log().strip()
            raise SandboxStartError(f"the sandbox did not start: {text or error}") from error
        finally:
            self._forget_token()
        self.scratch = announcement["scratch"]
        self.endpoint = f"http://{announcement['host']}:{announcement['port']}"
        self.isolation = announcement["isolation"]

    def _forget_token(self) -> None:
        if self._token_file is not None:
            self._token_file.close()

    def _first_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        output, line = self._process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            if not select.select([output], [], [], _LOOK_SECONDS)[0]:
                if time.monotonic() > self._late:
                    raise TimeoutError(f"no answer within {self._start_seconds:.0f} s")
                continue
            part = os.read(output, _LINE_BYTES)
            if not part:
                raise EOFError("the service ended before it answered")
            line += part
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
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
        self._forget_token()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        # The service removes the directory itself, unless it was killed.
        if self.scratch:
            with suppress(FileNotFoundError):
                shutil.rmtree(self.scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _written(token: str) -> IO[str]:
    """A file of this user's with the token; neither arguments nor environment may have it."""
    file = tempfile.NamedTemporaryFile("w", prefix="ctrl-sandbox-")  # noqa: SIM115
    print(token, file=file, flush=True)
    return file


def _text(errors: BinaryIO) -> str:
    # Without moving the file position, at which the service appends.
    return os.pread(errors.fileno(), _LOG_BYTES, 0).decode(errors="replace")
