"""Turn a problem set and first solutions into training files.

``python tools/prepare_data.py --out runs/data`` writes ``train.parquet`` and ``val.parquet``
(attempts with critique prompts, held-out problems in val), ``sft_train.parquet`` (critiques
synthesised from execution feedback, training problems only), ``sft_val.parquet`` (the same of
held-out problems, 64 at most; left out where no problem is held out) and ``solve.parquet`` (every
training problem once, with the prompt that asks for a solution: for GRPO without critiques).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from ctrl_megatron.checkpoint.files import new_files, require_own_files
from ctrl_megatron.commands.start import CommandParser, command
from ctrl_megatron.data.problems import problem_from, read_json_lines, read_problem_records
from ctrl_megatron.data.rows import row_of, write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.solutions import judge_attempts
from ctrl_megatron.prompts import critique_messages, fenced, generation_messages
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sft.examples import SftExample, write_examples
from ctrl_megatron.sft.synthesis import synthesise_rows
from ctrl_megatron.types import Attempt, Verdict

_TOOL = "prepare_data"
_FILES = [f"{name}.parquet" for name in ("train", "val", "sft_train", "sft_val", "solve")]
_HELD_OUT_SHARE = 0.2
_SFT_VAL_SIZE = 64


def held_out(problem_id: str) -> bool:
    """Whether a problem is kept for validation: by its name, so that it never moves."""
    return crc32(problem_id.encode()) % 1000 < 1000 * _HELD_OUT_SHARE


def read_attempts(problems: Path, solutions: Path) -> tuple[list[Attempt], list[Attempt]]:
    """(the model's attempts, reference and buggy solutions as further attempts)."""
    records = read_problem_records(problems)
    known = {record["id"]: problem_from(record) for record in records}
    own, seen = [], dict[str, str]()
    for place, entry in read_json_lines(solutions):
        for key in ("id", "problem_id", "solution"):
            if not isinstance(entry.get(key), str):
                raise UserError(f"{place}: key {key!r} is missing or no text")
        if entry["id"] in seen:
            raise UserError(f"{place}: key 'id' repeats {entry['id']!r} of {seen[entry['id']]}")
        if entry["problem_id"] not in known:
            raise UserError(
                f"{place}: problem {entry['problem_id']!r} is not in {problems}; "
                "generate the solutions anew with tools/generate_solutions.py"
            )
        seen[entry["id"]] = place
        problem = known[entry["problem_id"]]
        own.append(Attempt(id=entry["id"], problem=problem, solution=entry["solution"]))
    written = [
        Attempt(id=f"{record['id']}/{kind}", problem=known[record["id"]], solution=fenced(code))
        for record in records
        for kind, code in [
            *([("reference", record["reference"])] if record["reference"].strip() else []),
            *((f"buggy{i}", code) for i, code in enumerate(record.get("buggy", []))),
        ]
    ]
    return own, written


async def judge(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Verdict]]:
    """All verdicts, from an embedded sandbox."""
    sandbox = EmbeddedSandbox.start()
    try:
        with Progress() as progress:
            bar = progress.add_task("judging first solutions", total=len(attempts))
            async with SandboxClient(sandbox.endpoint) as client:
                return await judge_attempts(client, attempts, advance=lambda: progress.advance(bar))
    finally:
        sandbox.stop()


@command("prepare_data")
def main(arguments: Sequence[str] | None = None) -> int:
    """Read, judge, split, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    parser.add_argument("--problems", type=Path, default=Path("examples/problems"))
    parser.add_argument("--solutions", type=Path, default=Path("examples/solutions/smollm2.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("runs/data"))
    parser.add_argument("--overwrite", action="store_true", help="replace this tool's own files")
    parser.add_argument("--max-difficulty", type=int, default=2, help="hardest level used")
    parser.add_argument("--val-size", type=int, default=40, help="held-out attempts")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.val_size < 0:
        raise UserError(f"--val-size={options.val_size} must be 0 or more")
    require_own_files(options.out, _FILES, _TOOL, overwrite=options.overwrite)
    own, written = read_attempts(options.problems, options.solutions)
    chosen = [a for a in own + written if a.problem.difficulty <= options.max_difficulty]
    names = {a.id for a in own}
    if not any(a.id in names and not held_out(a.problem.id) for a in chosen):
        raise UserError(
            f"no training attempt is left of {len(own)} in {options.solutions}: all are harder "
            f"than --max-difficulty={options.max_difficulty} or held out",
            remedy="raise it, or add problems",
        )
    judged = asyncio.run(judge(chosen))
    for attempt, verdict in judged:
        if attempt.id.endswith("/reference") and not verdict.accepted:
            told = next((text for text in verdict.detail if text), "no detail")
            print(f"warning: {attempt.id} fails its own tests: {told}", file=sys.stderr)
    with new_files(options.out, _FILES, _TOOL, overwrite=options.overwrite) as folder:
        said = write_files(folder, options, judged, names)
    skipped = len(own) + len(written) - len(chosen)
    print(f"{options.out}: {said}; {skipped} harder attempts left out")
    return 0


def write_files(
    folder: Path,
    arguments: argparse.Namespace,
    judged: Sequence[tuple[Attempt, Verdict]],
    own: set[str],
) -> str:
    """Split by problem and write the files; says what is in them."""
    rows = {a.id: row_of(a, critique_messages(a.problem, a.solution)) for a, _ in judged}
    train = [(a, v) for a, v in judged if not held_out(a.problem.id)]
    rl = [rows[a.id] for a, _ in train if a.id in own]
    kept = [(a, v) for a, v in judged if held_out(a.problem.id)]
    val = [rows[a.id] for a, _ in kept if a.id in own]
    sft_train, sft_val = critiques(train, arguments.seed), critiques(kept, arguments.seed)
    sft_val = sft_val[:_SFT_VAL_SIZE]
    write_rows(folder / "train.parquet", rl)
    write_rows(folder / "val.parquet", val[: arguments.val_size])
    problems = {a.problem.id: a.problem for a, _ in train}.values()
    solve = [
        row_of(Attempt(id=p.id, problem=p, solution=""), generation_messages(p)) for p in problems
    ]
    write_rows(folder / "solve.parquet", solve)
    write_examples(folder / "sft_train.parquet", sft_train)
    if sft_val:
        write_examples(folder / "sft_val.parquet", sft_val)
    right = sum(row.pass_rate == 1 for row in rl)
    return (
        f"{len(rl)} training attempts ({right} correct), "
        f"{min(len(val), arguments.val_size)} held out, {len(sft_train)} critiques for SFT "
        f"({len(sft_val)} more held out)"
    )


def critiques(judged: Sequence[tuple[Attempt, Verdict]], seed: int) -> list[SftExample]:
    """A critique of every attempt, written from its verdict."""
    written = synthesise_rows([a for a, _ in judged], [v for _, v in judged], seed)
    return [
        SftExample(id=e["id"], prompt=tuple(e["prompt"]), response=e["response"]) for e in written
    ]


if __name__ == "__main__":
    raise SystemExit(main())
