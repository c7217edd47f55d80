"""Intervals against resampling spelt out, and draws against all resamples that there are."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from ctrl_megatron.eval.resampling import Estimate, Resampling, ratio_of_columns, sum_into_cells

SHARE = [(0, 0, (1.0, 2.0)), (0, 1, (2.0, 2.0)), (0, 2, (0.0, 1.0)), (0, 3, (0.0, 0.0))]
SHARE += [(1, 0, (2.0, 2.0)), (1, 1, (1.0, 2.0)), (1, 2, (0.0, 1.0)), (1, 3, (1.0, 1.0))]


def spelt_out(plan: Resampling, cells: np.ndarray) -> list[float]:
    """The ratio of every draw, from a list that has each problem as often as it was drawn."""
    values = []
    for problems, seeds in zip(plan.problem_counts, plan.seed_counts, strict=True):
        drawn = [
            tuple(cells[s, p])
            for s in np.repeat(np.arange(len(seeds)), seeds.astype(int))
            for p in np.repeat(np.arange(len(problems)), problems.astype(int))
        ]
        whole = sum(part[1] for part in drawn)
        if whole:
            values.append(sum(part[0] for part in drawn) / whole)
    return values


@pytest.mark.parametrize("seeds", [1, 2])
def test_an_interval_is_the_middle_of_what_resampling_gives(seeds: int) -> None:
    cells = sum_into_cells([part for part in SHARE if part[0] < seeds], seeds, 4)
    plan = Resampling(4, seeds, draws=400, level=0.8, seed=3)
    found = plan.estimate(cells, ratio_of_columns)
    values = spelt_out(plan, cells)
    expected = [part for part in SHARE if part[0] < seeds]
    value = sum(p[2][0] for p in expected) / sum(p[2][1] for p in expected)
    low, high = np.quantile(values, (0.1, 0.9))
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx([value, low, high])
    assert low < value < high


def test_draws_are_those_of_drawing_with_replacement() -> None:
    """Three problems have 27 ordered resamples; each set of counts comes as often as they say."""
    wanted = Counter(
        tuple(resample.count(p) for p in range(3)) for resample in product(range(3), repeat=3)
    )
    plan = Resampling(3, draws=20_000, seed=5)
    seen = Counter(tuple(map(int, counts)) for counts in plan.problem_counts)
    assert seen.keys() == wanted.keys()
    for counts, times in wanted.items():
        assert seen[counts] / 20_000 == pytest.approx(times / 27, abs=0.015)


def test_the_mean_varies_as_its_standard_error_says() -> None:
    values = np.random.default_rng(1).normal(size=200)
    cells = sum_into_cells([(0, i, (value, 1.0)) for i, value in enumerate(values)], 1, 200)
    drawn = ratio_of_columns(Resampling(200, draws=4000).resampled_sums(cells))
    assert drawn.std() == pytest.approx(values.std() / 200**0.5, rel=0.05)


def test_differences_are_paired() -> None:
    """Two critics that are far apart from problem to problem, and always 0.1 from each other."""
    base = [(0, i, (i / 10, 1.0)) for i in range(10)]
    more = [(0, i, (i / 10 + 0.1, 1.0)) for i in range(10)]
    gain = Resampling(10).difference(
        sum_into_cells(more, 1, 10), sum_into_cells(base, 1, 10), ratio_of_columns
    )
    assert gain is not None
    assert [gain.value, gain.low, gain.high] == pytest.approx([0.1, 0.1, 0.1])


def test_what_is_not_known_is_said() -> None:
    nothing = sum_into_cells([(0, 0, (0.0, 0.0)), (0, 1, (0.0, 0.0))], 1, 2)
    assert Resampling(2).estimate(nothing, ratio_of_columns) is None
    one = sum_into_cells([(0, 0, (1.0, 2.0))], 1, 1)
    assert Resampling(1).estimate(one, ratio_of_columns) == Estimate(0.5, None, None)
    with pytest.raises(ValueError, match="0 problems"):
        Resampling(0)
    with pytest.raises(ValueError, match="cells of 1 seeds and 2 problems"):
        Resampling(3).resampled_sums(nothing)
