"""A provider on top of any service that runs a script with an input and returns its output."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.comparison import (
    LIVE_CODE_BENCH,
    STRICT,
    ComparisonRule,
    output_difference,
    output_prefix_difference,
)
from ctrl_megatron.problems.fields import rule_field
from ctrl_megatron.problems.long_integers import load_long_integer_json
from ctrl_megatron.prompts import extract_code
from ctrl_megatron.rewards.providers.asserts import AssertsJob, split_off_expected_value
from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
    Script,
    ScriptBackend,
    ScriptResult,
    case_verdict,
)
from ctrl_megatron.sandbox.client import RequestRefused, SandboxError
from ctrl_megatron.sandbox.client.attempts import SilenceDeadline, describe_failure, retry
from ctrl_megatron.sandbox.datasets.functions import read_function_tests
from ctrl_megatron.sandbox.wire import EvalResult, EvalTestCase, SubmitRequest

Answer = TypeVar("Answer")
DEFAULT_SECONDS = 10.0
_FUNCTION_KINDS = ("MBPPDataset", "HumanEvalDataset")
_UNIT_TESTS = re.compile(r"^\s*(?:(?:import|from) pytest\b|(?:async )?def test)", re.MULTILINE)


@dataclass
class ScriptProvider:
    """Judges function problems by the harness, and stdin/stdout problems by comparing output here.

    It is a ``Judge``, as a sandbox client is. A request is attempted up to ``attempts`` times, with
    a first pause of ``backoff`` seconds, doubled for each attempt. At most ``max_concurrency``
    requests run at the same time. A request is given up after ``silence`` seconds in which no
    script has ended, all attempts together; one script may take half of it. An answer that cannot
    be read is a fault of the provider.
    """

    backend: ScriptBackend
    attempts: int = 3
    backoff: float = 1.0
    max_concurrency: int = 16
    silence: float = 640.0
    counters: ProviderCounters = field(default_factory=ProviderCounters)

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_concurrency < 1:
            raise ProviderSetupError("attempts and max_concurrency must be at least 1")
        self._semaphore: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def identity(self) -> Mapping[str, Any]:
        """The name and the identity of the back end: different where verdicts may differ."""
        return {"provider": self.backend.name, **self.backend.identity}

    def check(self, request: SubmitRequest) -> Sequence[AssertsJob | StdioRun]:
        """The scripts of ``request``. Raises ``RequestRefused`` and ``ProviderSetupError`` for one
        that the provider cannot judge, whatever its program.
        """
        try:
            return _jobs(request, self.backend)
        except ProviderSetupError:
            raise
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """One verdict per test of ``request``.

        Without ``extra.run_all_cases`` the list ends at the first failure. Raises ``ProviderError``
        where the provider fails, and ``ProviderSetupError`` or ``ValueError`` for a request that it
        cannot judge, such as a LiveCodeBench problem, which requires the local sandbox.
        """
        jobs = self.check(request)
        self.counters.requests += 1
        silence = SilenceDeadline(self.silence)
        try:
            tests = await retry(
                partial(self._attempt, request, silence),
                partial(self._again, silence),
                attempts=self.attempts,
                backoff=self.backoff,
            )
        except ProviderError as error:
            self.counters.failures += 1
            end = f"{self.attempts} attempts" if silence.seconds_left else f"{self.silence:g} s"
            raise ProviderError(
                f"provider {self.backend.name}: {error} (gave up after {end})"
            ) from error
        asserts = [test for job in jobs if isinstance(job, AssertsJob) for test in job.tests]
        total, inside = len(asserts) or len(jobs), sum(not test.compared for test in asserts)
        self.counters.compared_outside += total - inside
        self.counters.asserted_inside += inside
        return EvalResult(
            id=request.id,
            accepted=len(tests) == total and all(test.passed for test in tests),
            extracted_code=jobs[0].code,
            tests=tests,
        )

    async def close(self) -> None:
        await self.backend.close()

    def _again(self, silence: SilenceDeadline, error: Exception) -> float | None:
        if not isinstance(error, ProviderError) or not silence.seconds_left:
            return None
        self.counters.retries += 1
        return 0.0

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._loop is not loop:
            self._semaphore, self._loop = asyncio.Semaphore(self.max_concurrency), loop
        return self._semaphore

    async def _attempt(
        self, request: SubmitRequest, silence: SilenceDeadline
    ) -> list[EvalTestCase]:
        tests: list[EvalTestCase] = []
        jobs = _jobs(request, self.backend)  # with nonces of this attempt
        queued = time.monotonic()
        async with self._slot(), AsyncExitStack() as stack:
            silence.extend(time.monotonic() - queued)
            session = await self._answered(
                stack.enter_async_context(self.backend.session(self.counters)), silence
            )
            for job in jobs:
                result = await self._answered(session.run(job.script()), silence)
                silence.restart_countdown()
                tests += job.verdicts(result)
                if not tests[-1].passed and not _runs_all(request):
                    break
        return tests

    async def _answered(
        self, call: Coroutine[Any, Any, Answer], silence: SilenceDeadline
    ) -> Answer:
        """The answer of the provider. Raises ``ProviderError`` where it does not come in time, and
        for an answer that cannot be read.
        """
        seconds = min(self.silence / 2, silence.seconds_left)
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                return await call
        except TimeoutError as error:
            raise ProviderError(f"no answer within {seconds:g} s") from error
        except (SandboxError, UserError):
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ProviderError(f"its answer cannot be read: {describe_failure(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioRun:
    """One case of a stdin/stdout problem, for one run of the program."""

    code: str
    language: str
    seconds: float
    """Limit of the wall clock."""
    stdin: str
    expected: str
    rule: ComparisonRule = STRICT

    def script(self) -> Script:
        return Script(
            source=self.code, stdin=self.stdin, seconds=self.seconds, language=self.language
        )

    def verdicts(self, result: ScriptResult) -> list[EvalTestCase]:
        """One verdict. Raises ``ProviderError`` where a part of the output is missing that may
        matter.
        """
        if result.timed_out:
            return [case_verdict(False, "time limit exceeded", timed_out=True)]
        if result.cut_at is not None:
            # The length of a right output is unknown: numbers may have more digits.
            reason = output_prefix_difference(result.stdout, self.expected, self.rule)
            if reason is None:
                raise ProviderError(
                    f"the provider's output limit of {result.cut_at} characters has cut off an "
                    "output that may be right; raise the limit"
                )
            return [case_verdict(False, f"output limit exceeded: {reason}")]
        if result.exit_code != 0:
            return [case_verdict(False, result.failure)]
        reason = output_difference(result.stdout, self.expected, self.rule) or ""
        return [case_verdict(not reason, reason)]


def _runs_all(request: SubmitRequest) -> bool:
    return bool(request.config.extra.get("run_all_cases", False))


def _jobs(request: SubmitRequest, backend: ScriptBackend) -> Sequence[AssertsJob | StdioRun]:
    """The scripts that judge a request, in order. Raises ``ValueError`` or
    ``ProviderSetupError``.
    """
    config = request.config
    kind, language = config.dataset_type or request.dataset, config.language or "python"
    data, seconds = config.provided_data, config.run_timeout or DEFAULT_SECONDS
    if not isinstance(data, dict):
        raise UserError("provided_data must be an object: providers store no data sets")
    function = kind in _FUNCTION_KINDS
    if not function and kind != "CommonOJDataset":
        raise ProviderSetupError(
            f"provider {backend.name} cannot judge {kind}; use the provider local for it"
        )
    if language not in (("python",) if function else backend.languages):
        raise ProviderSetupError(
            f"provider {backend.name} cannot judge {kind} in {language}; "
            f"it supports {', '.join(backend.languages)}"
        )
    rule = rule_field(data, STRICT)
    if rule is LIVE_CODE_BENCH and language == "python":
        raise ProviderSetupError(
            f"provider {backend.name} lacks LiveCodeBench's preamble, which comparison "
            f"{rule.name!r} requires; use the provider local for it"
        )
    code = extract_code(request.completion, language)
    if not function:
        return [
            StdioRun(
                code=code,
                language=language,
                seconds=seconds,
                stdin=stdin,
                expected=expected,
                rule=rule,
            )
            for stdin, expected in _cases(data)
        ]
    problem = read_function_tests(data)
    if any(_UNIT_TESTS.search(test) for test in problem.tests):
        raise ProviderSetupError(
            f"provider {backend.name} cannot judge unit tests; use the provider local for them"
        )
    tests = tuple(map(split_off_expected_value, problem.tests))
    size = backend.tests_per_run or len(tests)
    return [
        AssertsJob(
            code=code + problem.adapter,
            names=problem.stubs,
            setup=data.get("test_setup_code") or "",
            tests=tests[start : start + size],
            seconds=seconds,
            run_all=_runs_all(request),
        )
        for start in range(0, len(tests), size)
    ]


def _cases(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    tests = data.get("test")
    try:
        items = load_long_integer_json(tests) if isinstance(tests, str) else tests or ()
        cases = [(item["input"].get("stdin", ""), item["output"]["stdout"]) for item in items]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"provided_data.test is not a list of stdin/stdout cases: {error!r}"
        ) from error
    if not cases:
        raise UserError("provided_data.test is empty: nothing to judge")
    return cases
