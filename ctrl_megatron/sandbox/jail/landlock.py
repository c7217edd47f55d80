"""Landlock through ctypes: restricts the files that a process may access, forbids TCP, and forbids
signals to processes outside its domain.

Source: Linux ``Documentation/userspace-api/landlock.rst``. The numbers of its system calls are the
same on all architectures.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from ctrl_megatron.sandbox.jail.linux import PR_SET_NO_NEW_PRIVS, KernelRefusal, prctl, syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_QUERY_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_FS_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_TCP_BIND_AND_CONNECT = 3
_SCOPE_ABSTRACT_SOCKET_AND_SIGNAL = 3


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Version of Landlock in this kernel, 0 if there is none."""
    try:
        return syscall("landlock_create_ruleset", _CREATE, None, 0, _QUERY_VERSION)
    except KernelRefusal:
        return 0


def restrict(version: int, *, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process permanently to reading ``readable`` and to reading and writing
    ``writable``.

    Paths that do not exist are skipped. Raises ``KernelRefusal``.
    """
    rights = _FS_RIGHTS_BY_ABI.get(version, (1 << 16) - 1)
    attribute = (ctypes.c_uint64 * 3)(
        rights,
        _TCP_BIND_AND_CONNECT if version >= 4 else 0,
        _SCOPE_ABSTRACT_SOCKET_AND_SIGNAL if version >= 6 else 0,
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = syscall("landlock_create_ruleset", _CREATE, attribute, size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, rights & (_EXECUTE | _READ_FILE | _READ_DIR))
        for path in writable:
            _allow(ruleset, path, rights)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall("landlock_restrict_self", _RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
        rule = _Rule(allowed=allowed, parent=parent)
        syscall(
            f"landlock_add_rule({path})", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0
        )
    finally:
        os.close(parent)
