"""Rewards of failed episodes by their distance to successful ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ctrl_megatron.algorithms.groups import group_number_of_rows

_EQUAL = 1e-6
"""Range of distances below which they count as equal."""


@torch.no_grad()
def progress_rewards(
    embeddings: torch.Tensor,
    success: torch.Tensor,
    tasks: Sequence[Hashable],
    *,
    radius: float = 0.5,
    max_failure_reward: float = 0.6,
    steepness: float = 10.0,
) -> torch.Tensor:
    """(n,) float64: 1 for a successful episode, and up to ``max_failure_reward`` for a failed one,
    the nearer its embedding is to those of successful episodes of its task; 0 for a task without
    any.

    embeddings (n, D) floating, success (n,) bool, tasks (n,) hashable. Successful episodes of a
    task form clusters: those with a neighbour within ``radius``, where every dimension is divided
    by its standard deviation, together with all neighbours of neighbours. The distance of a failed
    episode is that to the nearest cluster's mean, or to the mean of all successes where there is no
    cluster. Distances of a task are brought to [0, 1], 0.5 if all are equal, and x becomes
    ``max_failure_reward`` * sigmoid(``steepness`` * (0.5 - x)).

    Source: SRPO (arXiv 2511.15605), whose clusters are DBSCAN's with at least 2 members; the
    default numbers are siiRL's.

    Raises ValueError for shapes that do not fit.
    """
    if embeddings.dim() != 2 or not success.shape == embeddings.shape[:1] == (len(tasks),):
        raise ValueError(
            f"embeddings {tuple(embeddings.shape)}, success {tuple(success.shape)} and "
            f"{len(tasks)} tasks are not of the same episodes"
        )
    points, won = embeddings.double(), success.bool()
    rewards = won.double()
    of = group_number_of_rows(tasks, len(tasks))
    for task in of.unique():
        rows = of == task
        reached, failed = points[rows & won], points[rows & ~won]
        if not len(reached) or not len(failed):
            continue
        near = torch.cdist(failed, _centres(reached, radius)).min(dim=1).values
        low, wide = near.min(), near.max() - near.min()
        place = (near - low) / wide if wide >= _EQUAL else torch.full_like(near, 0.5)
        rewards[rows & ~won] = max_failure_reward * torch.sigmoid(steepness * (0.5 - place))
    return rewards


def _centres(points: torch.Tensor, radius: float) -> torch.Tensor:
    """(clusters, D): the mean of every cluster of ``points`` (n, D)."""
    spread = points.std(dim=0, correction=0)
    scaled = points / torch.where(spread > 0, spread, 1.0)
    reach = torch.cdist(scaled, scaled) <= radius
    for _ in range(len(points).bit_length()):
        # Paths of twice the length.
        reach = (reach.double() @ reach.double()) > 0
    clusters = [row for row in reach.unique(dim=0) if row.sum() > 1]
    return torch.stack([points[row].mean(dim=0) for row in clusters or [reach.any(dim=0)]])
