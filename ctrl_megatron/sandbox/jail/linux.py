"""System calls that Python does not wrap, made through ctypes, with errors that name the call;
resource limits and descriptors of a process.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import signal
import time

from ctrl_megatron.sandbox.limits import SandboxLimits

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 1 << 17, 1 << 25, 1 << 26, 1 << 27
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
_CPU_OF_PROCESS = 2
"""Kind of a clock of a process, as ``linux/posix-timers.h`` numbers them: what its threads ran."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_LAST_CAPABILITY = 40
_CAPABILITY_VERSION_3 = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_HIGHEST_DESCRIPTOR = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class KernelRefusal(OSError):
    """The kernel refused a call. The text names the call, the reason and the error number."""

    def __init__(self, call: str, number: int) -> None:
        super().__init__(number, f"{call}: {os.strerror(number)} (errno {number})")

    def __str__(self) -> str:
        return str(self.strerror)


def machine() -> str:
    """The machine's architecture, ``x86_64`` or ``aarch64``; any other raises ``KernelRefusal``."""
    name = platform.machine()
    if name not in _PIVOT_ROOT:
        raise KernelRefusal(f"system call table of {name}", 38)
    return name


def _check(result: int, call: str) -> int:
    if result < 0:
        raise KernelRefusal(call, ctypes.get_errno())
    return result


def syscall(call: str, number: int, *arguments: object) -> int:
    """A raw system call; integers are passed as 64-bit values. Raises ``KernelRefusal``."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *converted), call)


def prctl(option: int, *arguments: object) -> int:
    """``prctl(2)``. Raises ``KernelRefusal``."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    converted = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded]
    return _check(_libc.prctl(option, *converted), f"prctl({option})")


def unshare(flags: int) -> None:
    """``unshare(2)``. Raises ``KernelRefusal``."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """``setns(2)``. Raises ``KernelRefusal``."""
    _check(_libc.setns(fd, kind), f"setns({kind:#x})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """``mount(2)``. Raises ``KernelRefusal``."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount({target}, {kind or 'bind'}, {flags:#x})")


def unmount(target: str) -> None:
    """Detach what is mounted at ``target``. Raises ``KernelRefusal``."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount({target})")


def pivot_root(new_root: str) -> None:
    """Make ``new_root`` (a mount point) the root and detach the old root. Raises
    ``KernelRefusal``.
    """
    os.chdir(new_root)
    # The old root is mounted on top of the new one and detached at once, so it needs no directory.
    syscall("pivot_root", _PIVOT_ROOT[machine()], b".", b".")
    _check(_libc.umount2(b".", MNT_DETACH), "umount(.)")
    os.chdir("/")


def drop_bounding_set() -> None:
    """Prevent this process and its children from gaining capabilities by executing a program."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except KernelRefusal:
            break  # without CAP_SETPCAP nothing in the set could be gained


def drop_capabilities() -> None:
    """Give up all capabilities permanently: the ambient, effective, permitted and inheritable sets.

    ``drop_bounding_set``, called once per worker, prevents that they are gained again.
    """
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    syscall("capset", _CAPSET[machine()], header, (ctypes.c_uint32 * 6)())


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Request signal ``number`` for the end of the parent; exit at once if ``parent`` (a pid) has
    ended already.
    """
    prctl(PR_SET_PDEATHSIG, int(number))
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def limit_resources(
    limits: SandboxLimits, *, memory_mb: int, cpu_seconds: float, other_tasks: int
) -> None:
    """Set soft and hard limits; lower hard limits remain. ``other_tasks`` is the number of this
    user's threads outside the job that count towards the limit on processes.
    """
    seconds, memory = math.ceil(cpu_seconds) + 1, memory_mb << 20
    processes = limits.processes + other_tasks
    wanted = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_NPROC: (processes, processes),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in wanted.items():
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def allow_stack(size: int) -> None:
    """Allow the main thread a stack of ``size`` bytes, as far as the hard limit permits."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def tasks_of_user() -> int:
    """Number of this user's threads: RLIMIT_NPROC counts all of them outside a user namespace."""
    uid, total = os.getuid(), 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # the process has ended meanwhile
    return total


def close_all_but(standard: int, *kept: int) -> None:
    """Close every descriptor above ``standard`` that is not in ``kept``."""
    low = standard + 1
    for fd in sorted(set(kept)):
        if fd < low:
            continue
        # CPython's closerange can close everything if the range is empty.
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, _HIGHEST_DESCRIPTOR)


def set_standard_streams(stdin: int | None, stdout: int | None, stderr: int | None) -> None:
    """Duplicate the given descriptors to 0, 1 and 2; None means ``/dev/null``."""
    null = os.open("/dev/null", os.O_RDWR)
    for place, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(null if fd is None else fd, place)


def cpu_seconds(pid: int) -> float:
    """Seconds of processor time that all threads of a process have used, 0.0 for one that is gone.

    The clock of another process needs neither ``/proc`` nor a right to trace it.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPU_OF_PROCESS)
    except OSError:
        return 0.0
