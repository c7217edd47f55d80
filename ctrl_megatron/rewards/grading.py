"""One revision and one sample to one request, and the sandbox's answer to one verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ctrl_megatron.prompts import extract_code, fenced
from ctrl_megatron.rewards.cache import fingerprint
from ctrl_megatron.rewards.samples import (
    RUN_TIMEOUT,
    Sample,
    asserts_of,
    cases_of,
    time_limit_of,
)
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import (
    CommandRunStatus,
    EvalResult,
    EvalTestCase,
    SubmitRequest,
    TestConfig,
)
from ctrl_megatron.types import Verdict

GRADER_VERSION = "2"
"""Part of every cache key; raise it when equal requests may get other verdicts than before."""
TIMED_OUT = "TimeLimitExceeded"
"""``Verdict.detail`` of a test that ran out of time."""


class Judge(Protocol):
    """What grading needs of a sandbox client."""

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """Judge a completion; raise ``SandboxError`` when the service fails."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """A verdict and whether it may change when the same program runs again."""

    verdict: Verdict
    timed_out: bool
    """True when a test ran out of time, which a busy machine can cause."""
    forged: bool | None = None
    """A grader that believes exit codes would have accepted what was refused; None: not compared.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingJob:
    """A request and the number of tests it must be judged on."""

    request: SubmitRequest
    total: int

    @property
    def key(self) -> str:
        """Equal only for equal programs, tests, set-up, entry point, time limit and mode."""
        return fingerprint(GRADER_VERSION, self.request.model_dump(mode="json"))


def grading_job(
    text: str,
    sample: Sample,
    *,
    run_all_cases: bool,
    run_timeout: float = RUN_TIMEOUT,
    compare_lax: bool = False,
) -> GradingJob:
    """How to judge the program in ``text`` on the tests of ``sample``.

    A test may take ``run_timeout`` seconds where the sample does not say. ``compare_lax`` has our
    service also ask a lax grader, without an effect on the verdict.

    The program is extracted here and sent fenced, so that the service has nothing to guess. Raises
    ``ValueError`` for an unknown ``prompter_type`` and for a sample without tests.
    """
    dataset_type, data, total = _tests_of(sample)
    config = TestConfig(
        dataset_type=dataset_type,
        language="python",
        run_timeout=time_limit_of(sample, run_timeout),
        provided_data=data,
        extra={"run_all_cases": run_all_cases, **({"lax": "compare"} if compare_lax else {})},
    )
    request = SubmitRequest(
        dataset=sample["prompter_type"], id=0, completion=fenced(extract_code(text)), config=config
    )
    return GradingJob(request=request, total=total)


async def grade(judge: Judge, job: GradingJob) -> Graded:
    """Have ``job`` judged; ``SandboxError`` if the service fails or answers for other tests."""
    result = await judge.submit(job.request)
    cases = result.tests
    finished = len(cases) == job.total or (
        cases and len(cases) < job.total and not cases[-1].passed
    )
    if not finished or result.accepted != all(case.passed for case in cases):
        raise SandboxError(
            f"the sandbox answered with {len(cases)} verdict(s), accepted={result.accepted}, "
            f"for {job.total} test(s) of a {job.request.dataset} sample"
        )
    verdict = Verdict(
        passed=tuple(case.passed for case in cases),
        total=job.total,
        detail=tuple(map(_why, cases)),
    )
    return Graded(
        verdict=verdict,
        timed_out=any(map(_timed_out, cases)),
        forged=(result.extra or {}).get("forged"),
    )


def _tests_of(sample: Sample) -> tuple[str, dict[str, Any], int]:
    """``dataset_type``, ``provided_data`` and number of tests of a sample."""
    kind = sample["prompter_type"]
    if kind == "mbppplus":
        asserts = asserts_of(sample)
        data = {
            "test_list": asserts,
            "test_setup_code": sample.get("test_setup") or "",
            "entry_point": sample.get("entry_point") or "",
        }
        return "MBPPDataset", data, len(asserts)
    if kind == "code_contests":
        cases = cases_of(sample)
        return "CommonOJDataset", {"test": cases}, len(cases)
    if kind == "livecodebench":
        missing = [name for name in ("content", "labels", "test") if sample.get(name) is None]
        if missing:
            raise ValueError(
                f"sample {sample['id']!r}: livecodebench needs column(s) {', '.join(missing)}"
            )
        data = {name: sample[name] for name in ("id", "content", "labels", "test")}
        return "LiveCodeBenchDataset", data, 1
    raise ValueError(
        f"sample {sample['id']!r}: unknown prompter_type {kind!r}; "
        "use one of mbppplus, code_contests, livecodebench"
    )


def _timed_out(case: EvalTestCase) -> bool:
    run = case.exec_info.run_result
    return run is not None and run.status is CommandRunStatus.TIME_LIMIT_EXCEEDED


def _why(case: EvalTestCase) -> str:
    if case.passed:
        return ""
    if _timed_out(case):
        return TIMED_OUT
    run = case.exec_info.run_result
    crashed = run is not None and run.return_code not in (0, None)
    last_line = (
        (run.stderr or "").strip().rpartition("\n")[2] if run is not None and crashed else ""
    )
    told = str((case.test_info or {}).get("reason") or case.exec_info.message or "")
    parts = (told, last_line) if last_line not in told else (told,)
    return ": ".join(filter(None, parts))[:500] or str(case.exec_info.status)
