"""Bootstrap intervals over problems, and over seeds where there are several.

Problems and seeds are drawn with replacement, independently of each other (the crossed bootstrap;
A. B. Owen, 2007, The pigeonhole bootstrap). All first solutions and samples of a problem stay
together. An interval contains the middle share ``level`` of the statistic's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctrl_megatron.eval.measures import ratio_or_nan

Cells = NDArray[np.float64]
"""(seeds, problems, columns): the sums that a statistic is computed from, one for each problem."""
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Function from sums (..., columns) to values (...); nan where there is no value."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its bootstrap interval."""

    value: float
    low: float | None
    """Lower end of the interval; None where there is only one problem."""
    high: float | None
    """Upper end of the interval."""


class Resampling:
    """``draws`` resamples of ``problems`` problems and ``seeds`` seeds. Every statistic uses the
    same resamples, so that differences are paired. Raises ValueError without a problem or a seed.
    """

    def __init__(
        self, problems: int, seeds: int = 1, *, draws: int = 2000, level: float = 0.9, seed: int = 0
    ) -> None:
        if problems < 1 or seeds < 1:
            raise ValueError(f"{problems} problems and {seeds} seeds cannot be resampled")
        generator = np.random.default_rng(seed)
        self.level = level
        self.problem_counts = _counts(generator, problems, draws)
        """(draws, problems): how often each resample contains each problem."""
        self.seed_counts = _counts(generator, seeds, draws)
        """(draws, seeds): how often each resample contains each seed."""

    def estimate(self, cells: Cells, statistic: Statistic) -> Estimate | None:
        """The statistic of all cells and its interval; None where the statistic has no value."""
        value = float(statistic(cells.sum(axis=(0, 1))))
        return self._around(value, statistic(self.resampled_sums(cells)))

    def difference(self, cells: Cells, base: Cells, statistic: Statistic) -> Estimate | None:
        """The statistic of ``cells`` minus that of ``base``, paired by problem, and its
        interval.
        """
        values = [float(statistic(part.sum(axis=(0, 1)))) for part in (cells, base)]
        drawn = [statistic(self.resampled_sums(part)) for part in (cells, base)]
        return self._around(values[0] - values[1], drawn[0] - drawn[1])

    def resampled_sums(self, cells: Cells) -> NDArray[np.float64]:
        """(draws, columns): the sum of the cells of every resample."""
        seeds, problems, _ = cells.shape
        expected = (self.seed_counts.shape[1], self.problem_counts.shape[1])
        if (seeds, problems) != expected:
            raise ValueError(f"cells of {seeds} seeds and {problems} problems, not of {expected}")
        # One seed after the other, because (draws, seeds, problems) is too large for large sets.
        parts = (
            self.seed_counts[:, s, None] * (self.problem_counts @ cells[s]) for s in range(seeds)
        )
        return np.asarray(sum(parts))

    def _around(self, value: float, drawn: NDArray[np.float64]) -> Estimate | None:
        if np.isnan(value):
            return None
        known = drawn[~np.isnan(drawn)]
        if self.problem_counts.shape[1] < 2 or not len(known):
            return Estimate(value, None, None)
        tail = (1 - self.level) / 2
        low, high = np.quantile(known, (tail, 1 - tail))
        return Estimate(value, float(low), float(high))


def ratio_of_columns(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first column over the second; nan where the second is 0."""
    return ratio_or_nan(sums[..., 0], sums[..., 1])


def sum_into_cells(
    parts: Sequence[tuple[int, int, Sequence[float]]], seeds: int, problems: int
) -> Cells:
    """Cells from (number of the seed, number of the problem, columns). Parts of one cell are added;
    cells without a part are 0.
    """
    width = len(parts[0][2]) if parts else 0
    cells = np.zeros((seeds, problems, width))
    for seed, problem, columns in parts:
        cells[seed, problem] += columns
    return cells


def _counts(generator: np.random.Generator, n: int, draws: int) -> NDArray[np.float64]:
    return generator.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
