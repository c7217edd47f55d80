"""Numbers counted by hand."""

from __future__ import annotations

import torch

from ctrl_megatron.data.rows import Row
from ctrl_megatron.pipeline.critique_revision import critique_signal, reward_signal

NAN = float("nan")


def row(rate: float | None, **extra: str) -> Row:
    return Row(id="r", solution="", pass_rate=rate, extra=extra)


def test_equal_revisions_and_gains_are_counted() -> None:
    uids = [*"aaa", *"bbb", *"cc", "d", "e/unjudged/9"]
    rewards = torch.tensor([0.5, 0.5, NAN, 0.0, 1.0, 0.0, NAN, 1.0, 1.0, NAN])
    revisions = ["x", "x", "y", "p", "q", "", "s", "t", "u", ""]
    valid = torch.tensor([True, True, True, True, True, False, True, True, True, False])
    rows = [row(0.25)] * 6 + [row(None)] * 4
    found = reward_signal(rewards, uids, rows, revisions, valid)
    torch.testing.assert_close(
        found["group/distinct_revision_rate"], torch.tensor([2 / 3, 1.0, 1.0])
    )
    gains = found["group/reward_minus_first"]
    assert gains[~gains.isnan()].tolist() == [0.25, 0.25, -0.25, 0.75, -0.25]


def test_nothing_judged_is_no_zero() -> None:
    found = reward_signal(
        torch.tensor([NAN, NAN]),
        ["a", "a"],
        [row(None)] * 2,
        ["", ""],
        torch.tensor([False, False]),
    )
    assert all(len(vector) == 0 for vector in found.values())


def test_critiques_that_quote_the_fault_are_counted() -> None:
    known = row(0.0, wrong="n + 2", right="n * 2")
    critiques = [
        "`n + 2` is wrong. Replace `n + 2` with `n * 2`.",
        "`n + 2` is wrong. Replace `n + 2` with `n * 21`.",
        "n + 2 should be n * 2",
        "`n * 2` is fine",
        "right",
        "no columns",
    ]
    rows = [known] * 4 + [row(1.0, wrong="", right=""), row(0.5)]
    found = critique_signal(critiques, [False, False, None, True, True, None], rows)
    assert found["fault/named_rate"].tolist() == [1, 1, 0, 0]
    assert found["fault/exact_edit_rate"].tolist() == [1, 0, 0, 0]
    assert found["judgment/correct_rate"].tolist() == [0, 0, 1, 1]
