"""SandboxFusion's own client from PyPI, unchanged, against our service."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest

from ctrl_megatron.sandbox import EmbeddedSandbox

sandbox_fusion: Any = pytest.importorskip(
    "sandbox_fusion", reason="the public client is not installed; pip install sandbox-fusion==0.3.7"
)


@pytest.fixture(autouse=True)
def pointed_at_ours(service: EmbeddedSandbox) -> Iterator[None]:
    sandbox_fusion.set_endpoint(service.endpoint)
    yield
    sandbox_fusion.set_endpoint("http://localhost:8080")


def run_request(code: str, **options: Any) -> Any:
    return sandbox_fusion.RunCodeRequest(code=code, language="python", **options)


def submission(code: str, kind: str, data: dict[str, Any]) -> Any:
    config = sandbox_fusion.TestConfig(
        dataset_type=kind, language="python", provided_data=data, extra={"run_all_cases": True}
    )
    return sandbox_fusion.SubmitRequest(
        dataset="x", id=5, completion=f"```python\n{code}\n```", config=config
    )


def test_run_code() -> None:
    answer = sandbox_fusion.run_code(run_request("print(input() * 2)", stdin="ab"), max_attempts=1)
    assert answer.status is sandbox_fusion.RunStatus.Success
    assert answer.run_result.stdout == "abab\n"


def test_failures_and_time_limits_are_answers() -> None:
    for code, mapped in (("exit(3)", "RunFailed"), ("while True: pass", "RunTimeout")):
        answer = sandbox_fusion.run_code(run_request(code, run_timeout=0.5), max_attempts=1)
        assert answer.status is sandbox_fusion.RunStatus.Failed
        mapping = sandbox_fusion.SummaryMapping(RunFailed="RunFailed", RunTimeout="RunTimeout")
        assert sandbox_fusion.summary_run_code_result(answer, mapping) == mapped


def test_files_go_in_and_out() -> None:
    text = base64.b64encode(b"content").decode()
    request = run_request(
        "open('out', 'w').write(open('d/in').read()[::-1])",
        files={"d/in": text, "ignored": None},
        fetch_files=["out"],
    )
    answer = sandbox_fusion.run_code(request, max_attempts=1)
    assert base64.b64decode(answer.files["out"]) == b"tnetnoc"


def test_run_concurrent() -> None:
    requests = [[run_request(f"print({n})")] for n in range(12)]
    answers = sandbox_fusion.run_concurrent(sandbox_fusion.run_code, args=requests, concurrency=4)
    assert [a.run_result.stdout for a in answers] == [f"{n}\n" for n in range(12)]


def test_the_asynchronous_client() -> None:
    answer = asyncio.run(sandbox_fusion.run_code_async(run_request("print(1)"), max_attempts=1))
    assert answer.run_result.stdout == "1\n"


@pytest.mark.parametrize(("shift", "accepted"), [(0, True), (1, False)])
def test_submit(shift: int, accepted: bool) -> None:
    stdio = {"test": [{"input": {"stdin": "3"}, "output": {"stdout": "9"}}]}
    asserts = {"test_list": ["assert f(3) == 9", "assert f(0) == 0"], "entry_point": "f"}
    program = f"print(int(input()) ** 2 + {shift})"
    function = f"def f(x): return x * x + {shift}"
    for code, kind, data, count in (
        (program, "CommonOJDataset", stdio, 1),
        (function, "MBPPDataset", asserts, 2),
        (function, "HumanEvalDataset", asserts, 2),
    ):
        result = sandbox_fusion.submit(submission(code, kind, data), max_attempts=1)
        assert (result.id, result.accepted, len(result.tests)) == (5, accepted, count)
        assert [test.passed for test in result.tests] == [accepted] * count
