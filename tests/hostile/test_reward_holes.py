"""Rewards without merit that a policy could find: wrong answers that a grader accepts, and zeros
that become something else. Each program here was accepted once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ctrl_megatron.sandbox import EmbeddedSandbox, RunCodeRequest, SandboxClient
from ctrl_megatron.sandbox.jail.job import JobReport
from ctrl_megatron.sandbox.limits import VERDICT_CHARACTERS, SandboxLimits
from ctrl_megatron.sandbox.service.worker import WorkerFault, WorkerSettings
from ctrl_megatron.sandbox.service.workers import PoolCounters, WorkerPool
from ctrl_megatron.sandbox.wire import CommandRunStatus, EvalResult, RunCodeResponse

Submit = Callable[..., EvalResult]


def passed(result: EvalResult) -> list[bool]:
    return [case.passed for case in result.tests]


def reason(result: EvalResult, index: int = 0) -> str:
    return (result.tests[index].test_info or {})["reason"]


def printing(*cases: tuple[str, str]) -> dict[str, Any]:
    return {"test": [{"input": {"stdin": i}, "output": {"stdout": o}} for i, o in cases]}


# --- what counts as equal ------------------------------------------------------------------------

BITS = "1011" * 25


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('inf')", str(2**2000)),
        ("print('-infinity')", str(-(2**2000))),
        ("print('9' * 400)", str(2**2000)),
        ("print('1' * 309)", str(2**2000)),
        ("print(1000009000)", "1000000007"),
        (f"print({BITS[:6]!r} + '0' * 94)", BITS),
        ("print('nan')", "1.5"),
        ("print(input())", "AbC"),
    ],
)
def test_an_output_that_is_only_like_the_expected_one(
    submit: Submit, code: str, expected: str
) -> None:
    result = submit("CommonOJDataset", code, printing((expected.swapcase(), expected)))
    assert not result.accepted and reason(result).startswith("line 1 differs")


def test_the_first_item_of_an_expected_list_is_not_the_list(submit: Submit) -> None:
    calls = {"inputs": [[[3, 1, 2]], [[5]]], "outputs": [[1, 2, 3], [5]], "fn_name": "f"}
    data = {"input_output": calls}
    assert passed(submit("TACODataset", "f = min", data)) == [False, False]
    assert submit("TACODataset", "f = sorted", data).accepted


@pytest.mark.parametrize("printed", ["nan", "inf", "-1000", "1e5", "good"])
def test_a_checker_that_computes_with_the_output(submit: Submit, printed: str) -> None:
    checker = (
        "import sys\n_, a, o = [open(p).read().strip() for p in sys.argv[1:]]\n"
        "try: print(1 - abs(float(a) - float(o)) / float(a))\n"
        "except ValueError: print(o)"
    )
    data = {**printing(("", "2")), "checker": checker}
    assert submit("CommonOJDataset", "print(2)", data).accepted
    assert not submit("CommonOJDataset", f"print({printed!r})", data).accepted


# --- what a test may call ------------------------------------------------------------------------

POLY = (
    "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n"
    "def find_zero(xs):\n    '''A zero of the polynomial.'''\n"
)
CHECK_ZERO = "def check(candidate):\n    for xs in ([-2, 1], [3, 1]):\n" + (
    "        assert abs(poly(xs, candidate(xs))) < 1e-4\n"
)


def test_a_helper_of_the_tests_is_not_the_programs(submit: Submit) -> None:
    data = {"test": CHECK_ZERO, "entry_point": "find_zero", "prompt": POLY}
    right = "def find_zero(xs): return -xs[0] / xs[1]"
    assert submit("HumanEvalDataset", right, data).accepted
    dummy = "def poly(xs, x): return 0\ndef find_zero(xs): return 0"
    assert not submit("HumanEvalDataset", dummy, data).accepted
    with pytest.raises(ValueError, match="the tests use poly, which nothing defines"):
        submit("HumanEvalDataset", dummy, {**data, "prompt": ""})


def test_a_library_function_without_its_import_is_the_judges(submit: Submit) -> None:
    data = {"test_list": ["assert isclose(f(2.0), 4.0)", "assert math.floor(f(2.5)) == 6"]}
    dummy = "def isclose(a, b): return True\nclass math:\n    floor = lambda x: 6\ndef f(x): pass"
    for given in ({}, {"entry_point": "f"}):
        assert passed(submit("MBPPDataset", dummy, {**data, **given})) == [False, False]
        assert submit("MBPPDataset", "def f(x): return x * x", {**data, **given}).accepted


@pytest.mark.parametrize(
    "test",
    [
        "assert same(f(2), 4)",
        "assert same(f(2), 4) == 1",
        "assert same(f(2)) == same(4)",
        "assert same(f(2), 4) and same(f(3), 9)",
        "assert same(f(2), 4) < 1e-6",
        "assert all(same(a, b) for a, b in zip(f(2), [4]))",
        "r = f(2)\nassert same(r, 4)",
    ],
)
def test_two_possible_functions_need_an_entry_point(submit: Submit, test: str) -> None:
    cheat = "def same(*_): return 0\ndef f(x): return []"
    with pytest.raises(ValueError, match=r"the tests use f, same, .* provided_data\.entry_point"):
        submit("MBPPDataset", cheat, {"test_list": [test]})


def test_functions_that_judge_come_from_the_record(submit: Submit) -> None:
    data = {"test_list": ["assert same(f(2), 4)"]}
    cheat = "def same(a, b): return True\ndef f(x): return 0"
    with pytest.raises(ValueError, match="use same, which nothing defines"):
        submit("MBPPDataset", cheat, {**data, "entry_point": "f"})
    setup = {"test_setup_code": "def same(a, b): return a == b", "entry_point": "f"}
    assert not submit("MBPPDataset", cheat, {**data, **setup}).accepted


def test_an_object_of_the_program_does_not_judge_itself(submit: Submit) -> None:
    tests = [
        "assert f(1).startswith('secret')",
        "assert f(1).issubset({1})",
        "assert f(1) in [2]",
        "assert f(1) == 2",
        "assert not f(1) != 2",
    ]
    code = (
        "class Yes:\n    value = 3\n    def __eq__(s, o): return True\n"
        "    def __getattr__(s, n): return lambda *a: True\ndef f(x): return Yes()"
    )
    result = submit("MBPPDataset", code, {"test_list": tests, "entry_point": "f"})
    assert passed(result) == [False] * len(tests)


def test_the_judge_compares_with_unchanged_arguments(submit: Submit) -> None:
    tests = ["xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"]
    data = {"test_list": tests, "entry_point": "f"}
    assert not submit("MBPPDataset", "def f(xs):\n    xs.clear()\n    return xs", data).accepted
    assert submit("MBPPDataset", "def f(xs): return sorted(xs)", data).accepted
    # Nor where another call of the test is made for what it does.
    clears = "def f(xs):\n    if not xs: raise ValueError\n    xs.clear()\n    return []"
    for before in (
        "try:\n    f([])\nexcept ValueError:\n    pass\n",
        "f([1])\n",
        "assert f([2]) != None\n",
    ):
        data = {"test_list": [before + tests[0]], "entry_point": "f"}
        assert not submit("MBPPDataset", clears, data).accepted
        assert submit("MBPPDataset", "def f(xs): return sorted(xs)", data).accepted
    setup = {"test_setup_code": "f([1])\nXS = [3, 1, 2]\nR = f(XS)"}
    data = {"test_list": ["assert R == sorted(XS)"], "entry_point": "f", **setup}
    assert not submit("MBPPDataset", clears, data).accepted
    in_place = {"test_list": ["xs = [2, 1]\nf(xs)\nassert xs == [1, 2]"], "entry_point": "f"}
    assert submit("MBPPDataset", "def f(xs): xs.sort()", in_place).accepted


# --- what reaches the program --------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "compare"])
def test_no_grader_runs_the_tests_beside_the_program(submit: Submit, mode: Any) -> None:
    extra = {"run_all_cases": True, "lax": mode}
    data = {"test_list": ["assert f(1) == 2"], "entry_point": "f"}
    for code in ("raise SystemExit(0)", "class E:\n    __eq__ = lambda s, o: True\nf = E"):
        assert not submit("MBPPDataset", code, data, extra=extra).accepted


SPENDS_OTHERS_TIME = """
import gc, time
done = 0.0

