"""Problem files: a right one becomes problems, an error names file, line and key."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.preparation.problem_files import problem_record, read_problems

FUNCTION: dict[str, Any] = {
    "id": "t/double",
    "statement": "Write `double(x)`.",
    "prompter_type": "mbppplus",
    "entry_point": "double",
    "test_setup": "",
    "tests": ["assert double(1) == 2"],
    "reference": "def double(x):\n    return 2 * x\n",
    "buggy": ["def double(x):\n    return x\n"],
    "difficulty": 1,
    "time_limit": 5,
}
CASES = [{"input": {"stdin": "1\n"}, "output": {"stdout": "é\u2028\n"}}]
PROGRAM = {
    **{key: FUNCTION[key] for key in ("statement", "reference")},
    **{"id": "t/next", "prompter_type": "code_contests", "tests": CASES, "comparison": "tokens"},
}


def write(path: Path, *records: Any) -> Path:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def test_problems_of_both_kinds(tmp_path: Path) -> None:
    double, successor = read_problems(write(tmp_path / "x.jsonl", FUNCTION, PROGRAM))
    assert double.selected_uts == ("assert double(1) == 2",)
    assert (double.entry_point, double.difficulty, double.time_limit) == ("double", 1, 5.0)
    assert double.reference == FUNCTION["reference"]
    assert isinstance(successor.selected_uts, str)
    assert json.loads(successor.selected_uts) == CASES
    assert (successor.entry_point, successor.difficulty, successor.time_limit) == ("", 0, 10.0)
    assert (double.comparison, successor.comparison) == ("", "tokens")


def test_a_directory_is_read_in_name_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", FUNCTION)
    write(tmp_path / "a.jsonl", PROGRAM)
    (tmp_path / "README.md").write_text("not a problem")
    problems = read_problems(tmp_path)
    assert [problem.id for problem in problems] == ["t/next", "t/double"]
    assert [problem.buggy for problem in problems] == [(), tuple(FUNCTION["buggy"])]
    records = [problem_record(problem) for problem in problems]
    assert read_problems(write(tmp_path / "again.json", *records)) == problems


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"test": []}, "unknown key.s. test"),
        ({"id": ""}, "'id' is empty"),
        ({"statement": 3}, "'statement' has the wrong type"),
        ({"difficulty": True}, "'difficulty' has the wrong type"),
        ({"difficulty": 5}, "'difficulty' must be 0 to 4"),
        ({"time_limit": 0}, "'time_limit' must be positive"),
        ({"prompter_type": "apps"}, "'prompter_type' is 'apps'"),
        ({"entry_point": ""}, "'entry_point'"),
        ({"tests": []}, "'tests' must be a non-empty list"),
        ({"tests": [""]}, "'tests' has an entry"),
        ({"buggy": [""]}, "'buggy'"),
        ({"tests": ["assert double(1) == 2", "assert double(1 == 2"]}, "test 2 of .*t/double"),
        ({"tests": ["assert double(1) == 2", "not python at all"]}, "test 2 of .*t/double"),
        ({"tests": ["assert double('\\0') == 2\0"]}, "test 1 of .*t/double.*null"),
        ({"test_setup": "import (math"}, "'test_setup' of .*t/double"),
        ({"tests": ["assert missing_name(double(1)) == 2"]}, "tests of .*t/double.*missing_name"),
        ({"prompter_type": "code_contests", "entry_point": "", "tests": [{"a": 1}]}, "case 1 "),
        ({"comparison": 3}, "'comparison' has the wrong type"),
        ({"comparison": "float:2"}, "'comparison' names no rule: .* use strict, tokens"),
        ({"comparison": "code_contests"}, "'comparison' is 'code_contests', but asserts say"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    file = write(tmp_path / "x.jsonl", PROGRAM, {**FUNCTION, **change})
    with pytest.raises(ValueError, match=rf"x\.jsonl: line 2: .*{complaint}"):
        read_problems(file)


@pytest.mark.parametrize("key", ["id", "statement", "prompter_type", "tests"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    short = {k: v for k, v in FUNCTION.items() if k != key}
    with pytest.raises(ValueError, match=rf"line 1: key\(s\) {key} missing"):
        read_problems(write(tmp_path / "x.jsonl", short))


def test_other_mistakes(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", FUNCTION)
    write(tmp_path / "b.jsonl", FUNCTION)
    with pytest.raises(ValueError, match=r"b\.jsonl: line 1: key 'id' repeats .*a\.jsonl: line 1"):
        read_problems(tmp_path)
    (tmp_path / "b.jsonl").write_text("\n{\n")
    with pytest.raises(ValueError, match=r"b\.jsonl: line 2 is not JSON"):
        read_problems(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"statement": "\\ud83d\\ude00 \\ud83d"}\n')
    with pytest.raises(
        ValueError, match=r"b\.jsonl: line 1 has half of a character, \\ud83d alone"
    ):
        read_problems(tmp_path)
    (tmp_path / "b.jsonl").write_text("[]\n")
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        read_problems(tmp_path)
    with pytest.raises(ValueError, match="cannot read"):
        read_problems(tmp_path / "absent.jsonl")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no problems in"):
        read_problems(tmp_path / "none")


def test_a_packed_file_and_a_truncated_one(tmp_path: Path) -> None:
    plain = write(tmp_path / "x.jsonl", FUNCTION, PROGRAM)
    packed = tmp_path / "y.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_problems(packed) == read_problems(plain)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match="cannot read"):
        read_problems(packed)


def test_a_file_that_an_editor_of_windows_wrote_is_read(tmp_path: Path) -> None:
    lines = "\r\n".join(json.dumps(record) for record in (FUNCTION, PROGRAM))
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n")
    assert [problem.id for problem in read_problems(file)] == ["t/double", "t/next"]


@pytest.mark.parametrize("data", [b'{"id": "\xff"}\n', b"\xff\xfe{\x00}\x00\n\x00", b"\x1f\x8bxx"])
def test_bytes_that_are_no_text_are_reported_with_their_line(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(json.dumps(FUNCTION).encode() + b"\n" + data)
    with pytest.raises(ValueError, match=r"x\.jsonl line 2 is no UTF-8"):
        read_problems(file)
