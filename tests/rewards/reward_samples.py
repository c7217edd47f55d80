"""Rows and a scripted sandbox for the reward tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from ctrl_megatron.data.rows import Row, row_from_record
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import EvalResult, RunCodeRequest, RunCodeResponse, SubmitRequest

CORRECT = "Analysis: fine.\nOverall judgment: Correct"
INCORRECT = "Analysis: bad.\nOverall judgment: Incorrect"
STDIO = (
    '[{"input": {"stdin": "1 2"}, "output": {"stdout": "3"}},'
    ' {"input": {"stdin": "4 4"}, "output": {"stdout": "8"}}]'
)


def function_row(name: str = "add/0", **fields: Any) -> Row:
    return row_from_record(function_record(name, **fields), "rows.parquet: row 0", None)


def stdio_row(name: str = "sum/0", **fields: Any) -> Row:
    return row_from_record(stdio_record(name, **fields), "rows.parquet: row 0", None)


def function_record(name: str = "add/0", **fields: Any) -> dict[str, Any]:
    row = {
        "id": name,
        "problem_id": name.split("/")[0],
        "problem": "Add two numbers.",
        "solution": "Sure:\n```python\ndef add(a, b):\n    return a\n```",
        "prompter_type": "mbppplus",
        "selected_uts": ["assert add(1, 2) == 3", "assert add(4, 4) == 8", "assert add(0, 5) == 5"],
        "time_limit": 2.0,
        "entry_point": "add",
        "test_setup": "import math",
    }
    return {**row, **fields}


def stdio_record(name: str = "sum/0", **fields: Any) -> dict[str, Any]:
    row = {
        **function_record(name),
        "prompter_type": "code_contests",
        "selected_uts": STDIO,
        "entry_point": "",
    }
    return {**row, **fields}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def block(code: str) -> str:
    return f"```python\n{code}\n```"


class ScriptedSandbox:
    """Answers by ``passes(request) -> list[bool | None]`` (None: out of time); counts and records
    requests.
    """

    def __init__(
        self, passes: Callable[[SubmitRequest], list[bool | None]], identity: object = "scripted"
    ) -> None:
        self.passes, self._identity = passes, identity
        self.requests: list[SubmitRequest] = []
        self.under_way = self.most_under_way = self.faults_left = 0

    async def identity(self) -> object:
        return self._identity

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        raise AssertionError("rewards judge by /submit")

    async def submit(self, request: SubmitRequest) -> EvalResult:
        self.requests.append(request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.faults_left:
            self.faults_left -= 1
            raise SandboxError("the service is gone")
        verdicts = self.passes(request)
        return EvalResult.model_validate(
            {
                "id": 0,
                "accepted": all(verdicts),
                "extracted_code": "",
                "tests": [
                    {"passed": bool(passed), "exec_info": _run(passed)} for passed in verdicts
                ],
            }
        )


def _run(passed: bool | None) -> dict[str, Any]:
    if passed is None:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
    if passed:
        return {"status": "Success", "run_result": {"status": "Finished", "return_code": 0}}
    stderr = "Traceback ...\nValueError: no"
    return {
        "status": "Failed",
        "run_result": {"status": "Finished", "return_code": 1, "stderr": stderr},
    }
