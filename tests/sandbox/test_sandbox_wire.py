"""The HTTP contract as a foreign client sees it: raw JSON in, raw JSON out."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from ctrl_megatron.sandbox import EmbeddedSandbox

JSON = {"Content-Type": "application/json"}


def call(service: EmbeddedSandbox, path: str, body: Any = None) -> tuple[int, Any, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(service.endpoint + path, data=data, headers=JSON)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


def submit_body(**config: Any) -> dict[str, Any]:
    return {"dataset": "d", "id": 0, "completion": "```python\n1\n```", "config": config}


def test_ping_and_status(service: EmbeddedSandbox) -> None:
    code, body, headers = call(service, "/v1/ping")
    assert (code, body) == (200, "pong")
    assert headers["X-Sandbox-Isolation"] == service.isolation["tier"]
    assert call(service, "/")[1]["isolation"] == service.isolation


def test_the_kinds_are_listed(service: EmbeddedSandbox) -> None:
    code, body, _ = call(service, "/list_datasets")
    assert code == 200
    assert {"CommonOJDataset", "LiveCodeBenchDataset", "MBPPDataset", "IOIDataset"} <= set(body)


def test_stats_count(service: EmbeddedSandbox) -> None:
    before = call(service, "/stats")[1]
    call(service, "/run_code", {"code": "while 1: pass", "language": "python", "run_timeout": 0.2})
    after = call(service, "/stats")[1]
    assert after["executions"] == before["executions"] + 1
    assert after["timeouts"] == before["timeouts"] + 1
    assert (after["faults"], after["queue_length"], after["workers"]) == (0, 0, 2)


def test_run_code_answer(service: EmbeddedSandbox) -> None:
    code, body, _ = call(
        service,
        "/run_code",
        {"code": "print(1)", "language": "python", "unknown": [1], "stdin": None},
    )
    assert code == 200
    run = body.pop("run_result")
    assert body == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {},
    }
    assert run.pop("execution_time") > 0
    assert run == {"status": "Finished", "return_code": 0, "stdout": "1\n", "stderr": ""}


def test_submit_answer(service: EmbeddedSandbox) -> None:
    test = [{"input": {"stdin": "x"}, "output": {"stdout": "y"}}]
    body = submit_body(
        dataset_type="CommonOJDataset", language="python", provided_data={"test": test, "id": 3}
    )
    code, answer, _ = call(service, "/submit", body)
    assert code == 200
    assert {"id", "accepted", "extracted_code", "tests"} <= set(answer)
    (case,) = answer["tests"]
    assert case["passed"] is False and case["exec_info"]["status"] == "Success"


def test_one_assert_per_case_for_human_eval(service: EmbeddedSandbox) -> None:
    data = {
        "test_list": ["assert candidate(1) == 2", "assert candidate(2) == 2"],
        "entry_point": "f",
    }
    body = submit_body(
        dataset_type="HumanEvalDataset", provided_data=data, extra={"run_all_cases": True}
    )
    body["completion"] = "Here:\n```python\ndef f(x):\n    return 2\n```\nDone."
    code, answer, _ = call(service, "/submit", body)
    assert (code, answer["accepted"], len(answer["tests"])) == (200, True, 2)


@pytest.mark.parametrize(
    ("path", "body", "code", "text"),
    [
        ("/run_code", {"code": "1"}, 422, "language"),
        ("/run_code", {"code": 1, "language": "python"}, 422, "code"),
        ("/run_code", b"{", 422, "json"),
        ("/run_code", b"\xff\xfe", 422, ""),
        ("/run_code", [], 422, ""),
        ("/run_code", {"code": "1", "language": "rust"}, 400, "sandbox.endpoint"),
        ("/submit", submit_body(), 400, "'d' is not supported; supported: APPSDataset"),
        ("/submit", submit_body(dataset_type="LiveCodeBenchDataset"), 400, "provided_data"),
        ("/submit", submit_body(dataset_type="MBPPDataset"), 400, "provided_data"),
        (
            "/submit",
            submit_body(dataset_type="MBPPDataset", provided_data=[]),
            400,
            "provided_data",
        ),
        ("/submit", submit_body(dataset_type="MBPPDataset", provided_data={}), 400, "test_list"),
        ("/submit", submit_body(custom_extract_logic="import os"), 400, "custom_extract_logic"),
        (
            "/submit",
            submit_body(
                dataset_type="CommonOJDataset", language="python", provided_data={"test": []}
            ),
            400,
            "empty",
        ),
        ("/nothing", {}, 404, "Not Found"),
        ("/v1/ping", {}, 405, "Method Not Allowed"),
    ],
)
def test_refusals(service: EmbeddedSandbox, path: str, body: Any, code: int, text: str) -> None:
    status, answer, _ = call(service, path, body)
    assert status == code
    assert text in json.dumps(answer["detail"])


def test_too_large_a_request_is_refused() -> None:
    from ctrl_megatron.sandbox import SandboxLimits

    with EmbeddedSandbox.start(workers=1, limits=SandboxLimits(request_bytes=1000)) as small:
        code, _, _ = call(small, "/run_code", {"code": "#" * 2000, "language": "python"})
    assert code == 413
