"""Make training and test files from programs that people and models wrote.

``python examples/study_smollm2/prepare_real_faults.py --solutions FILE --humanevalpack FILE --out
runs/real`` judges every program in the sandbox. Problems of MBPP are for training, problems of
HumanEval for tests. It writes ``critic_sft.parquet`` and ``proxy_sft.parquet`` (wrong programs that
one edit repairs, and mutants of right programs), ``rl.parquet`` (wrong programs of models),
``rl_mutants.parquet`` (mutants of their right ones; ``rl_all_mutants.parquet`` has those that pass
more tests too), the test sets ``human_faults.parquet`` and ``model_edits.parquet`` (faults that one
edit repairs), ``model_faults.parquet`` (faults of any kind) and ``right_and_wrong.parquet``, and
two critiques of their rows: one that names the fault (``oracle.jsonl``, of those that one edit
repairs) and one that finds none (``bland.jsonl``).

Programs that exceed ``--longest-prompt`` or ``--longest-program`` tokens are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.checkpoint.files import require_replaceable_files, tool_output_files
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import count_flag, existing_file, output_path, share
from ctrl_megatron.data.rows import row_of_attempt, write_rows
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.solutions import judge_attempts
from ctrl_megatron.preparation.mutants import (
    BLAND,
    Mutant,
    attempt_row,
    critic_examples,
    oracle_critique,
    proxy_examples,
)
from ctrl_megatron.preparation.selection import distinct_attempts, round_robin_by_problem
from ctrl_megatron.prompts import critique_messages, fence_code
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sft.examples import write_examples
from ctrl_megatron.types import Attempt, Verdict
from examples.study_smollm2.real_faults import (
    code_of,
    known_faults,
    mutants_of,
    read_programs,
    right_programs,
    with_nearest_reference,
    with_references,
)

_TOOL = "prepare_real_faults"
TIME_LIMIT = 2.0
"""Seconds per test: these programs take milliseconds or never end."""
_TESTS = ("human_faults", "model_edits", "model_faults", "right_and_wrong")
_FILES = [
    *(f"{name}.parquet" for name in ("critic_sft", "proxy_sft", "rl", "rl_mutants")),
    *(f"{name}.parquet" for name in (*_TESTS, "rl_all_mutants")),
    *("oracle.jsonl", "bland.jsonl"),
]
_RIGHT_SHARE = 4
"""One example of a right program for so many of a fault."""


def judge(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Verdict]]:
    """Every attempt with its pass rate, and its verdict."""

    async def ask(endpoint: str) -> list[tuple[Attempt, Verdict]]:
        async with SandboxClient(endpoint) as client:
            return await judge_attempts(client, attempts)

    with EmbeddedSandbox.start() as sandbox:
        return asyncio.run(ask(sandbox.endpoint))


def fitting(codec: TextCodec, prompt: int, program: int) -> Callable[[Attempt], bool]:
    """Whether the request for a critique has at most ``prompt`` tokens and the answer with the
    program at most ``program``.
    """

    def fits(attempt: Attempt) -> bool:
        asked = codec.encode_chat(critique_messages(attempt.problem, attempt.solution))
        return len(asked) <= prompt and len(codec.encode(fence_code(code_of(attempt)))) < program

    return fits


@command_entry_point("prepare_real_faults")
def main(arguments: Sequence[str] | None = None) -> int:
    """Read, judge, choose, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    parser.add_argument("--solutions", type=existing_file, required=True, help="collected programs")
    parser.add_argument(
        "--humanevalpack", type=existing_file, required=True, help="its Python file"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of the critic")
    parser.add_argument("--out", type=output_path, default=Path("runs/real"))
    parser.add_argument("--overwrite", action="store_true", help="replace this tool's own files")
    parser.add_argument(
        "--test-size", type=count_flag(), default=100, help="most rows of a test set"
    )
    parser.add_argument("--longest-prompt", type=count_flag(), default=416, help="tokens")
    parser.add_argument("--longest-program", type=count_flag(), default=128, help="tokens")
    parser.add_argument("--mutants", type=count_flag(), default=4, help="most mutants of a problem")
    parser.add_argument(
        "--highest-pass-rate",
        type=share,
        default=0.25,
        help="most share of its tests that a program for reinforcement passes",
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    require_replaceable_files(options.out, _FILES, _TOOL, overwrite=options.overwrite)
    fits = fitting(TextCodec(options.tokenizer), options.longest_prompt, options.longest_program)
    programs = read_programs(options.solutions, options.humanevalpack)
    print("left out: " + ", ".join(f"{n} {why}" for why, n in programs.dropped.counts().items()))
    mbpp = _judged("MBPP, models", programs.mbpp, fits)
    models = _judged("HumanEval, models", programs.human_eval, fits)
    people = _judged("HumanEval, people", programs.human, fits)
    references = _judged("HumanEval, references", programs.references, fits)
    problems, mutants = with_references(mbpp), _mutants(_right(mbpp), options, fits)
    edits = known_faults(_wrong(mbpp), _right(mbpp), "model")
    right = [*_right(references), *_right(models)]
    tested = {
        "human_faults": known_faults(_wrong(people), right, "human", "unseen_problems"),
        "model_edits": known_faults(_wrong(models), right, "model", "unseen_problems"),
    }
    for name, found, wrong in (
        ("MBPP, models", edits, mbpp),
        ("HumanEval, people", tested["human_faults"], people),
        ("HumanEval, models", tested["model_edits"], models),
    ):
        print(f"{name}: one edit repairs {len(found)} of {len(_wrong(wrong))} wrong programs")
    print(f"MBPP: {len(mutants)} mutants of models' programs")
    rng, learned = Random(options.seed), [*mutants, *edits]
    half = options.test_size // 2
    both = [
        *_spread([*_wrong(people), *_wrong(models)], half, options.seed),
        *_spread(right, half, options.seed),
    ]
    chosen = {
        name: rng.sample(found, min(options.test_size, len(found)))
        for name, found in tested.items()
    }
    of_test = with_references([*references, *models])
    low = options.highest_pass_rate
    # Hints of a teacher are about programs that are as near as possible.
    known = right_programs(mbpp)
    mutated = [
        attempt_row(m, with_nearest_reference(problems[m.problem_id], m.code, known))
        for m in mutants
    ]
    rows = {
        "rl": [
            row_of_attempt(replace(a, problem=with_nearest_reference(a.problem, code_of(a), known)))
            for a in _wrong(mbpp)
            if (a.pass_rate or 0.0) <= low
        ],
        "rl_mutants": [row for row in mutated if (row.pass_rate or 0.0) <= low],
        **{
            name: [attempt_row(m, of_test[m.problem_id]) for m in found]
            for name, found in chosen.items()
        },
        "model_faults": [
            row_of_attempt(a) for a in _spread(_wrong(models), options.test_size, options.seed)
        ],
        "right_and_wrong": [row_of_attempt(attempt) for attempt in both],
        "rl_all_mutants": mutated,
    }
    for name, found in rows.items():
        rng.shuffle(found)
        if not found:
            raise UserError(
                f"no row is left for {name}.parquet",
                remedy="raise --longest-prompt, --longest-program or --highest-pass-rate",
            )
    said = critic_examples(learned, problems, options.seed, right=len(learned) // _RIGHT_SHARE)
    follow = proxy_examples(learned, problems, options.seed)
    critiques = {
        "oracle": {
            m.id: oracle_critique(m.wrong, m.right) for found in chosen.values() for m in found
        },
        "bland": {row.id: BLAND for name in _TESTS for row in rows[name]},
    }
    with tool_output_files(options.out, _FILES, _TOOL, overwrite=options.overwrite) as folder:
        write_examples(folder / "critic_sft.parquet", said)
        write_examples(folder / "proxy_sft.parquet", follow)
        for name, found in rows.items():
            write_rows(folder / f"{name}.parquet", found)
        for name, of_row in critiques.items():
            lines = [json.dumps({"id": key, "critique": c}) + "\n" for key, c in of_row.items()]
            (folder / f"{name}.jsonl").write_text("".join(lines))
    counts = {"critic_sft": len(said), "proxy_sft": len(follow)}
    counts |= {name: len(found) for name, found in rows.items()}
    print(f"{options.out}: " + ", ".join(f"{n} rows of {name}" for name, n in counts.items()))
    return 0


def _mutants(
    right: Sequence[Attempt], options: argparse.Namespace, fits: Callable[[Attempt], bool]
) -> list[Mutant]:
    """Mutants of right programs that fit and fail a test, with their pass rates."""
    made = mutants_of(right, options.seed, most=options.mutants)
    judged = judge([attempt for attempt, _ in made if fits(attempt)])
    rates = {attempt.id: attempt.pass_rate for attempt, _ in judged}
    known = [(mutant, rates.get(mutant.id)) for _, mutant in made]
    return [replace(m, pass_rate=rate) for m, rate in known if rate is not None and rate < 1]


def _judged(
    name: str, attempts: Sequence[Attempt], fits: Callable[[Attempt], bool]
) -> list[Attempt]:
    """The distinct attempts that fit, with their pass rates."""
    limited = [replace(a, problem=replace(a.problem, time_limit=TIME_LIMIT)) for a in attempts]
    distinct, _ = distinct_attempts(limited)
    short = [attempt for attempt in distinct if fits(attempt)]
    judged = [attempt for attempt, _ in judge(short)]
    print(
        f"{name}: {len(attempts)} programs, {len(distinct)} distinct, {len(short)} fit, "
        f"{len(_right(judged))} right, {len(_wrong(judged))} wrong",
        flush=True,
    )
    return judged


def _right(judged: Sequence[Attempt]) -> list[Attempt]:
    return [attempt for attempt in judged if attempt.pass_rate == 1]


def _wrong(judged: Sequence[Attempt]) -> list[Attempt]:
    return [attempt for attempt in judged if attempt.pass_rate != 1]


def _spread(attempts: Sequence[Attempt], most: int, seed: int) -> list[Attempt]:
    """Up to ``most`` attempts of as many problems as possible."""
    nothing = Verdict(passed=(), total=1)
    return [a for a, _ in round_robin_by_problem(((a, nothing) for a in attempts), seed)][:most]


if __name__ == "__main__":
    raise SystemExit(main())
