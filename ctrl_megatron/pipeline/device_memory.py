"""A GPU's memory: whether a run fits, before anything starts, and what each phase of it takes."""

from __future__ import annotations

import torch

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.memory.fit import require_fit
from ctrl_megatron.memory.shapes import model_shapes
from ctrl_megatron.models.layer_spec import has_transformer_engine
from ctrl_megatron.parallel.groups import ProcessGroups

_GIB = 2**30


def check_memory(config: Config, purpose: Purpose) -> None:
    """ValueError with phase, largest items and remedy where this rank's GPU cannot hold the run.

    Nothing is checked where there is no CUDA device: the host's memory is everybody's.
    """
    gpu_memory = total_memory()
    if gpu_memory is not None:
        kernels = "te" if has_transformer_engine() else "torch"
        shapes = model_shapes(config, purpose)
        require_fit(config, shapes, gpu_memory=gpu_memory, purpose=purpose, kernels=kernels)


def total_memory() -> int | None:
    """Bytes of this rank's CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(read_launch().local_rank).total_memory


class DeviceMemory:
    """Measures the phases of a rank's main thread, of which one may lie in another."""

    def __init__(self) -> None:
        self._open: list[int] = []
        self._found: dict[str, float] = {}

    def begin(self) -> None:
        """A phase begins."""
        self._fold_peak()
        self._open.append(0)

    def end(self, name: str) -> None:
        """The phase that began last ends."""
        self._fold_peak()
        free, total = torch.cuda.mem_get_info()
        for kind, size in (("peak", self._open.pop()), ("device", total - free)):
            key = f"memory/{name}_{kind}_gib"
            self._found[key] = max(self._found.get(key, 0.0), size / _GIB)

    def _fold_peak(self) -> None:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._open = [max(known, peak) for known in self._open]

    def take(self, groups: ProcessGroups) -> dict[str, float]:
        """Per phase since the last call, of the rank that has most: ``memory/NAME_peak_gib``, the
        most that PyTorch's tensors took, and ``memory/NAME_device_gib``, what all processes on the
        device, the engine's too, held at its end. Collective.
        """
        found, self._found = self._found, {}
        every = groups.from_all(found)
        names = dict.fromkeys(name for one in every for name in one)
        return {name: max(one.get(name, 0.0) for one in every) for name in names}


def device_memory(groups: ProcessGroups) -> DeviceMemory | None:
    """A new one where there is a GPU."""
    return DeviceMemory() if groups.device.type == "cuda" else None
