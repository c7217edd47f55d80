"""An engine of two tensor ranks takes our weights, sleeps, and gives the weights back whole."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from listening import listening, reached_from_outside
from rollout_models import (
    Sender,
    greedy,
    save,
    tiny_experts,
    tiny_glm,
    tiny_llama,
    tiny_mixtral,
    weights,
)
from safetensors.torch import load_file

from ctrl_megatron.engine_kinds import EngineName
from ctrl_megatron.parallel.parent_watch import process_group_members
from ctrl_megatron.resharding.plan import EngineCut, engine_cut
from ctrl_megatron.rollout.engine import EngineError, EngineSpec, available_engines
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine
from ctrl_megatron.rollout.weight_update import checkpoint_specs, tensor_checksum
from ctrl_megatron.types import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from world import run_world

PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]


def check_shards(process: EngineProcess, directory: Path, cut: EngineCut, transport: str) -> None:
    """Two ranks, each with every second half of the weights, push to the engine shard by shard."""
    found, _ = run_world(
        "push_into",
        2,
        layout={"pipeline": 2},
        directory=str(directory),
        address=process.address,
        cut=asdict(cut),
        transport=transport,
    )
    files = load_file(directory / "model.safetensors")
    tensors = {spec.name: files[spec.name] for spec in checkpoint_specs(directory, "float32")}
    for factor, version in enumerate(("sent", "doubled"), 1):
        want = {name: tensor_checksum(tensor * factor) for name, tensor in tensors.items()}
        assert found[version] == want


# A busy machine may be several times slower than an idle one.
@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "make"),
    [
        ("vllm", tiny_llama),
        ("sglang", tiny_llama),
        ("vllm", tiny_mixtral),
        ("vllm", tiny_glm),
        ("sglang", tiny_glm),
        # The width of its experts is padded before it is cut.
        ("sglang", tiny_experts),
        ("vllm", tiny_experts),
        ("sglang", tiny_mixtral),
    ],
)
def test_two_tensor_ranks_hold_what_was_sent(
    engine: EngineName,
    make: Callable[[int], torch.nn.Module],
    tmp_path: Path,
) -> None:
    if engine not in available_engines():
        pytest.skip(f"the optional engine {engine} is not installed")
    torch.set_num_threads(1)
    spec = EngineSpec(
        name=engine,
        model_path=str(save(make(0), tmp_path / "model")),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_gib=0.1,
        tensor_parallel_size=2,
        threads=1,
        awaits_weights=True,
        may_sleep=True,
        log_path=str(tmp_path / "engine.log"),
        startup_timeout=600.0,
    )
    sent = make(1)

    async def update_and_ask() -> None:
        client, sender = process.connect(), Sender(weights(sent))
        with pytest.raises(EngineError, match="has no weights yet; update them first"):
            await client.generate(PROMPTS, SamplingParams(max_tokens=1))
        await client.sleep(2)
        await client.wake(["weights"])
        await client.update(sender.specs(), sender.chunks(), "sent")
        await client.wake(["kv_cache"])
        params = SamplingParams(max_tokens=8, temperature=0.0, log_probs=False)
        answers = await client.generate(PROMPTS, params)
        for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
            assert list(completion.token_ids) == greedy(sent, prompt, 8)
            assert completion.spans[0].version == "sent"
        held = await client.checksums()
        assert held == {name: tensor_checksum(tensor) for name, tensor in weights(sent).items()}
        # Seeds mean the same on all tensor ranks.
        sampled = SamplingParams(max_tokens=6, seed=3)
        assert await client.generate(PROMPTS, sampled) == await client.generate(PROMPTS, sampled)
        await client.close()

    with launch_engine(spec) as process:
        sockets = listening(map(psutil.Process, process_group_members(process.pid)))
        # The workers' store is among them.
        assert len(sockets) > 2 and reached_from_outside(sockets) == {}
        asyncio.run(asyncio.wait_for(update_and_ask(), 120))
        cut = engine_cut(engine, 2, {}, on_cpu=True)
        for transport in ("shards", "cuda_ipc", "nccl"):
            check_shards(process, save(sent, tmp_path / "sent"), cut, transport)
    assert process_group_members(process.pid) == []
