"""The isolation of a worker and of its jobs. Every mechanism is tried before it is reported.

Tiers: ``namespaces`` (own root, pids, network and user, system call filter, Landlock), ``landlock``
(Landlock and the filter, no namespaces), ``limits`` (resource limits only).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ctrl_megatron.sandbox.jail import files, landlock, linux, namespaces, seccomp
from ctrl_megatron.sandbox.limits import MECHANISMS, Level, Profile, SandboxLimits


class IsolationRefused(RuntimeError):
    """The kernel does not provide the requested isolation; the text says what is
    missing and why.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """The isolation that a worker has reached."""

    requested: str
    tier: Literal["namespaces", "landlock", "limits"]
    seccomp: bool
    landlock: int
    """ABI version in use, 0 for none."""
    uid: int
    missing: tuple[str, ...]
    """The mechanisms that the kernel refused, with the error text of the call."""

    @property
    def level(self) -> Level:
        """The strictest level that this isolation satisfies, independent of the requested one."""
        if self.seccomp and self.tier == "namespaces":
            return "strict"
        return "none" if self.tier == "limits" else "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How to confine the processes of a worker's jobs; created once per worker."""

    report: IsolationReport
    limits: SandboxLimits
    scratch: str
    """Parent of the jobs' private directories where there are no mount namespaces."""
    readable: tuple[str, ...]
    filters: Mapping[Profile | None, seccomp.SyscallFilter]
    """System call filters by profile, None for Python; empty if the kernel cannot filter system
    calls."""

    @property
    def isolated(self) -> bool:
        """Whether jobs run in namespaces."""
        return self.report.tier == "namespaces"

    def share_directory(self) -> None:
        """Give the processes that the caller starts from now on a new directory in common, where
        there are mount namespaces; an earlier one is left to its processes.
        """
        if self.isolated:
            namespaces.unmount_tmp()
            namespaces.mount_tmp(self.limits.disk_mb << 20)

    def end_sharing(self) -> None:
        """Take the directory in common away."""
        if self.isolated:
            namespaces.unmount_tmp()

    def enter_job_directory(self, spec: Mapping[str, Any], *, shared: bool = False) -> str:
        """Move the calling process to its private directory, or to the one that it shares with
        others, write the job's files there and drop all capabilities. Returns the directory's path.

        The directory is a tmpfs that ends with the process, or ``spec["directory"]`` where there
        are no mount namespaces; files that an earlier program of the job left there are removed
        first.
        """
        directory = namespaces.TMP if self.isolated else spec["directory"]
        if shared:
            if self.isolated and not self.report.seccomp:
                linux.unshare(linux.CLONE_NEWIPC)
        elif self.isolated:
            # The worker's IPC namespace is enough if the filter denies its calls.
            namespaces.enter_job_namespaces(self.limits.disk_mb << 20, ipc=not self.report.seccomp)
        else:
            files.remove_tree(directory)
            os.mkdir(directory, 0o700)
        os.chdir(directory)
        linux.drop_capabilities()
        files.write_files(directory, spec["files"])
        return directory

    def confine(
        self,
        writable_directory: str | None,
        *,
        memory_mb: int,
        cpu_seconds: float,
        profile: Profile | None = None,
    ) -> None:
        """Confine the calling process permanently: resource limits, then Landlock, then the system
        call filter.

        It may write below ``writable_directory`` only, or nowhere if that is None. ``profile`` is
        given for programs that are not Python.
        """
        linux.limit_resources(
            self.limits,
            memory_mb=memory_mb,
            cpu_seconds=cpu_seconds,
            other_tasks=0 if self.isolated else linux.tasks_of_user(),
        )
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if self.report.landlock:
            tools = namespaces.tool_paths() if profile in ("compiler", "shell") else ()
            landlock.restrict(
                self.report.landlock,
                readable=(*self.readable, *tools, "/dev/urandom", "/dev/random"),
                writable=(*filter(None, (writable_directory,)), "/dev/null", "/dev/zero"),
            )
        if self.filters:
            self.filters[profile].install()


