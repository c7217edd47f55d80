"""Optimizer state that stays in host memory and visits the device a part at a time, while Adam
steps on it. The kernels and their results are those of a state that stays on the device.

A step moves the state to the device and back: with master weights 24 bytes per parameter, which
take about 4 s for 7 billion parameters at 50 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctrl_megatron.models.offload import OffloadedTensors

PART_BYTES = 1 << 30
"""Bytes of state that visit together; a larger tensor's state visits alone."""
StateOf = Callable[[torch.Tensor], Iterable[torch.Tensor]]
"""The tensors that Adam has for one that it steps on, and the latter itself if it is no weight of
the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """Consecutive tensors of one of Adam's groups, and the memory of their state."""

    group: int
    stepped: Sequence[torch.Tensor]
    memory: OffloadedTensors


class HostAdamState:
    """The state of ``adam``, an optimizer of torch or of Transformer Engine."""

    def __init__(self, adam: Any, state_of: StateOf, make: Callable[[torch.Tensor], None]) -> None:
        """``make`` creates the state of one tensor on the device, from which it leaves at once."""
        self._adam = adam
        self.parts: list[StatePart] = []
        for group, options in enumerate(adam.param_groups):
            for stepped in _parts(options["params"]):
                for tensor in stepped:
                    make(tensor)
                memory = OffloadedTensors(_all_of(stepped, state_of), keep=True)
                memory.offload()
                self.parts.append(StatePart(group=group, stepped=stepped, memory=memory))

    @property
    def memory(self) -> list[OffloadedTensors]:
        return [part.memory for part in self.parts]

    def step(self, stepped: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Adam's step; ``stepped`` is called with the tensors of each part while their state is on
        the device."""
        groups = self._adam.param_groups
        whole = [group["params"] for group in groups]
        before = [group.get("step") for group in groups]
        try:
            for part in self.parts:
                for group in groups:
                    group["params"] = []
                group = groups[part.group]
                group["params"] = list(part.stepped)
                # Transformer Engine's Adam counts in the group, once a call.
                if (count := before[part.group]) is not None:
                    group["step"] = count
                else:
                    group.pop("step", None)
                part.memory.onload()
                self._adam.step()
                stepped(part.stepped)
                part.memory.offload()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``tensors`` in order, cut where their float32 master weights and moments exceed a part."""
    part: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        own = 12 * tensor.numel()
        if part and size + own > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += own
    if part:
        yield part


def _all_of(
    stepped: Sequence[torch.Tensor], state_of: StateOf
) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: (state for tensor in stepped for state in state_of(tensor))
