"""Commands that prepare data check tests and references once, and a run finds the results."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.commands.prepare_data import main
from ctrl_megatron.data.rows import read_rows, row_of_attempt, write_rows
from ctrl_megatron.generation.checked_tests import FILE, RowTestChecks
from ctrl_megatron.preparation.checked_problems import select_judgeable_problems
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.types import Attempt

GOOD: dict[str, Any] = {
    "id": "t/double",
    "statement": "Write `double(x)`.",
    "prompter_type": "mbppplus",
    "entry_point": "double",
    "tests": ["assert double(1) == 2", "assert double(4) is not None"],
    "reference": "def double(x):\n    return 2 * x\n",
}
WRONG = GOOD | {
    "id": "t/triple",
    "statement": "Return three times the argument, whatever it may be.",
    "entry_point": "triple",
    "tests": ["assert triple(2) == 6"],
    "reference": "def triple(x):\n    return x + x\n",
}


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def no_sandbox() -> AbstractAsyncContextManager[Any]:
    raise AssertionError("nothing is left to check")


def test_the_command_checks_and_its_rows_need_no_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = write(tmp_path / "in.jsonl", GOOD, WRONG), tmp_path / "data" / "problems.jsonl"
    arguments = ["--format", "ctrl", "--input", str(given), "--out", str(out)]
    assert main(arguments) == 2 and not out.exists()
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 problems, the first is t/triple: the reference fails test 1 of 1" in told
    assert main([*arguments, "--skip-malformed"]) == 0
    assert [problem.id for problem in read_problems(out)] == ["t/double"]
    assert "t/triple: the reference fails" in " ".join(capsys.readouterr().out.split())

    # The next command finds the results, and so does a run in a folder that is not the first one.
    (problem,), left_out = select_judgeable_problems(
        read_problems(out), out, tmp_path / "rl", no_sandbox
    )
    assert problem.uncounted == (1,) and not left_out
    row = row_of_attempt(Attempt(id="t/double/0", problem=problem, solution="", pass_rate=0.0))
    write_rows(tmp_path / "rl" / "train.parquet", [row])
    (read,) = read_rows(tmp_path / "rl" / "train.parquet")
    assert read.reference == GOOD["reference"] and read.uncounted == ()
    checks = RowTestChecks([read], tmp_path / "run")
    assert not checks.missing and checks.result_of(read).remove_uncounted_from(read).uncounted == (
        1,
    )


def test_a_reference_is_in_no_text_that_a_model_reads(tmp_path: Path) -> None:
    (problem,) = read_problems(write(tmp_path / "in.jsonl", GOOD))
    row = row_of_attempt(Attempt(id="t/double/0", problem=problem, solution="pass"))
    assert row.reference and row.reference not in json.dumps(row.prompt)
    assert row.attempt().problem.reference == ""
    assert "reference" not in row.extra


def test_the_check_may_be_left_to_the_first_run(tmp_path: Path) -> None:
    given, out = write(tmp_path / "in.jsonl", WRONG), tmp_path / "problems.jsonl"
    arguments = ["--format", "ctrl", "--input", str(given), "--out", str(out), "--unchecked"]
    assert main(arguments) == 0 and not (tmp_path / FILE).exists()


def test_rows_without_references_have_no_such_column(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    (problem,) = read_problems(write(tmp_path / "in.jsonl", GOOD | {"reference": ""}))
    write_rows(
        tmp_path / "a.parquet", [row_of_attempt(Attempt(id="a", problem=problem, solution=""))]
    )
    assert "reference" not in parquet.read_table(tmp_path / "a.parquet").column_names