def isolate_worker(
    level: Level,
    *,
    limits: SandboxLimits,
    scratch: str,
    staging: str,
    user: int | None,
    without: tuple[str, ...] = (),
) -> tuple[Confinement, int | None]:
    """Isolate this worker process as ``level`` requires. Raises ``IsolationRefused``.

    The second value is the argument of ``namespaces.fork_pid_namespace_owner``, None without
    namespaces. ``staging`` is an empty directory for the new root, ``user`` the user id to switch
    to if started as root, ``without`` names mechanisms that are not tried.
    """
    missing: list[str] = []
    off = MECHANISMS if level == "none" else without
    refused = dict.fromkeys(off, "switched off by the configuration")
    abi = 0 if "landlock" in refused else landlock.landlock_version()
    if not abi:
        missing.append(f"landlock: {refused.get('landlock', 'not in this kernel')}")
    filtering = _usable("seccomp", refused, missing, lambda: seccomp.SyscallFilter().install())
    isolated = _usable("namespaces", refused, missing, lambda: _try_namespaces(staging, user))
    if level == "strict" and not (isolated and filtering):
        raise IsolationRefused(
            f"isolation strict needs namespaces and seccomp; missing: {'; '.join(missing)}. "
            "Enable unprivileged user namespaces or use isolation standard."
        )
    guarded = bool(isolated or (abi and filtering))
    if level == "standard" and not guarded:
        raise IsolationRefused(
            "isolation standard needs namespaces, or Landlock and seccomp; missing: "
            f"{'; '.join(missing)}. Programs could read every file of the user who runs them, "
            "expected answers too: enable unprivileged user namespaces, or ask for isolation=none."
        )
    # Each place once, even if it has several names: a rule costs every job four system calls.
    readable = tuple(dict.fromkeys(map(os.path.realpath, namespaces.library_paths())))
    process = None
    if isolated:
        process = namespaces.enter_worker_namespaces(staging, user)
    elif user is not None:
        _become(user)
    report = IsolationReport(
        requested=level,
        tier="namespaces" if isolated else "landlock" if guarded else "limits",
        seccomp=filtering,
        landlock=abi,
        uid=os.getuid(),
        missing=tuple(missing) if level != "none" else (),
    )
    filters: dict[Profile | None, seccomp.SyscallFilter] = {}
    if filtering:
        filters[None] = seccomp.SyscallFilter(landlock=None if isolated else abi)
    if filtering and isolated:
        # Starting processes needs a pid namespace, which ends all of them.
        filters["binary"] = seccomp.SyscallFilter(execute=True)
        filters["compiler"] = filters["shell"] = seccomp.SyscallFilter(execute=True, processes=True)
    confinement = Confinement(
        report=report, limits=limits, scratch=scratch, readable=readable, filters=filters
    )
    return confinement, process


def _become(user: int) -> None:
    """Switch to ``user``. Raises ``IsolationRefused`` if that user cannot read the interpreter."""
    namespaces.switch_user(user)
    try:
        os.listdir(os.path.join(sys.base_prefix, "lib"))
    except OSError as error:
        raise IsolationRefused(
            f"without namespaces, user {user} must be able to read the interpreter under "
            f"{sys.base_prefix}: {error}. Choose another interpreter (python=...) or run as an "
            "ordinary user."
        ) from error


def check_canaries(confinement: Confinement, directory: str) -> None:
    """Try operations that no job may perform. Raises ``IsolationRefused`` if one succeeds.
    ``directory`` is empty before and afterwards.
    """
    if not confinement.report.seccomp:
        return
    outside = None
    if not confinement.isolated:
        # A file of the same user, beside a job's directory.
        outside, directory = (os.path.join(directory, name) for name in ("outside", "inside"))
        os.mkdir(directory)
        with open(outside, "x") as stream:
            stream.write("canary")
    # Large limits, so that they are not the reason why an attempt fails.
    roomy = replace(confinement, limits=SandboxLimits())
    reason = _in_child(lambda: _try_forbidden(roomy, directory, outside))
    if outside is not None:
        os.unlink(outside)
        os.rmdir(directory)
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
    """Run ``attempt`` in a child process. Returns the text of its failure, empty if
    it succeeded.
    """
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


def _try_namespaces(staging: str, user: int | None) -> None:
    process = namespaces.enter_worker_namespaces(staging, user)
    if reason := _in_child(lambda: namespaces.enter_job_namespaces(1 << 20)):
        raise IsolationRefused(reason)
    pid, own = namespaces.fork_pid_namespace_owner(process)
    if pid:
        if os.waitpid(pid, 0)[1]:
            raise IsolationRefused("a process cannot become the first of a pid namespace")
        return
    try:
        for _ in range(2):
            inner = namespaces.fork_into_pid_namespace(own)
            if inner == 0:
                os._exit(0 if os.getpid() == 1 else 1)
            if os.waitpid(inner, 0)[1]:
                os._exit(1)
        os._exit(0)
    finally:
        os._exit(1)


def _try_forbidden(confinement: Confinement, directory: str, outside: str | None) -> None:
    confinement.confine(directory, memory_mb=1024, cpu_seconds=5)
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("a socket", socket.socket),
        ("a child process", lambda: os.fork() or os._exit(0)),
        ("a signal to other processes", lambda: os.kill(-1, 0)),
    ]
    if confinement.report.landlock or confinement.isolated:
        attempts += [
            ("a file in the library", lambda: os.open("/usr/lib/canary", os.O_CREAT | os.O_WRONLY)),
            ("the machine's password file", lambda: os.open("/etc/passwd", os.O_RDONLY)),
        ]
    if outside is not None:
        # Flags 3: neither reading nor writing.
        attempts += [
            ("the mode of another file", lambda: os.chmod(outside, 0)),
            ("another file emptied", lambda: os.truncate(outside, 0)),
            ("another file open without a right to it", lambda: os.open(outside, 3)),
        ]
    for what, attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        raise IsolationRefused(f"a program could get {what}")
    if os.environ:
        raise IsolationRefused("the environment is not empty")
