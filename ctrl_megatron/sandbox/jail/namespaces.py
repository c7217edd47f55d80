"""A root file system without the machine's data, and namespaces around a worker and around each
job.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable

from ctrl_megatron.sandbox.jail import linux

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_WORKER = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
_STATVFS_TO_MOUNT = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_TOOLS = ("/usr/bin", "/bin", "/usr/include", "/usr/libexec", "/etc/alternatives")
_LOCAL = ("/usr/local/bin", "/usr/local/include", "/usr/local/lib", "/usr/local/libexec")
TMP = "/tmp"
HOST_NAME = "sandbox"


def library_paths() -> tuple[str, ...]:
    """Paths that a Python program reads: shared libraries, the interpreter's
    libraries, time zones.
    """
    system = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
    own = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    paths = [path for path in (*system, "/usr/share/zoneinfo") if os.path.exists(path)]
    if not own.startswith("/usr/lib"):
        paths.append(own)
    return tuple(paths)


def tool_paths() -> tuple[str, ...]:
    """Existing directories with compilers and shells; ``/usr/local`` only if the
    compiler is there.
    """
    local = _LOCAL if os.access("/usr/local/bin/g++", os.X_OK) else ()
    return tuple(path for path in (*_TOOLS, *local) if os.path.isdir(path))


def enter_worker_namespaces(staging: str, user: int | None) -> int:
    """Move this process into namespaces of its own: new root, no network, no privileges.

    ``staging`` is an empty directory on which the root is built. ``user`` is the user id that a
    process started as root switches to; None keeps the current one. Returns a descriptor of the
    process's directory in /proc, which the new root lacks. Raises ``KernelRefusal`` if the kernel
    refuses any part.
    """
    process = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    if user is None:
        _new_user_namespace(process)
        _build_root(staging, (*library_paths(), *tool_paths()))
    else:
        # Built while still root: the interpreter may be in a directory that the unprivileged user
        # cannot read.
        linux.unshare(linux.CLONE_NEWNS)
        _build_root(staging, (*library_paths(), *tool_paths()))
        switch_user(user)
        _new_user_namespace(process)
    return process


def fork_pid_namespace_owner(process: int) -> tuple[int, int]:
    """Fork the first process of a pid namespace, which can create further ones with
    ``fork_into_pid_namespace``. Returns (pid, -1) in the caller and (0, a descriptor of the
    namespace) in the child.

    ``process`` is the descriptor that ``enter_worker_namespaces`` returned; it is closed.
    """
    ours, theirs = socket.socketpair()
    linux.unshare(linux.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(process)
        # The process's name in /proc is known only outside its namespace.
        with theirs:
            _, (own,), _, _ = socket.recv_fds(theirs, 1, 1)
        return 0, own
    theirs.close()
    own = os.open("ns/pid_for_children", os.O_RDONLY, dir_fd=process)
    with ours:
        socket.send_fds(ours, [b"n"], [own])
    os.close(own)
    os.close(process)
    return pid, -1


def fork_into_pid_namespace(own: int) -> int:
    """Like ``os.fork``, but the child is the first process of a new pid namespace. Its later
    children belong to that namespace, those of the caller do not. ``own`` is a descriptor of the
    caller's namespace.
    """
    linux.unshare(linux.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        linux.setns(own, linux.CLONE_NEWPID)
    return pid


def switch_user(user: int) -> None:
    """Switch from root to an unprivileged user and group id."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # After the change root owns /proc/self/uid_map; the dumpable flag returns it.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def enter_job_namespaces(disk_bytes: int, *, ipc: bool = True) -> None:
    """Give this process private mounts and a private ``/tmp`` of ``disk_bytes``.

    ``ipc`` adds a System V IPC namespace, which is not needed where a filter denies its calls.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC if ipc else linux.CLONE_NEWNS)
    mount_tmp(disk_bytes)
    os.chdir(TMP)


def unmount_tmp() -> None:
    """Detach the ``/tmp`` that this process and its children see, if one is mounted."""
    if os.path.ismount(TMP):
        linux.unmount(TMP)


def mount_tmp(disk_bytes: int) -> None:
    """Mount a new, empty ``/tmp`` of that size."""
    linux.mount(
        "tmpfs",
        TMP,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"size={disk_bytes},nr_inodes=4096,mode=1777",
    )


def _new_user_namespace(process: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(_WORKER)
    socket.sethostname(HOST_NAME)
    _write(process, "setgroups", "deny")
    _write(process, "uid_map", f"{uid} {uid} 1")
    _write(process, "gid_map", f"{gid} {gid} 1")


def _write(directory: int, name: str, text: str) -> None:
    try:
        with open(os.open(name, os.O_WRONLY, dir_fd=directory), "w") as stream:
            stream.write(text)
    except OSError as error:
        raise linux.KernelRefusal(f"write({name})", error.errno or 0) from error


def _build_root(staging: str, readable: Iterable[str]) -> None:
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", staging, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path in readable:
        target = staging + path
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        else:
            os.makedirs(target, mode=0o755, exist_ok=True)
            _bind(path, target, linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)
    os.mkdir(staging + "/dev", 0o755)
    for device in _DEVICES:
        with open(staging + device, "x"):
            pass
        _bind(device, staging + device, linux.MS_NOSUID)
    os.mkdir(staging + TMP, 0o755)
    read_only = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY
    linux.mount("", staging, "", read_only | linux.MS_NOSUID | linux.MS_NODEV)
    linux.pivot_root(staging)


def _bind(source: str, target: str, flags: int) -> None:
    linux.mount(source, target, "", linux.MS_BIND | linux.MS_REC)
    # In a user namespace the flags of the source's mount are locked: a remount has to repeat them.
    present = os.statvfs(target).f_flag
    kept = sum(mount for seen, mount in _STATVFS_TO_MOUNT.items() if present & seen)
    linux.mount("", target, "", linux.MS_REMOUNT | linux.MS_BIND | flags | kept)
