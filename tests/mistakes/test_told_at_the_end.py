"""Mistakes that a command notices only while it works: servers, empty results, a full output."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from mistaken_world import PROBLEM, make_world
from test_mistakes import MODULES

from ctrl_megatron.generation.chat import ChatError
from ctrl_megatron.sandbox import SandboxError

ROOT = Path(__file__).parents[2]
SYNTHESISE = [
    *("--problems", "problems.jsonl", "--solutions", "solutions.jsonl", "--out", "data"),
    *("--val-share", "0", "--sft-share", "0"),
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_world(tmp_path))
    return tmp_path


@pytest.mark.parametrize("error", [ChatError, SandboxError])
def test_a_service_that_does_not_answer_is_a_line(
    world: Path,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def unanswered(*_: object) -> None:
        raise error("http://127.0.0.1:1 cannot be reached")

    monkeypatch.setattr(f"{MODULES['synthesize']}.make_training_files", unanswered)
    assert import_module(MODULES["synthesize"]).main(SYNTHESISE) == 2
    said = capsys.readouterr().err.strip().splitlines()
    kept = "data keeps what is finished: run it again"
    assert said[-1] == f"synthesize: http://127.0.0.1:1 cannot be reached; {kept}"


def test_mutants_that_all_pass_are_no_product(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ctrl_megatron.generation.solutions import grading_job_of_attempt

    async def judge(attempts: list[object], part: Path) -> None:
        await asyncio.sleep(0)
        lines = [
            {"id": "", "digest": grading_job_of_attempt(one).key, "pass_rate": 1.0}
            for one in attempts
        ]  # type: ignore[arg-type]
        part.write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr("tools.make_mutants.judge", judge)
    main = import_module("tools.make_mutants").main
    assert main(["--problems", "problems.jsonl", "--out", "new.jsonl"]) == 2
    assert "pass every test: new.jsonl is not written" in capsys.readouterr().err
    assert not (world / "new.jsonl").exists()


def test_no_row_to_train_on_is_no_success(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference is all that is left, and it fails its own test."""
    problem = PROBLEM | {"id": "six", "reference": "print(6)"}
    (world / "problems.jsonl").write_text(f"{json.dumps(PROBLEM)}\n{json.dumps(problem)}\n")

    class Nothing:
        def __init__(self, **_: object) -> None: ...

        async def solutions(self, *_: object) -> list[object]:
            return []

        async def verdicts(self, *_: object) -> list[object]:
            return []

        async def critiques(self, *_: object) -> list[object]:
            return []

        async def revisions(self, *_: object) -> list[object]:
            return []

    monkeypatch.setattr(f"{MODULES['synthesize']}.SynthesisStages", Nothing)
    assert import_module(MODULES["synthesize"]).main(SYNTHESISE) == 2
    assert "no row to train on is left" in capsys.readouterr().err
    assert not (world / "data/train.parquet").exists()


@pytest.mark.parametrize(
    ("command", "code"),
    [pytest.param("{} > /dev/full", 2, marks=pytest.mark.long), ("{} | true", 141)],
)
def test_an_output_that_takes_nothing_is_no_traceback(command: str, code: int) -> None:
    shape = ROOT / "examples/shapes/qwen2.5-7b.json"
    plan = f"{sys.executable} -W ignore {ROOT}/tools/plan.py --model-config {shape}"
    words = f"{plan} --config {ROOT}/examples/ctrl_7b.yaml"
    line = f"set -o pipefail; {command.format(words)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == (1 if code == 2 else 0) and "Traceback" not in done.stderr, said
