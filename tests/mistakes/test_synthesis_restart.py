"""Synthesis is killed in every stage and goes on to the same files; a signal keeps what is done."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from forked_command import Interrupt, run

from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.prompts import REVISION_SENTENCE, parse_judgment
from ctrl_megatron.sft.examples import read_examples

KILL = signal.SIGKILL
SYNTHESIZE = "ctrl_megatron.commands.synthesize"
FILES = ("train", "val", "sft_train", "sft_val", "solve")


class _Model(BaseHTTPRequestHandler):
    """A model whose answers follow from the conversation and the seed."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.answer([m["content"] for m in body["messages"]], body["seed"])
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @staticmethod
    def answer(contents: list[str], seed: int) -> str:
        said = contents[-1]
        number = int(re.findall(r"number (\d+)", contents[0])[0])
        if "<hint>" in said:
            word = "Correct" if "The answer is correct" in said else "Incorrect"
            bad = ("", "The hint says so. ")[seed % 2]
            return f"Analysis: {bad}see number {number}.\nOverall judgment: {word}"
        if REVISION_SENTENCE in said:
            return f"```python\nprint({number})\n```"
        return (
            f"```python\nprint({number})\n```",
            f"print({number} + {seed % 50 + 1})\n```\nThis prints it.",
            "I would print the number.",
        )[seed % 3]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Model) as service:
        thread = Thread(target=service.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{service.server_port}/v1"
        service.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def arguments(server: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("given") / "problems.jsonl"
    lines = [
        {
            "id": f"p/{n}",
            "statement": f"Print the number {n + 1000}.",
            "prompter_type": "code_contests",
            "tests": [{"input": {"stdin": ""}, "output": {"stdout": f"{n + 1000}\n"}}],
        }
        for n in range(40)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = [
        part
        for role in ("solver", "critic", "reviser")
        for part in (f"--{role}", "m", f"--{role}-url", server)
    ]
    return ["--problems", str(file), "--out", "data", *models, "--critique-draws", "3"]


@pytest.fixture(scope="module")
def whole(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    code, output = run(SYNTHESIZE, arguments, folder)
    assert code == 0, output[-4000:]
    return folder


def final_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "data").iterdir() if p.is_file()}


def test_the_files_hold_what_they_should(whole: Path) -> None:
    files = {name: str(whole / "data" / f"{name}.parquet") for name in FILES}
    problems = {name: {r.problem_id for r in read_rows(files[name])} for name in ("train", "val")}
    examples = {name: read_examples([files[name]]) for name in ("sft_train", "sft_val")}
    fine_tuned = {e.id.rpartition("/")[0] for e in examples["sft_train"]}
    assert fine_tuned and not fine_tuned & problems["train"] and not fine_tuned & problems["val"]
    assert not problems["train"] & problems["val"]
    assert {e.id.rpartition("/")[0] for e in examples["sft_val"]} <= problems["val"]
    for row in read_rows([files["train"], files["val"]]):
        assert row.pass_rate == float(f"({row.problem[-5:-1]})" in row.solution)
        assert "This prints it" not in row.solution and "I would" not in row.solution
    for example in examples["sft_train"]:
        assert "<hint>" not in example.prompt[0]["content"] and "hint" not in example.response
        solved = f"print({int(example.id.split('/')[1]) + 1000})" in example.prompt[0]["content"]
        assert parse_judgment(example.response) is solved
    table = json.loads((whole / "data/synthesis.json").read_text())
    assert table["solutions"]["kept"] + table["solutions"].get("unreadable solution", 0) == 80
    assert table["solutions"]["(kept) code fence corrected"] > 5
    assert table["SFT critiques"]["kept"] == len(examples["sft_train"])


@pytest.mark.long
def test_a_kill_in_any_stage_changes_nothing(
    arguments: list[str], whole: Path, tmp_path: Path
) -> None:
    written, moved = (
        "ctrl_megatron.preparation.journal:os.fsync",
        "ctrl_megatron.checkpoint.files:os.replace",
    )
    stages = set()
    for interrupt in (
        Interrupt(written, KILL, 2),  # solutions
        Interrupt(written, KILL, 3),  # verdicts
        Interrupt("ctrl_megatron.preparation.stages:execution_hint", KILL, 20),
        Interrupt(written, KILL, 4),
        Interrupt("ctrl_megatron.preparation.training_files:choose_examples", KILL, 2),
        Interrupt(moved, KILL, 8),  # some files have their places already
    ):
        code, output = run(SYNTHESIZE, arguments, tmp_path, interrupt=interrupt)
        assert code == -KILL, output[-4000:]
        stages |= {path.stem for path in (tmp_path / "data/.synthesis").glob("*.jsonl")}
    assert stages == {"solutions", "verdicts", "critiques", "revisions", "revision_verdicts"}
    assert final_files(tmp_path).keys() < final_files(whole).keys()
    code, output = run(SYNTHESIZE, arguments, tmp_path)
    assert code == 0, output[-4000:]
    assert final_files(tmp_path) == final_files(whole)
    assert [p.name for p in (tmp_path / "data").iterdir() if p.is_dir()] == [".synthesis"]


def test_what_is_finished_is_not_done_again_and_not_mixed(
    arguments: list[str], whole: Path
) -> None:
    before = final_files(whole)
    code, output = run(SYNTHESIZE, arguments, whole)
    assert code == 0 and "nothing to do" in output
    code, output = run(SYNTHESIZE, [*arguments, "--seed", "2"], whole)
    assert code == 2 and "was begun with other --seed" in output
    assert final_files(whole) == before


def test_a_signal_keeps_what_is_finished(arguments: list[str], tmp_path: Path) -> None:
    interrupt = Interrupt("ctrl_megatron.preparation.stages:judge_attempts", signal.SIGINT)
    code, output = run(SYNTHESIZE, arguments, tmp_path, interrupt=interrupt)
    assert code == 130 and "Traceback" not in output, output[-4000:]
    assert "synthesize: stopped; what is finished is kept" in output
    names = {p.name for p in (tmp_path / "data").iterdir()}
    assert names == {".synthesis", "checked_tests.jsonl"}
    assert (tmp_path / "data/.synthesis/solutions.jsonl").read_bytes().count(b"\n") == 3


def test_rows_for_reinforcement_have_the_asked_share_of_right_programs(
    arguments: list[str], whole: Path, tmp_path: Path
) -> None:
    code, output = run(SYNTHESIZE, [*arguments, "--right-share", "0.5"], tmp_path)
    assert code == 0, output[-4000:]
    rows = read_rows(str(tmp_path / "data/train.parquet"))
    right = [row for row in rows if row.pass_rate == 1.0]
    assert right and len(right) * 2 == len(rows)
    every = {row.id for row in read_rows(str(whole / "data/train.parquet"))}
    assert {row.id for row in rows} < every
