"""The choice of the kernel for attention over packed rows: by GPU, dtype and installed libraries.

Transformer Engine computes variable-length rows with cuDNN or flash-attn. If neither has a kernel
for them, it falls back to attention in plain torch, which computes wrong log-probs for rows with a
shared prefix or does not run, so it is not used there.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

import torch

Kernel = Literal["segments", "transformer_engine", "varlen", "masked"]
"""``segments``: a CPU's fused kernel, segment by segment; ``varlen``: torch's flash attention;
``masked``: torch's attention with a mask, segment by segment, for everything else.
"""
Capability = tuple[int, int]
_HALVES = (torch.bfloat16, torch.float16)
_FLASH: Capability = (8, 0)
"""Lowest compute capability of flash attention, in torch and in flash-attn."""
_CUDNN: tuple[Capability, Capability] = ((9, 0), (12, 0))
"""Lowest and highest compute capability for which cuDNN has variable-length kernels (9.6 or newer,
as called by Transformer Engine 2.9 to 2.11)."""
_TE_MAJOR = 2
"""The oldest version of Transformer Engine with the mask of rows with a shared prefix."""


def attention_kernel(
    *,
    capability: Capability | None,
    dtype: torch.dtype,
    transformer_engine: str | None,
    flash_attn: bool,
) -> Kernel:
    """The kernel for a GPU of this compute capability (None: a CPU) and tensors of this dtype, with
    this version of Transformer Engine (None: not installed) and with or without flash-attn.
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
def attention_kernel_on(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for tensors on ``device`` with the libraries of this environment."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return attention_kernel(
        capability=capability,
        dtype=dtype,
        transformer_engine=_version("transformer-engine", "transformer_engine"),
        flash_attn=_version("flash-attn", "flash_attn") is not None,
    )


def why_not_transformer_engine(capability: Capability, dtype: torch.dtype) -> str:
    """Why an installed Transformer Engine does not compute attention, with a remedy."""
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
