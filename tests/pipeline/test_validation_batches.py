"""Validation asks the engine for ``data.val_batch_size`` prompts at a time, over all ranks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.eval.critique_revision import Round
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.pipeline import validation
from ctrl_megatron.types import Completion


def completion(token: int) -> Completion:
    return Completion(token_ids=(token,), log_probs=(0.0,), finish_reason="stop", spans=())


class Stage:
    """One of several data-parallel ranks; notes what it asks for and what it judges."""

    def __init__(self, rows: int, size: int, rank: int, ranks: int) -> None:
        self.config = load_config(
            None, ["data.val_files=v.parquet", f"data.val_batch_size={size}"], "none"
        )
        self.calls: list[Any] = []
        self.judged: list[tuple[int, str, int]] = []
        self.timeline = Timeline()
        self.validation = SimpleNamespace(rows=[SimpleNamespace(id=str(i)) for i in range(rows)])
        self.groups = SimpleNamespace(
            place=SimpleNamespace(dp=rank),
            layout=SimpleNamespace(data=ranks),
            from_data_ranks=lambda value: [value],
        )
        self.codec = SimpleNamespace(decode=lambda tokens: f"critique of {tokens[0]}")
        self.weights = SimpleNamespace(
            use=self.calls.append, rest=lambda: self.calls.append("rest")
        )

    def ask(self, work: Any) -> Any:
        return asyncio.run(work())


@pytest.fixture(autouse=True)
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def critiques(worker: Any, table: Any, rows: list[int], *, greedy: bool) -> Any:
        assert greedy
        worker.calls.append(len(rows))
        return [[completion(row)] for row in rows]

    async def revisions(worker: Any, ids: list[str], texts: list[str]) -> Any:
        assert texts == [f"critique of {i}" for i in ids]
        worker.calls.append(len(ids))
        return [completion(int(i)) for i in ids]

    async def judge(worker: Any, table: Any, rows: Any, texts: Any, answers: Any) -> list[Round]:
        tokens = [answer.token_ids[0] for answer in answers]
        worker.judged += zip(rows, texts, tokens, strict=True)
        return [
            Round(
                valid=True,
                judged_correct=True,
                passed_before=False,
                pass_rate_before=0.0,
                passed_after=True,
                pass_rate_after=1.0,
            )
            for _ in rows
        ]

    monkeypatch.setattr(validation.speech, "critiques", critiques)
    monkeypatch.setattr(validation.speech, "revisions", revisions)
    monkeypatch.setattr(validation, "_judge", judge)


@pytest.mark.parametrize(
    ("rows", "size", "ranks", "batches"),
    [
        (10, 4, 1, [[4, 4, 2]]),
        (10, 100, 1, [[10]]),
        (9, 4, 2, [[2, 2, 1], [2, 2, 0]]),
        (3, 1, 2, [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_every_row_is_asked_for_once_in_batches(
    rows: int, size: int, ranks: int, batches: list[list[int]]
) -> None:
    seen = []
    for rank, sizes in enumerate(batches):
        stage = Stage(rows, size, rank, ranks)
        if sum(sizes):
            validation.validate(stage)  # type: ignore[arg-type]
            assert stage.calls == ["actor", *sizes, "proxy", *sizes, "rest"]
        seen += stage.judged
    assert sorted(seen) == [(i, f"critique of {i}", i) for i in range(rows)]
