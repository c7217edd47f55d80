"""Refuses, before anything starts, a run whose GPUs are too small for it."""

from __future__ import annotations

import torch

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.memory.fit import require_fit
from ctrl_megatron.memory.shapes import model_shapes
from ctrl_megatron.models.layer_spec import has_transformer_engine


def check_memory(config: Config, purpose: Purpose) -> None:
    """ValueError with phase, largest items and remedy where this rank's GPU cannot hold the run.

    Nothing is checked where there is no CUDA device: the host's memory is everybody's.
    """
    gpu_memory = device_memory()
    if gpu_memory is not None:
        kernels = "te" if has_transformer_engine() else "torch"
        shapes = model_shapes(config, purpose)
        require_fit(config, shapes, gpu_memory=gpu_memory, purpose=purpose, kernels=kernels)


def device_memory() -> int | None:
    """Bytes of this rank's CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(read_launch().local_rank).total_memory
