"""Real solutions with known verdicts."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

from conftest import BackgroundLoop, submission

from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult

# They pass objects or types as arguments, or measure them: values that cannot cross to another
# process.
LOST_MBPP = {367, 533, 596, 601, 927}
MBPP_SAMPLE = 150
EVERY = 23


def judge_all(
    client: SandboxClient, on_loop: BackgroundLoop, rows: list[tuple[str, dict[str, Any]]]
) -> list[EvalResult]:
    async def scenario() -> list[EvalResult]:
        requests = [
            submission(code, dataset_type="MBPPDataset", provided_data=data, run_timeout=20.0)
            for code, data in rows
        ]
        return list(await asyncio.gather(*map(client.submit, requests)))

    return on_loop(scenario())


def test_mbpp_references_pass(
    client: SandboxClient, on_loop: BackgroundLoop, shared_data: Path
) -> None:
    lines = (shared_data / "mbpp" / "mbpp.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    chosen = problems[:MBPP_SAMPLE] + [p for p in problems if p["task_id"] in LOST_MBPP]
    rows = [
        (p["code"], {"test_list": p["test_list"], "test_setup_code": p["test_setup_code"]})
        for p in chosen
    ]
    results = judge_all(client, on_loop, rows)
    failed = {p["task_id"] for p, r in zip(chosen, results, strict=True) if not r.accepted}
    assert failed == LOST_MBPP


def test_known_verdicts_are_reproduced(
    client: SandboxClient, on_loop: BackgroundLoop, shared_data: Path
) -> None:
    path = shared_data / "initial_solutions" / "initial_solutions.jsonl.gz"
    with gzip.open(path, "rt") as stream:
        solutions = [json.loads(line) for line in stream][::EVERY]
    settled = [s for s in solutions if {"pass", "fail", "error"} >= set(s["verdicts"])]
    assert len(settled) > 120
    rows = [
        (
            s["solution"],
            {"test_list": s["tests"], "test_setup_code": s["setup"], "entry_point": s["stub"]},
        )
        for s in settled
    ]
    results = judge_all(client, on_loop, rows)
    got = [[case.passed for case in result.tests] for result in results]
    assert got == [[verdict == "pass" for verdict in s["verdicts"]] for s in settled]
