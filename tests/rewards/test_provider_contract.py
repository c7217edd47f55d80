"""Every provider, against a fake of its service that really runs programs: the same verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from provider_fakes import (
    FakeService,
    Machines,
    fake_e2b,
    fake_morph,
    function_request,
    sandbox_fusion,
    serving,
    stdio_request,
)
from reward_samples import block, function_row, stdio_row

from ctrl_megatron.rewards import RewardItem, RewardModelForCritic
from ctrl_megatron.rewards.grading import TIMED_OUT, grading_job, request_verdict
from ctrl_megatron.rewards.providers import (
    PROVIDERS,
    ProviderError,
    ProviderSetupError,
    make_provider,
)
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.client.embedded import EmbeddedSandbox
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest

REMOTE = [name for name in PROVIDERS if name != "local"]
TESTS = ["assert f(1) == 2", "assert f(5) == 6", "assert abs(f(2.5) - 3.5) < 1e-9"]
ADD_ONE = "def f(x):\n    return x + 1"


@asynccontextmanager
async def provider(
    name: str, folder: Path, *, service: FakeService | None = None, **options: Any
) -> AsyncIterator[Any]:
    """A provider over its fake; ``provider.machines`` or ``service`` records what happened."""
    options = {"attempts": 2, "backoff": 0.01, **options}
    service = service or FakeService()
    machines = Machines(folder)
    if name == "sandbox_fusion":
        async with (
            serving(sandbox_fusion(service)) as url,
            closing(make_provider(name, endpoint=url, **options)) as made,
        ):
            yield made
        return
    keys: dict[str, Any] = {"api_key": "secret"}
    keys |= {"create": fake_e2b(machines)} if name == "e2b" else {}
    keys |= {"connect": fake_morph(machines), "snapshot_id": "s"} if name == "morph" else {}
    async with closing(make_provider(name, **keys, **options)) as made:
        made.machines = machines
        yield made


@asynccontextmanager
async def closing(made: Any) -> AsyncIterator[Any]:
    try:
        yield made
    finally:
        await made.close()


def verdicts(result: EvalResult) -> list[bool]:
    return [test.passed for test in result.tests]


def judged(name: str, folder: Path, *requests: SubmitRequest) -> list[EvalResult]:
    async def main() -> list[EvalResult]:
        async with provider(name, folder) as made:
            return list(await asyncio.gather(*(made.submit(request) for request in requests)))

    return asyncio.run(main())


@pytest.mark.parametrize("name", REMOTE)
def test_function_problems(name: str, tmp_path: Path) -> None:
    right, partly, first, broken = judged(
        name,
        tmp_path,
        function_request(ADD_ONE, TESTS),
        function_request("def f(x):\n    return 6", TESTS),
        function_request("def f(x):\n    return 6", TESTS, run_all=False),
        function_request("def f(x:", TESTS),
    )
    assert verdicts(right) == [True, True, True] and right.accepted
    assert verdicts(partly) == [False, True, False] and not partly.accepted
    assert verdicts(first) == [False] and not first.accepted
    assert verdicts(broken) == [False, False, False]
    assert partly.tests[0].test_info == {"reason": "got 6, expected 2"}
    reason = (broken.tests[0].test_info or {})["reason"]
    assert reason.startswith("SyntaxError")


@pytest.mark.parametrize("name", REMOTE)
def test_stdin_stdout_problems(name: str, tmp_path: Path) -> None:
    cases = [("1 2\n", "3\n"), ("4 4\n", "8\n")]
    right, partly, crash, early = judged(
        name,
        tmp_path,
        stdio_request("a, b = map(int, input().split())\nprint(a + b)", cases),
        stdio_request("print(3)", cases),
        stdio_request("print(3)\nraise SystemExit(2)", cases),
        stdio_request("print(5)", cases, run_all=False),
    )
    assert right.accepted and verdicts(right) == [True, True]
    assert verdicts(partly) == [True, False]
    assert verdicts(crash) == [False, False]
    assert verdicts(early) == [False]


def test_the_rule_that_a_row_names(tmp_path: Path) -> None:
    """As the service compares; only the service has the preamble of LiveCodeBench's."""
    program, function = block("print('3.0')\nprint('8')"), block("def add(a, b): return a + b")

    async def main() -> None:
        async with provider("sandbox_fusion", tmp_path) as made:
            for comparison, passed in (("", False), ("strict", False), ("code_contests", True)):
                cases = [{"input": {"stdin": ""}, "output": {"stdout": "3\n8"}}]
                row = stdio_row(selected_uts=cases, comparison=comparison)
                verdict = await request_verdict(made, grading_job(program, row, run_all_cases=True))
                assert verdict.passed == (passed,)
            for code, row in (
                (program, stdio_row(comparison="livecodebench")),
                (function, function_row(comparison="livecodebench")),
            ):
                with pytest.raises(ProviderSetupError, match="LiveCodeBench's preamble"):
                    await request_verdict(made, grading_job(code, row, run_all_cases=True))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["sandbox_fusion", "e2b"])
