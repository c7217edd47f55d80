"""MBPP: small files made here, and the real ones if they are available."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.preparation.mbpp import SPLITS, entry_point_of
from ctrl_megatron.preparation.published import read_published
from ctrl_megatron.types import Problem

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")

MBPP = {
    "text": "Write a function to double.",
    "code": "def help(x):\r\n    return x\r\ndef double(x):\r\n    return help(x) + x",
    "task_id": 601,
    "test_setup_code": "import math\r\n",
    "test_list": ["assert double(1) == 2", "assert abs(double(2)) == 4"],
    "challenge_test_list": [],
}
SANITIZED = {
    "prompt": "Write a function to double.",
    "code": MBPP["code"],
    "task_id": 11,
    "test_imports": ["import math", "import re"],
    "test_list": MBPP["test_list"],
}


def read_mbpp(path: Path, split: str | None = None) -> list[Problem]:
    return read_published("mbpp", [path], split=split)[0]


def test_both_mbpp_formats(tmp_path: Path) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(MBPP) + "\n")
    (tmp_path / "sanitized.json").write_text(json.dumps([SANITIZED]))
    (full,) = read_mbpp(tmp_path / "mbpp.jsonl")
    (clean,) = read_mbpp(tmp_path / "sanitized.json")
    assert (full.id, clean.id) == ("mbpp/601", "mbpp/11")
    assert full.entry_point == clean.entry_point == "double"
    assert full.selected_uts == tuple(MBPP["test_list"])
    assert (full.test_setup, clean.test_setup) == ("import math\n", "import math\nimport re")
    assert "\r" not in full.reference
    assert read_mbpp(tmp_path / "mbpp.jsonl", split="test") == []
    assert read_mbpp(tmp_path / "mbpp.jsonl", split="train") == [full]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"test_list": []}, "0 functions"),
        ({"test_list": ["assert other(1)"]}, "0 functions"),
        ({"test_list": ["assert help(double(1))"]}, "2 functions"),
        ({"code": "def double(x: return"}, "invalid syntax|never closed"),
    ],
)
def test_an_mbpp_entry_without_a_clear_function(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps({**MBPP, **change}))
    with pytest.raises(ValueError, match=rf"mbpp\.jsonl: line 1: .*({complaint})"):
        read_mbpp(tmp_path / "mbpp.jsonl")


def test_mbpp_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="not a JSON list"):
        read_mbpp(file)
    file.write_text('[{"task_id": 3}]')
    with pytest.raises(ValueError, match=r"entry 0: key.s. code, test_list, text missing"):
        read_mbpp(file)
    with pytest.raises(ValueError, match="cannot read"):
        read_mbpp(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="--split=dev: only mbpp has splits"):
        read_mbpp(file, split="dev")


@needs_data
@pytest.mark.parametrize(("name", "count"), [("mbpp.jsonl", 974), ("sanitized-mbpp.json", 427)])
def test_the_real_mbpp(name: str, count: int) -> None:
    problems = read_mbpp(SHARED / "mbpp" / name)
    assert len({problem.id for problem in problems}) == len(problems) == count
    for problem in problems:
        assert problem.statement.strip() and len(problem.selected_uts) >= 3
        function, *classes = problem.entry_point.split(", ")
        assert all(name in problem.reference for name in (function, *classes))
        ast.parse(problem.test_setup)
        assert entry_point_of(problem.reference, problem.selected_uts) == function


@needs_data
def test_the_splits_of_mbpp_cover_it_once() -> None:
    file = SHARED / "mbpp" / "mbpp.jsonl"
    parts = {split: read_mbpp(file, split=split) for split in SPLITS}
    assert {split: len(part) for split, part in parts.items()} == {
        "prompt": 10,
        "test": 500,
        "validation": 90,
        "train": 374,
    }
    ids = [problem.id for part in parts.values() for problem in part]
    assert Counter(ids) == Counter(problem.id for problem in read_mbpp(file))
