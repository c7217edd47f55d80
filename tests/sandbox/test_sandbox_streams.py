"""A program finds what it finds in a fresh CPython: streams with names and modes, integers of any
length; and equal programs come out equally on every worker.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from ctrl_megatron.sandbox import EmbeddedSandbox, RunCodeRequest, SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult, RunCodeResponse

Run = Callable[..., RunCodeResponse]
FACES = """
import sys
for s in (sys.stdin, sys.stdout, sys.stderr):
    b = s.buffer
    print(s.mode, s.name, s.fileno(), s.readable(), s.writable(), s.isatty(), s.line_buffering,
          type(b).__name__, b.mode, b.name, type(b.raw).__name__, b.raw.mode, b.raw.name,
          b.raw.closefd, s.encoding, s.errors, s is getattr(sys, f'__{s.name[1:-1]}__'))
"""


def printed(response: RunCodeResponse) -> str:
    assert response.run_result is not None
    assert response.run_result.return_code == 0, response.run_result.stderr
    return response.run_result.stdout or ""


def test_streams_have_the_faces_of_cpythons_own(run_code: Run) -> None:
    own = subprocess.run(
        [sys.executable, "-I", "-c", FACES],
        input="",
        capture_output=True,
        text=True,
        check=True,
        env={"LC_ALL": "C.UTF-8", "PYTHONCOERCECLOCALE": "0"},
    )
    # C.UTF-8 alone makes CPython lenient with bytes that are no text.
    expected = own.stdout.replace("surrogateescape", "strict")
    assert printed(run_code(FACES)) == expected


@pytest.mark.parametrize(
    "body",
    [
        "print(2 * int(open('/dev/stdin').read()))",
        "with open('/dev/stdin', 'rb') as f: print(2 * int(f.read()), f.name == '/dev/stdin')",
        "import io; print(2 * int(io.open('/dev/fd/0').readline()))",
        "print(2 * int(open(0).read()))",
        "import os; print(2 * int(os.read(0, 100)))",
        "import os; fd = os.open('/dev/stdin', os.O_RDONLY); print(2 * int(os.read(fd, 100)))",
        "import sys; print(2 * int(sys.stdin.buffer.raw.read()))",
        "import sys; sys.stdin = open('/dev/stdin'); print(2 * int(input()))",
        "import pathlib; print(2 * int(pathlib.Path('/dev/stdin').read_text()))",
        "n = int(input()); open('/dev/stdout', 'w').write(f'{2 * n}\\n')",
        "n = int(input()); print(2 * n, file=open('/dev/fd/1', 'w'))",
        "import fileinput; print(2 * int(next(fileinput.input('/dev/stdin'))))",
        "n = int(input()); open('/dev/stderr', 'w').write('a note'); print(2 * n)",
    ],
)
def test_streams_go_by_every_name(run_code: Run, body: str) -> None:
    assert printed(run_code(body, stdin="21\n")).split()[0] == "42"


def test_a_stream_that_was_named_stays_open_behind_its_name(run_code: Run) -> None:
    code = "f = open('/dev/stdout', 'w'); f.write('a\\n'); f.close(); print('b')"
    assert printed(run_code(code)) == "a\nb\n"
    missing = run_code("open('/dev/stdin2')")
    assert missing.run_result and "FileNotFoundError" in (missing.run_result.stderr or "")


@pytest.mark.parametrize(
    ("code", "stdin", "expected"),
    [
        ("print(10 ** int(input()))", "5000", "1" + "0" * 5000),
        ("print(int(input()) % 10)", "7" * 5000, "7"),
        ("print(len(str(1 << 40_000)))", "", "12042"),
        ("print(len(str(eval(input()))))", "9" * 6000, "6000"),
    ],
)
def test_integers_may_be_long(run_code: Run, code: str, stdin: str, expected: str) -> None:
    assert printed(run_code(code, stdin=stdin)).strip() == expected


def test_functions_may_take_and_return_long_integers(judge: Callable[..., EvalResult]) -> None:
    long = "7" * 5000
    tests = [
        f"assert f({long}) == {long} + 1",
        f"assert str(f({long}))[-1] == '8'",
        f"assert f(0) != int('{long}')",
    ]
    assert judge("def f(x): return x + 1", tests).accepted
    assert judge("def f(x): return int(str(x)) + 1", tests).accepted


@pytest.mark.parametrize(
    "code",
    [
        "print(*set('the quick brown fox jumps over a lazy dog'.split()))",
        "print(hash('a text'), hash(b'bytes'), hash(('a', 1)))",
        "import random\nrandom.seed('a')\nprint(random.sample('abcdef', 6), {1.5, 'a', None})",
        "print(frozenset(map(str, range(30))))",
    ],
)
def test_equal_programs_print_equally_on_every_worker(service: EmbeddedSandbox, code: str) -> None:
    # Each occupies its worker long enough for the others to get another one.
    held = f"{code}\nimport time; time.sleep(0.1)"

    async def ask() -> list[RunCodeResponse]:
        async with SandboxClient(service.endpoint, attempts=1) as client:
            request = RunCodeRequest(code=held, language="python")
            return list(await asyncio.gather(*(client.run_code(request) for _ in range(4))))

    assert len({printed(answer) for answer in asyncio.run(ask())}) == 1


def test_equal_functions_are_judged_equally(judge: Callable[..., EvalResult]) -> None:
    code = textwrap.dedent(
        """
        def f(words): return list(set(words))
        def g(): return hash("g")
        """
    )
    tests = [
        "assert f(['a', 'b']) == ['a', 'b']",
        "assert g() % 2 == 0",
        "assert f('xyz')[0] == 'x'",
    ]
    judged = [judge(code, tests, entry_point=["f", "g"]).tests for _ in range(4)]
    assert len({tuple(case.passed for case in tests) for tests in judged}) == 1


def test_judges_draw_equal_numbers_that_the_program_cannot_foresee(
    judge: Callable[..., EvalResult],
) -> None:
    tests = ["import random\nx = random.randrange(10 ** 6)\nassert f(x) == x"]
    spies = "import random\nknown = random.randrange(10 ** 6)\ndef f(x): return known"
    assert judge("def f(x): return x", tests).accepted
    assert not judge(spies, tests).accepted
    half = "def f(x): return x if x % 2 else -1"
    assert len({judge(half, tests).accepted for _ in range(3)}) == 1
