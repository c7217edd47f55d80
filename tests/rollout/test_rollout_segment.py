"""Digests of tensors, and tensors in shared memory."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensor_specs import spec

from ctrl_megatron.rollout.digest import tensor_digest
from ctrl_megatron.rollout.engine import (
    Chunk,
    Slot,
)
from ctrl_megatron.rollout.segment import open_chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_is_that_of_the_contiguous_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 4).to(dtype)
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert tensor_digest(tensor) == hashlib.sha256(raw).hexdigest()[:32]
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous())
    changed = tensor.clone()
    changed[5, 3] = changed[5, 3] * 1.01 + 0.01
    assert tensor_digest(changed) != tensor_digest(tensor)


def test_the_sign_of_zero_does_not_count() -> None:
    assert tensor_digest(torch.tensor([-0.0, 1.0])) == tensor_digest(torch.tensor([0.0, 1.0]))
    assert tensor_digest(torch.tensor(2.0)) == tensor_digest(torch.tensor([2.0]))


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"ctrl-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    path.unlink(missing_ok=True)


def test_a_chunk_is_read_where_its_slots_lie(segment: Path) -> None:
    first, second = torch.randn(3, 2), torch.randn(5).bfloat16()
    raw = second.view(torch.uint8).numpy().tobytes()
    segment.write_bytes(first.numpy().tobytes() + b"\0" * 8 + raw)
    slots = (
        Slot(spec("b", (5,), "bfloat16"), 32),
        Slot(spec("a", (3, 2)), 0),
    )
    found = dict(open_chunk(Chunk(segment.name, slots)))
    assert torch.equal(found["a"], first) and torch.equal(found["b"], second)


@pytest.mark.parametrize(("offset", "shape"), [(4, (2, 3)), (0, (7,)), (-4, (1,)), (2, (1,))])
def test_a_slot_outside_its_segment_is_refused(
    segment: Path, offset: int, shape: tuple[int, ...]
) -> None:
    segment.write_bytes(b"\0" * 24)
    with pytest.raises(ValueError, match="does not fit segment"):
        list(open_chunk(Chunk(segment.name, (Slot(spec("a", shape), offset),))))


@pytest.mark.parametrize("name", ["../etc/passwd", "", ".", "a/b"])
def test_a_segment_is_named_not_pointed_to(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a shared-memory segment"):
        list(open_chunk(Chunk(name, ())))


def test_a_missing_segment_is_named() -> None:
    with pytest.raises(ValueError, match="ctrl-none-such does not exist"):
        list(open_chunk(Chunk("ctrl-none-such", ())))
