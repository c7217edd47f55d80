"""Pushes from shard to shard between real gloo processes, some of them in the place of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fused_weights import fused
from safetensors.torch import load_file
from tiny_models import save_tiny
from world import run_world

from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.resharding.plan import EngineCut

STAGES = {"tensor": 2, "pipeline": 2}
PUSHES: dict[str, tuple[Any, ...]] = {
    # Stages on different hosts; four workers share two groups of keys.
    "stages": ("qwen2_tied", STAGES, (0, 0, 1, 1), (0, 1), 4),
    # Replicas, of which one host has none, and experts; its engine gets all from elsewhere.
    "replicas": ("qwen3_moe_mixed", {"data": 3}, (0, 1, 2), (0, 2), 2),
    # Every host lacks what three others have, and passes it on.
    "line": ("qwen2_tied", {"pipeline": 4}, (0, 1, 2, 3), (0, 1, 2, 3), 1),
    # Whole models.
    "whole": (
        *("llama", {"tensor": 2, "virtual_pipeline": 2, "pipeline": 2}),
        *((0, 0, 1, 1), (1,), 1),
    ),
}


@pytest.mark.parametrize(
    ("family", "layout", "of_rank", "readers", "workers", "transport"),
    [
        pytest.param(
            *(*push, transport),
            id=f"{name}-{transport}",
            marks=() if name == "replicas" or transport == "shards" else pytest.mark.long,
        )
        for transport in ("shared_memory", "shards", "cuda_ipc", "nccl")
        for name, push in PUSHES.items()
    ],
)
def test_every_worker_has_its_part_and_checksums_are_those_of_wholes(
    family: str,
    layout: dict[str, Any],
    of_rank: tuple[int, ...],
    readers: tuple[int, ...],
    workers: int,
    transport: str,
    tmp_path: Path,
) -> None:
    directory = save_tiny(family, tmp_path, vocab_size=96)
    sent = load_file(directory / "model.safetensors")
    shape = read_model_shape(directory)
    if shape.tied_embeddings:
        sent.pop("lm_head.weight", None)
    found = run_world(
        "push_shards",
        len(of_rank),
        layout=layout,
        directory=str(directory),
        of_rank=of_rank,
        readers=readers,
        workers=workers,
        transport=transport,
    )
    for host in readers:
        for factor, got in zip((1, 2), found[of_rank.index(host)], strict=True):
            want = {name: tensor * factor for name, tensor in sent.items()}
            assert got[-1].keys() == want.keys()
            assert all(torch.equal(got[-1][name], want[name]) for name in want)
            for place in range(2 * workers):
                cut, worker = EngineCut(tensor=workers), place % workers
                held = fused(shape, cut, worker, got[place])
                asked = fused(shape, cut, worker, want)
                assert held.keys() == asked.keys()
                assert all(torch.equal(held[name], asked[name]) for name in asked)


@pytest.mark.parametrize(
    "transport",
    ["shards", *(pytest.param(n, marks=pytest.mark.long) for n in ("cuda_ipc", "nccl"))],
)
def test_workers_on_several_hosts_have_their_parts(transport: str, tmp_path: Path) -> None:
    """Of one engine, whose workers share groups of keys; the trainer's stages are on both hosts."""
    directory = save_tiny("qwen2_tied", tmp_path, vocab_size=96)
    sent = load_file(directory / "model.safetensors")
    sent.pop("lm_head.weight", None)
    shape, of_rank, cut = read_model_shape(directory), (0, 0, 1, 1), EngineCut(tensor=4)
    found = run_world(
        "push_shards",
        len(of_rank),
        layout=STAGES,
        directory=str(directory),
        of_rank=of_rank,
        readers=(0, 1),
        workers=4,
        transport=transport,
        spanning=True,
    )
    for host in (0, 1):
        for factor, got in zip((1, 2), found[of_rank.index(host)], strict=True):
            want = {name: tensor * factor for name, tensor in sent.items()}
            *workers, checked = got
            # Only the host that serves the engine has whole tensors.
            assert checked.keys() == (want.keys() if host == 0 else set())
            assert all(torch.equal(tensor, want[name]) for name, tensor in checked.items())
            assert len(workers) == 2
            for worker, own in enumerate(workers, start=2 * host):
                held, asked = fused(shape, cut, worker, own), fused(shape, cut, worker, want)
                assert held.keys() == asked.keys()
                assert all(torch.equal(held[name], asked[name]) for name in asked)


@pytest.mark.parametrize(
    ("transport", "layout", "workers", "had"),
    [
        # Three buckets of the worker beside each rank, mapped by it and by the other rank.
        ("cuda_ipc", {"tensor": 2}, 2, (3, 6, 0)),
        # Three segments, locked in the rank and in the worker's process, which still has the three
        # of the first policy's smaller buckets.
        ("shards", {}, 1, (0, 0, 9)),
    ],
)
def test_two_policies_in_turn_share_the_memory_of_a_push(
    transport: str, layout: dict[str, Any], workers: int, had: tuple[int, ...], tmp_path: Path
) -> None:
    given = {"directory": str(save_tiny("llama", tmp_path, vocab_size=96)), "workers": workers}
    found = run_world("push_two_policies", workers, layout=layout, transport=transport, **given)
    for pushes in found:
        assert pushes[1:] == [had] * 5


def test_groups_are_made_anew_for_a_new_worker_and_refused_to_another_library(
    tmp_path: Path,
) -> None:
    directory = save_tiny("llama", tmp_path, vocab_size=96)
    ((pushes, refusal),) = run_world("push_to_restarted", 1, layout={}, directory=str(directory))
    (first, _), (again, _), (anew, _) = pushes
    assert all(complete for _, complete in pushes)
    # The chunk with which a worker joins is missing where it is in the group already.
    assert first == anew == again + 1
    assert (
        "worker 0 of engine 0 has gloo of another torch, the trainer has gloo of torch" in refusal
    )
