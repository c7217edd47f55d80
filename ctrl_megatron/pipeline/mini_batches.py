"""A training step's optimizer steps: which rows each of them sees, and what they report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch


def mini_batches(numbers: torch.Tensor, *, epochs: int) -> Iterator[torch.Tensor]:
    """Row indices of every mini-batch in the order of its number (B,), ``epochs`` times over."""
    for _ in range(epochs):
        for number in sorted(set(numbers.tolist())):
            yield (numbers == number).nonzero().squeeze(-1)


def means_over_steps(steps: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Mean of every scalar over the steps; bare names get ``prefix/``."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            found[name if "/" in name else f"{prefix}/{name}"].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
