"""Slow wrong programs beside honest ones: ``python tools/bench_slow_programs.py --scale 0.1``.

Each slow program stays below the time limit of every one of its hundred cases, so that no single
verdict ends it but the problem's budget; each honest one is right on as many. All of them are sent
at once by one client. Printed are the rewards, None where one is unknown, and how long everything
took beside what the budgets allow. At scale 1: 100 of either, a budget of 20 s; the client is
patient with a silent service for less time than the whole takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards import RewardItem, RewardModelForCritic
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits

PROGRAMS, CASES, BUDGET, TEST_SECONDS, PATIENCE = 100, 100, 20.0, 10.0, 320.0
ALLOWED = 1.2
"""Times the sum of the slow programs' budgets over the workers."""


def problem(count: int, test_seconds: float) -> Row:
    """A problem of so many cases."""
    cases = [{"input": {"stdin": str(n)}, "output": {"stdout": str(n)}} for n in range(count)]
    return Row(
        id="echo",
        problem="Print the number that you read.",
        solution="```python\nprint(0)\n```",
        prompter_type="code_contests",
        selected_uts=json.dumps(cases),
        time_limit=test_seconds,
    )


def items(code: str, count: int, row: Row) -> list[RewardItem]:
    """As many programs, no two equal."""
    texts = [f"```python\n{code}\n# {number}\n```" for number in range(count)]
    return [
        RewardItem(text=text, critique="Overall judgment: Incorrect", row=row) for text in texts
    ]


async def judged(endpoint: str, scale: float) -> tuple[list[float | None], list[float | None]]:
    """Rewards of the slow programs and of the honest ones; an unknown one is None."""
    count, seconds = max(round(PROGRAMS * scale), 1), TEST_SECONDS * scale
    row = problem(max(round(CASES * scale), 1), seconds)
    slow = items(f"import time\ntime.sleep({0.75 * seconds})\nprint('wrong')", count, row)
    honest = items("print(input())", count, row)
    async with SandboxClient(endpoint, timeout=PATIENCE * scale) as client:
        model = RewardModelForCritic(
            [row], None, sandbox=client, show_progress=False, max_requests=2 * count
        )
        # The slow ones first: who waits his turn waits behind them.
        outcomes = await model.judge([*slow, *honest])
    rewards = [None if outcome.error else outcome.reward for outcome in outcomes]
    return rewards[:count], rewards[count:]


def main() -> int:
    """Parse, run, print; 1 where a reward or the time is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scale", type=float, default=0.1, help="of programs, cases and every time"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", default="standard")
    options = parser.parse_args()
    limits = SandboxLimits(problem_seconds=BUDGET * options.scale)
    with EmbeddedSandbox.start(
        workers=options.workers, isolation=options.isolation, limits=limits
    ) as service:
        began = time.monotonic()
        slow, honest = asyncio.run(judged(service.endpoint, options.scale))
        took = time.monotonic() - began
    allowed = ALLOWED * len(slow) * limits.problem_seconds / options.workers
    print(f"rewards of {len(slow)} slow programs: {dict(Counter(slow))}")
    print(f"rewards of {len(honest)} honest programs: {dict(Counter(honest))}")
    print(f"{took:.1f} s; {ALLOWED} times the slow ones' budgets over the workers: {allowed:.1f} s")
    right = set(slow) == {0.0} and set(honest) == {1.0}
    return 0 if right and took <= allowed else 1


if __name__ == "__main__":
    raise SystemExit(main())