def test_a_program_that_never_ends(name: str, tmp_path: Path) -> None:
    loop = "def f(x):\n    while True: pass"

    async def main() -> None:
        async with provider(name, tmp_path) as made:
            row = function_row(time_limit=0.2, selected_uts=["assert f(1) == 2"], entry_point="f")
            verdict = await request_verdict(made, grading_job(block(loop), row, run_all_cases=True))
            assert verdict.timed_out and verdict.detail == (TIMED_OUT,)
            cases = [{"input": {"stdin": ""}, "output": {"stdout": "1"}}]
            row = stdio_row(time_limit=0.2, selected_uts=cases)
            job = grading_job(block("while True: pass"), row, run_all_cases=True)
            assert (await request_verdict(made, job)).timed_out

    asyncio.run(main())


@pytest.mark.parametrize("name", REMOTE)
def test_a_critic_is_rewarded_through_any_provider(name: str, tmp_path: Path) -> None:
    row = function_row(time_limit=5.0)
    answers = ["def add(a, b):\n    return a + b", "def add(a, b):\n    return 3"]

    async def main() -> None:
        async with provider(name, tmp_path) as made:
            model = RewardModelForCritic([row], None, sandbox=made, show_progress=False)
            items = [
                RewardItem(text=block(answer), critique="Overall judgment: Correct", row=row)
                for answer in answers
            ]
            assert await model(items) == [1.0, pytest.approx(1 / 3)]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["sandbox_fusion"])
