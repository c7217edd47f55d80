"""Judge slow wrong programs together with right ones: ``python tools/bench/slow_programs.py``.

Each slow program stays below the time limit in each of its hundred cases, so only the problem's
time budget ends it; each right program passes as many cases. One client sends all of them at the
same time. Prints the rewards (None for unknown), and the duration beside the duration that the
budgets allow. At scale 1 there are 100 programs of each kind and a budget of 20 s; the client's
time-out for a silent service is shorter than the whole duration.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards import RewardItem, RewardModelForCritic
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxLimits

PROGRAMS, CASES, BUDGET, TEST_SECONDS, PATIENCE = 100, 100, 20.0, 10.0, 320.0
ALLOWED = 1.2
"""Allowed duration as a multiple of the slow programs' budgets divided by the workers."""


def problem(count: int, test_seconds: float) -> Row:
    """A problem with ``count`` cases."""
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
    """``count`` distinct programs."""
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
        # The slow ones first, so that the right ones queue after them.
        outcomes = await model.judge([*slow, *honest])
    rewards = [None if outcome.error else outcome.reward for outcome in outcomes]
    return rewards[:count], rewards[count:]


def main() -> int:
    """Parse, run, print; returns 1 if a reward or the duration is wrong."""
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
