"""Make training and test files from mutants (programs with one known fault).

``ctrl-prepare-mutants --out runs/mutants`` writes ``proxy_sft.parquet`` (following a
critique), ``critic_sft.parquet`` (naming the fault), ``rl.parquet`` (first solutions to criticise),
the test sets ``unseen_mutants.parquet`` and ``unseen_problems.parquet``, and two critiques of each
test row: one that names the fault (``oracle.jsonl``) and one that finds none (``bland.jsonl``).
Programs of ``rl.parquet`` and the test sets pass few of their own tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from ctrl_megatron.checkpoint.files import require_replaceable_files, tool_output_files
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import count_flag, existing_path, output_path, share
from ctrl_megatron.data.rows import write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.mutants import (
    BLAND,
    attempt_row,
    critic_examples,
    oracle_critique,
    proxy_examples,
    read_mutants,
    rl_rows,
)
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.sft.examples import write_examples

_TOOL = "prepare_mutants"
TIME_LIMIT = 2.0
"""Seconds per test: these programs take milliseconds or never end."""
_TESTS = ("unseen_mutants", "unseen_problems")
_FILES = [
    *(f"{name}.parquet" for name in ("proxy_sft", "critic_sft", "rl", *_TESTS)),
    *("oracle.jsonl", "bland.jsonl"),
]


@command_entry_point("prepare_mutants")
def main(arguments: Sequence[str] | None = None) -> int:
    """Read, split, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    parser.add_argument("--mutants", type=Path, default=Path("examples/mutants/builtin.jsonl"))
    parser.add_argument("--problems", type=existing_path, default=Path("examples/problems"))
    parser.add_argument("--out", type=output_path, default=Path("runs/mutants"))
    parser.add_argument("--overwrite", action="store_true", help="replace this tool's own files")
    parser.add_argument(
        "--test-size", type=count_flag(), default=100, help="most programs of each test set"
    )
    parser.add_argument(
        "--highest-pass-rate",
        type=share,
        default=0.25,
        help="most share of its tests that a mutant in rl.parquet passes",
    )
    parser.add_argument(
        "--longest-attempt", type=count_flag(), help="most characters of a program in rl.parquet"
    )
    parser.add_argument(
        "--right-share", type=share, default=0.0, help="share of right programs in rl.parquet"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    require_replaceable_files(options.out, _FILES, _TOOL, overwrite=options.overwrite)
    problems = {
        problem.id: replace(problem, time_limit=TIME_LIMIT)
        for problem in read_problems(options.problems)
    }
    mutants = read_mutants(options.mutants, problems)
    splits = {name: [m for m in mutants if m.split == name] for name in ("train", *_TESTS)}
    for name, members in splits.items():
        if not members:
            raise UserError(f"--mutants: {options.mutants} has none of split {name!r}")
    few = {
        name: [m for m in members if m.pass_rate <= options.highest_pass_rate]
        for name, members in splits.items()
    }
    for name, members in few.items():
        if not members:
            raise UserError(
                f"--highest-pass-rate={options.highest_pass_rate}: no mutant of split {name!r} "
                "passes so few tests"
            )
    train, rng = splits["train"], Random(options.seed)
    rows = rl_rows(
        train,
        problems,
        options.seed,
        highest_pass_rate=options.highest_pass_rate,
        longest=options.longest_attempt,
        right_share=options.right_share,
    )
    if not rows:
        raise UserError(
            f"--longest-attempt={options.longest_attempt}: no such mutant passes so few tests"
        )
    with tool_output_files(options.out, _FILES, _TOOL, overwrite=options.overwrite) as folder:
        write_examples(folder / "proxy_sft.parquet", proxy_examples(train, problems, options.seed))
        write_examples(
            folder / "critic_sft.parquet", critic_examples(train, problems, options.seed)
        )
        write_rows(folder / "rl.parquet", rows)
        kept = {}
        for name in _TESTS:
            kept[name] = rng.sample(few[name], min(options.test_size, len(few[name])))
            attempts = [attempt_row(m, problems[m.problem_id]) for m in kept[name]]
            write_rows(folder / f"{name}.parquet", attempts)
        tested = [mutant for members in kept.values() for mutant in members]
        for name, said in (
            ("oracle", [oracle_critique(m.wrong, m.right) for m in tested]),
            ("bland", [BLAND] * len(tested)),
        ):
            lines = [
                json.dumps({"id": mutant.id, "critique": critique}) + "\n"
                for mutant, critique in zip(tested, said, strict=True)
            ]
            (folder / f"{name}.jsonl").write_text("".join(lines))
    print(
        f"{options.out}: {len(train)} mutants to train on, {len(rows)} programs for reinforcement "
        "learning; test sets: "
        + " and ".join(f"{len(kept[name])} of {len(splits[name])} {name}" for name in _TESTS)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
