"""Which isolation this kernel gives a worker, tried for real before it is promised. Standard
library only.

Tiers (reference: layered design, tiers A and B): ``namespaces`` (own root, pids, network, user;
system call filter; Landlock), ``landlock`` (no namespaces: Landlock and the filter), ``limits``
(resource limits only).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ctrl_megatron.sandbox.jail import landlock, linux, namespaces, native, rlimits, seccomp

Level = Literal["strict", "standard", "none"]
LEVELS: tuple[Level, ...] = ("strict", "standard", "none")
MECHANISMS: tuple[str, ...] = ("namespaces", "seccomp", "landlock")


class IsolationRefused(RuntimeError):
    """The kernel does not give what was asked for; the text says what is missing and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The isolation that a worker really has."""

    requested: str
    tier: Literal["namespaces", "landlock", "limits"]
    seccomp: bool
    landlock: int
    """ABI version in force, 0 for none."""
    uid: int
    missing: tuple[str, ...]
    """What the kernel refused, with the error text of the call."""

    @property
    def level(self) -> Level:
        """The strictest level that this isolation fulfils, whatever was asked for."""
        if self.seccomp and self.tier == "namespaces":
            return "strict"
        return "none" if self.tier == "limits" else "standard"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for reports."""
        return {"level": self.level, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How to confine a process of a job; built once per worker."""

    reached: Reached
    readable: tuple[str, ...]
    call_filter: seccomp.Filter | None
    native_filters: Mapping[str, seccomp.Filter] = field(default_factory=dict)
    """Profile of ``native`` -> its filter."""

    def apply(
        self,
        directory: str | None,
        *,
        memory_bytes: int,
        cpu_seconds: float,
        profile: str | None = None,
        **rest: int,
    ) -> None:
        """Confine the calling process for good: limits, then Landlock, then the system call filter.

        It may write below ``directory`` only, None for nowhere.
        ``profile`` is a profile of ``native`` for programs that are not Python. ``rest`` is
        ``file_bytes``, ``open_files`` and ``processes`` of ``rlimits.limit``.
        """
        if self.reached.tier != "namespaces":
            rest["processes"] += rlimits.tasks_of_user()
        rlimits.limit(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds, **rest)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if self.reached.landlock:
            landlock.restrict(
                self.reached.landlock,
                readable=(*self.readable, *_tools(profile), "/dev/urandom", "/dev/random"),
                writable=(*filter(None, (directory,)), "/dev/null", "/dev/zero"),
            )
        if self.call_filter is not None:
            (self.native_filters[profile] if profile else self.call_filter).install()


def _tools(profile: str | None) -> tuple[str, ...]:
    return native.tool_paths() if profile and native.starts_processes(profile) else ()


def establish(
    level: Level, *, staging: str, user: int | None, without: tuple[str, ...] = ()
) -> tuple[Confinement, int | None]:
    """Isolate this worker process as far as ``level`` asks. Raises ``IsolationRefused``.

    With namespaces also what ``namespaces.fork_owner`` takes.
    ``user`` is the id to take on when started as root, ``without`` names mechanisms not to try.
    """
    missing: list[str] = []
    off = MECHANISMS if level == "none" else without
    refused = dict.fromkeys(off, "switched off by the configuration")
    abi = 0 if "landlock" in refused else landlock.abi()
    if not abi:
        missing.append(f"landlock: {refused.get('landlock', 'not in this kernel')}")
    filtering = _usable("seccomp", refused, missing, lambda: seccomp.Filter().install())
    isolated = _usable("namespaces", refused, missing, lambda: _whole_entry(staging, user))
    if level == "strict" and not (isolated and filtering):
        raise IsolationRefused(
            f"isolation strict needs namespaces and seccomp; missing: {'; '.join(missing)}. "
            "Enable unprivileged user namespaces or use isolation standard."
        )
    # Each place once, whatever its names: a rule costs every job four system calls.
    readable = tuple(dict.fromkeys(map(os.path.realpath, namespaces.library_paths())))
    process = None
    if isolated:
        process = namespaces.enter_worker(staging, user)
    elif user is not None:
        namespaces.become(user)
        _require_readable(sys.base_prefix, user)
    tier = "namespaces" if isolated else "landlock" if abi and filtering else "limits"
    reached = Reached(
        requested=level,
        tier=tier,
        seccomp=filtering,
        landlock=abi,
        uid=os.getuid(),
        missing=tuple(missing) if level != "none" else (),
    )
    call_filter = seccomp.Filter() if filtering else None
    confinement = Confinement(
        reached=reached,
        readable=readable,
        call_filter=call_filter,
        native_filters=_native_filters() if filtering and isolated else {},
    )
    return confinement, process


def _native_filters() -> dict[str, seccomp.Filter]:
    """Processes only where a pid namespace bounds them."""
    one, many = seccomp.Filter(execute=True), seccomp.Filter(execute=True, processes=True)
    return {"binary": one, "compiler": many, "shell": many}


def check_canaries(confinement: Confinement, directory: str) -> None:
    """Try, in a confined child, what no job may do. Raises ``IsolationRefused`` if any of it
    succeeds.
    """
    if not confinement.reached.seccomp:
        return
    reason = _in_child(lambda: _canaries(confinement, directory))
    if reason:
        raise IsolationRefused(f"the isolation does not hold: {reason}")


def _usable(
    name: str, refused: dict[str, str], missing: list[str], attempt: Callable[[], None]
) -> bool:
    reason = refused.get(name) or _in_child(attempt)
    if reason:
        missing.append(f"{name}: {reason}")
    return not reason


def _in_child(attempt: Callable[[], None]) -> str:
    """Run ``attempt`` in a child; the text of what went wrong, empty when nothing did."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os._exit(0)
        except BaseException as error:
            os.write(writer, f"{error}"[:2000].encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    status = os.waitpid(pid, 0)[1]
    return text or ("" if status == 0 else f"the trial ended with status {status}")


def _whole_entry(staging: str, user: int | None) -> None:
    process = namespaces.enter_worker(staging, user)
    if reason := _in_child(lambda: namespaces.enter_job(1 << 20)):
        raise IsolationRefused(reason)
    pid, own = namespaces.fork_owner(process)
    if pid:
        if os.waitpid(pid, 0)[1]:
            raise IsolationRefused("a process cannot become the first of a pid namespace")
        return
    try:
        for _ in range(2):
            inner = namespaces.fork_first(own)
            if inner == 0:
                os._exit(0 if os.getpid() == 1 else 1)
            if os.waitpid(inner, 0)[1]:
                os._exit(1)
        os._exit(0)
    finally:
        os._exit(1)


def _canaries(confinement: Confinement, directory: str) -> None:
    confinement.apply(
        directory,
        memory_bytes=1 << 30,
        cpu_seconds=5,
        file_bytes=1 << 20,
        open_files=64,
        processes=64,
    )
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("a socket", socket.socket),
        ("a child process", _fork),
        ("a signal to other processes", lambda: os.kill(-1, 0)),
    ]
    if confinement.reached.landlock or confinement.reached.tier == "namespaces":
        attempts.append(
            ("a file in the library", lambda: os.open("/usr/lib/canary", os.O_CREAT | os.O_WRONLY))
        )
        attempts.append(
            ("the machine's password file", lambda: os.open("/etc/passwd", os.O_RDONLY))
        )
    for what, attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        raise IsolationRefused(f"a program could get {what}")
    if os.environ:
        raise IsolationRefused("the environment is not empty")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _require_readable(prefix: str, user: int) -> None:
    try:
        os.listdir(os.path.join(prefix, "lib"))
    except OSError as error:
        raise IsolationRefused(
            f"without namespaces, user {user} must be able to read the interpreter under {prefix}: "
            f"{error}. Choose another interpreter (python=...) or run as an ordinary user."
        ) from error
