"""A system call filter, written without a library. It allows what a program needs and denies what
affects other processes.

Denied: new processes and programs, sockets, signals to others, tracing, anonymous executable memory
files, shared memory outside the address-space limit, keys, eBPF, mounts, namespaces, clocks and
scheduling, and signals through the owner of a descriptor. Also denied: resources that the machine
or the user has only once (both kinds of asynchronous I/O, timers that hold a signal), and
operations that would turn the library files, which all jobs share, into a channel between jobs
(locks, watches, leases, queries and hints about the page cache). Threads work. Where only Landlock
protects the machine's files, operations that Landlock does not control are denied too. Source:
Linux ``include/uapi/linux/seccomp.h`` and ``bpf_common.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os

from ctrl_megatron.sandbox.jail.linux import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, machine, prctl

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
_ARGUMENT_OFFSET, _SECOND_OFFSET, _THIRD_OFFSET = 16, 24, 32
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_FIRST_UNKNOWN = 463
"""First number of the system calls newer than this list; for the program they do not exist."""
_FILTER_MODE = 2
_OWN_PID = 0xFFFFFFFF
"""Placeholder in a compiled filter; the process that installs the filter replaces it by its own
pid."""

DENIED: dict[str, tuple[int, ...]] = {
    "x86_64": (
        *(41, 42, 43, 49, 50, 288),  # socket connect accept bind listen accept4
        *(57, 58, 59, 322),  # fork vfork execve execveat (see _EXECUTE, _START)
        *(101, 310, 311, 312, 440),  # ptrace process_vm_readv/writev kcmp process_madvise
        *(200, 129, 297, 424, 434, 438),  # tkill rt_(tg)sigqueueinfo pidfd_send_signal/open/getfd
        *(319, 447, 29, 30, 31, 67),  # memfd_create memfd_secret shmget shmat shmctl shmdt
        *(64, 65, 66, 220, 68, 69, 70, 71),  # sem* msg*
        *(240, 241, 242, 243, 244, 245),  # mq_*
        *(248, 249, 250, 321, 298, 323),  # keys bpf perf_event_open userfaultfd
        *(425, 426, 427),  # io_uring
        *(206, 207, 208, 209, 210, 333),  # io_setup destroy getevents submit cancel pgetevents
        *(222,),  # timer_create
        *(165, 166, 155, 161, 428, 429, 430, 431, 432, 433, 442),  # mount family
        *(272, 308),  # unshare setns
        *(203, 144, 142, 314, 141, 251, 239, 237, 238, 256, 279),  # scheduling, NUMA
        *(133, 259, 303, 304, 300),  # mknod(at) name_to/open_by_handle fanotify
        *(135, 163, 179, 164, 159, 227, 305, 170, 171, 103, 153),  # machine settings
        *(172, 173, 167, 168, 169, 246, 320, 175, 176, 313, 212, 443),  # ports swap reboot modules
        *(73, 162, 306, 277),  # flock sync syncfs sync_file_range: files that all jobs share
        *(253, 254, 255, 294, 301),  # inotify fanotify_mark
        *(221, 187, 27, 451, 327, 328),  # fadvise readahead mincore cachestat preadv2 pwritev2
        *(457, 458),  # statmount listmount
    ),
    "aarch64": (
        *(198, 203, 202, 200, 201, 242),
        *(221, 281),
        *(117, 270, 271, 272, 440),
        *(130, 138, 240, 424, 434, 438),
        *(279, 447, 194, 196, 195, 197),
        *(190, 193, 191, 192, 186, 189, 188, 187),
        *(180, 181, 182, 183, 184, 185),
        *(217, 218, 219, 280, 241, 282),
        *(425, 426, 427),
        *(0, 1, 4, 2, 3, 292),
        *(107,),
        *(40, 39, 41, 51, 428, 429, 430, 431, 432, 433, 442),
        *(97, 268),
        *(122, 119, 118, 274, 140, 30, 235, 237, 238, 239),
        *(33, 264, 265, 262),
        *(92, 89, 60, 170, 171, 112, 266, 161, 162, 116, 58),
        *(224, 225, 142, 104, 294, 105, 106, 273, 18, 443),
        *(32, 81, 267, 84),
        *(26, 27, 28, 263),
        *(223, 213, 232, 451, 286, 287),
        *(457, 458),
    ),
}
_EXECUTE = {"x86_64": (59,), "aarch64": (221,)}
_START = {"x86_64": (57, 58), "aarch64": ()}
_NEW_NAMESPACES = 0x7E020000
_INIT = 1
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SIGNALS = {"x86_64": (62, 234), "aarch64": (129, 131)}  # kill, tgkill
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_LOCAL, _STREAM, _KIND = 1, 1, 0xF
_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX = 8, 10, 15
_LOCKS = (5, 6, 7, 36, 37, 38)
"""Commands of record locks, of a process and of an open file: get, set, set and wait."""
_LEASE_AND_NOTIFY = (1024, 1025, 1026)
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_UNMEDIATED = {
    "x86_64": (
        *(90, 91, 268, 452),  # chmod fchmod fchmodat fchmodat2
        *(92, 93, 94, 260),  # chown fchown lchown fchownat
        *(132, 235, 261, 280),  # utime utimes futimesat utimensat
        *(188, 189, 190, 197, 198, 199),  # (l|f)setxattr (l|f)removexattr
    ),
    "aarch64": (
        *(52, 53, 452),
        *(54, 55),
        *(88,),
        *(5, 6, 7, 14, 15, 16),
    ),
}
"""Calls that change a file's metadata, which no version of Landlock controls. ``setxattrat`` and
``removexattrat`` are newer than the list."""
_SETFLAGS, _FSSETXATTR, _ENABLE_VERITY = 0x40086602, 0x401C5820, 0x40806685
_OPEN = {
    "x86_64": ((2, _SECOND_OFFSET), (257, _THIRD_OFFSET)),
    "aarch64": ((56, _THIRD_OFFSET),),
}
"""System calls ``open`` and ``openat``, and the offsets of their flags."""
_OPENAT2 = 437
_TRUNCATE = {"x86_64": 76, "aarch64": 45}
_ACCESS_MODE, _TO_TRUNCATE = 3, 0o1000
_LANDLOCK_TRUNCATES = 3
"""First version of Landlock that controls truncation."""


def compile_filter(
    name: str,
    *,
    execute: bool = False,
    processes: bool = False,
    landlock: int | None = None,
) -> list[Instruction]:
    """Compile the filter for architecture ``name``; comparisons with the process's own pid contain
    a placeholder.

    ``execute`` allows the process to execute another program. ``processes`` allows it to start
    processes (in no new namespace) and to signal all processes of its job except pid 1, which
    requires a pid namespace around the job. ``landlock`` is the version of Landlock that protects
    the machine's files, None if namespaces do; operations that it does not control are denied.
    """
    fail, allow = (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    absent = (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
    first_argument = (_LOAD, 0, 0, _ARGUMENT_OFFSET)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, _ARCHITECTURE[name]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if name == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), absent]
    program += [(_AT_LEAST, 0, 1, _FIRST_UNKNOWN), absent]
    # A filter cannot read the flags of clone3. Without it the C library uses clone.
    program += [(_EQUAL, 0, 1, _CLONE3), absent]
    # Threads are allowed. A job that may start processes must not leave its namespaces.
    bit, if_set, if_clear = (
        (_NEW_NAMESPACES, fail, allow) if processes else (_CLONE_THREAD, allow, fail)
    )
    program += _on_call(_CLONE[name], first_argument, (_ANY_BIT, 0, 1, bit), if_set, if_clear)
    target, if_same, if_other = (_INIT, fail, allow) if processes else (_OWN_PID, allow, fail)
    for number in _SIGNALS[name]:
        program += _on_call(number, first_argument, (_EQUAL, 0, 1, target), if_same, if_other)
    own = (_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, _OWN_PID)
    program += _on_call(_PRLIMIT[name], first_argument, *own, allow, fail)
    # A socket pair of any other kind can still send to an address, even if it cannot connect.
    stream = (_LOAD, 0, 0, _SECOND_OFFSET), (_MASK, 0, 0, _KIND), (_EQUAL, 1, 0, _STREAM)
    local = (_EQUAL, 1, 0, _LOCAL), fail
    program += _on_call(_SOCKETPAIR[name], first_argument, *local, *stream, fail, allow)
    # The owner of a descriptor receives a signal that the setter chooses when data arrives.
    refused = (_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX, *_LOCKS, *_LEASE_AND_NOTIFY)
    program += _deny_second(_FCNTL[name], refused)
    requests = (_FIOSETOWN, _SIOCSPGRP)
    denied = DENIED[name]
    if landlock is not None:
        requests += (_SETFLAGS, _FSSETXATTR, _ENABLE_VERITY)
        denied += _UNMEDIATED[name]
        if landlock < _LANDLOCK_TRUNCATES:
            denied += (_TRUNCATE[name],)
        for number, flags in _OPEN[name]:
            program += _on_call(number, *_judge_flags((_LOAD, 0, 0, flags), landlock), allow)
        # Its flags are behind a pointer, which a filter cannot read. The C library does not use it.
        program += [(_EQUAL, 0, 1, _OPENAT2), absent]
    program += _deny_second(_IOCTL[name], requests)
    permitted = (_EXECUTE[name] if execute else ()) + (_START[name] if processes else ())
    for number in denied:
        if number not in permitted:
            program += [(_EQUAL, 0, 1, number), fail]
    return [*program, allow]


def _deny_second(number: int, values: tuple[int, ...]) -> list[Instruction]:
    """Deny call ``number`` if its second argument is one of ``values``, else allow it."""
    tests: list[Instruction] = [
        (_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)
    ]
    allow, fail = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)
    return _on_call(number, (_LOAD, 0, 0, _SECOND_OFFSET), *tests, allow, fail)


def _judge_flags(load_flags: Instruction, landlock: int) -> list[Instruction]:
    """Deny ways to open a file that Landlock does not control."""
    fail = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    # Opened for neither reading nor writing: Landlock checks no right.
    tests = [load_flags, (_MASK, 0, 0, _ACCESS_MODE), (_EQUAL, 0, 1, _ACCESS_MODE), fail]
    if landlock < _LANDLOCK_TRUNCATES:
        # Opened for reading and truncated.
        mask = _ACCESS_MODE | _TO_TRUNCATE
        tests += [load_flags, (_MASK, 0, 0, mask), (_EQUAL, 0, 1, _TO_TRUNCATE), fail]
    return tests


def _on_call(number: int, *body: Instruction) -> list[Instruction]:
    return [(_EQUAL, 0, len(body), number), *body]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


class SyscallFilter:
    """A compiled filter, built once per worker and installed by each of its jobs."""

    def __init__(
        self, *, execute: bool = False, processes: bool = False, landlock: int | None = None
    ) -> None:
        program = compile_filter(machine(), execute=execute, processes=processes, landlock=landlock)
        self._code = (ctypes.c_uint64 * len(program))(
            *(code | yes << 16 | no << 24 | constant << 32 for code, yes, no, constant in program)
        )
        self._own_pid = [
            i for i, (code, *_, k) in enumerate(program) if code == _EQUAL and k == _OWN_PID
        ]

    def install(self) -> None:
        """Install the filter in the calling process, permanently. Raises ``KernelRefusal``."""
        pid = os.getpid()
        for index in self._own_pid:
            self._code[index] = (self._code[index] & 0xFFFFFFFF) | pid << 32
        program = _FilterProgram(len(self._code), ctypes.addressof(self._code))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(program))
