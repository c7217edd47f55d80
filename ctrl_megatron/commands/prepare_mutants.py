"""Make training and test files from mutants (programs with one known fault).

``ctrl-prepare-mutants --out runs/mutants`` writes ``proxy_sft.parquet`` (following a
critique), ``critic_sft.parquet`` (naming the fault), ``rl.parquet`` (first solutions to criticise),
the test sets ``unseen_mutants.parquet`` and ``unseen_problems.parquet``, and two critiques of each
test row: one that names the fault (``oracle.jsonl``; none of a right program) and one that finds
none (``bland.jsonl``). Programs of ``rl.parquet`` and the test sets pass few of their own tests.
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
from ctrl_megatron.data.rows import Row, write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.mutants import (
    BLAND,
    critic_examples,
    evaluation_rows,
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
    parser.add_argument(
        "--sft-right-share",
        type=share,
        help="share of right programs in critic_sft.parquet; by default it has 80 of them",
    )
    parser.add_argument(
        "--balanced-tests",
        action="store_true",
        help="test sets of as many right programs as mutants, each of a problem of its own; these "
        "right programs are in no training file",
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
    tests: dict[str, list[Row]] = {}
    for name in _TESTS:
        most = len(few[name]) if options.balanced_tests else options.test_size
        drawn = rng.sample(few[name], min(most, len(few[name])))
        tests[name] = evaluation_rows(
            drawn, problems, options.test_size, right=options.balanced_tests
        )
    held_out = {row.problem_id for rows in tests.values() for row in rows if row.pass_rate == 1.0}
    rows = rl_rows(
        train,
        problems,
        options.seed,
        highest_pass_rate=options.highest_pass_rate,
        longest=options.longest_attempt,
        right_share=options.right_share,
        held_out=held_out,
    )
    if not rows:
        raise UserError(
            f"--longest-attempt={options.longest_attempt}, --right-share={options.right_share}: "
            "no program is left, right ones or mutants that pass so few tests"
        )
    with tool_output_files(options.out, _FILES, _TOOL, overwrite=options.overwrite) as folder:
        # A repair ends with the right program, which a balanced test asks about.
        shown = [mutant for mutant in train if mutant.problem_id not in held_out]
        write_examples(folder / "proxy_sft.parquet", proxy_examples(shown, problems, options.seed))
        taught = critic_examples(
            train,
            problems,
            options.seed,
            right_share=options.sft_right_share,
            held_out=held_out,
        )
        write_examples(folder / "critic_sft.parquet", taught)
        write_rows(folder / "rl.parquet", rows)
        for name, attempts in tests.items():
            write_rows(folder / f"{name}.parquet", attempts)
        tested = [row for attempts in tests.values() for row in attempts]
        for name, said in (("oracle", map(_oracle, tested)), ("bland", [BLAND] * len(tested))):
            lines = [
                json.dumps({"id": row.id, "critique": critique}) + "\n"
                for row, critique in zip(tested, said, strict=True)
            ]
            (folder / f"{name}.jsonl").write_text("".join(lines))
    print(
        f"{options.out}: {len(train)} mutants to train on, {len(rows)} programs for reinforcement "
        "learning; test sets: "
        + " and ".join(f"{len(tests[name])} {name} of {len(splits[name])}" for name in _TESTS)
    )
    return 0


def _oracle(row: Row) -> str:
    return oracle_critique(row.extra["wrong"], row.extra["right"]) if row.extra["wrong"] else BLAND


if __name__ == "__main__":
    raise SystemExit(main())
