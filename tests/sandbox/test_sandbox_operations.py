"""Operation of the service: token, addresses, draining, fairness, metrics, logs, size limits."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from ctrl_megatron.exposition import DurationHistogram, metric_lines
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits
from ctrl_megatron.sandbox.access import (
    UnprotectedAddress,
    is_allowed,
    read_token,
    require_safe_address,
)
from ctrl_megatron.sandbox.service.telemetry import JsonLogFormatter, RequestTelemetry
from ctrl_megatron.sandbox.wire import RunCodeRequest, RunStatus, SubmitRequest, TestConfig

ROOT = Path(__file__).parents[2]
TOKEN = "a token of the tests, long enough"
_JSON = {"Content-Type": "application/json"}
REQUEST = RunCodeRequest(code="print(1)", language="python", run_timeout=60.0)


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedSandbox]:
    """A service with a token and one worker."""
    with EmbeddedSandbox.start(workers=1, token=TOKEN) as running:
        yield running


async def get(url: str, token: str | None = TOKEN) -> tuple[int, str, dict[str, str]]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as answer:
        return answer.status, await answer.text(), dict(answer.headers)


def slow(seconds: float) -> RunCodeRequest:
    code = f"import time; time.sleep({seconds}); print('slow')"
    return RunCodeRequest(code=code, language="python", run_timeout=60.0)


def test_without_the_token_only_the_health_check_answers(guarded: EmbeddedSandbox) -> None:
    async def scenario() -> None:
        assert (await get(guarded.endpoint + "/v1/ping", None))[0] == 200
        for path in ("/metrics", "/stats", "/", "/list_datasets", "/nothing"):
            for wrong in (None, TOKEN + "x", TOKEN[:-1], ""):
                status, _, headers = await get(guarded.endpoint + path, wrong)
                assert (status, headers.get("WWW-Authenticate")) == (401, "Bearer")
        assert (await get(guarded.endpoint + "/metrics"))[0] == 200
        async with SandboxClient(guarded.endpoint, attempts=3, backoff=0.01) as client:
            with pytest.raises(ValueError, match="bearer token"):
                await client.run_code(REQUEST)
            assert client.counters.retries == 0
        async with SandboxClient(guarded.endpoint, token=TOKEN) as client:
            assert (await client.run_code(REQUEST)).status is RunStatus.SUCCESS

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN}", True),
        (f"Basic {TOKEN}", False),
        (TOKEN, False),
        ("Bearer", False),
        ("", False),
        ("Bearer \udcff", False),
    ],
)
def test_authorization_headers(header: str, allowed: bool) -> None:
    assert is_allowed(header, TOKEN) is allowed
    assert is_allowed(header, None)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (_JSON, 200),
        ({**_JSON, "Host": "localhost"}, 200),
        ({**_JSON, "Host": "[::1]:80"}, 200),
        # A name of somebody's that leads to loopback.
        ({**_JSON, "Host": "evil.example"}, 403),
        ({**_JSON, "Host": "127.0.0.1.evil.example"}, 403),
        ({**_JSON, "Host": "[::1].evil.example"}, 403),
        ({**_JSON, "Host": "localhost:80@evil.example"}, 403),
        # What a browser sends for a page without asking.
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
    ],
)
def test_without_a_token_no_web_page_reaches_the_service(
    service: EmbeddedSandbox, headers: dict[str, str], status: int
) -> None:
    body = REQUEST.model_dump_json().encode()
    assert asyncio.run(post(service.endpoint, body, headers)) == status


@pytest.mark.parametrize("text", ["", "short", "with\x00nul" * 4, "ümlaut" * 5])
def test_tokens_that_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ValueError, match="16 printable ASCII"):
        read_token(file)
    file.write_text("first line is the long token\nsecond\n")
    assert read_token(file) == "first line is the long token"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    require_safe_address(host, None, allow_open=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node17", ""])
def test_other_addresses_need_a_token_or_a_word(host: str) -> None:
    with pytest.raises(UnprotectedAddress, match="--token-file"):
        require_safe_address(host, None, allow_open=False)
    require_safe_address(host, TOKEN, allow_open=False)
    require_safe_address(host, None, allow_open=True)


def test_the_tool_refuses_an_open_address() -> None:
    tool = ROOT / "tools" / "serve_sandbox.py"
    done = subprocess.run(
        [sys.executable, tool, "--host", "0.0.0.0", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"sandbox: --host 0\.0\.0\.0 is reached .*\n", done.stderr)


def test_draining_finishes_the_running_and_refuses_the_new() -> None:
    async def scenario() -> None:
        service = await asyncio.to_thread(EmbeddedSandbox.start, workers=1)
        try:
            async with SandboxClient(service.endpoint, attempts=1) as client:
                work = [asyncio.create_task(client.run_code(slow(0.8))) for _ in range(2)]
                await until_running(service.endpoint, 2)
                os.kill(service.pid, signal.SIGTERM)
                status, headers = 200, {}
                while status == 200:
                    status, _, headers = await get(service.endpoint + "/v1/ping", None)
                assert (status, int(headers["Retry-After"]) > 0) == (503, True)
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(service.endpoint + "/run_code", json={}) as answer,
                ):
                    assert answer.status == 503 and "Retry-After" in answer.headers
                answers = await asyncio.gather(*work)
                assert [a.run_result and a.run_result.stdout for a in answers] == ["slow\n"] * 2
            for _ in range(500):
                if not service.alive():
                    break
                await asyncio.sleep(0.02)
            assert not service.alive()
        finally:
            service.stop()

    asyncio.run(scenario())


async def until_running(endpoint: str, count: int, token: str | None = None) -> None:
    text = ""
    while f"sandbox_requests_running {count}\n" not in text:
        await asyncio.sleep(0.02)
        text = (await get(endpoint + "/metrics", token))[1]


def test_one_case_does_not_wait_for_a_request_of_hundreds(guarded: EmbeddedSandbox) -> None:
    test = [{"input": {"stdin": str(n)}, "output": {"stdout": "x"}} for n in range(200)]
    config = TestConfig(
        dataset_type="CommonOJDataset",
        language="python",
        provided_data={"test": test},
        extra={"run_all_cases": True},
    )
    code = "```python\nimport time; time.sleep(0.02); print('x')\n```"
    long = SubmitRequest(dataset="t", id=0, completion=code, config=config)

    async def scenario() -> None:
        async with SandboxClient(guarded.endpoint, token=TOKEN, name="many cases") as client:
            crowd = [asyncio.create_task(client.submit(long)) for _ in range(2)]
            await until_running(guarded.endpoint, 2, TOKEN)
            # Each client has another name, which gives it no larger share.
            for number in range(5):
                name = {"X-Sandbox-Client": f"other {number}"}
                await asyncio.wait_for(post_json(guarded.endpoint, REQUEST, name), 3.0)
            assert not any(task.done() for task in crowd)
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(scenario())


async def post_json(endpoint: str, request: RunCodeRequest, headers: dict[str, str]) -> str:
    own = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", **headers}
    async with (
        aiohttp.ClientSession(headers=own) as session,
        session.post(endpoint + "/run_code", data=request.model_dump_json()) as answer,
    ):
        assert answer.status == 200
        return await answer.text()


def test_bodies_that_are_declared_and_never_sent_take_no_memory() -> None:
    limits = SandboxLimits(service_mb=16, request_bytes=8 << 20, body_seconds=1.0)
    size = limits.request_bytes - 1

    async def send(host: str, port: str, body: bytes) -> tuple[asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {size}\r\n\r\n"
        writer.write(head.encode() + body)
        return writer, await reader.readuntil(b"\r\n")

    async def scenario(service: EmbeddedSandbox) -> None:
        host, _, port = service.endpoint.removeprefix("http://").partition(":")
        silent = [asyncio.create_task(send(host, port, b"{")) for _ in range(20)]
        await until_running(service.endpoint, 20)
        async with SandboxClient(service.endpoint, attempts=1) as client:
            assert (await client.run_code(REQUEST)).status is RunStatus.SUCCESS
        for task in silent:
            writer, answer = await task
            assert answer.split()[1] == b"408"
            writer.close()
        # Bytes that arrived count: two bodies of 8 MiB fit, a third is too much.
        full = [asyncio.create_task(send(host, port, b" " * (size - 1))) for _ in range(3)]
        answers = sorted([(await task)[1].split()[1] for task in full])
        assert answers == [b"408", b"408", b"503"] or answers == [b"408", b"503", b"503"]
        assert "sandbox_requests_bytes 0\n" in (await get(service.endpoint + "/metrics", None))[1]

    with EmbeddedSandbox.start(workers=1, limits=limits) as service:
        asyncio.run(scenario(service))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_a_packed_body_is_refused(service: EmbeddedSandbox, encoding: str) -> None:
    body = REQUEST.model_dump_json().encode()
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)(body)
    named, plain = (
        {**_JSON, "Content-Encoding": encoding},
        {**_JSON, "Content-Encoding": "Identity"},
    )
    assert asyncio.run(post(service.endpoint, packed, named)) == 415
    assert asyncio.run(post(service.endpoint, body, plain)) == 200


async def post(endpoint: str, body: bytes, headers: dict[str, str]) -> int:
    url = endpoint + "/run_code"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers) as answer,
    ):
        return answer.status


def test_prometheus_can_read_the_metrics(guarded: EmbeddedSandbox) -> None:
    async def scenario() -> tuple[str, dict[str, str]]:
        async with SandboxClient(guarded.endpoint, token=TOKEN) as client:
            await client.run_code(REQUEST)
        _, text, headers = await get(guarded.endpoint + "/metrics")
        return text, headers

    text, headers = asyncio.run(scenario())
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = parse(text)
    assert samples['sandbox_requests_total{route="/run_code",status="200"}'] >= 1
    assert samples["sandbox_jobs_total"] >= 1
    assert samples["sandbox_workers"] == samples["sandbox_workers_free"] == 1
    assert samples["sandbox_queue_length"] == samples["sandbox_worker_faults_total"] == 0
    level = guarded.isolation["level"]
    assert any(f'level="{level}"' in name for name in samples)


def parse(text: str) -> dict[str, float]:
    """Samples of the exposition format; checks that each family has its head exactly once."""
    samples, families = {}, []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            families.append(line.split()[2])
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            base = name.partition("{")[0]
            assert any(base.startswith(family) for family in families[-1:]), line
            samples[name] = float(value)
    assert len(families) == len(set(families)) and text.endswith("\n")
    return samples


def test_histograms_are_cumulative() -> None:
    telemetry, histogram = RequestTelemetry(), DurationHistogram()
    for seconds in (0.001, 0.005, 0.02, 1000.0):
        histogram.add(seconds)
        telemetry.add("/x", 200, seconds)
    lines = list(histogram.lines("h", {}))
    counts = [int(line.rpartition(" ")[2]) for line in lines if "bucket" in line]
    assert counts == sorted(counts) and counts[0] == 2 and counts[-2:] == [3, 4]
    assert lines[-1] == "h_count 4"
    assert (
        parse("\n".join([*telemetry.lines(), ""]))['sandbox_request_seconds_count{route="/x"}'] == 4
    )
    assert list(metric_lines("gauge", "g", "t", ({"a": 'q"\\\n'}, 1)))[-1] == 'g{a="q\\"\\\\\\n"} 1'


def test_log_lines_are_json() -> None:
    record = logging.LogRecord("n", logging.ERROR, "f", 1, "said %s", ("\ud800\n",), None)
    record.fields = {"route": "/x"}
    line = json.loads(JsonLogFormatter().format(record))
    assert (line["level"], line["message"], line["route"]) == ("error", "said \ud800\n", "/x")


def test_ping_names_the_level_reached(service: EmbeddedSandbox) -> None:
    _, text, headers = asyncio.run(get(service.endpoint + "/v1/ping", None))
    assert text == '"pong"'
    assert headers["X-Sandbox-Level"] == service.isolation["level"]
    assert headers["X-Sandbox-Isolation"] == service.isolation["tier"]


def test_the_next_start_removes_the_files_of_services_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "ctrl-sandbox-files-of-another-user"
    foreign.mkdir()
    if os.geteuid() == 0:
        os.chown(foreign, 12345, -1)
    with EmbeddedSandbox.start(workers=1) as used:
        killed = EmbeddedSandbox.start(workers=1)
        folder = Path(killed.scratch)
        (folder / "more").mkdir()
        (folder / "more/of a program").write_text("left")
        os.kill(killed.pid, signal.SIGKILL)
        while killed.alive():
            time.sleep(0.01)
        assert folder.is_dir()
        with EmbeddedSandbox.start(workers=1):
            assert not folder.exists() and Path(used.scratch).is_dir()
        assert foreign.is_dir() or os.geteuid() != 0
        killed.stop()
    assert {path.name for path in tmp_path.iterdir()} <= {foreign.name}
