"""A provider out of anything that can run one script with an input and return its output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.rewards.providers.asserts import (
    AssertsJob,
    CaseVerdict,
    SplitTest,
    harness_source,
    split_test,
)
from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
)
from ctrl_megatron.sandbox.comparison import difference
from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    EvalResult,
    EvalTestCase,
    RunCodeResponse,
    RunStatus,
    SubmitRequest,
)

DEFAULT_SECONDS = 10.0
_FUNCTION_KINDS = ("MBPPDataset", "HumanEvalDataset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One program to run once."""

    source: str
    stdin: str
    seconds: float
    """Wall clock."""
    language: str = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """What a program did. A fault of the provider is ``ProviderError``, never a result."""

    stdout: str
    stderr: str = ""
    exit_code: int | None = None
    """None after a time-out or a signal whose number is unknown."""
    timed_out: bool = False
    cut_at: int | None = None
    """The program wrote more than this many characters; some or all of its output is missing."""


class ScriptSession(Protocol):
    """One machine, for the scripts of one request."""

    async def run(self, script: Script) -> ScriptResult:
        """Run a script to its end. Raises ``ProviderError`` and ``ProviderSetupError``."""
        ...


class ScriptBackend(Protocol):
    """Where scripts run."""

    name: str
    languages: tuple[str, ...]
    tests_per_run: int | None
    """Tests of a function problem that one run may take; None for all of them."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Plain values that may change verdicts."""
        ...

    def session(self, counters: ProviderCounters) -> AbstractAsyncContextManager[ScriptSession]:
        """A machine of its own for one request, taken away at the end."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass
class ScriptProvider:
    """Judges function problems by the harness and stdin/stdout problems by comparing output here.

    A request that fails is tried ``attempts`` times, with a first pause of ``backoff`` seconds,
    doubled each time; ``max_concurrency`` requests are under way at most.
    """

    backend: ScriptBackend
    attempts: int = 3
    backoff: float = 1.0
    max_concurrency: int = 16
    counters: ProviderCounters = field(default_factory=ProviderCounters)

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_concurrency < 1:
            raise ProviderSetupError("attempts and max_concurrency must be at least 1")
        self.name = self.backend.name
        self._semaphore: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """The back end's, and its name."""
        return {"provider": self.name, **self.backend.identity}

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """See ``CodeProvider.submit``; LiveCodeBench problems need the local sandbox."""
        plan = _read(request, self.backend)
        self.counters.requests += 1
        wait = wait_exponential(multiplier=self.backoff, max=60.0) + wait_random(0.0, self.backoff)
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait,
            retry=retry_if_exception_type(ProviderError),
            before_sleep=self._count_retry,
            reraise=True,
        )
        try:
            verdicts = await retrying(self._attempt, plan)
        except ProviderError as error:
            self.counters.failures += 1
            raise ProviderError(
                f"provider {self.name}: {error} (gave up after {self.attempts} attempts)"
            ) from error
        outside = sum(isinstance(test, _Case) or test.compared for test in plan.tests)
        self.counters.compared_outside += outside
        self.counters.asserted_inside += len(plan.tests) - outside
        return _answer(request, plan, verdicts)

    async def close(self) -> None:
        """Close the back end's connections."""
        await self.backend.close()

    def _count_retry(self, _: RetryCallState) -> None:
        self.counters.retries += 1

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._loop is not loop:
            self._semaphore, self._loop = asyncio.Semaphore(self.max_concurrency), loop
        return self._semaphore

    async def _attempt(self, plan: _Plan) -> list[CaseVerdict]:
        async with self._slot(), self.backend.session(self.counters) as session:
            if plan.function:
                return await _judge_function(session, plan, self.backend.tests_per_run)
            return await _judge_stdio(session, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    stdin: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    code: str
    language: str
    function: bool
    setup: str
    tests: tuple[SplitTest, ...] | tuple[_Case, ...]
    seconds: float
    run_all: bool


def _read(request: SubmitRequest, backend: ScriptBackend) -> _Plan:
    config = request.config
    kind, language = config.dataset_type or request.dataset, config.language or "python"
    data = config.provided_data
    if not isinstance(data, dict):
        raise ValueError("provided_data must be an object: providers keep no data sets")
    function = kind in _FUNCTION_KINDS
    if not function and kind != "CommonOJDataset":
        raise ProviderSetupError(
            f"provider {backend.name} cannot judge {kind}; use the provider local for it"
        )
    if language not in (("python",) if function else backend.languages):
        raise ProviderSetupError(
            f"provider {backend.name} cannot judge {kind} in {language}; "
            f"it knows {', '.join(backend.languages)}"
        )
    return _Plan(
        code=extract_code(request.completion, language),
        language=language,
        function=function,
        setup=data.get("test_setup_code") or "",
        tests=_function_tests(data) if function else _cases(data),
        seconds=config.run_timeout or DEFAULT_SECONDS,
        run_all=bool(config.extra.get("run_all_cases", False)),
    )


def _function_tests(data: Mapping[str, Any]) -> tuple[SplitTest, ...]:
    tests = data.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError("provided_data.test_list must be a non-empty list of Python tests")
    return tuple(split_test(test) for test in tests)


def _cases(data: Mapping[str, Any]) -> tuple[_Case, ...]:
    tests = data.get("test")
    try:
        items = json.loads(tests) if isinstance(tests, str) else tests or ()
        cases = tuple(
            _Case(stdin=item["input"].get("stdin", ""), expected=item["output"]["stdout"])
            for item in items
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"provided_data.test is not a list of stdin/stdout cases: {error!r}"
        ) from error
    if not cases:
        raise ValueError("provided_data.test is empty: nothing to judge")
    return cases


async def _judge_function(
    session: ScriptSession, plan: _Plan, tests_per_run: int | None
) -> list[CaseVerdict]:
    """All tests through the harness, in runs of ``tests_per_run``; a failure ends it unless
    ``run_all``.
    """
    tests = [test for test in plan.tests if isinstance(test, SplitTest)]
    size = tests_per_run or len(tests)
    verdicts: list[CaseVerdict] = []
    for start in range(0, len(tests), size):
        chosen = tuple(tests[start : start + size])
        job = AssertsJob(
            code=plan.code,
            setup=plan.setup,
            tests=chosen,
            seconds=plan.seconds,
            run_all=plan.run_all,
        )
        script = Script(source=harness_source(), stdin=job.stdin(), seconds=job.run_seconds)
        result = await session.run(script)
        if result.cut_at is not None:  # the harness bounds what it writes
            raise ProviderError(
                f"the verdicts do not fit into the provider's output limit of {result.cut_at} "
                "characters; raise it"
            )
        verdicts += _verdicts_in(job, result)
        if not verdicts[-1].passed and not plan.run_all:
            break
    return verdicts


def _verdicts_in(job: AssertsJob, result: ScriptResult) -> list[CaseVerdict]:
    try:
        return job.verdicts(result.stdout, timed_out=result.timed_out)
    except ProviderError as error:
        last = result.stderr.strip().rpartition("\n")[2][:300]
        raise ProviderError(f"{error}; exit status {result.exit_code}: {last}") from error


async def _judge_stdio(session: ScriptSession, plan: _Plan) -> list[CaseVerdict]:
    verdicts: list[CaseVerdict] = []
    for case in plan.tests:
        assert isinstance(case, _Case)
        script = Script(
            source=plan.code, stdin=case.stdin, seconds=plan.seconds, language=plan.language
        )
        verdicts.append(_compare_output(case, await session.run(script)))
        if not verdicts[-1].passed and not plan.run_all:
            break
    return verdicts


def _compare_output(case: _Case, result: ScriptResult) -> CaseVerdict:
    if result.timed_out:
        return CaseVerdict(passed=False, reason="time limit exceeded", timed_out=True)
    if result.cut_at is not None:
        # More output than the right answer has is wrong; below that, nobody knows.
        if result.cut_at < len(case.expected):
            raise ProviderError(
                f"the provider's output limit is {result.cut_at} characters, the expected answer "
                f"has {len(case.expected)}; raise the limit"
            )
        return CaseVerdict(passed=False, reason="output limit exceeded")
    if result.exit_code != 0:
        last = result.stderr.strip().rpartition("\n")[2]
        return CaseVerdict(passed=False, reason=f"exit status {result.exit_code}: {last}"[:400])
    reason = difference(result.stdout, case.expected) or ""
    return CaseVerdict(passed=not reason, reason=reason)


def _answer(request: SubmitRequest, plan: _Plan, verdicts: Sequence[CaseVerdict]) -> EvalResult:
    tests = [_test_case(verdict) for verdict in verdicts]
    return EvalResult(
        id=request.id,
        accepted=len(tests) == len(plan.tests) and all(test.passed for test in tests),
        extracted_code=plan.code,
        tests=tests,
    )


def _test_case(verdict: CaseVerdict) -> EvalTestCase:
    status = CommandRunStatus.FINISHED
    if verdict.timed_out:
        status = CommandRunStatus.TIME_LIMIT_EXCEEDED
    run = CommandRunResult(
        status=status, return_code=None if verdict.timed_out else int(not verdict.passed)
    )
    outcome = RunStatus.SUCCESS if verdict.passed else RunStatus.FAILED
    return EvalTestCase(
        passed=verdict.passed,
        exec_info=RunCodeResponse(status=outcome, run_result=run),
        test_info={"reason": verdict.reason},
    )
