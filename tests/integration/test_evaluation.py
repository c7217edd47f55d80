"""The commands of docs/evaluation.md: a tiny critic, a real engine, a real sandbox."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from in_process import in_process
from launched_run import Job
from proxy_server import serving
from tiny_run import PROGRAM, REPOSITORY, byte_chat_model

from ctrl_megatron.commands.report import main as report
from ctrl_megatron.eval.transcripts import read_evaluation
from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(600)

PAGE = (REPOSITORY / "docs/evaluation.md").read_text()
DRAWN = ("--temperature", "1.0", "--samples", "2", "--turns", "2", "--seeds", "1")
PAIRS = ("--pairs", "examples/pairs/own.jsonl")


def commands(places: dict[str, str]) -> list[list[str]]:
    """Those of the page as words, with other paths."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    text = "".join(blocks).replace("\\\n", " ")
    for path, instead in places.items():
        assert path in text
        text = text.replace(path, instead)
    return [shlex.split(line) for line in text.splitlines()]


def evaluate(job: Job, words: list[str], flags: tuple[str, ...]) -> dict[str, Any]:
    overrides = [o for o in job.overrides("training", 1) if not o.startswith("data.val_files")]
    overrides.append(f"data.val_files={job.data}")
    arguments = [*words, *flags, "--set", *overrides]
    return in_process("run_command", name="evaluate", arguments=arguments)


def test_an_evaluation_is_kept_continued_and_reported(job: Job, tmp_path: Path) -> None:
    out, page = tmp_path / "sampled", tmp_path / "comparison.html"
    places = {"runs/models/smollm2": job.proxy, "runs/mine_sft/hf": job.actor}
    places |= {"runs/mine_evaluation": out, "runs/other_evaluation": tmp_path / "other"}
    places |= {"runs/mine_pairs": out, "comparison.html": page}
    two, alone, both, one = commands({path: str(there) for path, there in places.items()})
    assert [words[0] for words in (one, two)] == ["ctrl-evaluate"] * 2
    first = evaluate(job, one[1:], (*DRAWN, *PAIRS))
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
    assert row["stage"] == "after SFT" and row["solved_after"] == 7 / 8
    assert len((out / "problems.jsonl").read_text().splitlines()) == 8
    assert not (job.folder / "training").exists()

    # What is missing is drawn as it was, though paths are spelled otherwise; another critic comes
    # beside it.
    transcript = out / "transcripts/after_SFT.seed1.jsonl"
    kept = read_json_lines(transcript)
    transcript.unlink()
    spelled = [word.replace(str(job.actor), f"{job.actor}/.") for word in two[1:]]
    assert spelled != two[1:]
    second = evaluate(job, spelled, (*DRAWN, "--pairs", "./examples/pairs/own.jsonl"))
    assert second["code"] == 0, second["output"]
    assert [line for line in second["output"].splitlines() if line.endswith(", seed 1")] == [
        *("zero-shot: transcripts, seed 1", "zero-shot: pairs, seed 1"),
        "after SFT: transcripts, seed 1",
    ]
    again = read_json_lines(transcript)
    # Another batch rounds log-probs otherwise.
    sure = [[turn.pop("confidence") for turn in turns] for turns in (kept, again)]
    assert again == kept
    assert [value is None for value in sure[0]] == [value is None for value in sure[1]]
    known = [[value or 0.0 for value in values] for values in sure]
    assert known[1] == pytest.approx(known[0], abs=1e-4) and any(known[0])

    # Without a model.
    shutil.copytree(out, tmp_path / "other")
    assert report(alone[1:]) == 0 and report(both[1:]) == 0
    for text in ((out / "report.md").read_text(), page.with_suffix(".md").read_text()):
        assert all(words in text for words in ("zero-shot |", "after SFT |", "## Pairs", "pass@1"))


def test_written_critiques_are_revised_and_judged(job: Job, tmp_path: Path) -> None:
    file, out = tmp_path / "said.jsonl", tmp_path / "written"
    said = {f"tiny/{n}/0": f"Line {n}.\nOverall judgment: Incorrect" for n in range(9)}
    lines = [json.dumps({"id": name, "critique": text}) for name, text in said.items()]
    file.write_text("\n".join(lines))
    words = [*commands({})[0][1:3], f"rule={file}", "--out", str(out)]
    made = evaluate(job, words, ())
    assert made["code"] == 0, made["output"]
    turns = read_evaluation(out).turns
    assert len(turns) == 8 and all(turn.critique == said[turn.attempt] for turn in turns)
    assert all(turn.judgment is False and turn.revision == "print(7)" for turn in turns)
    assert all(turn.after is not None for turn in turns)


@pytest.mark.long
def test_one_critic_is_compared_over_several_proxies(job: Job, tmp_path: Path) -> None:
    out, stranger = tmp_path / "generators", byte_chat_model(tmp_path / "stranger", ["print(8)"])
    words = [*commands({})[0][1:3], f"ours={job.actor}", "--out", str(out), "--proxy"]
    with serving(fails=False) as server:
        places = ["own=shared", f"other={stranger}", f"served=stranger-7b@{server.url}"]
        made = evaluate(job, [*words, *places], ())
        asked = len(server.bodies)
    assert made["code"] == 0, made["output"]
    found = json.loads((out / "report.json").read_text())["critics"]
    assert [one["critic"] for one in found] == ["own: ours", "other: ours", "served: ours"]
    for one, name, solved in zip(found, ("own", "other", "served"), (7, 1, 7), strict=True):
        turns = read_evaluation(out / name).turns
        right = sum(t.after.accepted for t in turns if t.after)
        assert len(turns) == 8 and right == solved, name
        before = one["curves"][0]["pass@1"]["value"]
        assert one["last"]["delta"]["value"] == one["last"]["pass@1"]["value"] - before
        assert one["last"]["pass@1"]["value"] == right / 8
    for name, text in (("own", PROGRAM), ("other", "print(8)"), ("served", PROGRAM)):
        assert {t.revision for t in read_evaluation(out / name).turns} == {text}
    assert asked > 0 and found[1]["gains"]
    assert (out / "report.html").is_file() and "| served: ours |" in (out / "report.md").read_text()

    # The server is gone, and everything is there.
    again = evaluate(job, [*words, *places], ())
    assert again["code"] == 0, again["output"]
    assert "seed 0" not in again["output"]
