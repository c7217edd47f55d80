"""Compare the sandbox's verdicts with known verdicts of real programs: ``python
tools/check/sandbox_data.py --data FOLDER``.

Judges published reference solutions (MBPP, MBPP+, HumanEval, HumanEval+, HumanEvalPack with its
buggy versions, the samples of SandboxFusion) and model-written solutions with known verdicts.
Prints one line per set, and each difference with its id and reason. Exit status 1 if a set has too
many differences.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.preparation.published import read_published
from ctrl_megatron.sandbox import EmbeddedSandbox, EvalResult, SandboxClient, SubmitRequest
from ctrl_megatron.sandbox.wire import TestConfig

_NO_TUPLES = (106, 124, 252, 580, 596, 720, 737, 787, 794)
KNOWN_BAD = {
    # JSON has no tuples; and results that are matches of a regular expression.
    "mbppplus-inputs": {f"mbppplus/{number}" for number in _NO_TUPLES},
    # The published loop calls the polynomial with the pieces of a number.
    "humanevalplus": {"HumanEval/32"},
}
"""Set -> references that fail their own published tests here."""
SOLUTIONS_LEFT_OUT = {704, 2690}
"""Rows of the solutions whose recorded verdicts are not plain Python's: one takes the first of a
set's characters, which depends on the process's seed of hashes, and one returns a generator where
the test wants a list."""
MOST_TESTS = 16
"""Tests per published problem: some problems of the plus sets have thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A program, its tests and the verdicts it must get: one per test, or one bool for all."""

    name: str
    code: str
    kind: str
    data: dict[str, Any]
    verdicts: tuple[bool, ...] | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one set. ``differences`` are lines of text."""

    agreed: int
    total: int
    differences: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of verdicts that agree."""
        return self.agreed / self.total


def published(name: str, format: str, file: str) -> Callable[[Path], Iterator[Known]]:
    """The references of a set that ``ctrl-prepare-data`` reads, with the tests that it writes."""

    def references(data: Path) -> Iterator[Known]:
        for problem in read_published(format, [data / file], check=False)[0]:
            tests = {
                "test_list": list(problem.selected_uts[:MOST_TESTS]),
                "test_setup_code": problem.test_setup,
                "entry_point": problem.entry_point.split(", "),
            }
            yield Known(
                name=problem.id,
                code=problem.reference,
                kind="MBPPDataset",
                data=tests,
                verdicts=problem.id not in KNOWN_BAD.get(name, ()),
            )

    return references


def human_eval_pack(data: Path) -> Iterator[Known]:
    """All 164 references of HumanEval."""
    for row in _lines(data / "humanevalpack" / "humanevalpack_python.jsonl"):
        yield _human_eval(row, row["canonical_solution"], row["task_id"], True)


def human_eval_pack_buggy(data: Path) -> Iterator[Known]:
    """The buggy versions of HumanEvalPack; each must be refused."""
    for row in _lines(data / "humanevalpack" / "humanevalpack_python.jsonl"):
        yield _human_eval(row, row["buggy_solution"], f"{row['task_id']} (buggy)", False)


def samples(data: Path) -> Iterator[Known]:
    """SandboxFusion's samples: MBPP references pass; LiveCodeBench's ``sys.exit(0)`` fails."""
    folder = data / "sandboxfusion_samples"
    for row in _lines(folder / "code_eval_mbpp.jsonl"):
        tests = {"test_list": row["test_list"]}
        name, code = f"sample mbpp/{row['id']}", row["canonical_solution"]
        yield Known(name=name, code=code, kind="MBPPDataset", data=tests, verdicts=True)
    for row in _lines(folder / "code_eval_live_code_bench_v1.jsonl"):
        name, code = f"sample livecodebench/{row['id']}", row["canonical_solution"]
        yield Known(name=name, code=code, kind="LiveCodeBenchDataset", data=row, verdicts=False)


def solutions(data: Path) -> Iterator[Known]:
    """Solutions by models with the verdict on each test."""
    path = data / "initial_solutions" / "initial_solutions.jsonl.gz"
    for number, row in enumerate(_lines(path)):
        if number in SOLUTIONS_LEFT_OUT:
            continue
        words = set(re.findall(r"\w+", " ".join(row["tests"])))
        called = not words.isdisjoint([*row["stub"], "candidate"])
        tests = {
            "test_list": row["tests"],
            "test_setup_code": row["setup"],
            # The data set names, for some problems, another function than their tests call.
            "entry_point": row["stub"] if called else None,
            "prompt": row["prompt"],
        }
        yield Known(
            name=f"{row['source']} {row['model']} {row['task_id']} (row {number})",
            code=row["solution"],
            kind="HumanEvalDataset",
            data=tests,
            verdicts=tuple(verdict == "pass" for verdict in row["verdicts"]),
        )


SETS: dict[str, tuple[Callable[[Path], Iterator[Known]], float]] = {
    "mbpp": (published("mbpp", "mbpp", "mbpp/mbpp.jsonl"), 1.0),
    "mbpp-sanitized": (published("mbpp-sanitized", "mbpp", "mbpp/sanitized-mbpp.json"), 1.0),
    "mbppplus": (published("mbppplus", "mbppplus", "mbppplus/MbppPlus-OriginFmt.jsonl.gz"), 1.0),
    "mbppplus-inputs": (
        published("mbppplus-inputs", "mbppplus", "mbppplus/MbppPlus.jsonl.gz"),
        1.0,
    ),
    "humaneval": (published("humaneval", "humaneval", "humaneval/HumanEval.jsonl.gz"), 1.0),
    "humanevalplus": (
        published(
            "humanevalplus", "humanevalplus", "humanevalplus/HumanEvalPlus-OriginFmt.jsonl.gz"
        ),
        1.0,
    ),
    "humanevalplus-inputs": (
        published("humanevalplus-inputs", "humanevalplus", "humanevalplus/HumanEvalPlus.jsonl.gz"),
        1.0,
    ),
    "humanevalpack": (human_eval_pack, 1.0),
    "humanevalpack-buggy": (human_eval_pack_buggy, 1.0),
    "samples": (samples, 1.0),
    "solutions": (solutions, 0.999),
}
"""Name -> its programs and the least share of verdicts that must agree."""


async def check(
    client: SandboxClient, known: Sequence[Known], *, seconds: float, at_once: int
) -> Outcome:
    """Judge all of ``known``, up to ``at_once`` concurrently, and compare."""
    places = asyncio.Semaphore(at_once)

    async def one(item: Known) -> EvalResult:
        async with places:
            return await client.submit(_request(item, seconds))

    results = await asyncio.gather(*map(one, known))
    agreed, total, differences = 0, 0, []
    for item, result in zip(known, results, strict=True):
        if isinstance(item.verdicts, bool):
            same = [result.accepted == item.verdicts]
        else:
            got = [case.passed for case in result.tests]
            same = [a == b for a, b in zip(got, item.verdicts, strict=True)]
        agreed, total = agreed + sum(same), total + len(same)
        if not all(same):
            differences.append(f"{item.name}: {_reasons(result, same)}")
    return Outcome(agreed=agreed, total=total, differences=tuple(differences))


def _reasons(result: EvalResult, same: list[bool]) -> str:
    told = [
        f"test {i}: {(case.test_info or {}).get('reason') or 'passed'}"
        for i, case in enumerate(result.tests)
        if (not same[i] if len(same) == len(result.tests) else not case.passed)
    ]
    return "; ".join(told)[:300] or "accepted"


def _request(item: Known, seconds: float) -> SubmitRequest:
    config = TestConfig(
        dataset_type=item.kind,
        language="python",
        run_timeout=seconds,
        provided_data=item.data,
        extra={"run_all_cases": True},
    )
    return SubmitRequest(
        dataset="check", id=item.name, completion=f"```python\n{item.code}\n```", config=config
    )


def _human_eval(row: dict[str, Any], body: str, name: str, right: bool) -> Known:
    tests = {name: row[name] for name in ("test", "entry_point", "prompt")}
    return Known(
        name=name, code=row["prompt"] + body, kind="HumanEvalDataset", data=tests, verdicts=right
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    # Not splitlines(): JSON text may hold other separators that end no line.
    for line in text.decode().split("\n"):
        if line.strip():
            yield json.loads(line)


async def _check_all(options: argparse.Namespace, service: EmbeddedSandbox) -> int:
    missed = 0
    async with SandboxClient(service.endpoint) as client:
        for name in options.sets:
            read, least = SETS[name]
            known = list(read(options.data))[:: options.every]
            outcome = await check(
                client, known, seconds=options.seconds, at_once=2 * options.workers
            )
            print(f"{name}: {outcome.agreed} of {outcome.total} ({outcome.share:.2%})", flush=True)
            for line in outcome.differences:
                print(f"  {line}")
            missed += outcome.share < least
    return 1 if missed else 0


def main() -> int:
    """Parse, start the service, judge, print."""
    parser = ToolParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--every", type=int, default=1, help="take one program of so many")
    parser.add_argument("--seconds", type=float, default=20.0, help="wall clock per test")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", default="standard")
    options = parser.parse_args()
    with EmbeddedSandbox.start(workers=options.workers, isolation=options.isolation) as service:
        return asyncio.run(_check_all(options, service))


if __name__ == "__main__":
    raise SystemExit(main())
