"""Make mutants (programs with one known fault) from the references of problems, and judge them.

``python tools/make_mutants.py --out examples/mutants/builtin.jsonl``

The same command continues after a stop: ``OUT.part`` has the judged mutants until OUT is written.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import existing_path, output_path
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.solutions import grading_job_of_attempt, judge_attempts
from ctrl_megatron.metrics import JsonlWriter, read_json_lines
from ctrl_megatron.preparation.mutants import Mutant, Split
from ctrl_megatron.preparation.mutations import Mutation, mutations
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.prompts import fence_code
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import Attempt, Problem

_PART = 32
_UNSEEN_PROBLEMS, _UNSEEN_MUTANTS = 0.2, 0.3
"""Shares for tests: of the problems, and of the mutants of the other problems."""


async def judge(todo: Sequence[Attempt], part: Path) -> None:
    """Append the pass rate of each mutant to ``part``, with a digest of its job, because a problem
    may be corrected between two calls.
    """
    columns = TextColumn("judging mutants"), BarColumn(), MofNCompleteColumn()
    with (
        EmbeddedSandbox.start() as sandbox,
        Progress(*columns, TimeRemainingColumn()) as progress,
        closing(JsonlWriter(part)) as lines,
    ):
        bar = progress.add_task("", total=len(todo))
        async with SandboxClient(sandbox.endpoint) as client:
            for start in range(0, len(todo), _PART):
                # Progress per mutant: one that never ends uses its time limit in every test.
                judged = await judge_attempts(
                    client, todo[start : start + _PART], advance=lambda: progress.advance(bar)
                )
                for attempt, _ in judged:
                    lines.append(
                        {
                            "id": attempt.id,
                            "digest": grading_job_of_attempt(attempt).key,
                            "pass_rate": attempt.pass_rate,
                        }
                    )


def judged_already(part: Path) -> dict[str, float]:
    """Digest -> pass rate. A truncated last line is ignored."""
    rates = {}
    for number, entry in enumerate(read_json_lines(part) if part.exists() else (), start=1):
        if entry.keys() != {"id", "digest", "pass_rate"}:
            raise UserError(
                f"{part} line {number} is no judged mutant", remedy="move it or name another --out"
            )
        rates[entry["digest"]] = entry["pass_rate"]
    return rates


def split_of(problem_id: str, name: str) -> Split:
    """The split of a mutant. It depends only on the ids, so a mutant never changes its split."""
    if crc32(problem_id.encode()) % 1000 < 1000 * _UNSEEN_PROBLEMS:
        return "unseen_problems"
    return "unseen_mutants" if crc32(name.encode()) % 1000 < 1000 * _UNSEEN_MUTANTS else "train"


@command_entry_point("make_mutants")
def main(arguments: Sequence[str] | None = None) -> int:
    """Read, change, judge, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    parser.add_argument("--problems", type=existing_path, default=Path("examples/problems"))
    parser.add_argument("--out", type=output_path, required=True)
    parser.add_argument("--max-difficulty", type=int, default=2, help="hardest level used")
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise UserError(f"--out: {options.out} is there", remedy="name another file or move it")
    mutants = list[tuple[Attempt, Mutation]]()
    for problem in read_problems(options.problems):
        if problem.difficulty <= options.max_difficulty and problem.reference.strip():
            for number, mutation in enumerate(_mutations(problem)):
                name, solution = f"{problem.id}/mutant{number}", fence_code(mutation.code)
                mutants.append((Attempt(id=name, problem=problem, solution=solution), mutation))
    if not mutants:
        raise UserError(
            f"--problems: no reference in {options.problems} can be changed",
            remedy="give problems with references, or raise --max-difficulty",
        )
    part = options.out.with_name(options.out.name + ".part")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = judged_already(part)
    digests = {attempt.id: grading_job_of_attempt(attempt).key for attempt, _ in mutants}
    asyncio.run(judge([a for a, _ in mutants if digests[a.id] not in known], part))
    rates = judged_already(part)
    found = [
        Mutant(
            id=attempt.id,
            problem_id=attempt.problem.id,
            split=split_of(attempt.problem.id, attempt.id),
            kind=mutation.kind,
            code=mutation.code,
            wrong=mutation.wrong,
            right=mutation.right,
            pass_rate=rates[digests[attempt.id]],
        )
        for attempt, mutation in mutants
        if rates[digests[attempt.id]] < 1
    ]
    if not found:
        raise UserError(
            f"--problems: all {len(mutants)} changed programs pass every test: {options.out} is "
            "not written",
            remedy="give problems with stricter tests",
        )
    write_text_atomically(options.out, "".join(json.dumps(asdict(m)) + "\n" for m in found))
    part.unlink()
    harmless = len(mutants) - len(found)
    print(
        f"{options.out}: {len(found)} mutants of {len({m.problem_id for m in found})} problems, "
        f"by split {dict(Counter(m.split for m in found))}, by kind "
        f"{dict(Counter(m.kind for m in found))}; {harmless} that pass every test left out"
    )
    return 0


def _mutations(problem: Problem) -> list[Mutation]:
    try:
        return mutations(problem.reference.strip())
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise UserError(
            f"--problems: the reference of {problem.id} is no Python: {error}",
            remedy="correct it or leave it out",
        ) from error


if __name__ == "__main__":
    raise SystemExit(main())
