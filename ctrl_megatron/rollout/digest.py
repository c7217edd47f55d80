"""Digests of weights, for comparing what was sent with what an engine holds."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch

# Small enough to stay in a core's cache between the two passes over it.
_PIECE = 2**17


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hex digest (SHA-256, first 128 bits) of the tensor's bytes, contiguous, in its own dtype.

    A negative zero counts as zero: some engines hold weights in a packed form from which its sign
    cannot be read back, and it never changes what a model computes. SHA-256 because processors
    have instructions for it: one to two GB/s per core there.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = sha256()
    for piece in flat.split(_PIECE):
        plain = piece + 0.0 if flat.is_floating_point() else piece
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def digest_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest of each named tensor; only one tensor is looked at at a time."""
    return {name: tensor_digest(tensor) for name, tensor in tensors}
