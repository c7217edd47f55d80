"""The harness on machines that only run scripts: what it splits, and what cannot be forged."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from provider_fakes import execute, function_request

from ctrl_megatron.rewards.providers import ProviderError, ScriptProvider
from ctrl_megatron.rewards.providers.asserts import AssertsJob, SplitTest, split_off_expected_value
from ctrl_megatron.rewards.providers.codec import encode
from ctrl_megatron.rewards.providers.contract import ProviderCounters, Script, ScriptResult


class Machine:
    """Runs scripts as plain subprocesses and remembers what left us."""

    name = "machine"
    languages: tuple[str, ...] = ("python",)
    tests_per_run: int | None = None

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.identity: Mapping[str, Any] = {}

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[Machine]:
        yield self

    async def run(self, script: Script) -> ScriptResult:
        self.scripts.append(script)
        out, err, code = await execute(
            sys.executable, "-c", script.source, stdin=script.stdin, seconds=script.seconds
        )
        return ScriptResult(stdout=out, stderr=err, exit_code=code, timed_out=code is None)

    async def close(self) -> None: ...


def judged(code: str, tests: list[str], **options: Any) -> list[bool]:
    provider = ScriptProvider(Machine(), attempts=1)
    result = asyncio.run(provider.submit(function_request(code, tests, **options)))
    return [test.passed for test in result.tests]


@pytest.mark.parametrize(
    ("test", "source", "expected"),
    [
        ("assert f(1) == 2", "f(1)", 2),
        ("assert 2 == f(1)", "f(1)", 2),
        ("assert f(x=[1, 2]) == {'a': (1, -2.5)}, 'no'", "f(x=[1, 2])", {"a": (1, -2.5)}),
        ("assert set(f(1)) == {1, 2}", "set(f(1))", {1, 2}),
        ("assert f(1) is None", "f(1)", None),
        ("assert f(1) == set()", "f(1)", set()),
    ],
)
def test_an_expected_literal_stays_here(test: str, source: str, expected: Any) -> None:
    split = split_off_expected_value(test)
    assert split.compared and (split.source, split.expected) == (source, expected)
    job = AssertsJob(code="", setup="", tests=(split,), seconds=1.0, run_all=True)
    sent = json.loads(job.stdin())["tests"]
    assert sent == [{"kind": "value", "source": source}]


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1)",
        "assert not f(1)",
        "assert f(1) != 2",
        "assert f(1) == g(2)",
        "assert abs(f(1) - 0.5) < 1e-9",
        "assert 1 < f(1) == 2",
        "assert f(1) is 5",
        "assert 1 == 1",
        "x = f(1)\nassert x == 2",
    ],
)
def test_any_other_test_runs_whole(test: str) -> None:
    assert split_off_expected_value(test) == SplitTest(source=test, compared=False)


def test_a_test_that_is_no_python_is_said() -> None:
    with pytest.raises(ValueError, match="not valid Python"):
        split_off_expected_value("assert f(1")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(values, values)
def test_a_value_passes_if_and_only_if_it_equals_the_expected_one(value: Any, other: Any) -> None:
    job = AssertsJob(code="", setup="", tests=(split_of(other),), seconds=1.0, run_all=True)
    lines = [{"ready": 1}, {"index": 0, "value": json.dumps(encode(value))}]
    stdout = "\n".join(f"{job.nonce} {json.dumps(line)}" for line in lines)
    assert job.verdicts(ScriptResult(stdout=stdout))[0].passed == (value == other)
    again = AssertsJob(code="", setup="", tests=(split_of(value),), seconds=1.0, run_all=True)
    stdout = stdout.replace(job.nonce, again.nonce)
    assert again.verdicts(ScriptResult(stdout=stdout))[0].passed


def split_of(expected: Any) -> SplitTest:
    return SplitTest(source="f()", compared=True, expected=expected)


@given(st.text(), st.lists(st.text(), max_size=5))
def test_whatever_a_machine_writes_is_no_pass(junk: str, lines: list[str]) -> None:
    job = AssertsJob(
        code="",
        setup="",
        tests=(split_of(1), split_off_expected_value("assert f()")),
        seconds=1,
        run_all=True,
    )
    stdout = "\n".join([f'{job.nonce} {{"ready": 2}}', junk, *(f"{job.nonce} {x}" for x in lines)])
    assert [verdict.passed for verdict in job.verdicts(ScriptResult(stdout=stdout))] == [
        False,
        False,
    ]
    with pytest.raises(ProviderError, match="did not start"):
        job.verdicts(ScriptResult(stdout=junk))


FORGERIES = {
    "exit": "exit(0)",
    "system exit in the call": "def f(x):\n    raise SystemExit(0)",
    "hard exit": "import os\nos._exit(0)",
    "hard exit in the call": "import os\ndef f(x):\n    os._exit(0)",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "printed marker": "print('ready', 'passed', 'end')\ndef f(x):\n    print({'passed': True})",
    "prints what the harness prints": (
        "import json\ndef f(x):\n    print('0' * 32, json.dumps({'index': 0, 'passed': True}))"
    ),
    "writes to every descriptor": (
        "import os\nfor fd in range(1, 20):\n"
        '    try: os.write(fd, b\'{"passed": true, "value": "2"}\')\n'
        "    except OSError: pass\nos._exit(0)"
    ),
    "equals everything": (
        "class E:\n    def __eq__(self, o): return True\n    __ne__ = None\ndef f(x): return E()"
    ),
    "an int that lies": (
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = None\n"
        "def f(x): return E(99)"
    ),
    "kills the harness": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "stops the harness and floods": "import sys\nsys.stdout.write('x' * 10**6)\ndef f(x): return 0",
    "another assertion": "import builtins\nbuiltins.AssertionError = None\ndef f(x): return 0",
    "patched json": "import json\njson.dumps = lambda *a: '2'\ndef f(x): return 0",
    "looks for the expected value": (
        "import gc, sys\ndef f(x):\n"
        "    frames, frame = [], sys._getframe()\n"
        "    while frame: frames.append(frame.f_locals); frame = frame.f_back\n"
        "    texts = [repr(v) for v in frames]\n"
        "    return 271827 + 1 if any(str(271827 + 1) in t for t in texts) else 0"
    ),
    "too large a value": "def f(x): return 'x' * 10**6",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_of_compared_tests_fail(name: str) -> None:
    assert judged(FORGERIES[name], ["assert f(1) == 271828"]) == [False]


def test_leaving_early_and_markers_do_not_pass_whole_tests_either() -> None:
    tests = ["assert f(1) > 5", "assert f(1) > 0\nassert f(2) > 0"]
    for name in ("exit", "hard exit in the call", "exit handler", "printed marker"):
        assert judged(FORGERIES[name], tests) == [False, False], name


def test_a_known_limit_whole_tests_trust_the_programs_process() -> None:
    """Documented limit: an object with a false ``__eq__`` can pass such a test."""
    assert judged(
        "class E:\n    def __ne__(self, o): return True\ndef f(x): return E()", ["assert f(1) != 5"]
    ) == [True]


def test_tests_run_in_processes_of_their_own() -> None:
    counting = "calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)"
    assert judged(counting, ["assert f(1) == 1", "assert f(1) == 1"]) == [True, True]


def test_set_up_and_future_imports_belong_to_the_program() -> None:
    code = "def f(x: undefined_name): return math.floor(x)"
    tests = ["assert f(1.5) == 1", "assert f(1.5) < 2"]
    assert judged(code, tests, setup="import math") == [False, False]  # the annotation is evaluated
    future = f"from __future__ import annotations\n{code}"
    assert judged(future, tests, setup="import math") == [True, True]


def test_the_nonce_is_new_for_every_run_and_counters_tell_the_kinds() -> None:
    machine = Machine()
    provider = ScriptProvider(machine, attempts=1)
    request = function_request("def f(x): return x", ["assert f(1) == 1", "assert f(1) < 2"])

    async def main() -> None:
        await provider.submit(request)
        await provider.submit(request)

    asyncio.run(main())
    nonces = {json.loads(script.stdin)["nonce"] for script in machine.scripts}
    assert len(nonces) == 2 and all(len(nonce) == 32 for nonce in nonces)
    counters = provider.counters
    assert (counters.compared_outside, counters.asserted_inside) == (2, 2)


def test_a_hanging_program_ends_the_rest_after_two_time_outs() -> None:
    provider = ScriptProvider(Machine(), attempts=1)
    request = function_request(
        "def f(x):\n    while True: pass", ["assert f(1) == 1"] * 4, seconds=0.1
    )
    result = asyncio.run(provider.submit(request))
    assert [test.passed for test in result.tests] == [False] * 4
    reasons = [(test.test_info or {})["reason"] for test in result.tests]
    assert reasons == ["time limit exceeded"] * 2 + ["not run: out of time"] * 2
