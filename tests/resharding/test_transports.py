"""Media for weights: how they are chosen, and that both halves of the built-in ones fit."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from test_plan import model

from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.hosts import Hosts
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.resharding import transports as sending
from ctrl_megatron.resharding.buckets import Buckets
from ctrl_megatron.resharding.plan import EngineLayout, Rectangle, hf_specs
from ctrl_megatron.resharding.transports import sender_class
from ctrl_megatron.rollout import transports as receiving
from ctrl_megatron.rollout.device_memory import lock_pages
from ctrl_megatron.rollout.transports import read_chunk
from ctrl_megatron.rollout.transports.shared_memory import SharedMemoryReceiver
from ctrl_megatron.rollout.weight_chunks import weight_chunk

BUILT_IN = [module.name for module in iter_modules(sending.__path__)]
SHAPE = model(hidden=64, layers=3)
SPECS = hf_specs(SHAPE, "float32")
NUMBERS = {spec.name: float(number) for number, spec in enumerate(SPECS)}


class OneRank:
    """``ProcessGroups`` of a single process, without torch.distributed."""

    is_first_of_host, rank, size = True, 0, 1

    def barrier(self) -> None:
        """There is no other rank to wait for."""

    host_index, hosts = 0, Hosts(names=("here",), of_rank=(0,))

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_from_host(self, value: Any) -> dict[int, Any]:
        return {0: value}


class Numbers:
    """A ``WeightSource`` whose tensors have one value each."""

    engine_layout = EngineLayout(dtype="float32", bucket_bytes=60_000)
    shape, trainer_layout, te_names, specs = SHAPE, Layout(), False, SPECS
    model, kept = None, False

    def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
        return torch.full(rectangle.piece.extent, NUMBERS[rectangle.piece.hf])


def buckets_of(source: Any) -> Buckets:
    groups: Any = OneRank()
    return Buckets(source, groups)


def own_names() -> list[str]:
    """This process's names in /dev/shm."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"ctrl-{os.getpid()}-")]


