"""Limits on all processes of a worker together, by cgroup v2, where a subtree is delegated to the
service.

Delegation: Linux kernel, Documentation/admin-guide/cgroup-v2.rst, section "Delegation"; systemd,
docs/CGROUP_DELEGATION.md.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ctrl_megatron.sandbox.limits import SandboxLimits

CONTROLLERS = ("memory", "pids")
_SYSTEMD = Path("/run/systemd/system")
_DELEGATED = ("user.delegate", "trusted.delegate")
_OWN_MB = 256
"""MiB for supervisor and fork server, and for memory that the kernel counts beside that of
programs."""
_OWN_TASKS = 16


class NotDelegated(RuntimeError):
    """No cgroup v2 subtree is delegated to this process; the text says why."""


class CgroupSubtree:
    """A cgroup below the service's own that contains one cgroup per worker."""

    def __init__(self, base: Path, controllers: frozenset[str], undo: contextlib.ExitStack) -> None:
        self._base = base
        self._undo = undo
        self.controllers = controllers
        """The available ones of ``CONTROLLERS``."""

    @classmethod
    def split_own_cgroup(
        cls,
        mounts: Path = Path("/proc/self/mountinfo"),
        membership: Path = Path("/proc/self/cgroup"),
    ) -> CgroupSubtree:
        """Divide this process's own cgroup. Raises ``NotDelegated``.

        Only leaves may contain processes: if the controllers are not enabled for children yet, this
        process moves into a leaf of its own, which requires that the cgroup contains no other
        process.
        """
        home = _home(mounts, membership)
        try:
            available = frozenset((home / "cgroup.controllers").read_text().split()) & set(
                CONTROLLERS
            )
            if not available:
                raise NotDelegated(f"no {' or '.join(CONTROLLERS)} controller in {home}")
            _require_delegated(home)
            control, base = home / "cgroup.subtree_control", home / f"sandbox-{os.getpid()}"
            missing = available - set(control.read_text().split())
            with contextlib.ExitStack() as undo:
                # Only the root of the hierarchy may contain processes and enable controllers for
                # children.
                if missing and (home / "cgroup.type").exists():
                    _move_aside(home, undo)
                if missing:
                    control.write_text(_listed("+", missing))
                    undo.callback(control.write_text, _listed("-", missing))
                base.mkdir()
                undo.callback(base.rmdir)
                (base / "cgroup.subtree_control").write_text(_listed("+", available))
                return cls(base, available, undo.pop_all())
        except OSError as error:
            raise NotDelegated(f"{error.filename or home}: {error.strerror}") from error

    def confine(self, number: int, pid: int, limits: SandboxLimits) -> None:
        """Move process ``pid``, with all processes it will start, into the cgroup of worker
        ``number``. Raises ``OSError``.

        A program within its own limits never reaches these limits, but many processes together may.
        """
        leaf = self._base / f"worker-{number}"
        leaf.mkdir(exist_ok=True)
        if "memory" in self.controllers:
            programs = max(2 * limits.memory_mb, limits.max_memory_mb)
            total = programs + limits.disk_mb + _OWN_MB
            (leaf / "memory.max").write_text(str(total << 20))
            if (leaf / "memory.swap.max").exists():
                (leaf / "memory.swap.max").write_text("0")
        if "pids" in self.controllers:
            (leaf / "pids.max").write_text(str(limits.processes + _OWN_TASKS))
        (leaf / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Restore the cgroup; the workers have ended."""
        for leaf in self._base.glob("worker-*"):
            leaf.rmdir()
        self._undo.close()


def _home(mounts: Path, membership: Path) -> Path:
    """The directory of this process's cgroup."""
    with contextlib.suppress(OSError):
        paths = [x[3:] for x in membership.read_text().splitlines() if x.startswith("0::")]
        for line in mounts.read_text().splitlines():
            place, _, kind = line.partition(" - ")
            if kind.startswith("cgroup2 ") and paths:
                return Path(place.split()[4]) / paths[0].lstrip("/")
    raise NotDelegated("no cgroup v2 is mounted")


def _require_delegated(home: Path) -> None:
    # For an ordinary user the kernel checks the owner of the files. Root may write anywhere, but
    # must not change what systemd manages.
    if os.geteuid() != 0 or not _SYSTEMD.exists():
        return
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(home, name) == b"1":
                return
    raise NotDelegated(f"{home} belongs to systemd; start the service with Delegate=yes")


def _move_aside(home: Path, undo: contextlib.ExitStack) -> None:
    own, procs, leaf = str(os.getpid()), home / "cgroup.procs", home / f"service-{os.getpid()}"
    others = sorted(set(procs.read_text().split()) - {own})
    if others:
        raise NotDelegated(
            f"{home} holds other processes ({', '.join(others[:5])}); the service needs a cgroup "
            "of its own, such as one of systemd-run --scope"
        )
    leaf.mkdir()
    undo.callback(leaf.rmdir)
    (leaf / "cgroup.procs").write_text(own)
    undo.callback(procs.write_text, own)


def _listed(sign: str, controllers: frozenset[str]) -> str:
    return " ".join(f"{sign}{name}" for name in sorted(controllers))
