"""Rows that no program can be judged on are found before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reward_samples import function_record, stdio_record, write

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.build import make_row_check
from ctrl_megatron.rewards.plan import plan_rewards

VERL = {"data_source": "x", "reward_model": {"ground_truth": "4"}}
SUBTASKS = json.dumps([{"points": 1, "tests": [0, 1]}])
MANY = json.dumps([{"input": "1", "output": "1"}] * 20_000)
FILE = """
def compute_score(data_source, solution_str, ground_truth):
    return 1.0
"""


def config(*overrides: str) -> Config:
    return load_config(None, ["data.train_files=x.parquet", *overrides], "none")


def live_code_bench(test: str) -> dict[str, Any]:
    kind = {"prompter_type": "livecodebench", "selected_uts": '["all"]', "entry_point": ""}
    return {**function_record("lcb"), **kind, "content": "p", "labels": "{}", "test": test}


def checked(path: Path, *overrides: str, drop: bool = False) -> tuple[list[str], list[str]]:
    """The ids of the rows of ``path`` that are kept, and the messages of those left out."""
    made = config(*overrides)
    left_out = list[str]() if drop else None
    check = make_row_check(made, plan_rewards(made, ()))
    rows = read_rows(path, prompt_key=None, check=check, left_out=left_out)
    return [row.id for row in rows], left_out or []


@pytest.mark.parametrize(
    ("reward", "bad", "complaint"),
    [
        ("critic", live_code_bench("eJwrtoAAAA"), "provided_data.test is neither JSON nor"),
        (
            "critic",
            function_record("r", selected_uts=["assert add(1, x) == 2"]),
            "use x, which nothing",
        ),
        (
            "code",
            function_record("r", selected_uts=["assert add(1, x) == 2"]),
            "use x, which nothing",
        ),
        (
            "code",
            stdio_record("r", checker=json.dumps({"code": "x", "language": "pyhton"})),
            "pyht",
        ),
        ("code", stdio_record("r", checker="{"), "column checker is not valid JSON"),
        ("code", stdio_record("r", time_limit=1e6), r"run_timeout must be in \(0, 300\] seconds"),
        ("code", stdio_record("r", selected_uts=MANY), "more than 50000 JSON values"),
        ("code", stdio_record("r", selected_uts="[" * 100_000), "is not JSON: maximum recursion"),
        ("code", stdio_record("r", selected_uts="null"), "must be a non-empty JSON list of cases"),
        ("code", stdio_record("r", checker="[" * 100_000), "is not valid JSON: maximum recurs"),
        ("code", stdio_record("r", prompter_type=None), "the row's tests cannot be read"),
        ("code", {**stdio_record("r"), "selected_uts": None}, "'selected_uts' is missing or null"),
        ("ioi_code", stdio_record("r", subtasks="[" * 100_000), "maximum recursion depth"),
        ("ioi_code", stdio_record("r", subtasks="[]"), "column subtasks, and it is empty"),
        ("ioi_code", stdio_record("r", subtasks=SUBTASKS, language="cobol"), "'cobol' is not supp"),
        (
            "score.py:compute_score",
            {"id": "r", **VERL, "reward_model": {"a": 1}},
            "no ground_truth",
        ),
    ],
)
def test_a_bad_row_is_refused_with_file_and_row_or_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: str,
    bad: dict[str, Any],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text(FILE)
    good = {**function_record("good"), **VERL}
    if reward == "ioi_code":
        good = stdio_record("good", subtasks=SUBTASKS)
    # One row a file: a column of parquet has one type.
    write(tmp_path / "good.parquet", good)
    file = write(tmp_path / "bad.parquet", bad)
    of = f"reward.reward_funcs=[{reward}]"
    assert checked(tmp_path / "good.parquet", of) == (["good"], [])
    with pytest.raises(UserError, match=f"bad.parquet: row 1: .*{complaint}"):
        checked(file, of)
    with pytest.raises(UserError, match=f"no usable rows in .*: row 1: .*{complaint}"):
        checked(file, of, drop=True)


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    bad, short = (
        function_record("b", selected_uts=["assert add(1, x) == 2"]),
        function_record("c", id=""),
    )
    file = write(tmp_path / "rows.parquet", function_record("a"), bad, short)
    kept, left_out = checked(file, drop=True)
    assert kept == ["a"]
    assert [text.split(": ")[1] for text in left_out] == ["row 2", "row 3"]


def test_limits_count_only_of_a_sandbox_that_the_run_starts(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", stdio_record("r", time_limit=1e6))
    of = "reward.reward_funcs=[code]"
    assert checked(file, of, "sandbox.endpoint=http://127.0.0.1:1")[0] == ["r"]


def test_a_provider_names_the_rows_that_it_cannot_judge(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", live_code_bench("{}"))
    of = (
        "reward.provider=sandbox_fusion",
        "reward.provider_options={endpoint: http://127.0.0.1:1}",
    )
    with pytest.raises(
        UserError, match=r"row 1: .*sandbox_fusion cannot judge LiveCodeBenchDataset"
    ):
        checked(file, *of)


def test_only_calls_of_functions_are_judged_by_a_normal_form(tmp_path: Path) -> None:
    called = write(tmp_path / "called.parquet", function_record("f"))
    assert checked(called, "reward.cache_key=normalised") == (["f"], [])
    printed = write(tmp_path / "printed.parquet", stdio_record("s"))
    assert checked(printed, "reward.reward_funcs=[code]") == (["s"], [])
    with pytest.raises(UserError, match=r"cache_key=normalised: .*'s' has tests of code_contests"):
        checked(printed, "reward.cache_key=normalised")
