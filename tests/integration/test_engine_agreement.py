"""The real SmolLM2 in fp32: engine and trainer give the same tokens the same probability."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import in_process

from ctrl_megatron.rollout.engine import available_engines

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

PROMPTS = [
    "Write a Python function that returns the larger of two numbers.",
    "What is the capital of France?",
    "Name three colours.",
    "Explain what a list comprehension is, in one sentence.",
    "Is 17 a prime number? Answer and say why.",
    "Continue: one, two, three,",
]
GATE = 0.005


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.long)])
def test_engine_and_trainer_agree_and_updates_are_followed(engine: str, smollm2_path: Path) -> None:
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    found = in_process(
        "speak_and_listen",
        engine=engine,
        model=str(smollm2_path),
        prompts=PROMPTS,
        count=12,
    )
    for version, spoken in found.items():
        for completion in spoken["sampled"]:
            assert len(completion.token_ids) == len(completion.log_probs) >= 1
            assert {span.version for span in completion.spans} == {version}
    for version in ("actor@0", "actor@1"):
        gaps = found[version]["gaps"]
        print(
            f"{engine} {version}: |p_engine - p_trainer| of {len(gaps)} tokens: "
            f"mean {gaps.mean():.2e}, max {gaps.max():.2e}"
        )
        assert len(gaps) >= 6 * 3
        assert gaps.mean() < GATE
    before, after, restored = (found[v] for v in ("actor@0", "actor@1", "proxy"))
    assert before["digests"].keys() == after["digests"].keys()
    assert all(before["digests"][name] != after["digests"][name] for name in before["digests"])
    assert before["greedy"] != after["greedy"]
    assert restored["digests"] == before["digests"]
    assert restored["greedy"] == before["greedy"]