def test_both_halves_of_every_medium_are_there() -> None:
    assert "shared_memory" in BUILT_IN
    halves = [module.name for module in iter_modules(receiving.__path__)]
    # Parts of tensors are read where whole ones are.
    assert halves == [name for name in BUILT_IN if name != "shards"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_sent_is_read(name: str) -> None:
    groups: Any = OneRank()
    sender, source = sender_class(name)(groups), Numbers()
    for _ in range(2):
        waited, found = [], dict[str, torch.Tensor]()
        with sender.send(source, waited.append) as buckets:  # type: ignore[arg-type]
            for bucket in buckets:
                # As it arrives in the engine's process.
                chunk = json.loads(json.dumps(bucket.chunk))
                read = {key: tensor.clone() for key, tensor in read_chunk(chunk)}
                sent = dict(bucket.tensors)
                assert read.keys() == sent.keys()
                assert all(torch.equal(read[key], tensor) for key, tensor in sent.items())
                found |= read
        assert found.keys() == NUMBERS.keys()
        for spec in SPECS:
            assert torch.equal(found[spec.name], torch.full(spec.shape, NUMBERS[spec.name]))
        # The memory of three buckets is used in turn: each is read before it is filled again.
        assert waited == list(range(len(buckets_of(source).parts) - 3)) != []
        assert own_names() == []


def test_kept_buckets_are_filled_once_and_read_again() -> None:
    class Kept(Numbers):
        kept = True

        def __init__(self) -> None:
            self.read: list[str] = []

        def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
            self.read.append(rectangle.param)
            return super().values(chunk, rectangle)

    groups: Any = OneRank()
    sender, source, other = sender_class("shared_memory")(groups), Kept(), Numbers()

    def push(source: Any, most: int = 99) -> tuple[dict[str, torch.Tensor], list[bool]]:
        found, kept = dict[str, torch.Tensor](), []
        with sender.send(source, lambda bucket: None) as buckets:
            for bucket in itertools.islice(buckets, most):
                found |= {name: tensor.clone() for name, tensor in read_chunk(bucket.chunk)}
                kept.append(bucket.kept)
        return found, kept

    # A push that is lost after its first bucket leaves nothing that can be read again.
    push(source, most=1)
    begun = len(source.read)
    first, moved = push(source)
    every = len(source.read) - begun
    assert 0 < begun < every and not any(moved)
    push(other)
    again, moved = push(source)
    assert len(source.read) == begun + every and all(moved)
    assert first.keys() == again.keys() == NUMBERS.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert own_names() == []


class Runtime:
    """The calls of CUDA's runtime for page-locked memory; ``locked`` is what is locked now."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        assert place not in self.locked and flags == 1
        self.locked[place] = size
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        del self.locked[place]
        return 0


def test_host_memory_is_page_locked_while_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    groups: Any = OneRank()
    receiver = SharedMemoryReceiver()

    def push(sender: Any, source: Any) -> None:
        with sender.send(source, lambda bucket: None) as buckets:
            for bucket in buckets:
                list(receiver.tensors(bucket.chunk))

    class Large(Numbers):
        engine_layout = EngineLayout(dtype="float32", bucket_bytes=1 << 22)

    class Kept(Numbers):
        kept = True

    sender, sizes = sender_class("shared_memory")(groups), runtime.locked.values
    push(sender, Numbers())
    ends = [places[-1].end for places in buckets_of(Numbers()).places]
    # Three segments, each in the sender's process and in the engine's.
    assert list(sizes()) == [max(ends)] * 6
    # Larger ones replace the sender's; the engine's receiver still has the old ones mapped.
    push(sender, Large())
    assert len(sizes()) == 3 + 3 + 1
    # Senders of one push, as those of an export, leave nothing locked.
    del sender
    assert len(sizes()) == 3 + 1
    # Of the proxy each bucket's own bytes, in the engine's process only: ranks fill it from files.
    runtime.locked.clear()
    receiver = SharedMemoryReceiver()
    push(sender_class("shared_memory")(groups), Kept())
    assert list(sizes()) == ends[-8:]


def test_a_lock_that_is_refused_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuses(Runtime):
        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Refuses)
    lock_pages(torch.zeros(8, dtype=torch.uint8))()
    assert "8 bytes of host memory are not page-locked (CUDA error 2)" in capsys.readouterr().err


def test_a_shard_for_an_engine_of_another_size_is_refused() -> None:
    place = {"segments": ["one", "two"], "workers": 2, "offsets": [0], "locked": 0}
    receiver = "ctrl_megatron.rollout.transports.shared_memory:SharedMemoryReceiver"
    chunk = weight_chunk(receiver, SPECS[:1], place)
    with pytest.raises(ValueError, match=r"cut for an engine of 2 workers; this one has 1"):
        list(read_chunk(chunk))


def test_a_push_that_fails_leaves_no_name_behind() -> None:
    groups: Any = OneRank()
    sender = sender_class("shared_memory")(groups)
    with (
        pytest.raises(RuntimeError, match="half-way"),
        sender.send(Numbers(), lambda bucket: None) as buckets,  # type: ignore[arg-type]
    ):
        next(buckets)
        assert len(own_names()) == 3
        raise RuntimeError("half-way")
    assert own_names() == []


def test_close_removes_names_that_a_push_has_left() -> None:
    groups: Any = OneRank()
    sender = sender_class("shared_memory")(groups)
    context = sender.send(Numbers(), lambda bucket: None)  # type: ignore[arg-type]
    next(context.__enter__())
    assert len(own_names()) == 3
    # As another thread does when the run ends in the middle of a push.
    sender.close()
    assert own_names() == []


def test_a_medium_of_ones_own_is_named_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "medium_of_mine.py").write_text("class Pigeons:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert sender_class("medium_of_mine:Pigeons").__name__ == "Pigeons"
    finally:
        del sys.modules["medium_of_mine"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "carrier_pigeon",
            "is none of cuda_ipc, nccl, shards, shared_memory; name one of them, or module:Class",
        ),
        ("no_such_module_anywhere:Sender", "cannot import 'no_such_module_anywhere:Sender'"),
        ("ctrl_megatron.types:Sender", "cannot import 'ctrl_megatron.types:Sender'"),
    ],
)
def test_an_unknown_medium_is_refused_by_its_key(name: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"actor_rollout_ref\.rollout\.weight_transport.*{words}"):
        sender_class(name)
