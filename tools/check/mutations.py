"""Check that slightly wrong answers fail: ``python tools/check/mutations.py --data FOLDER``.

Takes programs that the sandbox accepts, changes what they print or return in ten ways, and judges
each change: a digit, the sign, the case, the order, a line or an item dropped, ``inf``, ``nan``,
nothing, twice as much, half as much. A mutant may pass only if it is equal by the problem's rule;
others that pass are printed, and the exit status is 1.

Functions come from MBPP. Programs with stdin and stdout are made from MBPP too: the first test is
the input, and the output of the reference is the expected output.

Then right outputs whose format matters, and results of functions, are changed in format (leading
zeros, decimals, padding, case, units and more) and judged by every rule. The expected verdicts come
from ``format_mutations.py``, which implements the documentation of the rules independently.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.sandbox import (
    EmbeddedSandbox,
    EvalResult,
    RunCodeRequest,
    SandboxClient,
    SubmitRequest,
)
from ctrl_megatron.sandbox.wire import TestConfig
from tools.check import format_mutations as formats
from tools.check.sandbox_data import SETS

LARGE = 8
"""Calls whose results form one output of several lines."""
TEXT = """
import re
def same(s): return s
def one_digit(s): return re.sub('[0-9]', lambda m: str((int(m[0]) + 1) % 10), s, count=1)
def sign(s): return s[1:] if s.startswith('-') else '-' + s
def case(s): return s.swapcase()
def order(s): return '\\n'.join(reversed(s.split('\\n')))
def dropped(s): return s.rpartition('\\n')[0]
def inf(s): return 'inf'
def nan(s): return 'nan'
def empty(s): return ''
def doubled(s): return s + '\\n' + s
def truncated(s): return s[:len(s) // 2]
"""
VALUE = """
def same(v): return v
def one_digit(v): return v + 1 if isinstance(v, (int, float)) else [v]
def sign(v): return -v if isinstance(v, (int, float)) else (v,)
def case(v): return v.swapcase() if isinstance(v, str) else str(v)
def order(v): return type(v)(reversed(v)) if isinstance(v, (list, tuple)) else v[::-1]
def dropped(v): return v[:-1]
def inf(v): return float('inf')
def nan(v): return float('nan')
def empty(v): return type(v)()
def doubled(v): return v + v
def truncated(v): return v[:len(v) // 2]
"""
MUTATIONS = (
    *("one_digit", "sign", "case", "order", "dropped"),
    *("inf", "nan", "empty", "doubled", "truncated"),
)
Mutate = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A right program, and the requests of its mutants."""

    name: str
    kind: str
    data: dict[str, Any]
    mutant: Mutate
    """Name of the mutation -> the mutated program."""


def functions(data: Path) -> Iterator[Accepted]:
    """MBPP's references whose tests call one function; mutations change its result."""
    for known in SETS["mbpp"][0](data):
        name = _function(known.data["test_list"])
        if name is None:
            continue

        def mutant(mutation: str, code: str = known.code, name: str = name) -> str:
            return (
                f"{code}\n{VALUE}\n_right = {name}\ndef {name}(*arguments):\n"
                f"    value = _right(*arguments)\n    try: return {mutation}(value)\n"
                f"    except Exception: return ['no such {mutation}']\n"
            )

        tests = {**known.data, "entry_point": name}
        yield Accepted(name=known.name, kind="MBPPDataset", data=tests, mutant=mutant)


async def printed(client: SandboxClient, data: Path) -> list[Accepted]:
    """The same references as programs that print the results of their tests' calls, one per
    line.
    """
    found = []
    for known in SETS["mbpp"][0](data):
        name, calls = _function(known.data["test_list"]), _calls(known.data["test_list"])
        if name is None or not calls:
            continue
        setup = known.data["test_setup_code"]
        code = f"{known.code}\n{setup}\n" + "".join(f"print({c})\n" for c in calls[:LARGE])
        run = await client.run_code(RunCodeRequest(code=code, language="python"))
        if run.status != "Success" or run.run_result is None or not run.run_result.stdout:
            continue
        wanted = run.run_result.stdout

        def mutant(mutation: str, code: str = code) -> str:
            return (
                "import io, sys\n_real, sys.stdout = sys.stdout, io.StringIO()\n"
                f"{code}\n{TEXT}\n_text = sys.stdout.getvalue().strip()\n"
                f"sys.stdout = _real\nprint({mutation}(_text))\n"
            )

        case = {"test": [{"input": {"stdin": ""}, "output": {"stdout": wanted}}]}
        found.append(Accepted(name=known.name, kind="CommonOJDataset", data=case, mutant=mutant))
    return found


def _function(tests: list[str]) -> str | None:
    """The one function that every test calls."""
    names = set()
    for test in tests:
        calls = [n for n in ast.walk(ast.parse(test)) if isinstance(n, ast.Call)]
        names |= {n.func.id if isinstance(n.func, ast.Name) else "" for n in calls}
    return next(iter(names)) if len(names) == 1 and "" not in names else None


def _calls(tests: list[str]) -> list[str]:
    found = []
    for test in tests:
        node = ast.parse(test).body[0]
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            found.append(ast.unparse(node.test.left))
    return found


async def accepted(client: SandboxClient, item: Accepted, code: str) -> bool:
    """Whether every test passes."""
    return (await _submit(client, item.kind, code, item.data)).accepted


async def equal_by_rule(client: SandboxClient, item: Accepted, mutation: str) -> bool:
    """Whether the mutant prints exactly what the right program prints, because the mutation changed
    nothing, such as the sign of 0. The interpreter decides this, not the graders.
    """
    if item.kind == "MBPPDataset":
        tests = "\n".join(item.data["test_list"])
        code = f"{item.mutant(mutation)}\n{item.data['test_setup_code']}\n{tests}\n"
    else:
        wanted = item.data["test"][0]["output"]["stdout"]
        code = (
            f"import io as _i, sys as _s\n_out, _s.stdout = _s.stdout, _i.StringIO()\n"
            f"exec({item.mutant(mutation)!r})\n_got, _s.stdout = _s.stdout.getvalue(), _out\n"
            "def _words(text):\n    for w in text.split():\n"
            "        try: yield int(w)\n        except ValueError: yield w\n"
            f"assert list(_words(_got)) == list(_words({wanted!r})), _got\n"
        )
    run = await client.run_code(RunCodeRequest(code=code, language="python"))
    return run.status == "Success"


async def check(client: SandboxClient, kind: str, items: list[Accepted], count: int) -> int:
    """Judge ``count`` programs and their mutants; print, and return how many passed wrongly."""
    places, counts, wrong = asyncio.Semaphore(4), Counter[str](), list[str]()
    chosen: list[Accepted] = []
    for item in items:
        # Changed in nothing: what makes the changes must not be what fails.
        if len(chosen) < count and await accepted(client, item, item.mutant("same")):
            chosen.append(item)

    async def one(item: Accepted, mutation: str) -> None:
        async with places:
            if not await accepted(client, item, item.mutant(mutation)):
                counts["rejected"] += 1
            elif await equal_by_rule(client, item, mutation):
                counts["equal"] += 1
            else:
                counts["wrong"] += 1
                wrong.append(f"{item.name}: {mutation}")

    await asyncio.gather(*(one(item, m) for item in chosen for m in MUTATIONS))
    shown = ", ".join(f"{counts[name]} {name}" for name in ("rejected", "equal", "wrong"))
    print(f"{kind}: {len(chosen)} programs, {len(chosen) * len(MUTATIONS)} mutants: {shown}")
    for line in sorted(wrong):
        print(f"  passed: {line}")
    return len(wrong)


ECHO = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
Judged = tuple[str, bool, bool]
"""Description, whether it passed, and whether it should pass."""


async def outputs(client: SandboxClient, want: str, rule: str) -> list[Judged]:
    """Judge a right output and its mutants by ``rule``, with a program that prints its stdin."""
    changed = {name: change(want) for name, change in formats.MUTATIONS.items()}
    given = {"same": want, **{name: got for name, got in changed.items() if got != want}}
    data = {
        "test": [{"input": {"stdin": got}, "output": {"stdout": want}} for got in given.values()],
        "comparison": rule,
    }
    result = await _submit(client, "CommonOJDataset", ECHO, data)
    return [
        (f"{rule}: {name}: {got!r}, expected {want!r}"[:300], case.passed, means)
        for (name, got), case in zip(given.items(), result.tests, strict=True)
        for means in [formats.means_the_same(got, want, rule)]
    ]


async def results(client: SandboxClient, want: Any, rule: str) -> list[Judged]:
    """Judge a right result of a function and its mutants by ``rule``."""
    given = {name: change(want) for name, change in formats.RESULT_MUTATIONS.items()}
    code = f"from math import inf, nan\nRESULTS = {list(given.values())!r}\n"
    cases = {
        "inputs": [str(number) for number in range(len(given))],
        "outputs": [json.dumps(want)] * len(given),
        "fn_name": "answer",
    }
    data = {"test": json.dumps(cases), "comparison": rule}
    code += "def answer(number): return RESULTS[number]"
    result = await _submit(client, "LiveCodeBenchDataset", code, data)
    verdicts = (result.extra or {})["verdicts"]
    return [
        (f"{rule}: {name}: {got!r}, expected {want!r}"[:300], passed, means)
        for (name, got), passed in zip(given.items(), verdicts, strict=True)
        for means in [formats.results_the_same(got, want, rule)]
    ]


async def check_formats(kind: str, work: list[Awaitable[list[Judged]]]) -> int:
    """Judge, print, and return the number of verdicts that differ from the rules."""
    places, counts, differ = asyncio.Semaphore(4), Counter[str](), list[str]()

    async def one(item: Awaitable[list[Judged]]) -> None:
        async with places:
            for what, passed, same in await item:
                verdict = "wrong" if passed and not same else "equal" if passed else "rejected"
                counts[verdict] += 1
                counts["refused though equal"] += same and not passed
                if passed != same:
                    differ.append(what)

    await asyncio.gather(*map(one, work))
    names = ("rejected", "equal", "wrong", "refused though equal")
    judged = sum(counts[name] for name in names[:3])
    print(f"{kind}: {judged} mutants: {', '.join(f'{counts[name]} {name}' for name in names)}")
    for line in sorted(differ):
        print(f"  {line}")
    return len(differ)


async def _submit(client: SandboxClient, kind: str, code: str, data: dict[str, Any]) -> EvalResult:
    config = TestConfig(
        dataset_type=kind,
        language="python",
        run_timeout=10.0,
        provided_data=data,
        extra={"run_all_cases": True},
    )
    completion = f"```python\n{code}\n```"
    return await client.submit(
        SubmitRequest(dataset="mutants", id=0, completion=completion, config=config)
    )


async def check_all(options: argparse.Namespace, endpoint: str) -> int:
    """Run all kinds; returns the number of wrong verdicts."""
    async with SandboxClient(endpoint) as client:
        wrong = await check_formats(
            "formats of outputs",
            [
                outputs(client, want, rule)
                for want in formats.right_outputs(options.formats, options.seed)
                for rule in formats.RULES
            ],
        )
        wrong += await check_formats(
            "formats of results",
            [
                results(client, want, rule)
                for want in formats.right_results(options.formats, options.seed)
                for rule in formats.RESULT_RULES
            ],
        )
        if options.data is not None:
            called = list(functions(options.data))
            wrong += await check(client, "functions", called, options.count)
            made = await printed(client, options.data)
            wrong += await check(client, "stdin/stdout", made, options.count)
        return wrong


def main() -> int:
    """Parse, start the service, judge, print."""
    parser = ToolParser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the data sets, for MBPP's programs")
    parser.add_argument("--count", type=int, default=200, help="programs of each kind")
    parser.add_argument("--formats", type=int, default=60, help="right outputs, and results")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with EmbeddedSandbox.start(workers=options.workers, isolation="standard") as service:
        return 1 if asyncio.run(check_all(options, service.endpoint)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
