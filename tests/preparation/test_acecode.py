"""The reader of AceCode on records in the published columns, and its selection by difficulty."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.acecode import PassRates, acecode_rows, pass_rates, select
from ctrl_megatron.rewards import RewardItem, make_reward
from ctrl_megatron.rewards.build import make_row_check
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from tools.prepare_acecode import main

SAMPLE = Path(__file__).parents[2] / "examples/acecode/sample.jsonl"


def record(**fields: Any) -> dict[str, Any]:
    answer = {"completion_id": 0, "completion": "def f(x: int) -> int:\n    return x\n"}
    answers = [
        {**answer, "model_name": "qwen_coder_2.5", "pass_rate": 1.0},
        {**answer, "model_name": "llama3_instruct", "pass_rate": 0.5},
        {**answer, "model_name": "another", "pass_rate": 0.0},
    ]
    tests = ["assert f(1) == 1", "assert f(2) == 2"]
    made = {"id": "q", "question": "Return x.", "test_cases": tests, "inferences": answers}
    return {**made, **fields}


def percentile(values: list[float], share: float) -> float:
    """By linear interpolation between the ordered values."""
    ordered, place = sorted(values), share / 100 * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def test_the_selection_against_a_plain_loop() -> None:
    rates = [[i % 4 / 3, (i * i) % 7 / 6, (3 * i) % 5 / 4] for i in range(60)]
    found = [
        pass_rates(
            (
                "",
                record(
                    inferences=[{"model_name": "qwen_coder_2.5", "pass_rate": rate} for rate in own]
                ),
            )
        )
        for own in rates
    ]
    means, stds = [statistics.mean(own) for own in rates], [statistics.pstdev(own) for own in rates]
    low, std = percentile(means, 20), percentile(stds, 40)
    wanted = [m <= low + 1e-12 and s >= std - 1e-12 for m, s in zip(means, stds, strict=True)]
    assert select(found, "hard") == wanted and 0 < sum(wanted) < 12
    a, b = percentile(means, 25), percentile(means, 75)
    assert select(found, "medium") == [a - 1e-12 <= m <= b + 1e-12 for m in means]
    assert select(found, "easy") == [m >= b - 1e-12 for m in means]
    assert select([None, *found], "easy")[0] is False
    assert select([None], "all") == [True]
    with pytest.raises(UserError, match="--coders"):
        select([None], "hard")


def test_only_named_coders_count() -> None:
    assert pass_rates(("", record())) == PassRates(0.75, 0.25)
    assert pass_rates(("", record()), ["another"]) == PassRates(0.0, 0.0)
    assert pass_rates(("", record()), ["nobody"]) is None
    with pytest.raises(UserError, match="row 3: column inferences"):
        pass_rates(("row 3", record(inferences=[{"model_name": "qwen_coder_2.5"}])))


def test_a_question_becomes_rows() -> None:
    rows, dropped = acecode_rows([("row 1", record())])
    assert not dropped.counts()
    assert [row.id for row in rows] == ["acecode/q", "acecode/q/function"]
    plain, typed = (row.prompt[0]["content"] for row in rows)
    assert plain == "Return x.\n\nA test of it: `assert f(1) == 1`"
    assert 'def f(x: int) -> int:\n    """\n    Return x.\n    """\n```' in typed
    assert {row.entry_point for row in rows} == {"f"} and {r.problem_id for r in rows} == {
        "acecode/q"
    }
    fenced = "Return x.\n```\nf(1) -> 1\n```"
    (row, _), _ = acecode_rows([("", record(question=fenced))])
    assert row.prompt[0]["content"] == fenced
    for question in ("Can you return x?", 'Return """x""".'):
        assert len(acecode_rows([("", record(question=question))])[0]) == 1
    prose = [{"model_name": "m", "pass_rate": 1.0, "completion": "It is:\ndef f(x):\n  return x"}]
    assert len(acecode_rows([("", record(inferences=prose))])[0]) == 1
    assert len(acecode_rows([("", record())], as_functions=False)[0]) == 1


def test_what_cannot_be_judged_is_left_out_and_counted() -> None:
    two = record(test_cases=["assert f(1) == 1", "assert g(1) == 1"])
    rows, dropped = acecode_rows([("a", two), ("b", record(test_cases=["print(f(1))"]))])
    assert not rows and [*dropped.counts().values()] == [2]
    with pytest.raises(UserError, match="row 7: test_cases"):
        acecode_rows([("row 7", record(test_cases=[]))])


def test_the_sample_is_prepared_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.parquet"
    assert main(["--data", str(SAMPLE), "--out", str(out), "--difficulty", "all"]) == 0
    assert "left out: 1 question(s)" in capsys.readouterr().out
    config = load_config(None, ["reward.reward_funcs=[code, code_format]"], "none")
    rows = read_rows(out, check=make_row_check(config, plan_rewards(config, ())))
    given = {f"acecode/{q['id']}": q for q in map(json.loads, SAMPLE.read_text().splitlines())}
    items = []
    for row in rows:
        best = max(given[row.problem_id]["inferences"], key=lambda a: a["pass_rate"])
        items.append(RewardItem(text=f"```python\n{best['completion']}```\n", row=row))

    async def judged(endpoint: str) -> list[float | None]:
        async with SandboxClient(endpoint) as client:
            return await make_reward("code", provider=client)(items)

    with EmbeddedSandbox.start(workers=1) as sandbox:
        scores = asyncio.run(judged(sandbox.endpoint))
    rates = [max(a["pass_rate"] for a in given[r.problem_id]["inferences"]) for r in rows]
    assert [score == 1.0 for score in scores] == [rate == 1.0 for rate in rates]
    assert main(["--data", str(SAMPLE), "--out", str(out), "--coders", "nobody"]) == 2
