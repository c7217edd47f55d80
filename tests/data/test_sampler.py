"""The row order: every epoch a permutation, the same everywhere, and resumed exactly."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.data.sampler import ResumableSampler

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def epoch_batches(sampler: ResumableSampler, size: int) -> list[list[int]]:
    return [sampler.next_batch(size) for _ in range(sampler.num_rows // size)]


@given(sizes, st.integers(0, 5), st.booleans())
def test_an_epoch_shows_every_row_at_most_once(
    shape: tuple[int, int], seed: int, shuffle: bool
) -> None:
    num_rows, size = shape
    sampler = ResumableSampler(num_rows, seed=seed, shuffle=shuffle)
    for _ in range(3):
        batches = epoch_batches(sampler, size)
        drawn = [row for batch in batches for row in batch]
        assert all(len(batch) == size for batch in batches)
        assert len(set(drawn)) == len(drawn) == num_rows - num_rows % size
        assert set(drawn) <= set(range(num_rows))
        if not shuffle:
            assert drawn == list(range(len(drawn)))


@given(sizes, st.integers(1, 4))
def test_it_is_through_once_no_whole_batch_is_left(shape: tuple[int, int], epochs: int) -> None:
    num_rows, size = shape
    sampler, batches = ResumableSampler(num_rows, seed=1), 0
    while not sampler.is_through(epochs, size):
        sampler.next_batch(size)
        batches += 1
        assert sampler.epoch < epochs
    assert batches == epochs * (num_rows // size)


@given(sizes, st.integers(0, 5), st.integers(0, 60), st.booleans())
def test_resuming_anywhere_continues_exactly(
    shape: tuple[int, int], seed: int, steps: int, shuffle: bool
) -> None:
    num_rows, size = shape
    whole = ResumableSampler(num_rows, seed=seed, shuffle=shuffle)
    for _ in range(steps):
        whole.next_batch(size)
    resumed = ResumableSampler(num_rows, seed=seed, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [resumed.next_batch(size) for _ in range(9)] == [
        whole.next_batch(size) for _ in range(9)
    ]


@given(st.integers(8, 40), st.integers(0, 3))
def test_rows_do_not_depend_on_the_batch_size(num_rows: int, seed: int) -> None:
    """Position counts rows: after a resume with another batch size the order goes on."""
    one, four = (ResumableSampler(num_rows, seed=seed) for _ in range(2))
    whole = [row for batch in epoch_batches(one, 1) for row in batch]
    first = four.next_batch(4)
    other = ResumableSampler(num_rows, seed=seed)
    other.load_state_dict(four.state_dict())
    assert first + other.next_batch(3) == whole[:7]


def test_dropped_rows_get_their_turn() -> None:
    sampler = ResumableSampler(10, seed=1)
    seen = {row for _ in range(6) for batch in epoch_batches(sampler, 4) for row in batch}
    assert seen == set(range(10))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        sampler.next_batch(50)
        for sampler in (ResumableSampler(50, seed=s) for s in (1, 2))
        for _ in range(2)
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_the_same_in_another_process_and_release() -> None:
    """A fixed vector: a checkpoint must mean the same rows after an upgrade."""
    expected = [8, 5, 9, 0, 4, 2, 3, 1, 7, 6]
    assert ResumableSampler(10, seed=1).next_batch(10) == expected
    script = (
        "from ctrl_megatron.data.sampler import ResumableSampler as R;"
        "print(R(10, seed=1).next_batch(10))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout) == expected


def test_errors() -> None:
    with pytest.raises(ValueError, match="no rows"):
        ResumableSampler(0, seed=1)
    sampler = ResumableSampler(3, seed=1)
    with pytest.raises(ValueError, match=r"data\.train_batch_size=4 .*\(3 rows\)"):
        sampler.next_batch(4)
    with pytest.raises(ValueError, match="positive"):
        sampler.next_batch(0)


@pytest.mark.parametrize(
    "other",
    [
        ResumableSampler(4, seed=1),
        ResumableSampler(3, seed=2),
        ResumableSampler(3, seed=1, shuffle=False),
    ],
)
def test_another_order_is_not_resumed(other: ResumableSampler) -> None:
    with pytest.raises(ValueError, match="same training files"):
        ResumableSampler(3, seed=1).load_state_dict(other.state_dict())
