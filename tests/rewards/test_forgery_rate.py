from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import block, function_row, stdio_row

from ctrl_megatron.rewards.disk_cache import verdict_cache
from ctrl_megatron.rewards.forgery import ForgeryCount, count_forgeries, lax_verdicts
from ctrl_megatron.rewards.items import RewardItem
from ctrl_megatron.rewards.registry import make_reward
from ctrl_megatron.sandbox.client import SandboxClient, SandboxError
from ctrl_megatron.sandbox.embedded import EmbeddedSandbox
from ctrl_megatron.sandbox.wire import RunCodeRequest, RunCodeResponse

known = st.sampled_from([True, False, None])


@given(st.lists(st.tuples(known, known)))
def test_counts_against_a_plain_loop(rows: list[tuple[bool | None, bool | None]]) -> None:
    judged = passes = forged = unknown = 0
    for lax, strict in rows:
        if lax is None or strict is None:
            unknown += 1
            continue
        judged += 1
        passes += lax
        forged += lax and not strict
    count = count_forgeries([a for a, _ in rows], [b for _, b in rows])
    assert count == ForgeryCount(judged=judged, lax_passes=passes, forged=forged, unknown=unknown)
    assert count.rate == (forged / judged if judged else None)
    assert count.share_of_passes == (forged / passes if passes else None)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        count_forgeries([True], [])


def test_an_unknown_verdict_is_none() -> None:
    class Gone:
        async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
            raise SandboxError("gone")

    rows = [function_row(), stdio_row()]
    assert asyncio.run(lax_verdicts(Gone(), ["x", "x"], rows)) == [None, None]


def test_forgeries_in_the_real_sandbox(tmp_path: Path) -> None:
    texts = [
        block("def add(a, b): return a + b"),
        block("def add(a, b): return 0"),
        block("exit(0)"),
        block("class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()"),
    ]
    row = function_row(time_limit=5.0)

    async def main(endpoint: str) -> None:
        async with SandboxClient(endpoint) as client:
            lax = await lax_verdicts(client, texts, [row] * len(texts))
            assert lax == [True, False, True, True]
            code = make_reward("code", provider=client, cache=verdict_cache(tmp_path / "c.db"))
            rewards = await code([RewardItem(text=text, sample=row) for text in texts])
            assert rewards == [1.0, 0.0, 0.0, 0.0]
            count = count_forgeries(lax, [r == 1.0 for r in rewards])
            assert (count.rate, count.share_of_passes) == (0.5, pytest.approx(2 / 3))

    with EmbeddedSandbox.start(workers=1) as sandbox:
        asyncio.run(main(sandbox.endpoint))
