"""The row order: every epoch a permutation, the same everywhere, and resumed exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.data.sampler import MixtureSampler, ResumableSampler
from ctrl_megatron.errors import UserError
from ctrl_megatron.run.build import row_sampler

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
    while not sampler.is_exhausted(epochs, size):
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


mixtures = st.lists(
    st.tuples(st.integers(8, 30), st.floats(0.05, 5.0)), min_size=1, max_size=4
).flatmap(lambda sets: st.tuples(st.just(sets), st.integers(1, 8)))


def mixture(sets: list[tuple[int, float]], seed: int = 1) -> MixtureSampler:
    """Sets of that many rows and of these shares; row 1000 s + i is row i of set s."""
    parts = [[1000 * number + i for i in range(rows)] for number, (rows, _) in enumerate(sets)]
    return MixtureSampler(parts, [share for _, share in sets], seed=seed)


@given(mixtures, st.integers(1, 25))
def test_every_set_gets_its_share_and_no_row_comes_twice_in_an_epoch_of_its_set(
    shape: tuple[list[tuple[int, float]], int], batches: int
) -> None:
    sets, size = shape
    sampler, drawn = mixture(sets), list[int]()
    for _ in range(batches):
        batch = sampler.next_batch(size)
        assert len(set(batch)) == len(batch) == size
        drawn += batch
    whole = sum(share for _, share in sets)
    for number, (rows, share) in enumerate(sets):
        mine = [row for row in drawn if row // 1000 == number]
        assert abs(len(mine) - len(drawn) * share / whole) <= len(sets)
        # An epoch drops at most what does not fill its share of a batch.
        least = rows - size
        assert all(len(set(mine[:n])) == n for n in range(1, min(len(mine), least) + 1))


@given(mixtures, st.integers(0, 20))
def test_a_mixture_resumes_exactly_and_a_look_ahead_takes_nothing(
    shape: tuple[list[tuple[int, float]], int], steps: int
) -> None:
    sets, size = shape
    whole, resumed = mixture(sets), mixture(sets)
    for _ in range(steps):
        whole.next_batch(size)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    coming = whole.peek(size, 3)
    assert (
        coming
        == [whole.next_batch(size) for _ in range(3)]
        == [resumed.next_batch(size) for _ in range(3)]
    )


def test_a_set_that_is_too_small_and_other_shares_are_refused() -> None:
    with pytest.raises(ValueError, match=r"file 2 of data\.train_files, which has 2"):
        mixture([(9, 0.5), (2, 0.5)]).next_batch(8)
    state = mixture([(9, 1), (9, 1)]).state_dict()
    with pytest.raises(ValueError, match="the shares"):
        mixture([(9, 1), (9, 2)]).load_state_dict(state)
    with pytest.raises(ValueError, match="of one set"):
        mixture([(9, 1), (9, 2)]).load_state_dict(ResumableSampler(18, seed=1).state_dict())
    with pytest.raises(ValueError, match="has the shares"):
        ResumableSampler(18, seed=1).load_state_dict(state)


@pytest.mark.parametrize("shares", [(), (0.9, 0.1)])
def test_a_run_names_what_is_too_small_before_engines_start(shares: tuple[float, ...]) -> None:
    data = SimpleNamespace(mixture=shares, shuffle=True)
    config = SimpleNamespace(trainer=SimpleNamespace(seed=1), data=data, gen_batch_size=5)
    names = ["a", "b", "c"]
    table = SimpleNamespace(
        rows=names,
        row_number_by_id={name: place for place, name in enumerate(names)},
        sets={"0": {"a", "b"}, "1": {"b", "c"}},
    )
    message = "file 1 of data.train_files, which has 2" if shares else "the training data"
    with pytest.raises(UserError, match=re.escape(message)):
        row_sampler(cast(Any, config), cast(Any, table))
