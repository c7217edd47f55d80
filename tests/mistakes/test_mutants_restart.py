"""Judging mutants is killed and goes on to the same file."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from forked_command import Interrupt, run

TOOL, KILL = "tools.make_mutants", signal.SIGKILL
ARGUMENTS = ["--problems", "problems.jsonl", "--out", "mutants.jsonl"]


def write_problems(folder: Path) -> Path:
    folder.mkdir()
    lines = [
        {
            "id": f"p/{n}",
            "statement": f"Say of two numbers whether their sum is above {n}.",
            "prompter_type": "mbppplus",
            "entry_point": "above",
            "tests": [f"assert above({n}, 1) is True", f"assert above({n - 9}, 2) is False"],
            "reference": f"def above(a, b):\n    if a + b > {n}:\n        return True\n"
            "    return False",
        }
        for n in range(10)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "problems.jsonl").write_text(text)
    return folder


def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    whole, killed = (write_problems(tmp_path / name) for name in ("whole", "killed"))
    code, output = run(TOOL, ARGUMENTS, whole)
    assert code == 0 and "mutants of 10 problems" in output, output[-4000:]
    made = (whole / "mutants.jsonl").read_bytes()
    part, counts = killed / "mutants.jsonl.part", []
    for place, nth in (
        ("judge_attempts", 2),
        ("JsonlWriter.append", 20),
        ("write_text_atomically", 1),
    ):
        code, output = run(
            TOOL, ARGUMENTS, killed, interrupt=Interrupt(f"{TOOL}:{place}", KILL, nth)
        )
        assert code == -KILL, output[-4000:]
        assert not (killed / "mutants.jsonl").exists()
        counts.append(part.read_bytes().count(b"\n"))
        with part.open("a") as file:
            file.write('{"id": "p/')  # a line that was cut off
    assert 0 < counts[0] < counts[1] < counts[2]
    code, output = run(TOOL, ARGUMENTS, killed)
    assert code == 0, output[-4000:]
    assert (killed / "mutants.jsonl").read_bytes() == made and not part.exists()


def test_a_problem_that_was_corrected_is_judged_by_its_new_tests(tmp_path: Path) -> None:
    folder = write_problems(tmp_path / "given")
    stopped = Interrupt(f"{TOOL}:write_text_atomically", KILL, 1)
    code, output = run(TOOL, ARGUMENTS, folder, interrupt=stopped)
    assert code == -KILL, output[-4000:]
    lines = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    # The first problem's tests are ones that no program fails, the second's reference is another:
    # its mutants have the names that those of the first call had.
    lines[0]["tests"] = ["assert above(1, 2) is not None"]
    lines[1]["reference"] = "def above(a, b):\n    return a + b > 1"
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    anew = tmp_path / "anew"
    anew.mkdir()
    (anew / "problems.jsonl").write_bytes((folder / "problems.jsonl").read_bytes())
    for there in (folder, anew):
        code, output = run(TOOL, ARGUMENTS, there)
        assert code == 0 and "mutants of 9 problems" in output, output[-4000:]
    made = (folder / "mutants.jsonl").read_bytes()
    assert made == (anew / "mutants.jsonl").read_bytes() and b"p/0/" not in made
