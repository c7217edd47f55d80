"""The metrics of a GPU's memory, against stand-ins for PyTorch's counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrl_megatron.metrics import Timeline
from ctrl_megatron.steps.performance import DeviceMemory

GIB = 2**30


class Allocator:
    """PyTorch's counters of one device, and an engine beside it, in GiB."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held = self.peak = 1.0
        self.engine = 0.0
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: int(self.peak * GIB))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        patch.setattr(torch.cuda, "mem_get_info", self.info)
        self.ranges: list[str] = []
        patch.setattr(torch.cuda.nvtx, "range_push", self.ranges.append)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: self.ranges.append("end"))

    def reset(self) -> None:
        self.peak = self.held

    def info(self) -> tuple[int, int]:
        return int((80 - self.held - self.engine) * GIB), 80 * GIB

    def pass_with(self, extra: float) -> None:
        self.peak = max(self.peak, self.held + extra)


def groups_of(*others: dict[str, float]) -> Any:
    return SimpleNamespace(all_gather=lambda mine: [mine, *others])


def test_phases_keep_their_own_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, memory = Allocator(monkeypatch), DeviceMemory()
    timeline = Timeline(meter=memory)
    with timeline.phase("update"):
        allocator.pass_with(20)
        with timeline.phase("push"):
            allocator.pass_with(3)
            allocator.engine = 30
    with timeline.phase("update"):
        allocator.pass_with(5)
    # A node that runs aside is no phase of the device.
    with timeline.phase("sandbox", kind="host"):
        allocator.pass_with(70)
    with timeline.phase("save"):
        pass
    found = memory.take_peak_metrics(
        groups_of({"memory/save_peak_gib": 9.0, "memory/elsewhere_peak_gib": 2.0})
    )
    assert found == {
        "memory/update_peak_gib": 21,
        "memory/update_device_gib": 31,
        "memory/push_peak_gib": 4,
        "memory/push_device_gib": 31,
        "memory/save_peak_gib": 9,
        "memory/save_device_gib": 31,
        "memory/elsewhere_peak_gib": 2,
    }
    assert memory.take_peak_metrics(groups_of()) == {}
    assert allocator.ranges == ["update", "push", "end", "end", "update", "end", "save", "end"]
