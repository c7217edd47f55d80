"""Bytes between the memory of the trainer's processes and that of engines: NCCL, and gloo behind
the same interface.

NCCL's library is called by its own functions, so that both sides may have different builds of
torch. No GPU has run it. Processes on a CPU use gloo.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ctrl_megatron.parallel.store import SingleAddressTCPStore

Library = Literal["nccl", "gloo"]
Messages = Sequence[tuple[torch.Tensor, int]]
"""(memory, uint8; the number of the member that it goes to or comes from)."""
MEETING_SECONDS = 120.0
"""Within this time all members of a group must have met."""
_LONGEST_WAIT = timedelta(hours=1)
_POLL_SECONDS = 0.0005


class PendingMessages(Protocol):
    """Messages that are being sent or received."""

    def wait_until_ended(self, seconds: float) -> bool:
        """Wait, for about ``seconds`` at most where the library allows it; returns whether all
        messages have gone or come. RuntimeError if a member is gone."""
        ...


class Communicator(Protocol):
    """A group of processes, numbered from 0. Messages between two members arrive in the order in
    which they were sent."""

    def send(self, messages: Messages) -> PendingMessages:
        """Begin to send; the memory must not change before the messages have gone."""
        ...

    def receive(self, messages: Messages) -> PendingMessages:
        """Begin to receive."""
        ...

    def close(self) -> None:
        """Leave the group, whatever is on its way."""
        ...


def library_version(library: Library) -> str:
    """The library's name and version; members with different ones may not understand each other."""
    if library == "gloo":
        return f"gloo of torch {torch.__version__}"
    number = ctypes.c_int()
    _nccl_call("ncclGetVersion", ctypes.byref(number))
    # NCCL's own macro NCCL_VERSION, since 2.9.
    return f"NCCL {number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def connect_or_serve_store(host: str, port: int = 0) -> Any:
    """The store at an address, in which members of groups meet; without a port a new one, served by
    this process at a free ``port``. RuntimeError if there is none."""
    limit, serves = timedelta(seconds=MEETING_SECONDS), port == 0
    return SingleAddressTCPStore(
        host, port, is_master=serves, wait_for_workers=False, timeout=limit
    )


def join_communicator(
    library: Library, store: Any, group: str, number: int, size: int
) -> Communicator:
    """The group of that name, of ``size`` members that meet in ``store``, as its member ``number``.
    Collective over the members.

    RuntimeError if they do not meet.
    """
    group_store = dist.PrefixStore(group, store)  # pyright: ignore[reportPrivateImportUsage]
    # NCCL waits without a limit for members that do not come, so all are there before it begins.
    group_store.set(f"{number}", "there")
    group_store.wait([f"{other}" for other in range(size)], timedelta(seconds=MEETING_SECONDS))
    kind = NcclCommunicator if library == "nccl" else GlooCommunicator
    return kind(group_store, number, size)


class GlooCommunicator:
    """``Communicator`` between host memories. A member that is lost is noticed at once."""

    def __init__(self, store: Any, number: int, size: int) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, number, size, _LONGEST_WAIT)

    def send(self, messages: Messages) -> PendingMessages:
        return _OverGloo([self._group.send([memory], peer, 0) for memory, peer in messages])

    def receive(self, messages: Messages) -> PendingMessages:
        return _OverGloo([self._group.recv([memory], peer, 0) for memory, peer in messages])

    def close(self) -> None:
        self._group.abort()


class _OverGloo:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait_until_ended(self, seconds: float) -> bool:
        """The group's own limit takes the place of ``seconds``, which gloo would not survive."""
        try:
            for work in self._works:
                work.wait()
        finally:
            # Operations keep the connections of their group open.
            self._works = []
        return True


class NcclCommunicator:
    """``Communicator`` between the current devices of its members, which must be different ones.

    It has a stream of its own, which waits for what the caller's stream has begun before.
    """

    _UINT8 = 1

    class _UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 128),)

    def __init__(self, store: Any, number: int, size: int) -> None:
        unique = self._UniqueId()
        if number == 0:
            _nccl_call("ncclGetUniqueId", ctypes.byref(unique))
            store.set("id", ctypes.string_at(ctypes.byref(unique), 128).hex())
        else:
            unique = self._UniqueId.from_buffer_copy(bytes.fromhex(store.get("id").decode()))
        self._group = ctypes.c_void_p()
        _nccl_call("ncclCommInitRank", ctypes.byref(self._group), size, unique, number)
        self._stream = torch.cuda.Stream()

    def send(self, messages: Messages) -> PendingMessages:
        return self._begin("ncclSend", messages)

    def receive(self, messages: Messages) -> PendingMessages:
        return self._begin("ncclRecv", messages)

    def _begin(self, function: str, messages: Messages) -> PendingMessages:
        self._stream.wait_stream(torch.cuda.current_stream())
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        _nccl_call("ncclGroupStart")
        for memory, peer in messages:
            place, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
            _nccl_call(function, place, size, self._UINT8, peer, self._group, stream)
        _nccl_call("ncclGroupEnd")
        return _OnStream(self, self._stream.record_event())

    def check(self) -> None:
        """RuntimeError if NCCL has lost a member."""
        state = ctypes.c_int()
        _nccl_call("ncclCommGetAsyncError", self._group, ctypes.byref(state))
        if state.value:
            raise RuntimeError(f"NCCL has lost a member: {_nccl_words(state.value)}")

    def close(self) -> None:
        _nccl_call("ncclCommAbort", self._group)


class _OnStream:
    def __init__(self, group: NcclCommunicator, event: Any) -> None:
        self._group, self._event = group, event

    def wait_until_ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._event.query():
            self._group.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


@cache
def _nccl() -> Any:
    # The one that torch has loaded.
    return ctypes.CDLL("libnccl.so.2")


def _nccl_words(code: int) -> str:
    words = _nccl().ncclGetErrorString
    words.restype = ctypes.c_char_p
    return words(code).decode()


def _nccl_call(name: str, *arguments: Any) -> None:
    if code := getattr(_nccl(), name)(*arguments):
        raise RuntimeError(f"{name} failed: {_nccl_words(code)}")
