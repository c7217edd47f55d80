"""Numbers counted by hand."""

from __future__ import annotations

import torch

from ctrl_megatron.data.rows import Row
from ctrl_megatron.steps.critique_report import critique_judgment_metrics, reward_signal_metrics
from ctrl_megatron.steps.sample import Revision, Sample
from ctrl_megatron.types import Completion

NAN = float("nan")


def row(rate: float | None, **extra: str) -> Row:
    return Row(id="r", solution="", pass_rate=rate, extra=extra)


def critique(
    row: Row, judgment: bool | None, *, text: str = "", revision: str = ""
) -> tuple[Sample, Row]:
    drawn = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", spans=())
    revised = Revision(text=revision)
    return Sample(
        row_id=row.id, completion=drawn, text=text, judgment=judgment, revision=revised
    ), row


def test_equal_revisions_and_gains_are_counted() -> None:
    uids = [*"aaa", *"bbb", *"cc", "d", "e/unjudged/9"]
    rewards = torch.tensor([0.5, 0.5, NAN, 0.0, 1.0, 0.0, NAN, 1.0, 1.0, NAN])
    revisions = ["x", "x", "y", "p", "q", "", "s", "t", "u", ""]
    valid = [True, True, True, True, True, False, True, True, True, False]
    rows = [row(0.25)] * 6 + [row(None)] * 4
    critiques = [
        critique(row, False if ok else None, revision=revision)
        for row, ok, revision in zip(rows, valid, revisions, strict=True)
    ]
    found = reward_signal_metrics(rewards, uids, critiques)
    torch.testing.assert_close(
        found["group/distinct_revision_rate"], torch.tensor([2 / 3, 1.0, 1.0])
    )
    gains = found["group/reward_minus_first"]
    assert gains[~gains.isnan()].tolist() == [0.25, 0.25, -0.25, 0.75, -0.25]


def test_nothing_judged_is_no_zero() -> None:
    found = reward_signal_metrics(
        torch.tensor([NAN, NAN]), ["a", "a"], [critique(row(None), None)] * 2
    )
    assert all(len(vector) == 0 for vector in found.values())


def test_critiques_that_quote_the_fault_are_counted() -> None:
    known = row(0.0, wrong="n + 2", right="n * 2")
    texts = [
        "`n + 2` is wrong. Replace `n + 2` with `n * 2`.",
        "`n + 2` is wrong. Replace `n + 2` with `n * 21`.",
        "n + 2 should be n * 2",
        "`n * 2` is fine",
        "right",
        "no columns",
    ]
    rows = [known] * 4 + [row(1.0, wrong="", right=""), row(0.5)]
    judgments = [False, False, None, True, True, None]
    found = critique_judgment_metrics(
        [critique(r, j, text=t) for r, j, t in zip(rows, judgments, texts, strict=True)]
    )
    assert found["fault/named_rate"].tolist() == [1, 1, 0, 0]
    assert found["fault/exact_edit_rate"].tolist() == [1, 0, 0, 0]
    assert found["judgment/correct_rate"].tolist() == [0, 0, 1, 1]
