"""Rewards by the distance to successful episodes, against a definition in plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.algorithms.progress import progress_rewards

Point = tuple[float, ...]


def clusters_of(points: list[Point], radius: float) -> list[list[Point]]:
    """DBSCAN with at least two members: a point joins every cluster that has a neighbour of it."""
    spreads = [statistics.pstdev(axis) or 1.0 for axis in zip(*points, strict=True)]
    scaled = [tuple(x / s for x, s in zip(point, spreads, strict=True)) for point in points]
    clusters: list[set[int]] = []
    for one, place in enumerate(scaled):
        near = {n for n, other in enumerate(scaled) if math.dist(place, other) <= radius}
        touched = [c for c in clusters if c & near]
        clusters = [c for c in clusters if not c & near] + [near.union({one}, *touched)]
    return [[points[n] for n in sorted(c)] for c in clusters if len(c) > 1]


def by_definition(points: list[Point], won: list[bool], tasks: list[int]) -> list[float]:
    rewards = [float(success) for success in won]
    for task in set(tasks):
        mine = [n for n, own in enumerate(tasks) if own == task]
        reached = [points[n] for n in mine if won[n]]
        failed = [n for n in mine if not won[n]]
        if not reached or not failed:
            continue
        found = clusters_of(reached, 0.5) or [reached]
        centres = [tuple(map(statistics.fmean, zip(*c, strict=True))) for c in found]
        near = {n: min(math.dist(points[n], centre) for centre in centres) for n in failed}
        low, high = min(near.values()), max(near.values())
        for n, distance in near.items():
            place = (distance - low) / (high - low) if high - low >= 1e-6 else 0.5
            rewards[n] = 0.6 / (1 + math.exp(-10 * (0.5 - place)))
    return rewards


coordinates = st.integers(-3, 3).map(float)
episodes = st.lists(
    st.tuples(st.tuples(coordinates, coordinates), st.booleans(), st.integers(0, 1)),
    min_size=1,
    max_size=14,
)


@settings(deadline=None)
@given(episodes)
def test_rewards_are_those_of_the_definition(given: list[tuple[Point, bool, int]]) -> None:
    points, won, tasks = map(list, zip(*given, strict=True))
    found = progress_rewards(torch.tensor(points), torch.tensor(won), tasks)
    assert found.tolist() == pytest.approx(by_definition(points, won, tasks), abs=1e-9)


def test_nearer_failures_earn_more_and_successes_most() -> None:
    points = torch.tensor([[0.0, 0.0], [0.0, 0.1], [1.0, 0.0], [2.0, 0.0], [9.0, 9.0]])
    success = torch.tensor([True, True, False, False, False])
    rewards = progress_rewards(points, success, ["a"] * 4 + ["b"]).tolist()
    assert rewards[:2] == [1.0, 1.0] and 0.6 > rewards[2] > rewards[3] > 0
    assert rewards[4] == 0.0  # nothing of its task has succeeded


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embeddings \(2, 3\), success \(3,\) and 2 tasks"):
        progress_rewards(torch.zeros(2, 3), torch.zeros(3, dtype=torch.bool), ["a", "b"])
