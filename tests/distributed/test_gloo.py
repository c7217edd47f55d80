"""Gradients are summed and weights gathered where they lie, by ranks with one gloo thread each."""

from __future__ import annotations

from world import run_world

RANKS, ELEMENTS = 3, 12


def test_buffers_are_summed_and_gathered_in_place_over_one_loop() -> None:
    share = ELEMENTS // RANKS
    ranks = run_world("gloo_work:collectives", RANKS, size=RANKS, elements=ELEMENTS)
    for rank, found in enumerate(ranks):
        # Megatron makes more than forty groups.
        assert found["loops"] == 1
        own = [6.0 * place for place in range(rank * share, (rank + 1) * share)]
        # The other sum is waited for as well, also where Megatron waits later.
        assert found["sums"] == [(own, [3.0]), (own, [3.0])]
        assert found["part"] == own
        assert found["gathered"] == [float(place // share) for place in range(ELEMENTS)]
