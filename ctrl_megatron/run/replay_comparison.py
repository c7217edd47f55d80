"""Where a replayed step differs from the recorded one: metric by metric, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

_ALL = torch.ones(1, dtype=torch.bool)
_SHOWN = 5
"""Samples of a field that are printed, the largest differences first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPair:
    """A metric of the step; None where one of the two has not reported it."""

    name: str
    recorded: float | None
    replayed: float | None

    def agrees(self, tolerance: float) -> bool:
        """Whether both values exist and differ by at most ``tolerance`` x max(1, their size)."""
        if self.recorded is None or self.replayed is None:
            return False
        recorded, replayed = torch.tensor([[self.recorded], [self.replayed]], dtype=torch.float64)
        (gap,) = largest_gaps(recorded, replayed, _ALL)
        return gap <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldGap:
    """A field of the batch: how far each sample's replayed values are from the recorded ones."""

    name: str
    gaps: Mapping[int, float]
    """Number of the sample in the dump -> largest difference of its values, as ``largest_gaps``
    measures it."""

    def samples_beyond(self, tolerance: float) -> list[tuple[int, float]]:
        """The samples beyond ``tolerance``, largest first."""
        beyond = [(sample, gap) for sample, gap in self.gaps.items() if not gap <= tolerance]
        return sorted(beyond, key=lambda one: (-one[1], one[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """A recorded and a replayed step."""

    metrics: Sequence[MetricPair]
    fields: Sequence[FieldGap]

    def agrees(self, tolerance: float) -> bool:
        """Whether no metric and no sample differs by more than ``tolerance``."""
        return all(pair.agrees(tolerance) for pair in self.metrics) and not any(
            gap.samples_beyond(tolerance) for gap in self.fields
        )

    def report_lines(self, tolerance: float, names: Sequence[str]) -> list[str]:
        """The comparison as lines for the terminal; ``names`` are the names of the samples."""
        shown = [f"{'metric':34} {'recorded':>14} {'replayed':>14}"]
        for pair in self.metrics:
            mark = "" if pair.recorded is None or pair.agrees(tolerance) else "   differs"
            shown.append(f"{pair.name:34} {_words(pair.recorded)} {_words(pair.replayed)}{mark}")
        for field in self.fields:
            beyond, largest = field.samples_beyond(tolerance), max(field.gaps.values(), default=0.0)
            shown.append(
                f"{field.name}: {len(beyond)} of {len(field.gaps)} samples differ; largest "
                f"difference {largest:.3g}"
            )
            shown += [f"  {names[sample]}: {gap:.3g}" for sample, gap in beyond[:_SHOWN]]
            if len(beyond) > _SHOWN:
                shown.append(f"  and {len(beyond) - _SHOWN} more")
        end = "agree" if self.agrees(tolerance) else "do not all agree"
        return [*shown, f"recorded and replayed values {end} within {tolerance:g}"]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON, with every sample."""
        return {
            "metrics": [asdict(pair) for pair in self.metrics],
            "fields": [
                {"name": f.name, "gaps": [f.gaps[i] for i in sorted(f.gaps)]} for f in self.fields
            ],
        }


def _words(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.7g'):>14}"


def metric_pairs(
    recorded: Mapping[str, float], replayed: Mapping[str, float]
) -> tuple[MetricPair, ...]:
    """The metrics that the replay reports and, of those that both report, the recorded value."""
    return tuple(
        MetricPair(name=name, recorded=recorded.get(name), replayed=replayed[name])
        for name in sorted(replayed)
    )


def largest_gaps(recorded: torch.Tensor, replayed: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """For each of B rows the largest difference, relative to max(1, size), of its values: those of
    (B,) tensors, or of (B, R) ones where ``mask`` (B, R) is on. Two NaN are equal; the gap is
    infinite where only one of the two is NaN or infinite.
    """
    a, b = recorded.double(), replayed.double()
    gap = (a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=1.0)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, gap.nan_to_num(nan=float("inf")))
    if gap.dim() == 2:
        gap = torch.where(mask.bool(), gap, 0.0).max(dim=1).values
    return gap.tolist()
