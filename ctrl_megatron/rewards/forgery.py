"""The forgery rate: programs that a lax grader accepts and the strict one does not.

Lax is what CTRL's own grader does: program and asserts in one process, accepted if it exits with 0.
Leaving early, or an object that equals everything, passes it. A rising rate says that the policy
learns to forge. Not every case is a forgery: a program whose answers cannot leave its process, or
that is slower under the strict grader, counts as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.rewards.code_rewards import gathered
from ctrl_megatron.rewards.samples import RUN_TIMEOUT, Sample, asserts_of, time_limit_of
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import RunCodeRequest, RunCodeResponse, RunStatus


class Runner(Protocol):
    """What a lax run needs of a sandbox client."""

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run a program; raise ``SandboxError`` when the service fails."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgeryCount:
    """Samples by their two verdicts; those with an unknown verdict are in ``unknown`` only."""

    judged: int
    """Samples with both verdicts."""
    lax_passes: int
    """Accepted by the lax grader."""
    forged: int
    """Accepted by the lax grader, not by the strict one."""
    unknown: int
    """Samples without one of the verdicts."""

    @property
    def rate(self) -> float | None:
        """Forged over judged; None where nothing was judged."""
        return self.forged / self.judged if self.judged else None

    @property
    def share_of_passes(self) -> float | None:
        """Forged over lax passes; None where there is none."""
        return self.forged / self.lax_passes if self.lax_passes else None


def count_forgeries(lax: Sequence[bool | None], strict: Sequence[bool | None]) -> ForgeryCount:
    """Compare verdicts sample by sample; None is unknown. Raises ``ValueError`` for lists of
    unequal length.
    """
    pairs = list(zip(lax, strict, strict=True))
    known = [pair for pair in pairs if None not in pair]
    return ForgeryCount(
        judged=len(known),
        lax_passes=sum(bool(a) for a, _ in known),
        forged=sum(bool(a) and not b for a, b in known),
        unknown=len(pairs) - len(known),
    )


async def lax_verdicts(
    client: Runner,
    texts: Sequence[str],
    samples: Sequence[Sample],
    *,
    run_timeout: float = RUN_TIMEOUT,
    max_requests: int = 256,
) -> list[bool | None]:
    """Whether set-up, program and all asserts in one process exit with 0, per answer.

    None where the service failed, and for stdin/stdout problems: their output is compared in any
    grader, so there is nothing to forge. The time limit is that of all asserts together.
    """
    semaphore = asyncio.Semaphore(max_requests)

    async def verdict(text: str, sample: Sample) -> bool | None:
        if sample["prompter_type"] != "mbppplus":
            return None
        async with semaphore:
            try:
                response = await client.run_code(_lax_request(text, sample, run_timeout))
            except SandboxError:
                return None
        return response.status is RunStatus.SUCCESS

    pairs = list(zip(texts, samples, strict=True))
    return await gathered([lambda p=pair: verdict(*p) for pair in pairs])


def _lax_request(text: str, sample: Sample, run_timeout: float) -> RunCodeRequest:
    parts = [sample.get("test_setup") or "", extract_code(text), *asserts_of(sample)]
    return RunCodeRequest(
        code="\n\n".join(parts),
        language="python",
        run_timeout=time_limit_of(sample, run_timeout),
    )