def test_a_service_that_fails_is_asked_again_and_then_an_error(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        service = FakeService()
        async with provider(name, tmp_path, service=service) as made:
            service.faults = [(500, {"message": "no disk"})]
            result = await made.submit(function_request(ADD_ONE, TESTS[:1]))
            assert result.accepted and not service.faults
            service.faults = [(503, {"message": "full"})] * 2
            with pytest.raises(ProviderError, match="full"):
                await made.submit(function_request(ADD_ONE, TESTS[:1]))
            assert made.counters.failures == 1

    asyncio.run(main())


@pytest.mark.parametrize("name", ["sandbox_fusion"])
def test_a_service_that_is_not_there_is_an_error(name: str) -> None:
    async def main() -> None:
        url = "http://127.0.0.1:9/api/v2"
        made = make_provider(name, endpoint=url, attempts=1, backoff=0.01)
        with pytest.raises(ProviderError, match=r"127\.0\.0\.1:9"):
            await made.submit(function_request(ADD_ONE, TESTS))
        await made.close()

    asyncio.run(main())
    assert issubclass(ProviderError, SandboxError)  # so a critic's sample is masked


def finished(code: int | None, **more: Any) -> dict[str, Any]:
    return {"status": "Finished", "return_code": code, "stdout": "", "stderr": "", **more}


LATE = {"status": "TimeLimitExceeded", "execution_time": 10.0}
BROKEN = {"status": "Error", "stderr": "exception on running command: no space left"}


def check_verdict(
    name: str,
    answer: dict[str, Any],
    expected: str | None,
    folder: Path,
    *,
    error: str | None = None,
) -> None:
    """What ``name`` makes of a service's ``answer`` about a C++ program: a verdict whose detail
    begins with ``expected``, empty where it passed; None for a ``ProviderError``, with ``error``.
    """
    row = stdio_row(selected_uts=[{"input": {"stdin": ""}, "output": {"stdout": "1"}}])
    job = grading_job("```cpp\nint main(){}\n```", row, run_all_cases=True, language="cpp")

    async def main() -> None:
        service = FakeService(faults=[(200, answer)])
        async with provider(name, folder, service=service, attempts=1) as made:
            if expected is None:
                with pytest.raises(ProviderError, match=error):
                    await request_verdict(made, job)
                return
            verdict = await request_verdict(made, job)
            assert verdict.passed == (expected == "",)
            assert verdict.timed_out == (expected == TIMED_OUT)
            assert verdict.detail[0].startswith(expected)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"compile_result": LATE, "run_result": None}, TIMED_OUT),
        ({"compile_result": finished(0), "run_result": LATE}, TIMED_OUT),
        (
            {"compile_result": finished(1, stderr="main.cpp:1: error: x"), "run_result": None},
            "exit status 1: main.cpp:1: error: x",
        ),
        ({"compile_result": finished(0), "run_result": finished(-11)}, "exit status -11"),
        ({"compile_result": finished(0), "run_result": finished(0, stdout="1\n")}, ""),
        ({"compile_result": finished(0), "run_result": None}, None),
        ({"compile_result": BROKEN, "run_result": None}, None),
        ({"run_result": BROKEN}, None),
        ({"run_result": finished(None, stdout="1\n")}, None),
        ({"compile_result": finished(None), "run_result": finished(0, stdout="1\n")}, None),
        ({}, None),
    ],
)
def test_what_sandbox_fusion_says_of_compiler_and_program(
    answer: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    """The verdict's detail, empty if it passed; None if the answer reports no ending."""
    reply = {"status": "Failed", "message": "", **answer}
    check_verdict("sandbox_fusion", reply, expected, tmp_path)


@pytest.mark.parametrize("name", ["e2b", "morph"])
def test_every_request_gets_a_machine_that_ends_with_it(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with provider(name, tmp_path) as made:
            requests = [function_request(ADD_ONE, TESTS) for _ in range(3)]
            await asyncio.gather(*map(made.submit, requests))
            assert (made.machines.started, made.machines.open) == (3, 0)
            loop = function_request("def f(x):\n    while True: pass", TESTS)
            task = asyncio.ensure_future(made.submit(loop))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (made.machines.started, made.machines.open) == (4, 0)

    asyncio.run(main())


def test_what_the_clouds_are_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("e2b", "morph"):
            (tmp_path / name).mkdir()
            async with provider(name, tmp_path / name, lifetime=77) as made:
                await made.submit(function_request(ADD_ONE, TESTS))
                seen = made.machines.options
            if name == "e2b":
                assert seen[0]["api_key"] == "secret" and seen[0]["timeout"] == 77
                assert seen[0]["allow_internet_access"] is False
            else:
                assert seen[0] == {"api_key": "secret", "base_url": None}
                assert seen[1]["snapshot_id"] == "s" and seen[1]["ttl_seconds"] == 77

    asyncio.run(main())


class AuthenticationException(Exception):
    """Named as E2B's."""


class ApiError(Exception):
    """Formed as Morph's."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"HTTP Error {status_code}")
        self.status_code = status_code


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("e2b", AuthenticationException("bad"), "E2B_API_KEY"),
        ("morph", ApiError(401), "MORPH_API_KEY"),
        ("morph", ApiError(404), "refused the request"),
    ],
)
def test_a_refused_key_is_not_tried_again(
    name: str, fault: Exception, told: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with provider(name, tmp_path) as made:
            made.machines.faults = [fault]
            with pytest.raises(ProviderSetupError, match=told):
                await made.submit(function_request(ADD_ONE, TESTS))
            assert made.counters.retries == 0

    asyncio.run(main())


@pytest.mark.parametrize("name", ["e2b", "morph"])
def test_a_cloud_that_fails_is_asked_again_and_then_an_error(name: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with provider(name, tmp_path) as made:
            made.machines.faults = [TimeoutError("no answer")]
            assert (await made.submit(function_request(ADD_ONE, TESTS))).accepted
            made.machines.faults = [ConnectionError("gone")] * 2
            with pytest.raises(ProviderError, match=r"gone.*gave up after 2"):
                await made.submit(function_request(ADD_ONE, TESTS))
            assert (made.counters.retries, made.counters.failures) == (2, 1)
            made.machines.end_fault = ConnectionError("gone")
            assert (await made.submit(function_request(ADD_ONE, TESTS))).accepted
            assert made.counters.left_open == 1

    asyncio.run(main())


@pytest.mark.parametrize("name", ["e2b", "morph"])
def test_a_large_input_arrives_whole(name: str, tmp_path: Path) -> None:
    text = "äx" * 100_000
    code = "import hashlib, sys\nprint(len(sys.stdin.read()))"
    (result,) = judged(name, tmp_path, stdio_request(code, [(text, "200000")]))
    assert result.accepted, result.tests[0].test_info


@pytest.mark.parametrize("name", ["e2b", "morph"])
def test_a_flood_of_output_is_cut_off_on_the_machine(name: str, tmp_path: Path) -> None:
    (result,) = judged(name, tmp_path, stdio_request("while True: print('x' * 999)", [("", "1")]))
    reason = "output limit exceeded: line 1 differs: "
    assert (result.tests[0].test_info or {})["reason"].startswith(reason)


@pytest.mark.parametrize(("name", "variable"), [("e2b", "E2B_API_KEY"), ("morph", "MORPH_API_KEY")])
def test_a_missing_key_names_its_variable(name: str, variable: str) -> None:
    options = {"snapshot_id": "s"} if name == "morph" else {}
    for key in (None, "", " "):
        with pytest.raises(ProviderSetupError, match=variable):
            make_provider(name, api_key=key, **options)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("e2b", "e2b_code_interpreter", "e2b-code-interpreter"), ("morph", "morphcloud.api", "morph")],
)
def test_a_missing_package_is_named(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    options = {"snapshot_id": "s"} if name == "morph" else {}
    with pytest.raises(ProviderSetupError, match=package) as caught:
        make_provider(name, api_key="k", **options)
    assert f"ctrl_megatron[{name}]" in str(caught.value)


def test_wrong_names_and_options_are_said() -> None:
    with pytest.raises(ProviderSetupError, match="did you mean 'morph'"):
        make_provider("morphs")
    with pytest.raises(ProviderSetupError, match="colour"):
        make_provider("sandbox_fusion", endpoint="http://x", colour="red")
    for name in ("local", "sandbox_fusion"):
        with pytest.raises(ProviderSetupError, match="endpoint"):
            make_provider(name, **({} if name == "local" else {"endpoint": None}))
    with pytest.raises(ProviderSetupError, match="snapshot_id"):
        make_provider("morph", api_key="k", snapshot_id="")


def test_kinds_and_languages_that_a_script_provider_does_not_know(tmp_path: Path) -> None:
    request = function_request(ADD_ONE, TESTS)
    live = request.config.model_copy(update={"dataset_type": "LiveCodeBenchDataset"})
    java = request.config.model_copy(update={"language": "java"})

    async def main() -> None:
        async with provider("e2b", tmp_path) as made:
            with pytest.raises(ProviderSetupError, match="provider local"):
                await made.submit(request.model_copy(update={"config": live}))
            with pytest.raises(ProviderSetupError, match="java"):
                await made.submit(request.model_copy(update={"config": java}))
            for tests in ([], None, [3]):
                with pytest.raises(ValueError, match="test_list"):
                    await made.submit(function_request(ADD_ONE, tests))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="empty"):
                await made.submit(stdio_request("", []))

    asyncio.run(main())


def test_our_own_sandbox(tmp_path: Path) -> None:
    """``local`` judges there; ``sandbox_fusion`` says that it cannot, instead of scoring 0."""
    run: Callable[[Any], Awaitable[EvalResult]] = lambda made: made.submit(  # noqa: E731
        function_request(ADD_ONE, TESTS)
    )

    async def main(endpoint: str) -> None:
        local = make_provider("local", endpoint=endpoint)
        assert (await run(local)).accepted
        (said,) = cast(list[Any], await local.identity())
        assert said["limits"]["memory_mb"] == 1024 and said["isolation"]["level"]
        await local.close()
        other = make_provider("sandbox_fusion", endpoint=endpoint, attempts=1)
        with pytest.raises(ProviderError, match="use the provider local"):
            await run(other)
        assert (await other.submit(stdio_request("print(input())", [("7", "7")]))).accepted
        await other.close()

    with EmbeddedSandbox.start(workers=1) as sandbox:
        asyncio.run(main(sandbox.endpoint))


def test_identities_tell_apart_what_may_judge_differently() -> None:
    made = [
        make_provider("sandbox_fusion", endpoint="http://a"),
        make_provider("e2b", api_key="k", create=fake_e2b(Machines(Path("/none")))),
    ]
    seen = [asyncio.run(provider.identity()) for provider in made]
    assert len(set(map(repr, seen))) == len(made)
    again = make_provider("sandbox_fusion", endpoint="http://b")
    assert asyncio.run(again.identity()) == seen[0]  # the same runtime elsewhere


RAISES = "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False"
UNIT_TESTS = (
    "import unittest\nclass Tests(unittest.TestCase):\n"
    "    def test_one(self):\n        self.assertEqual(f(1), 2)\n"
    "    def test_five(self):\n        self.assertEqual(f(5), 6)\n"
)


def test_unit_tests_are_left_to_the_own_sandbox(tmp_path: Path) -> None:
    for tests in (UNIT_TESTS, "import pytest\n" + UNIT_TESTS):
        with pytest.raises(ProviderSetupError, match="unit tests; use the provider local"):
            judged("sandbox_fusion", tmp_path, function_request(ADD_ONE, [tests]))
