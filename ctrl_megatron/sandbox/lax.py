"""The laxer grading of other services, to compare with: whoever leaves with status 0 has passed.

The program and its tests run in one process and its exit status is believed, as SandboxFusion does
for asserts and for LiveCodeBench. Programs forge it with ``exit(0)``, an ``__eq__`` that always
agrees, or by reading the tests. Never a reward: only a measure of how often that happens.
"""

from __future__ import annotations

import asyncio

from ctrl_megatron.sandbox.datasets.problems import FunctionProblem, StdioProblem
from ctrl_megatron.sandbox.execution import Executor, Program
from ctrl_megatron.sandbox.judging import Judged, Terms
from ctrl_megatron.sandbox.languages.registry import PYTHON
from ctrl_megatron.sandbox.wire import EvalTestCase, RunStatus

_HARNESS = """
import io as _io, sys as _sys
_code, _cases = {code!r}, {cases!r}
for _given, _wanted in _cases:
    _sys.stdin, _sys.stdout = _io.StringIO(_given), _io.StringIO()
    try:
        exec(_code, {{"__name__": "__main__"}})
    except SystemExit:
        pass
    _got, _sys.stdout = _sys.stdout.getvalue(), _sys.__stdout__
    if _got.strip().lower().split() != _wanted.strip().lower().split():
        raise AssertionError("wrong answer")
"""


async def judge_laxly(
    executor: Executor, problem: FunctionProblem | StdioProblem, code: str, terms: Terms
) -> Judged:
    """Verdicts by exit status: one run per assert, or one run for all cases of a problem that
    answers with a single verdict.
    """
    seconds = terms.seconds_for(problem)
    sources = _sources(problem, code)

    async def one(source: str) -> EvalTestCase:
        program = Program(language=PYTHON, code=source, prelude=_prelude(problem))
        ran = await executor.run(program, seconds=seconds)
        passed = ran.response.status is RunStatus.SUCCESS
        info = {"test": source[-1000:], "reason": ran.failure, "lax": True}
        return EvalTestCase(passed=passed, exec_info=ran.response, test_info=info)

    cases: list[EvalTestCase] = []
    if terms.run_all:
        cases = list(await asyncio.gather(*map(one, sources)))
    else:
        for source in sources:
            cases.append(await one(source))
            if not cases[-1].passed:
                break
    return Judged(cases=tuple(cases), total=len(sources))


def differs(problem: object) -> bool:
    """Whether lax grading of ``problem`` is another than the strict one: comparing outputs outside
    the program is the same in both.
    """
    return isinstance(problem, FunctionProblem) or (
        isinstance(problem, StdioProblem) and problem.single
    )


def _prelude(problem: FunctionProblem | StdioProblem) -> str:
    return problem.tests.prelude if isinstance(problem, FunctionProblem) else problem.prelude


def _sources(problem: FunctionProblem | StdioProblem, code: str) -> list[str]:
    if isinstance(problem, StdioProblem):
        cases = [(case.input, case.output) for case in problem.cases]
        return [_HARNESS.format(code=code, cases=cases)]
    tests = problem.tests
    # What the program sees of the setup comes before it; the rest with the tests, as there.
    parts = [code, problem.adapter, tests.setup]
    if problem.single:
        return ["\n".join([*parts, *tests.tests])]
    return ["\n".join([*parts, test]) for test in tests.tests]
