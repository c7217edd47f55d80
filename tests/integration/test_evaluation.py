"""``ctrl-evaluate`` and ``ctrl-report`` as the pages give them: a tiny critic, a real engine, a real
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import in_process
from launched_run import Job

from ctrl_megatron.commands.report import main as report
from ctrl_megatron.eval.transcripts import read_evaluation

pytestmark = pytest.mark.timeout(600)

DRAWN = ("--temperature", "1.0", "--n", "2", "--turns", "2", "--seeds", "1")
PAIRS = ("--pairs", "examples/pairs/own.jsonl")


def evaluate(job: Job, out: Path, critics: Sequence[str]) -> dict[str, Any]:
    overrides = [o for o in job.overrides("training", 1) if not o.startswith("data.val_files")]
    overrides.append(f"data.val_files={job.data}")
    given = ["--config", "examples/ctrl_smollm2_cpu.yaml", *critics, "--out", str(out)]
    return in_process(
        "run_command",
        name="evaluate",
        arguments=[*given, *DRAWN, *PAIRS, "--set", *overrides],
    )


def test_an_evaluation_is_kept_continued_and_reported(job: Job, tmp_path: Path) -> None:
    out, taught = tmp_path / "sampled", f"taught={job.actor}"
    first = evaluate(job, out, [taught])
    assert first["code"] == 0, first["output"]
    evaluation = read_evaluation(out)
    turns, pairs = evaluation.turns, evaluation.pairs
    # Eight rows, two chains, two turns; the proxy always prints 7.
    assert len(turns) == 32 and len({turn.critique for turn in turns}) > 1
    assert {turn.judgment for turn in turns} == {None, True, False}
    assert all(turn.revision == "print(7)" for turn in turns)
    for turn in turns:
        assert turn.before is not None and turn.after is not None
        assert turn.before.accepted == (turn.turn == 2 and turn.problem_id != "tiny/7")
        assert turn.after.accepted == (turn.problem_id != "tiny/7")
    assert len(pairs) == 8 and all(len(pair.judgments_a) == 2 for pair in pairs)
    (critic,) = json.loads((out / "results.json").read_text())["critics"]
    solved = critic["last"]["pass@1"]
    assert solved["value"] == critic["last"]["delta_up"]["value"] == 7 / 8
    assert solved["low"] < 7 / 8 <= solved["high"]
    (row,) = json.loads((out / "summary.json").read_text())["table"]
    assert row["stage"] == "taught" and row["solved_after"] == 7 / 8
    assert len((out / "problems.jsonl").read_text().splitlines()) == 8
    assert not (job.folder / "training").exists()

    # What is missing is drawn as it was; another critic comes beside it.
    kept = (out / "transcripts/taught.seed1.jsonl").read_bytes()
    (out / "transcripts/taught.seed1.jsonl").unlink()
    second = evaluate(job, out, [taught, f"untaught={job.proxy}"])
    assert second["code"] == 0, second["output"]
    assert [line for line in second["output"].splitlines() if line.endswith(", seed 1")] == [
        "taught: transcripts, seed 1",
        "untaught: transcripts, seed 1",
        "untaught: pairs, seed 1",
    ]
    assert (out / "transcripts/taught.seed1.jsonl").read_bytes() == kept

    # Without a model.
    text = (out / "report.md").read_text()
    (out / "report.md").unlink()
    assert report([str(out), "--pass-at", "1", "2"]) == 0
    assert (out / "report.md").read_text() == text
    assert all(words in text for words in ("| taught |", "| untaught |", "## Pairs", "pass@2"))
