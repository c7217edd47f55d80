"""Validation asks the engine for ``data.val_batch_size`` prompts at a time, over all ranks, and a
sandbox fault leaves a row out of the rates instead of ending the run.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.steps import chain, conversation, grpo
from ctrl_megatron.steps.sample import Revision
from ctrl_megatron.types import Completion, Verdict

JUDGMENT = "Overall judgment: Incorrect"


def completion(token: int) -> Completion:
    return Completion(token_ids=(token,), log_probs=(0.0,), finish_reason="stop", spans=())


class Rank:
    """One of several data ranks; records the prompts that it sends and the rows that it judges."""

    role = "actor"

    def __init__(self, rows: int, size: int, rank: int, ranks: int, lost: int | None) -> None:
        self.config = load_config(
            None, [f"data.val_batch_size={size}", "data.val_files=rows.parquet"], "none"
        )
        self.calls: list[Any] = []
        self.judged: list[int] = []
        self.timeline = Timeline()
        positions = [Row(id=str(i), solution=f"first {i}") for i in range(rows)]
        self.validation = SimpleNamespace(
            rows=positions, prompts=[[i] for i in range(rows)], sets={}
        )
        self.groups = SimpleNamespace(
            place=SimpleNamespace(dp=rank),
            layout=SimpleNamespace(data=ranks),
            gather_data_ranks=lambda value: [value],
        )
        self.codec = SimpleNamespace(
            decode=lambda t: f"{t[0]}. {JUDGMENT}" if t else "", eos_token_ids=(0,)
        )
        self.rewards = SimpleNamespace(
            judge_solutions=self._judge, begin_solution=lambda text, row: None
        )
        self.background = SimpleNamespace(submit=asyncio.run)
        self.proxy = None
        self._lost = lost

    async def _judge(self, texts: list[str], rows: list[Any]) -> list[Any]:
        return [self._outcome(*pair) for pair in zip(texts, rows, strict=True)]

    def _outcome(self, text: str, row: Any) -> Any:
        if text.startswith("first"):
            return SimpleNamespace(verdict=Verdict(passed=(False,), total=1))
        self.judged.append(int(text.partition(".")[0]))
        lost = self._lost == int(row.id)
        return SimpleNamespace(verdict=None if lost else Verdict(passed=(True,), total=1))

    def run_on_leader(self, work: Any, what: str = "") -> Any:
        return asyncio.run(work())

    def judged_rate_metrics(self) -> dict[str, float]:
        return {}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(
        worker: Any, role: str, prompts: list[list[int]], params: Any, finished: Any
    ) -> Any:
        assert params.temperature == 0.0
        worker.calls.append((role, len(prompts)))
        return [[completion(prompt[0])] for prompt in prompts]

    def revise(worker: Any, critiques: Any, rows: Any, then: chain.FollowUp) -> Any:
        assert then.without_judgment
        assert [c.text for c in critiques] == [f"{row.id}. {JUDGMENT}" for row in rows]
        worker.calls.append(("proxy", len(critiques)))
        return [replace(c, revision=Revision(text=c.text, tokens=1)) for c in critiques]

    monkeypatch.setattr(chain, "generate", generate)
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(conversation, "revise", revise)


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
    judged = []
    for rank, sizes in enumerate(batches):
        worker = Rank(rows, size, rank, ranks, lost=None)
        if sum(sizes):
            conversation.validate_critiques(worker)  # type: ignore[arg-type]
            asked = [(role, size) for role in ("actor", "proxy") for size in sizes]
            assert worker.calls == asked
        judged += worker.judged
    assert sorted(judged) == list(range(rows))


def test_a_row_that_the_sandbox_lost_is_counted_and_left_out() -> None:
    rates = conversation.validate_critiques(Rank(4, 4, 0, 1, lost=2))  # type: ignore[arg-type]
    assert (rates["rounds"], rates["unjudged"], rates["solved_after"]) == (3.0, 1.0, 1.0)
    assert rates["judgment_accuracy"] == 1.0
    nothing = conversation.validate_critiques(Rank(1, 4, 0, 1, lost=0))  # type: ignore[arg-type]
    assert nothing == {"rounds": 0.0, "unjudged": 1.0}


def test_every_file_of_several_has_rates_of_its_own() -> None:
    worker = Rank(4, 4, 0, 1, lost=2)
    worker.validation.sets = {"easy": {"0", "1"}, "hard": {"1", "2", "3"}, "lost": {"2"}}
    rates = conversation.validate_critiques(worker)  # type: ignore[arg-type]
    assert rates["rounds"] == 3.0 and rates["unjudged"] == 1.0
    # A row that is in two files counts in both, and once in the total.
    assert rates["easy/rounds"] == 2.0 and "easy/unjudged" not in rates
    assert (rates["hard/rounds"], rates["hard/unjudged"]) == (2.0, 1.0)
    assert rates["lost/rounds"] == 0.0 and "lost/solved_after" not in rates


def test_every_file_of_several_has_rewards_of_its_own() -> None:
    worker: Any = Rank(4, 4, 0, 1, lost=None)
    worker.validation.sets = {"even": {"0", "2"}, "odd": {"1", "3"}}
    worker.codec.decode = lambda tokens: str(tokens[0])

    async def score(items: list[Any]) -> Any:
        halves = [None if item.text == "2" else int(item.text) / 2 for item in items]
        return SimpleNamespace(parts={"halves": halves})

    worker.score = score
    rates = grpo.validate_completions(worker)
    assert rates == {
        "unjudged": 1.0,
        "reward/halves": (0 + 0.5 + 1.5) / 3,
        "even/unjudged": 1.0,
        "even/reward/halves": 0.0,
        "odd/unjudged": 0.0,
        "odd/reward/halves": 1.0,
    }
