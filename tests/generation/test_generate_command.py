"""``ctrl-generate`` on a scripted server and a real sandbox: its budget, going on, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Scripted, good, served

from ctrl_megatron.commands.generate import flags_of_files, main
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.search_nodes import SearchNode, read_records

RIGHT, WRONG = "return a + b", "return a - b"


def reply(body: dict[str, Any]) -> Any:
    """Every other first solution is right; critiques are right; revisions follow them."""
    asked = body["messages"][-1]["content"]
    if asked.startswith("Review"):
        return good(f"Overall judgment: {'Correct' if RIGHT in asked else 'Incorrect'}")
    right = len(body["messages"]) > 1 or body["seed"] % 2
    return good(f"```python\ndef add(a, b):\n    {RIGHT if right else WRONG}\n```")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    file = tmp_path / "problems.jsonl"
    lines = [
        {
            "id": f"add/{number}",
            "statement": f"Add two numbers ({number}).",
            "prompter_type": "mbppplus",
            "entry_point": "add",
            "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        }
        for number in range(2)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_tree_from_a_server_goes_on_after_its_budget(
    tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tree"
    arguments = ["--problems", str(problems), "--out", str(out), "--generator", "tiny"]
    arguments += ["--widths", "1", "5", "1", "1", "--stop-when-correct", "--best-of-n"]
    for name in ("", "critique-", "revision-"):
        arguments += [f"--{name}max-tokens", "20"]
    with served(Scripted(reply)) as url:
        arguments += ["--generator-url", url.replace("://", "://me:correct-horse@")]
        # Ten answers of 8 tokens are the first solutions.
        assert main([*arguments, "--token-budget", "110"]) == 2
        assert "budget of 110 tokens is used up" in capsys.readouterr().err
        assert sorted(path.name for path in (out / "layers").iterdir()) == ["1-5"]
        assert main(arguments) == 0
        # The same flags as a file.
        file = tmp_path / "flags.yaml"
        file.write_text("widths: [1, 9]\nstop_when_correct: true\nbest-of-n: true\n")
        rest = [word for word in arguments if word not in ("--stop-when-correct", "--best-of-n")]
        assert main(["--config", str(file), *rest]) == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"correct-horse" in path.read_bytes()]
    shown = capsys.readouterr().out
    assert "first solutions" in shown and "best of n" in shown
    nodes, _ = read_records(out / "nodes.parquet", SearchNode)
    first = [node for node in nodes if node.depth == 1]
    assert {node.pass_rate for node in first} == {1.0, 0.5}
    assert all(
        node.judgment == (node.prev_hash in {n.hash for n in first if n.success})
        for node in nodes
        if node.depth == 2
    )
    assert all(node.success for node in nodes if node.depth >= 2)
    summary = json.loads((out / "summary.json").read_text())
    assert [row["solved"] for row in summary["turns"]][1:] == [1.0, 1.0]
    assert summary["best_of_n"]["solved"] == 1.0
    assert summary["sandbox_seconds"] > 0
    best, _ = read_records(out / "best.parquet", SearchNode)
    assert [node.task_id for node in best] == ["add/0", "add/1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--widths", "5"], "--widths 5: must be 1"),
        (["--generator-url", "localhost"], "--generator"),
        (["--max-tokens", "4096"], "no room for its prompt in --max-model-len=2048"),
        (["--critic-url", "http://localhost"], "--critic-url needs --critic"),
        (["--limit", "0"], "--limit=0 must be at least 1"),
        (["--problems", "none.jsonl"], "none.jsonl"),
        (["--top-p", "0"], "--top-p"),
        (["--temperature", "-1"], "--temperature=-1.0 must be at least 0"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path,
    problems: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    given = ["--problems", str(problems), "--out", str(tmp_path / "tree"), "--generator", "tiny"]
    given += ["--generator-url", "http://127.0.0.1:9/v1", *arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "tree").exists()


def test_a_directory_with_another_tree_is_left_alone(
    tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tree"
    given = ["--problems", str(problems), "--out", str(out), "--generator", "tiny"]
    given += ["--sandbox", "none", "--widths", "1", "2"]
    with served(Scripted(reply)) as url:
        given += ["--generator-url", url]
        assert main(given) == 0
        assert main([*given, "--seed", "5"]) == 2
    assert "seed: 0, now 5" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    assert main([*given, "--out", str(other)]) == 2
    assert f"{other} is not empty" in capsys.readouterr().err
    for foreign in ("[1]", "{", "\xff"):
        (other / "settings.json").write_text(foreign, "latin-1")
        assert main([*given, "--out", str(other)]) == 2
        assert "settings.json was not written by ctrl-generate" in capsys.readouterr().err


def test_flags_may_be_in_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("top_p: 0.5\nwidths: [1, 2]\nbest-of-n: false\nlimit: null\n")
    second.write_text("stop-when-correct: true\n")
    found = flags_of_files(["--config", str(first), "--seed", "3", "--config", str(second)])
    assert found == ["--top-p", "0.5", "--widths", "1", "2", "--stop-when-correct"]
    for text, said in (("- a", "must hold flags"), ("a: {b: 1}", "a is a group of keys")):
        first.write_text(text)
        with pytest.raises(UserError, match=said):
            flags_of_files(["--config", str(first)])
