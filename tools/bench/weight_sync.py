"""Measure pushes of weights from the trainer into a running vLLM, and compare with the machine's
limits: ``python tools/bench/weight_sync.py``.

The following alternate in every round, so that a slower phase of the machine affects all of them:

- ``raw``: the same bytes copied into mapped shared memory and out of it again;
- ``vLLM``: vLLM's own ``reload_weights`` from tensors in its process;
- ``push``: ``resharding.push.push`` of the trainer's model, as before every generation;
- ``verified``: the same with ``trainer.verify_weight_sync``;
- ``files``: a push of a shared proxy that is read from its directory for every step;
- ``kept``: one whose weights stay in host memory (``proxy.keep_in_host_memory``).

``--transport`` selects the medium of the pushes. ``--shape FILE`` measures a model of a
``config.json`` with random weights, which it writes to ``runs/models`` once;
``--without-proxy`` leaves ``files`` and ``kept`` out, for models that fill the memory.

Each push brings new weights, and a completion from the last ones checks that they arrived. Medians
are reported; the goal is 60 % of the slower of ``raw`` and ``vLLM``.

    python tools/bench/weight_sync.py --shape examples/shapes/tinyllama-1.1b.json --rounds 4
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.checkpoint.hf import load_hf
from ctrl_megatron.models.build import BuildOptions
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.strategy import ModelOptions
from ctrl_megatron.parallel.groups import initialize_groups
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.push import push
from ctrl_megatron.resharding.sources import DirectorySource, ModelSource, WeightSource
from ctrl_megatron.resharding.transports import sender_class
from ctrl_megatron.resharding.transports.shared_memory import (
    SharedSegment,
    remove_segment,
    segment_names,
)
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.types import SamplingParams
from tools.bench.engine_setup import HostedEngine, ask, bench_parser, given_spec, host
from tools.bench.random_model import random_model


def own_reload(worker: Any, model: str) -> float:
    """Seconds of vLLM's own reload in its worker, from tensors in its memory."""
    if not hasattr(worker, "bench_tensors"):
        directory = SafetensorsDirectory(model)
        worker.bench_tensors = [(n, directory.read(n).clone()) for n in directory.shapes()]
    began = time.perf_counter()
    worker.reload_weights(weights_iterator=worker.bench_tensors)
    return time.perf_counter() - began


async def serve(spec: EngineSpec) -> None:
    """In the engine's process: serve the engine, and a route that runs vLLM's own reload."""
    # Allows sending a function to the process of the model.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from ctrl_megatron.rollout.vllm_engine import VllmEngine

    engine, function = await VllmEngine.build(spec), cast(Any, own_reload)

    async def reload(_: object) -> float:
        (seconds,) = await engine._llm.collective_rpc(function, args=(spec.model_path,))
        return seconds

    await host(engine, {"/reload": reload})


def raw_copy(parts: list[torch.Tensor], segments: list[SharedSegment]) -> float:
    """Seconds to copy the bytes of ``parts`` into the mapped segments and out again."""
    began = time.perf_counter()
    for number, part in enumerate(parts):
        there = segments[number % len(segments)].memory[: part.numel()]
        there.copy_(part)
        part.copy_(there)
    return time.perf_counter() - began


def main() -> None:
    """Entry point."""
    parser = bench_parser(__doc__)
    parser.add_argument("--bucket", type=int, default=128, help="in 2**20 bytes")
    parser.add_argument("--transport", default="shared_memory", help="medium of the pushes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shape", type=Path, help="config.json of a random model")
    parser.add_argument("--without-proxy", action="store_true", help="leave files and kept out")
    parser.add_argument("--log", type=Path, default=Path("runs/bench_weight_sync.log"))
    options = parser.parse_args()
    if options.host_engine:
        asyncio.run(serve(given_spec()))
    if options.shape:
        options.model = str(random_model(options.shape, options.dtype))
    spec = EngineSpec(
        name="vllm",
        model_path=options.model,
        dtype=options.dtype,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_gib=0.25,
    )
    process = HostedEngine(spec, options.log)
    try:
        measure(options, process)
    finally:
        process.stop()


def measure(options: argparse.Namespace, process: HostedEngine) -> None:
    """Run all rounds and print the result."""
    groups = initialize_groups(Layout(), seed=1, timeout_seconds=60)
    policy = Policy(
        read_model_shape(options.model),
        groups,
        ModelOptions(build=BuildOptions(dtype=options.dtype), optimizer=None),
    )
    load_hf(policy, options.model)
    layout = EngineLayout(dtype=options.dtype, bucket_bytes=options.bucket << 20)
    source = ModelSource(policy, layout)
    print("starting vLLM ...", flush=True)
    engine, loop = process.connect(), BackgroundLoop()
    sender = sender_class(options.transport)(groups)

    size = layout.bucket_bytes
    names = segment_names(2)
    segments = [SharedSegment(name, size, create=True) for name in names]
    for name in names:
        remove_segment(name)
    total = sum(p.numel() * p.element_size() for p in policy.models[0].parameters())
    # A bucket is larger than the processor's caches, so that one does for all of the bytes.
    whole = torch.ones(size, dtype=torch.uint8)
    parts = [whole[: total - at] for at in range(0, total, size)]

    def pushed(version: str, *, verify: bool, of: WeightSource = source) -> float:
        waiting = WaitRules(groups=groups, stop=StopFlag(), limit=600.0)
        return push(of, engine, loop, sender, waiting, version=version, verify=verify).seconds

    proxies = {
        name: DirectorySource(options.model, layout, groups, kept=name == "kept")
        for name in (() if options.without_proxy else ("files", "kept"))
    }
    names = ("raw", "vLLM", "push", *proxies, "verified")
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, options.rounds):
        change(policy)
        seconds = {
            "raw": raw_copy(parts, segments),
            "vLLM": loop.run(ask(engine, "/reload", {})),
            "push": pushed(f"push@{number}", verify=False),
        }
        for name, proxy in proxies.items():
            seconds[name] = pushed(f"{name}@{number}", verify=False, of=proxy)
        change(policy)
        seconds["verified"] = pushed(f"verified@{number}", verify=True)
        said = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
        print(f"round {number + 1}: {said}" if number >= 0 else f"warm-up: {said}", flush=True)
        if number >= 0:
            for name, value in seconds.items():
                took[name].append(value)
    ((completion,),) = loop.run(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4)))
    assert {span.version for span in completion.spans} == {f"verified@{options.rounds - 1}"}
    loop.run(engine.close())
    report({name: statistics.median(values) for name, values in took.items()}, total)


@torch.no_grad()
def change(policy: Policy) -> None:
    """Change all weights, as an update does."""
    for parameter in policy.models[0].parameters():
        parameter.mul_(1.01)


def report(seconds: dict[str, float], total: int) -> None:
    """Print rates and their ratios."""
    for name, value in seconds.items():
        print(f"{name:>9}: {value:6.3f} s, {total / value / 1e9:5.2f} GB/s")
    limit = max(seconds["raw"], seconds["vLLM"])
    for name in ("push", "verified"):
        print(f"{name} reaches {limit / seconds[name]:.0%} of the slower of raw and vLLM")
    if "kept" in seconds:
        print(f"kept takes {seconds['kept'] / seconds['files']:.2f} times as long as files")
    print(f"verified takes {seconds['verified'] / seconds['push']:.2f} times as long as push")


if __name__ == "__main__":
    main()