def ahead():
    readers = (o for o in gc.get_objects() if type(o).__name__ == "FrameReader")
    return any(b"[7]" in o._data for o in readers)

def f(x):
    global done
    if x != 7 and done < 4.8 and ahead():
        time.sleep(1.8)
        done += 1.8
    while x == 7 and done < 4.8:
        time.sleep(0.1)
        done += 0.1
    return x
"""


def test_no_test_spends_the_time_of_another(submit: Submit) -> None:
    data = {"test_list": [f"assert f({x}) == {x}" for x in range(11)], "entry_point": "f"}
    honest = SPENDS_OTHERS_TIME.replace(
        "ahead():\n    readers", "ahead():\n    return False\n    r"
    )
    for code in (honest, SPENDS_OTHERS_TIME):
        result = submit("MBPPDataset", code, data, run_timeout=1.0)
        assert passed(result) == [x != 7 for x in range(11)]
        assert reason(result, 7) == "time limit exceeded (wall-clock time)"


# --- a zero stays a zero -------------------------------------------------------------------------


def faults(service: EmbeddedSandbox) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(service.endpoint + "/stats") as answer:
            return await answer.json()

    return asyncio.run(ask())


def test_a_value_that_takes_long_to_read_is_a_failure(
    service: EmbeddedSandbox, submit: Submit
) -> None:
    before = faults(service)["faults"]
    data = {"test_list": ["assert f(1) == 1", "assert f(2) == 2"], "entry_point": "f"}
    # In the judge they are plain integers, all with hash 0.
    code = (
        "class I(int):\n    def __hash__(s): return id(s)\n"
        "def f(x): return {I(i * (2**61 - 1)) for i in range(60_000)} if x == 1 else x"
    )
    result = submit("MBPPDataset", code, data)
    assert passed(result) == [False, True]
    assert reason(result) == "the returned value takes too long to read"
    assert faults(service)["faults"] == before


def test_more_files_than_may_be_fetched_are_a_failure(service: EmbeddedSandbox) -> None:
    code = (
        "import os\nopen('f0', 'wb').write(bytes(15 << 20))\n"
        "for i in range(1, 4): os.link('f0', f'f{i}')"
    )
    names = [f"f{i}" for i in range(4)]
    request = RunCodeRequest(code=code, language="python", fetch_files=names)

    async def ask() -> RunCodeResponse:
        async with SandboxClient(service.endpoint, attempts=1) as client:
            return await client.run_code(request)

    response = asyncio.run(ask())
    assert response.status == "Failed" and not response.files
    result = response.run_result
    assert result is not None and result.status is CommandRunStatus.FINISHED
    # Without a private file system each name counts as a file.
    wanted = ("the files to fetch take more than 32 MiB", "disk limit exceeded")
    assert (result.stderr or "").endswith(wanted)


def make_pool(outcomes: list[Any]) -> WorkerPool:
    """A pool whose runs come out as given."""

    class Scripted(WorkerPool):
        async def _run_once(self, job: Any, seconds: float, clock: Any) -> JobReport:
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    return Scripted(WorkerSettings(level="none", limits=SandboxLimits()), 1)


def test_a_program_that_breaks_every_worker_has_failed() -> None:
    fault, well = WorkerFault("a worker died"), {"stopped": None, "exit": 0}
    pool = make_pool([fault, fault, fault, well])
    assert asyncio.run(pool.run({}, 1.0))["stopped"] == "broke"
    assert pool.counters == PoolCounters(faults=3, broken=1)


@pytest.mark.parametrize("last", [WorkerFault("no memory"), {"stopped": None, "exit": 9}])
def test_workers_that_break_by_themselves_are_the_services_fault(last: Any) -> None:
    fault = WorkerFault("a worker died")
    pool = make_pool([fault, fault, fault, last])
    with pytest.raises(WorkerFault):
        asyncio.run(pool.run({}, 1.0))
    assert pool.counters.broken == 0


def test_loading_for_long_and_dying_uses_up_time(submit: Submit) -> None:
    code = "import time, os\ntime.sleep(0.25)\ndef f(x): os._exit(0)"
    data = {"test_list": [f"assert f({x}) == {x}" for x in range(40)], "entry_point": "f"}
    result = submit("MBPPDataset", code, data, run_timeout=0.7)
    assert passed(result) == [False] * 40
    assert reason(result, 39).startswith("not run")


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cases", "size"), [(1, 1_000_000), (10, 1_000_000), (60, 5000)])
def test_the_answer_is_bounded_however_much_a_program_prints(
    submit: Submit, cases: int, size: int
) -> None:
    code = f"import sys\nfor s in (sys.stdout, sys.stderr): s.write('\\0' * {size})"
    result = submit("CommonOJDataset", code, printing(*[("1" * 5000, "2")] * cases))
    texts = [
        str(text)
        for case in result.tests
        for text in (
            *(case.test_info or {}).values(),
            *dict(case.exec_info.run_result or ()).values(),
        )
    ]
    assert not result.accepted and len(result.tests) == cases
    assert sum(map(len, texts)) < VERDICT_CHARACTERS + 200 * cases


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"a": "", "a/b": ""}}, "file 'a' is the folder of file 'a/b' as well"),
        ({"files": {"a": "", "./a": ""}}, "file 'a' is named twice"),
        ({"files": {"a" * 300: ""}}, "name that is too long"),
        ({"files": {f"f{i}": "" for i in range(5000)}}, "5000 files; a request may name 2048"),
        ({"fetch_files": [f"f{i}" for i in range(5000)]}, "5000 files; a request may name 2048"),
        ({"files": {f"f{i}": "A" * (15 << 20) for i in range(3)}}, "the files take"),
    ],
)
def test_files_that_cannot_be_made_are_a_bad_request(
    service: EmbeddedSandbox, change: dict[str, Any], message: str
) -> None:
    request = RunCodeRequest(code="", language="python", **change)

    async def ask() -> None:
        async with SandboxClient(service.endpoint, attempts=1) as client:
            await client.run_code(request)

    with pytest.raises(ValueError, match=message):
        asyncio.run(ask())


def test_an_entry_point_that_is_no_name_is_a_bad_request(submit: Submit) -> None:
    for entry in (5, {"f": 1}, ["f", 5], "a b"):
        with pytest.raises(ValueError, match="entry_point must be a function's name"):
            submit("MBPPDataset", "f = abs", {"test_list": ["assert f(1)"], "entry_point": entry})


def test_a_request_of_too_many_values_is_refused(service: EmbeddedSandbox) -> None:
    data = {"test": json.dumps([1] * 300_000), "more": [1] * 300_000}
    body = {"dataset": "x", "id": 0, "completion": "", "config": {"provided_data": data}}

    async def post() -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(service.endpoint + "/submit", json=body) as answer,
        ):
            return answer.status, await answer.text()

    status, text = asyncio.run(post())
    assert status == 400 and "more than 50000 JSON values" in text
    body["config"]["provided_data"].pop("more")  # what is quoted is text
    assert "not supported" in asyncio.run(post())[1]


# --- clients that leave, workers that come and go ------------------------------------------------


def test_a_client_that_leaves_costs_no_worker_and_nothing_piles_up(
    service: EmbeddedSandbox,
) -> None:
    before, folders = faults(service), len(list(Path(service.scratch).iterdir()))
    request = RunCodeRequest(code="while True: pass", language="python", run_timeout=30.0)

    async def leave() -> None:
        async with SandboxClient(service.endpoint, attempts=1) as client:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.run_code(request), 0.3)
            honest = RunCodeRequest(code="print(1)", language="python")
            assert (await client.run_code(honest)).status == "Success"

    asyncio.run(leave())
    after = faults(service)
    assert after["cancelled"] == before["cancelled"] + 3
    assert (after["restarts"], after["faults"]) == (before["restarts"], before["faults"])
    # What an earlier test has left may be removed meanwhile.
    assert len(list(Path(service.scratch).iterdir())) <= folders
