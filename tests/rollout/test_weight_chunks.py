"""Checksums of tensors, and tensors in shared memory."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from rollout_models import shared_chunk
from tensor_specs import spec

from ctrl_megatron.parallel import hosts
from ctrl_megatron.parallel.hosts import SHARED_MEMORY, own_segment_prefix
from ctrl_megatron.resharding.transports.shared_memory import (
    SharedSegment,
    remove_segment,
    remove_segments,
    segment_names,
)
from ctrl_megatron.rollout.transports import read_chunk
from ctrl_megatron.rollout.weight_chunks import WeightChunk, spec_bytes, tensor_at, weight_chunk
from ctrl_megatron.rollout.weight_update import checksums, tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_is_that_of_the_contiguous_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4).to(dtype)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert tensor_checksum(tensor) == blake3(raw).hexdigest()[:32]
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    changed = tensor.clone()
    changed[5, 3] += 1
    assert tensor_checksum(changed) != tensor_checksum(tensor)


def test_the_sign_of_zero_does_not_count() -> None:
    assert tensor_checksum(torch.tensor([-0.0, 1.0])) == tensor_checksum(torch.tensor([0.0, 1.0]))
    assert tensor_checksum(torch.tensor(2.0)) == tensor_checksum(torch.tensor([2.0]))


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"ctrl-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    path.unlink(missing_ok=True)


def test_a_chunk_is_read_where_its_tensors_lie(segment: Path) -> None:
    first, second = torch.randn(3, 2), torch.randn(5).bfloat16()
    raw = second.view(torch.uint8).numpy().tobytes()
    segment.write_bytes(first.numpy().tobytes() + b"\0" * 8 + raw)
    places = [(spec("b", (5,), "bfloat16"), 32), (spec("a", (3, 2)), 0)]
    # The JSON as it arrives in the engine's process.
    chunk: WeightChunk = json.loads(json.dumps(shared_chunk(segment.name, places)))
    found = dict(read_chunk(chunk))
    assert torch.equal(found["a"], first) and torch.equal(found["b"], second)


@pytest.mark.parametrize(("offset", "shape"), [(4, (2, 3)), (0, (7,)), (-4, (1,)), (2, (1,))])
def test_a_tensor_outside_its_segment_is_refused(
    segment: Path, offset: int, shape: tuple[int, ...]
) -> None:
    segment.write_bytes(b"\0" * 24)
    with pytest.raises(ValueError, match="does not fit memory of 24 bytes"):
        list(read_chunk(shared_chunk(segment.name, [(spec("a", shape), offset)])))


@pytest.mark.parametrize("name", ["../etc/passwd", "", ".", "a/b"])
def test_a_segment_is_named_not_pointed_to(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a shared-memory segment"):
        list(read_chunk(shared_chunk(name, [])))


@pytest.mark.parametrize(
    "receiver", ["no_such_module_anywhere:Receiver", "ctrl_megatron.types:Receiver", "plain", ""]
)
def test_a_receiving_half_that_cannot_be_imported_is_named(receiver: str) -> None:
    with pytest.raises(ValueError, match=rf"'{receiver}' is no importable module:Class"):
        list(read_chunk(weight_chunk(receiver, [], {})))


def test_a_missing_segment_is_named() -> None:
    with pytest.raises(ValueError, match="ctrl-none-such does not exist"):
        list(read_chunk(shared_chunk("ctrl-none-such", [])))


def test_what_the_ranks_write_an_engine_reads() -> None:
    first, second = torch.randn(3, 2), torch.randn(5).bfloat16()
    specs = [spec("a", (3, 2)), spec("b", (5,), "bfloat16")]
    (name,) = segment_names(1)
    writer = SharedSegment(name, 64, create=True)
    try:
        # Another rank of the host.
        other = SharedSegment(name, 64, create=False)
        tensor_at(writer.memory, specs[0], 0).copy_(first)
        tensor_at(other.memory, specs[1], 32).copy_(second)
        found = dict(read_chunk(shared_chunk(name, [(specs[0], 0), (specs[1], 32)])))
        assert torch.equal(found["a"], first) and torch.equal(found["b"], second)
    finally:
        remove_segments(lambda pid: pid == os.getpid())
    assert not (Path("/dev/shm") / name).exists()


def test_a_container_beside_this_one_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(hosts, "pid_namespace", lambda: 1)
        (name,) = segment_names(1)
    path = Path("/dev/shm") / name
    path.symlink_to("/proc/1/fd/0")
    try:
        remove_segments(lambda pid: pid == os.getpid())
        assert path.is_symlink()
    finally:
        path.unlink()


def test_directories_that_a_killed_engine_has_left_are_removed() -> None:
    left = Path(tempfile.mkdtemp(prefix=own_segment_prefix(), dir=SHARED_MEMORY))
    (left / "1").mkdir()
    (left / "1/adapter_model.safetensors").touch()
    remove_segments(lambda pid: pid == os.getpid())
    assert not left.exists()


def test_memory_outlives_its_name_and_is_found_again_under_it() -> None:
    want = spec("a", (4,))
    (name,) = segment_names(1)
    writer = SharedSegment(name, 16, create=True)
    chunk = shared_chunk(name, [(want, 0)])
    try:
        ((_, first),) = read_chunk(chunk)
        remove_segment(name)
        with pytest.raises(ValueError, match=f"{name} does not exist"):
            list(read_chunk(chunk))
        writer.publish()
        tensor_at(writer.memory, want, 0).copy_(torch.arange(4.0))
        ((_, again),) = read_chunk(chunk)
    finally:
        remove_segment(name)
    # A reader maps it once.
    assert again.data_ptr() == first.data_ptr() and torch.equal(again, torch.arange(4.0))


def test_another_segment_under_the_same_name_is_another(segment: Path) -> None:
    chunk = shared_chunk(segment.name, [(spec("a", (2,)), 0)])
    for values in ([1.0, 2.0], [3.0, 4.0]):
        segment.write_bytes(torch.tensor(values).numpy().tobytes())
        ((_, found),) = read_chunk(chunk)
        assert found.tolist() == values
        segment.unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checksums_of_threads_are_those_of_one(dtype: torch.dtype) -> None:
    tensors = {str(n): torch.randn(70_000 * n).to(dtype) for n in range(1, 9)}
    for tensor in tensors.values():
        tensor[::7] = -0.0
    zeros = {name: tensor + 0.0 for name, tensor in tensors.items()}
    found = checksums(tensors.items())
    assert found == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    raw = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in zeros.items()}
    assert found == {name: blake3(given).hexdigest()[:32] for name, given in raw.items()}


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int7"):
        spec_bytes(spec("x", (1,), "int7"))
