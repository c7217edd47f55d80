"""Which kernel computes attention over packed rows, by the GPU, the type and what is installed.

Transformer Engine takes variable-length rows through cuDNN or through flash-attn. Where neither has
a kernel for them it falls back to attention in plain torch, which gives rows that see a shared
prefix wrong log-probs or does not run; so it is not asked there.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

import torch

Kernel = Literal["segments", "transformer_engine", "varlen", "masked"]
"""``segments``: a CPU's fused kernel, segment by segment; ``varlen``: torch's flash attention;
``masked``: torch's attention with a mask, segment by segment, for whatever the others do not know.
"""
Capability = tuple[int, int]
_HALVES = (torch.bfloat16, torch.float16)
_FLASH: Capability = (8, 0)
"""Oldest GPUs of flash attention, torch's own and flash-attn."""
_CUDNN: tuple[Capability, Capability] = ((9, 0), (12, 0))
"""From which GPUs on, and up to which, cuDNN is known to have variable-length kernels (cuDNN 9.6 or
newer, as Transformer Engine 2.9 to 2.11 asks it)."""
_TE_MAJOR = 2
"""Of the oldest version that knows the mask of rows with a shared prefix."""


def attention_kernel(
    *,
    capability: Capability | None,
    dtype: torch.dtype,
    transformer_engine: str | None,
    flash_attn: bool,
) -> Kernel:
    """The kernel for a GPU of this compute capability (None: a CPU), for tensors of this type, with
    this version of Transformer Engine (None: not installed), flash-attn beside it or not.
    """
    if capability is None:
        return "segments"
    if dtype not in _HALVES:
        return "masked"
    by_flash = flash_attn and capability >= _FLASH
    by_cudnn = _CUDNN[0] <= capability < _CUDNN[1]
    known = int((transformer_engine or "0").partition(".")[0]) >= _TE_MAJOR
    if known and (by_flash or by_cudnn):
        return "transformer_engine"
    return "varlen" if capability >= _FLASH else "masked"


@cache
def kernel_on(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for tensors on ``device`` with what is installed here."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return attention_kernel(
        capability=capability,
        dtype=dtype,
        transformer_engine=_version("transformer-engine", "transformer_engine"),
        flash_attn=_version("flash-attn", "flash_attn") is not None,
    )


def why_not_transformer_engine(capability: Capability, dtype: torch.dtype) -> str:
    """For reports: why an installed Transformer Engine does not compute attention, and a remedy."""
    if dtype not in _HALVES:
        return "no kernel of Transformer Engine takes float32; use bfloat16"
    architecture = f"sm{capability[0]}{capability[1]}"
    if capability < _FLASH:
        return f"neither cuDNN nor flash-attn takes variable lengths on {architecture}"
    return f"cuDNN takes no variable lengths on {architecture}; install flash-attn for it"


def _version(distribution: str, module: str) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "0"
