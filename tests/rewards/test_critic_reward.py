"""RewardModelForCritic: judgment rule, requests, modes, cache identity, faults, order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reward_samples import (
    CORRECT,
    INCORRECT,
    STDIO,
    ScriptedSandbox,
    block,
    function_record,
    function_row,
    stdio_row,
    write,
)

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards import (
    MAX_REQUESTS,
    RUN_TIMEOUT,
    RewardItem,
    RewardModelForCritic,
    RewardOutcome,
    grading,
    normalize_code,
)
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import SubmitRequest
from ctrl_megatron.types import Verdict

Make = Callable[..., tuple[RewardModelForCritic, ScriptedSandbox]]


def by_marker(request: SubmitRequest) -> list[bool | None]:
    """The program says what it passes: ``# +-?`` passes, fails, runs out of time. Stops early
    unless ``run_all_cases`` is set.
    """
    marks = request.completion.partition("# ")[2].partition("\n")[0]
    verdicts: list[bool | None] = [{"+": True, "-": False, "?": None}[mark] for mark in marks]
    if request.config.extra["run_all_cases"] or all(verdicts):
        return verdicts
    return verdicts[: next(i for i, passed in enumerate(verdicts) if not passed) + 1]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(**options: Any) -> tuple[RewardModelForCritic, ScriptedSandbox]:
        path = write(tmp_path / "rows.parquet", function_record(), function_record("add/1"))
        sandbox = ScriptedSandbox(by_marker)
        model = RewardModelForCritic(path, None, sandbox=sandbox, show_progress=False, **options)
        return model, sandbox

    return build


async def judge(
    model: RewardModelForCritic, critiques: list[str], texts: list[str], rows: list[Row]
) -> list[RewardOutcome]:
    return await model.judge(
        [
            RewardItem(text=text, critique=critique, row=row)
            for critique, text, row in zip(critiques, texts, rows, strict=True)
        ]
    )


def semaphore() -> asyncio.Semaphore:
    return asyncio.Semaphore(4)


def reward(model: RewardModelForCritic, critique: str, revision: str, sample: Row) -> float:
    return asyncio.run(model.reward_revision(critique, revision, sample, semaphore()))


def test_constants() -> None:
    assert (MAX_REQUESTS, RUN_TIMEOUT) == (256, 10)


@pytest.mark.parametrize(
    "critique", ["", "good", "**Overall judgment:** Correct", "Overall judgment: correct"]
)
def test_without_judgment_the_reward_is_zero_and_nothing_runs(make: Make, critique: str) -> None:
    model, sandbox = make()
    assert reward(model, critique, block("# +++"), function_row()) == 0.0
    (outcome,) = asyncio.run(judge(model, [critique], [block("# +++")], [function_row()]))
    assert outcome == RewardOutcome(reward=0.0)
    assert sandbox.requests == []


@pytest.mark.parametrize(
    ("marks", "pass_rate", "binary"), [("+++", 1.0, 1.0), ("+-+", 2 / 3, 0.0), ("---", 0.0, 0.0)]
)
def test_modes_and_the_judgments_truth_does_not_matter(
    make: Make, marks: str, pass_rate: float, binary: float
) -> None:
    for run_all_cases, expected in ((True, pass_rate), (False, binary)):
        model, _ = make(run_all_cases=run_all_cases)
        for critique in (CORRECT, INCORRECT):
            assert reward(model, critique, block(f"# {marks}"), function_row()) == pytest.approx(
                expected
            )


def test_function_problem_request(make: Make) -> None:
    model, sandbox = make()
    reward(model, CORRECT, "Here you go\n```\n# +++\n```\nbye", function_row())
    (request,) = sandbox.requests
    assert request.completion == block("# +++")
    assert request.config.dataset_type == "MBPPDataset"
    assert request.config.run_timeout == 2.0
    assert request.config.extra == {"run_all_cases": True}
    assert request.config.provided_data == {
        "test_list": function_record()["selected_uts"],
        "test_setup_code": "import math",
        "entry_point": "add",
        "prompt": "Add two numbers.",
    }


def test_stdio_request(make: Make) -> None:
    model, sandbox = make(run_all_cases=False)
    assert reward(model, CORRECT, block("# ++"), stdio_row(time_limit=None)) == 1.0
    config = sandbox.requests[0].config
    assert (config.dataset_type, config.language, config.run_timeout) == (
        "CommonOJDataset",
        "python",
        10.0,
    )
    assert config.extra == {"run_all_cases": False}
    assert isinstance(config.provided_data, dict)
    assert config.provided_data["test"][0]["input"] == {"stdin": "1 2"}


def test_livecodebench_request(make: Make) -> None:
    model, sandbox = make()
    sample = function_row(
        prompter_type="livecodebench", selected_uts=STDIO, content="c", labels="{}", test="[]"
    )
    assert reward(model, CORRECT, block("# +"), sample) == 1.0
    config = sandbox.requests[0].config
    assert config.dataset_type == "LiveCodeBenchDataset"
    assert config.provided_data == {"id": "add/0", "content": "c", "labels": "{}", "test": "[]"}
    with pytest.raises(ValueError, match=r"rows\.parquet: row 0.*labels for 'add/0'"):
        reward(model, CORRECT, block("# +"), replace(sample, extra={"content": "c", "test": "[]"}))


def test_rows_may_be_given_instead_of_files() -> None:
    rows = [function_row(), stdio_row(), function_row()]
    model = RewardModelForCritic(rows, None)
    assert list(model.table.values()) == rows[:2]
    with pytest.raises(ValueError, match="differ in solution"):
        RewardModelForCritic([*rows, function_row(solution="another")], None)


def test_an_item_without_a_row_is_named(make: Make) -> None:
    model, _ = make()
    with pytest.raises(ValueError, match=r"'critic'.*item 0"):
        asyncio.run(model.judge([RewardItem(text="x", critique=CORRECT)]))


def test_no_sandbox_is_said_at_the_first_run(tmp_path: Path) -> None:
    model = RewardModelForCritic(
        write(tmp_path / "a.parquet", function_record()), None, show_progress=False
    )
    assert reward(model, "no judgment", "x", function_row()) == 0.0
    with pytest.raises(ValueError, match="sandbox="):
        reward(model, CORRECT, "x", function_row())


def test_order_length_and_bound_of_a_batch(make: Make) -> None:
    model, sandbox = make()
    marks = ["+++", "++-", "+--", "---"] * 100
    revisions = [block(f"# {mark}\nx = {number}") for number, mark in enumerate(marks)]
    rewards = asyncio.run(
        model.get_reward_all([CORRECT] * 401, revisions, [function_row() for _ in range(450)])
    )
    assert rewards == [pytest.approx(mark.count("+") / 3) for mark in marks]
    assert len(sandbox.requests) == 400
    assert sandbox.most_under_way == MAX_REQUESTS
    assert asyncio.run(model.get_reward_all([], [], [])) == []


def test_an_answer_for_some_tests_is_one_only_where_the_first_failure_ends_it(make: Make) -> None:
    """``function_row`` has three tests."""
    for run_all_cases, marks, expected in (
        (True, "+-", None),
        (True, "-", None),
        (True, "++", None),
        (False, "+-", 0.0),
        (False, "++", None),
        (True, "+--", 1 / 3),
    ):
        model, _ = make(run_all_cases=run_all_cases)
        if expected is not None:
            assert reward(model, CORRECT, block(f"# {marks}"), function_row()) == expected
            continue
        with pytest.raises(SandboxError, match=rf"{len(marks)} verdict\(s\), .* for 3 test\(s\)"):
            reward(model, CORRECT, block(f"# {marks}"), function_row())


def test_the_bound_and_the_seconds_per_test_can_be_chosen(make: Make) -> None:
    model, sandbox = make(max_requests=3, run_timeout=4.5)
    rows = [function_row(time_limit=None), function_row()] * 5
    revisions = [block(f"# +\nx = {number}") for number in range(10)]
    with pytest.raises(SandboxError):
        asyncio.run(model.get_reward_all([CORRECT] * 10, revisions[:1], rows))
    outcomes = asyncio.run(judge(model, [CORRECT] * 10, revisions, rows))
    assert sandbox.most_under_way == 3
    assert len(outcomes) == 10
    assert {r.config.run_timeout for r in sandbox.requests} == {4.5, 2.0}


def test_the_public_methods_build_on_each_other() -> None:
    """Who replaces ``reward_revision`` or ``get_sandbox_response``, as CTRL's own tests do, changes
    the result.
    """

    class Half(RewardModelForCritic):
        async def get_sandbox_response(
            self, revision: str, sample: Row, semaphore: asyncio.Semaphore
        ) -> float:
            assert revision == block("x = 1")
            return 0.5

    model = Half.__new__(Half)
    samples = [function_row()] * 2
    rewards = asyncio.run(
        model.get_reward_all([CORRECT, "none"], [f"a {block('x = 1')} b"] * 2, samples)
    )
    assert rewards == [0.5, 0.0]


def test_progress_is_shown(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = make()
    model.show_progress = True
    asyncio.run(model.get_reward_all([CORRECT], [block("# +++")], [function_row()]))
    shown = capsys.readouterr().err
    assert "Generating rewards" in shown
    assert "1/1" in shown


class TestCache:
    ALMOST_EQUAL = (
        ("# +++\ndef f(a):\n a=a+1\n return a", "# ---\ndef f(a):\n b=b+1\n return b"),
        ("# +++\nx=1;print(x)", "# ---\nx=1;print(v_0)"),
        (
            "# +++\ndef f():\n  global n\n  n = 1\nn = 0",
            "# ---\ndef f():\n  global n\n  m = 1\nm = 0",
        ),
    )

    @pytest.mark.parametrize(("right", "wrong"), ALMOST_EQUAL)
    def test_programs_that_only_look_equal_are_judged_apart(
        self, make: Make, right: str, wrong: str
    ) -> None:
        assert normalize_code(right) != normalize_code(wrong)
        model, sandbox = make()
        revisions = [block(right), block(wrong), block(right), block(wrong)]
        rewards = asyncio.run(model.get_reward_all([CORRECT] * 4, revisions, [function_row()] * 4))
        assert rewards == [1.0, 0.0, 1.0, 0.0]
        assert len(sandbox.requests) == 2

    def test_equal_requests_of_a_batch_run_once(self, make: Make) -> None:
        model, sandbox = make()
        texts = [block("# ++-"), "prose " + block("# ++-"), "```\n# ++-", block("# ++-")]
        outcomes = asyncio.run(judge(model, [CORRECT] * 4, texts, [function_row()] * 4))
        assert len(sandbox.requests) == 1
        assert [outcome.cached for outcome in outcomes] == [False, True, True, True]
        assert {outcome.reward for outcome in outcomes} == {2 / 3}
        asyncio.run(judge(model, [CORRECT], texts[:1], [function_row("add/1")]))
        counters = model._cache.counters
        assert (counters.runs, counters.joined, counters.hits) == (1, 3, 1)

    @pytest.mark.parametrize(
        "change",
        [
            {
                "selected_uts": [
                    "assert add(1, 2) == 3",
                    "assert add(4, 4) == 8",
                    "assert add(0, 6) == 6",
                ]
            },
            {"time_limit": 3.0},
            {"entry_point": "plus"},
            {"test_setup": "import os"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_everything_that_can_change_a_verdict_is_in_the_key(
        self, make: Make, change: dict[str, Any]
    ) -> None:
        model, sandbox = make()
        asyncio.run(
            model.get_reward_all(
                [CORRECT] * 2, [block("# +++")] * 2, [function_row(), function_row(**change)]
            )
        )
        assert len(sandbox.requests) == 2

    def test_the_mode_is_in_the_key(self, make: Make) -> None:
        model, sandbox = make(run_all_cases=False)
        assert reward(model, CORRECT, block("# -++"), function_row()) == 0.0
        (outcome,) = asyncio.run(model.judge_solutions([block("# -++")], [function_row()]))
        assert outcome.pass_rate == pytest.approx(2 / 3)
        assert len(sandbox.requests) == 2

    def test_a_time_out_is_judged_again_later(self, make: Make) -> None:
        model, sandbox = make()
        for _ in range(2):
            outcomes = asyncio.run(
                judge(model, [CORRECT] * 2, [block("# +?+")] * 2, [function_row()] * 2)
            )
            assert [outcome.cached for outcome in outcomes] == [False, True]
            assert outcomes[0].detail == "TimeLimitExceeded"
            assert outcomes[0].verdict is not None and outcomes[0].verdict.timed_out
        assert len(sandbox.requests) == 2


class TestFaults:
    def test_a_fault_masks_its_sample_and_only_that(self, make: Make) -> None:
        model, sandbox = make()
        sandbox.faults_left = 1
        revisions = [block("# +++"), block("# ++-")]
        first, second = asyncio.run(judge(model, [INCORRECT] * 2, revisions, [function_row()] * 2))
        assert (first.reward, first.judgment, first.verdict, first.pass_rate) == (
            None,
            False,
            None,
            None,
        )
        assert first.error == first.detail == "the service is gone"
        assert (second.reward, second.error) == (pytest.approx(2 / 3), "")
        (again,) = asyncio.run(judge(model, [INCORRECT], revisions[:1], [function_row()]))
        assert (again.reward, again.cached) == (1.0, False)

    def test_equal_revisions_share_the_fault(self, make: Make) -> None:
        model, sandbox = make()
        sandbox.faults_left = 1
        outcomes = asyncio.run(
            judge(model, [CORRECT] * 3, [block("# +++")] * 3, [function_row()] * 3)
        )
        assert [outcome.reward for outcome in outcomes] == [None] * 3
        assert len(sandbox.requests) == 1

    def test_get_reward_all_raises(self, make: Make) -> None:
        model, sandbox = make()
        sandbox.faults_left = 1
        with pytest.raises(SandboxError, match="the service is gone"):
            asyncio.run(
                model.get_reward_all([CORRECT] * 2, [block("# +++")] * 2, [function_row()] * 2)
            )

    def test_solutions_are_judged_on_every_test_and_a_fault_is_an_outcome(self, make: Make) -> None:
        model, sandbox = make(run_all_cases=False)
        sandbox.faults_left = 1
        texts = [block("# +++"), block("# -++")]
        lost, judged = asyncio.run(model.judge_solutions(texts, [function_row()] * 2))
        assert (lost.verdict, lost.reward, lost.error) == (None, None, "the service is gone")
        assert judged.verdict is not None and judged.verdict.passed == (False, True, True)
        with pytest.raises(ValueError):
            asyncio.run(model.judge_solutions(texts, [function_row()]))

    @pytest.mark.parametrize("marks", ["", "++", "++++", "----"])
    def test_an_answer_for_other_tests_is_a_fault_not_a_reward(
        self, make: Make, marks: str
    ) -> None:
        model, _ = make()
        (outcome,) = asyncio.run(judge(model, [CORRECT], [block(f"# {marks}\n")], [function_row()]))
        assert outcome.reward is None
        assert "for 3 test(s)" in outcome.error


def test_an_outcome_records_what_happened(make: Make) -> None:
    model, _ = make()
    (outcome,) = asyncio.run(judge(model, [INCORRECT], [block("# +-+")], [function_row()]))
    verdict = Verdict(passed=(True, False, True), total=3, detail=("", "ValueError: no", ""))
    assert outcome == RewardOutcome(reward=2 / 3, judgment=False, verdict=verdict, copied=0.0)
    assert (outcome.detail, outcome.pass_rate) == ("ValueError: no", 2 / 3)


def test_binary_mode_keeps_the_number_of_tests(make: Make) -> None:
    model, _ = make(run_all_cases=False)
    (outcome,) = asyncio.run(judge(model, [CORRECT], [block("# +-+")], [function_row()]))
    assert outcome.verdict is not None
    assert (outcome.reward, outcome.verdict.passed, outcome.pass_rate) == (
        0.0,
        (True, False),
        1 / 3,
    )


def test_a_row_whose_tests_use_what_nothing_defines_is_named() -> None:
    row = function_row(selected_uts=["assert close(add(1, 2), 3)"], entry_point="add")
    with pytest.raises(ValueError, match="the tests use close, which nothing defines"):
        RewardModelForCritic([row], None)


def test_a_batch_reads_the_tests_of_a_row_and_a_program_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    model, sandbox = make()
    for name in ("_tests_of", "extract_code"):
        monkeypatch.setattr(grading, name, counted(name, getattr(grading, name), calls))
    rows = [function_row(), function_row("add/1"), function_row("sub/0", time_limit=1.0)]
    texts = [block(f"# +++\n{n}") for n in range(12)]
    outcomes = asyncio.run(judge(model, [CORRECT] * 12, texts, rows * 4))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 12
    assert calls == {"_tests_of": 3, "extract_code": 12}
    assert [r.config.run_timeout for r in sandbox.requests] == [2.0, 2.0, 1.0] * 4

    # Another row with the same id is not taken for this one.
    changed = replace(rows[0], selected_uts=("assert add(9, 9) == 18",), solution="new")
    asyncio.run(judge(model, [CORRECT] * 2, [block("# +++"), block("# +")], [rows[0], changed]))
    data: list[Any] = [request.config.provided_data for request in sandbox.requests[-2:]]
    assert [one["test_list"] for one in data] == [
        list(rows[0].selected_uts),
        ["assert add(9, 9) == 18"],
    ]


def counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **options)

    return call
