"""The calls into NCCL's library, which a record of them replaces."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ctrl_megatron.rollout import communicator
from ctrl_megatron.rollout.communicator import NcclCommunicator, library_version

INVALID_USAGE = 5


class Nccl:
    """``libnccl.so.2`` with the arguments of its header; a fifth return value is an error."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.asynchronous = 0
        self.ncclGetErrorString = lambda code: f"error {code}".encode()

    def ncclGetVersion(self, number: Any) -> int:
        number._obj.value = 22705
        return 0

    def ncclGetUniqueId(self, unique: Any) -> int:
        unique._obj.internal = b"of the first"
        return 0

    def ncclCommInitRank(self, group: Any, size: int, unique: Any, number: int) -> int:
        self.calls.append(("init", size, unique.internal, number))
        group._obj.value = 77
        return 0 if number < size else INVALID_USAGE

    def ncclGroupStart(self) -> int:
        self.calls.append(("start",))
        return 0

    def ncclGroupEnd(self) -> int:
        self.calls.append(("end",))
        return 0

    def ncclSend(self, *given: Any) -> int:
        return self._message("send", *given)

    def ncclRecv(self, *given: Any) -> int:
        return self._message("receive", *given)

    def _message(
        self, name: str, place: Any, count: Any, kind: int, peer: int, group: Any, stream: Any
    ) -> int:
        # ncclUint8 is 1.
        assert (kind, group.value, stream.value) == (1, 77, 55)
        self.calls.append((name, place.value, count.value, peer))
        return 0

    def ncclCommGetAsyncError(self, group: Any, state: Any) -> int:
        state._obj.value = self.asynchronous
        return 0

    def ncclCommAbort(self, group: Any) -> int:
        self.calls.append(("abort", group.value))
        return 0


class Stream:
    cuda_stream = 55

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.answers = [False, False, True]

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def record_event(self) -> Any:
        return self

    def query(self) -> bool:
        return self.answers.pop(0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    found = Nccl()
    monkeypatch.setattr(communicator, "_nccl", lambda: found)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    return found


def test_the_version_is_read_from_the_library(library: Nccl) -> None:
    assert library_version("nccl") == "NCCL 2.27.5"
    assert torch.__version__ in library_version("gloo")


def test_messages_of_one_call_are_one_group_on_a_stream_of_their_own(library: Nccl) -> None:
    store, memory = dist.HashStore(), torch.zeros(10, dtype=torch.uint8)
    group = NcclCommunicator(store, 0, 3)
    other = NcclCommunicator(store, 2, 3)
    assert library.calls == [("init", 3, b"of the first", 0), ("init", 3, b"of the first", 2)]
    library.calls.clear()
    sent = group.send([(memory[:4], 1), (memory[4:], 2)])
    first = memory.data_ptr()
    assert library.calls == [("start",), ("send", first, 4, 1), ("send", first + 4, 6, 2), ("end",)]
    assert group._stream.waited == ["the caller's"]  # type: ignore[attr-defined]
    assert not sent.wait_until_ended(0.0)
    assert sent.wait_until_ended(1.0)
    library.calls.clear()
    other.receive([(memory, 0)])
    assert library.calls == [("start",), ("receive", first, 10, 0), ("end",)]
    group.close()
    assert library.calls[-1] == ("abort", 77)


def test_lost_members_and_refused_calls_raise(library: Nccl) -> None:
    group = NcclCommunicator(dist.HashStore(), 0, 1)
    running = group.send([])
    library.asynchronous = 6
    with pytest.raises(RuntimeError, match="lost a member: error 6"):
        running.wait_until_ended(1.0)
    with pytest.raises(RuntimeError, match="ncclCommInitRank failed: error 5"):
        store = dist.HashStore()
        store.set("id", bytes(128).hex())
        NcclCommunicator(store, 1, 1)


def test_an_identity_is_as_long_as_in_the_header() -> None:
    assert ctypes.sizeof(NcclCommunicator._UniqueId) == 128
