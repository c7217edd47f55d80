"""Starts engines in separate processes and ends them."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from ctrl_megatron.config.environment import child_environment
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.parallel.parent_watch import kill_process_group
from ctrl_megatron.rollout.client import RemoteEngine, describe_exit, engine_died_error
from ctrl_megatron.rollout.engine import EngineAddress, EngineSpec, require_engine
from ctrl_megatron.rollout.interpreter import engine_python_path
from ctrl_megatron.rollout.weight_update import checkpoint_specs

_KILL_SECONDS = 10.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOGGED_ERROR = re.compile(r"^(?:.*\] |\(.*\) )?((?:\w+\.)*\w+(?:Error|Exception): .+)$", re.M)
"""The last line of a traceback, after a logger's prefix."""
_ELSEWHERE = "root cause"
"""Occurs in errors that refer to another one, which was logged before."""
_SPINS = "8000"
"""Number of times that an OpenMP thread polls for work before it sleeps. The default, 300,000,
takes many times longer than the pause between two layers: if other work needs a core, threads spend
their time waiting for each other, and 16 texts are drawn 12 times as slowly
(docs/experiments/engines.md)."""


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """The environment of the engine's process: this one without the variables of a trainer rank."""
    kept = child_environment(devices=spec.devices)
    # torchrun sets it to 1 for each of its ranks.
    kept.pop("OMP_NUM_THREADS", None)
    path = engine_python_path(spec.python, kept.get("PYTHONPATH"))
    chosen = {**_OFFLINE, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    chosen |= ENGINES[spec.name].environment
    if spec.part is not None:
        # Not the loopback of engines on one host.
        chosen[_INTERFACE] = kept.get(_INTERFACE) or _interface_of(spec.host)
    if spec.threads:
        chosen["OMP_NUM_THREADS"] = str(spec.threads)
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & kept.keys():
        chosen["GOMP_SPINCOUNT"] = _SPINS
    return {**kept, **chosen}


def _interface_of(address: str) -> str:
    """The network interface that has an address of this host."""
    for name, own in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in own):
            return name
    raise UserError(
        f"no network interface of this host has the address {address}", remedy=f"set {_INTERFACE}"
    )


class EngineProcess:
    """A launched engine, which ends when the process that launched it ends."""

    def __init__(self, spec: EngineSpec) -> None:
        require_engine(spec.name, spec.python)
        self._spec, self._token = spec, secrets.token_urlsafe(32)
        checkpoint_specs(spec.model_path, spec.dtype)
        self._launch()

    def _launch(self) -> None:
        spec, self._started = self._spec, time.monotonic()
        ready, ready_child = os.pipe()
        self._ready = os.fdopen(ready, "rb", buffering=0)
        python = spec.python or sys.executable
        command = [python, "-m", "ctrl_megatron.rollout.server", "--engine", spec.name]
        log_path = spec.log_path
        if log_path is None:
            descriptor, log_path = tempfile.mkstemp(
                prefix=f"ctrl-engine-{spec.name}-", suffix=".log"
            )
            os.close(descriptor)
        with open(log_path, "ab") as log:
            # A session of its own: ``stop`` ends the process group with all that the engine
            # started, and a Ctrl-C in the terminal does not reach it.
            self._popen = subprocess.Popen(
                [*command, "--ready-fd", str(ready_child)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_child,),
                env=engine_environment(spec),
                start_new_session=True,
            )
        os.close(ready_child)
        assert self._popen.stdin is not None
        # The engine ends when this pipe is closed.
        start = json.dumps({"spec": asdict(spec), "token": self._token})
        self._popen.stdin.write(start.encode() + b"\n")
        self._popen.stdin.flush()
        self.pid = self._popen.pid
        """Process id of the server, which is also the id of its process group."""
        self.address = EngineAddress(
            name=spec.title or spec.name,
            endpoint=self._endpoint(spec.port) if spec.port else "",
            home=host_identity(),
            token=self._token,
            pid=self.pid,
            log_path=log_path,
        )
        """The address for other ranks; its endpoint is known after ``wait_ready``."""

    def launch_again(self) -> None:
        """Start a process in place of one that ``stop`` has ended, at the same address and with the
        same token, so that clients go on. ``wait_ready`` waits for it.
        """
        port = int(self.address.endpoint.rpartition(":")[2])
        self._spec = replace(self._spec, port=port, log_path=self.address.log_path)
        self._launch()

    def _endpoint(self, port: int) -> str:
        host = self._spec.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def connect(self) -> RemoteEngine:
        """A client that also reports how the process ended."""
        return RemoteEngine(self.address, self)

    def exit_code(self) -> int | None:
        return self._popen.poll()

    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait_ready(self) -> None:
        """Return when the engine can generate. UserError with the cause if it refuses the model or
        its keys; EngineDied with the end of the log if it dies.
        """
        while self.alive() and not select.select([self._ready], [], [], 0.2)[0]:
            if time.monotonic() > self._started + self._spec.startup_timeout:
                self._fail(f"was not ready within {self._spec.startup_timeout:g} s")
        text = os.read(self._ready.fileno(), 4096) if self.alive() else b""
        if not text:
            # The server has ended or is about to, so nothing else will arrive.
            self._fail(describe_exit(self._popen.wait(_KILL_SECONDS)) + " while starting")
        answer = json.loads(text)
        if "error" in answer:
            self._refused(answer["error"], is_bug=answer["is_bug"])
        self.address = replace(self.address, endpoint=self._endpoint(answer["port"]))

    def _refused(self, cause: str, *, is_bug: bool) -> None:
        """Raise the cause. The process still waits: ``FailureWatch`` would report its death
        first."""
        address = self.address
        if is_bug:
            raise engine_died_error(address, f"could not start ({cause})")
        raise UserError(
            f"engine {address.name} refuses the model {self._spec.model_path}: "
            f"{root_cause(cause, address.log_path)} (its log is {address.log_path})",
            remedy="take another engine or model, or other settings of the engine",
        )

    def _fail(self, what: str) -> None:
        self.stop()
        raise engine_died_error(self.address, what)

    def stop(self) -> None:
        """End the engine and all its processes; returns when none is left."""
        if left := kill_process_group(self.pid):
            raise RuntimeError(f"processes {left} of engine {self.address.name} cannot be killed")
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._ready.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def root_cause(cause: str, log_path: str) -> str:
    """``cause``, or the logged error to which it refers: an engine with several processes only
    reports that one of them has failed.
    """
    if _ELSEWHERE not in cause or not Path(log_path).is_file():
        return cause
    errors = _LOGGED_ERROR.findall(Path(log_path).read_text(errors="replace"))
    return next((error for error in reversed(errors) if _ELSEWHERE not in error), cause)


def launch_engine(spec: EngineSpec) -> EngineProcess:
    """Start an engine and wait until it can generate.

    ValueError with the cause if the engine is not installed, ``model_path`` is no model directory
    or the engine refuses its arguments; EngineDied with the end of the log if the process dies or
    is not ready within ``startup_timeout``.
    """
    process = EngineProcess(spec)
    try:
        process.wait_ready()
    except BaseException:
        process.stop()
        raise
    return process
