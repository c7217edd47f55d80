"""The SandboxFusion wire contract as records; unknown fields are ignored in both directions.

Source: bytedance/SandboxFusion, ``/run_code`` and ``/submit``. Fields keep upstream's names and
defaults, so that its public client and ours are interchangeable.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

CLIENT_HEADER = "X-Sandbox-Client"
"""Request header: the client's name for the service's log. It has no other effect."""
JOB_HEADER = "X-Sandbox-Job"
"""Request header: a number that the client chooses. The same request with the same number joins the
running work, or gets the existing answer, instead of starting it anew."""
WAIT_HEADER = "X-Sandbox-Wait"
"""Request header, with ``JOB_HEADER``: seconds after which the service answers 202 that the work
continues, with the route in ``Location`` at which the client can ask again."""
FINISHED_HEADER = "X-Sandbox-Finished"
"""Response header of 202 and of a full service: how many jobs and requests the service has finished
since its start, from which a client that waits sees that work goes on. Jobs count, because requests
with equally slow tests advance in step, so that none of them may finish for a long time."""
BUSY_HEADER = "X-Sandbox-Busy"
"""Header of an answer 503: the service is busy with other requests and accepts this one later."""
LEVEL_HEADER = "X-Sandbox-Level"
"""Header of an answer to ``/v1/ping``: the isolation level that the service reached."""


GRADER_VERSION = "8"
"""Version of the judging rules; increase it when equal requests may get other verdicts
than before."""


class RunStatus(StrEnum):
    """Outcome of a request. ``SandboxError`` is a fault of the service, never the program's."""

    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandRunStatus(StrEnum):
    """Outcome of one process."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore")


class CommandRunResult(_Record):
    """The result of one process. A run that exceeded its time has no ``return_code``."""

    status: CommandRunStatus
    execution_time: float | None = None
    """Seconds of wall clock."""
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeRequest(_Record):
    """Body of ``POST /run_code``."""

    code: str
    language: str
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    """Seconds of processor time; the limit by the clock is a multiple of it."""
    memory_limit_MB: int = -1
    """Spelled as upstream. Address space in MiB; -1 means the service's own limit."""
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict)
    """Base64 content by path in the program's directory; null entries are ignored."""
    fetch_files: list[str] = Field(default_factory=list)


class RunCodeResponse(_Record):
    """Answer of ``POST /run_code``."""

    status: RunStatus
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    """Base64 content by fetched path."""

    @property
    def timed_out(self) -> bool:
        """Whether the program or its compiler ran out of time."""
        late = CommandRunStatus.TIME_LIMIT_EXCEEDED
        results = (self.compile_result, self.run_result)
        return any(result is not None and result.status is late for result in results)


class TestConfig(_Record):
    """How a submission is judged."""

    __test__ = False  # not a pytest class

    dataset_type: str | None = None
    """``MBPPDataset``, ``HumanEvalDataset``, ``CommonOJDataset``, ``CodeContestsDataset``,
    ``LiveCodeBenchDataset``, ``APPSDataset``, ``TACODataset`` or ``IOIDataset``.
    """
    language: str | None = None
    locale: str | None = None
    is_fewshot: bool | None = None
    compile_timeout: float | None = None
    run_timeout: float | None = None
    """Seconds of processor time per test; the limit by the clock is a multiple of it."""
    custom_extract_logic: str | None = None
    """Refused, because it would run the caller's code in the service."""
    provided_data: dict[str, Any] | list[dict[str, Any]] | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    """``run_all_cases`` (bool) judges every test instead of stopping at the first failure;
    ``max_cases`` (int) judges only the first ones; ``problem_seconds`` limits the workers' time for
    all tests together; ``cpp_standard`` (c++17); ``compatibility`` (``sandbox_fusion``) compares
    outputs and results as tolerantly as that service."""


class SubmitRequest(_Record):
    """Body of ``POST /submit``."""

    dataset: str
    id: int | str
    completion: str
    config: TestConfig


class EvalTestCase(_Record):
    """The verdict on one test."""

    passed: bool
    exec_info: RunCodeResponse
    test_info: dict[str, Any] | None = None
    """Summary of the test. ``reason`` says why it failed. ``timed_out`` is true if time decided the
    verdict although the run itself does not show it."""

    @property
    def timed_out(self) -> bool:
        """Whether time decided the verdict, so that it may be different on an idle machine."""
        return self.exec_info.timed_out or bool((self.test_info or {}).get("timed_out"))


class EvalResult(_Record):
    """Answer of ``POST /submit``. Without ``run_all_cases`` ``tests`` is a prefix ending at the
    first failure.
    """

    id: int | str
    accepted: bool
    extracted_code: str
    full_code: str | None = None
    test_code: str | None = None
    tests: list[EvalTestCase]
    extracted_type: str | None = None
    extra: dict[str, Any] | None = None
