"""Small questions to one GPU that need no engine: ``python tools/check/gpu_kit/probes.py [NAME
...]`` prints one line each, FAIL where the answer is not the wanted one.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

_SHARED = 128 << 20
_LARGE = 4 << 30
_PRODUCT = 8192


def ceilings() -> str:
    """The rates of matrix products and of copies on the device."""
    import torch

    left = torch.randn(_PRODUCT, _PRODUCT, device="cuda", dtype=torch.bfloat16)
    right = torch.randn_like(left)
    product = _seconds(lambda: left @ right, 10)
    source = torch.empty(_LARGE, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), 5)
    return (
        f"matrix products {2 * _PRODUCT**3 / product / 1e12:.0f} TFLOP/s; copies "
        f"{2 * _LARGE / copy / 1e12:.2f} TB/s read and written"
    )


def kernels() -> str:
    """The kernels that a run would choose."""
    from ctrl_megatron.models.kernels import kernels_line

    return kernels_line(on_gpu=True)


def cuda_ipc() -> str:
    """Whether another process reads and writes memory of this one."""
    import torch

    from ctrl_megatron.rollout.device_memory import CudaMemory

    torch.cuda.init()
    device = CudaMemory()
    memory = device.allocate(_SHARED)
    memory.fill_(3)
    device.synchronize()
    here, there = multiprocessing.Pipe()
    handle = device.get_handle(memory)
    spawn = multiprocessing.get_context("spawn")
    reader = spawn.Process(target=_read_and_write, args=(handle, there))
    reader.start()
    total = here.recv() if here.poll(90) else "nothing"
    value = int(memory[0])
    here.send("close it")
    reader.join(30)
    device.free(memory)
    assert (total, value) == (3000, 7), f"read {total} (3000), then wrote {value} (7)"
    return "another process reads and writes this one's memory"


def _read_and_write(handle: bytes, pipe: Connection) -> None:
    import torch

    from ctrl_megatron.rollout.device_memory import CudaMemory

    torch.cuda.init()
    device = CudaMemory()
    memory = device.open_handle(handle, _SHARED)
    total = int(memory[:1000].sum())
    memory[:10] = 7
    device.synchronize()
    pipe.send(total)
    pipe.recv()
    device.close(memory)


def page_locked() -> str:
    """The rates of copies between the device and page-locked memory of the host."""
    import torch

    from ctrl_megatron.models.offload import host_block

    began = time.perf_counter()
    host = host_block(_LARGE, page_locked=True)
    locked = time.perf_counter() - began
    device = torch.ones(_LARGE, dtype=torch.uint8, device="cuda")
    out = _LARGE / _seconds(lambda: host.copy_(device), 2) / 1e9
    back = _LARGE / _seconds(lambda: device.copy_(host), 2) / 1e9
    return f"4 GiB locked in {locked:.2f} s; to the host {out:.1f} GB/s, back {back:.1f} GB/s"


def grouped_heads() -> str:
    """torch's attention of packed rows with fewer key heads, against plain attention."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    from ctrl_megatron.torch_features import varlen_attention_needs_enable_gqa

    query, key = (_normal(64, heads, 64) for heads in (8, 2))
    ends = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    groups: dict[str, Any] = {"enable_gqa": True} if varlen_attention_needs_enable_gqa() else {}
    found: Any = varlen_attn(query, key, key, ends, ends, 64, 64, window_size=(-1, 0), **groups)
    heads = [t.transpose(0, 1)[None] for t in (query, *2 * [key.repeat_interleave(4, 1)])]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)[0]
    error = float((found - wanted.transpose(0, 1)).abs().max())
    assert error < 0.05, f"error {error:.3g}"
    return f"8 query and 2 key heads: error {error:.2g}"


def part_of_the_heads() -> str:
    """Transformer Engine's attention with a part of the heads, as context parallelism calls it."""
    import torch
    from transformer_engine.pytorch import (  # type: ignore[import-not-found]
        DotProductAttention,
    )

    names = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    attention = DotProductAttention(8, 64, num_gqa_groups=4, **names)
    attention.num_gqa_groups_per_partition = 2
    ends = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    query, key = (_normal(64, heads, 64) for heads in (4, 2))
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    attention(query, key, key, attn_mask_type="padding_causal", **lengths)
    return "4 of 8 query heads and 2 of 4 groups are computed"


def grouped_products() -> str:
    """torch's grouped products of experts and their gradients, against one product each."""
    import torch

    rows, weights = _normal(96, 256), _normal(3, 256, 128)
    ends = torch.tensor([32, 32, 96], device="cuda", dtype=torch.int32)
    for tensor in (rows, weights):
        tensor.requires_grad_()
    torch.nn.functional.grouped_mm(rows, weights, offs=ends).float().square().sum().backward()
    found = [rows.grad, weights.grad]
    rows.grad = weights.grad = None
    parts = [rows[:32] @ weights[0], rows[32:] @ weights[2]]
    torch.cat(parts).float().square().sum().backward()
    errors = [
        float((one.float() - other.float()).norm() / other.float().norm())
        for one, other in zip(found, (rows.grad, weights.grad), strict=True)
        if one is not None and other is not None
    ]
    assert len(errors) == 2 and max(errors) < 0.02, f"errors of gradients {errors}"
    return f"gradients differ by {max(errors):.2g}, one expert without rows"


def softmax_kernels() -> str:
    """The Triton kernels of the softmax over the vocabulary, against float64."""

    from ctrl_megatron.parallel.softmax_kernels import softmax_statistics

    logits, scale = _normal(512, 32000) * 4, 1.7
    found = softmax_statistics(logits, scale)
    wide = logits.double()
    bits = (wide - wide.amax(-1, keepdim=True)) * scale
    wanted = wide.amax(-1), bits.exp2().sum(-1), (bits.exp2() * bits).sum(-1)
    error = max(
        float(((one - other) / other.abs().clamp(min=1)).abs().max())
        for one, other in zip(found, wanted, strict=True)
    )
    assert error < 1e-4, f"error {error:.3g}"
    rows = _seconds(lambda: softmax_statistics(logits, scale), 20)
    return f"error {error:.2g}; {2 * logits.numel() / rows / 1e12:.2f} TB/s read"


def _normal(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _seconds(work: Callable[[], object], times: int) -> float:
    """Seconds of one call, after a first that is not counted."""
    import torch

    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


PROBES: tuple[Callable[[], str], ...] = (
    *(ceilings, kernels, cuda_ipc, page_locked, grouped_heads, part_of_the_heads),
    *(grouped_products, softmax_kernels),
)


def main() -> int:
    """Run the probes that are named, or all; 1 if one fails."""
    wanted, failed = sys.argv[1:], 0
    for probe in PROBES:
        if wanted and probe.__name__ not in wanted:
            continue
        began = time.perf_counter()
        try:
            text = probe()
        except Exception:
            text, failed = f"FAIL {traceback.format_exc()[-1200:]}", 1
        took = time.perf_counter() - began
        print(f"probe {probe.__name__}: {text} ({took:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
