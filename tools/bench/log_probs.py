"""Measure memory and time of log-probs and entropies over a vocabulary, or of the divergence from a
teacher (``--divergence``), forward and backward: ``python tools/bench/log_probs.py``.

Memory is the process's largest resident size during the computation, minus its size when hidden
states, output weight and the weight's float32 gradient exist.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.parallel import host_memory
from ctrl_megatron.parallel.divergence import OutputLayer
from ctrl_megatron.parallel.vocab import linear_log_probs


def resident(name: str) -> int:
    """Resident bytes of the process: current (VmRSS) or largest (VmHWM)."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index(f"{name}:") + 1]) << 10


def forget_peak() -> None:
    """Restart the count of ``VmHWM``."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Entry point."""
    parser = ToolParser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument(
        "--chunk", type=int, default=1024, help="tokens whose logits are computed together"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--divergence", choices=("reverse_kl", "forward_kl", "jsd"))
    parser.add_argument(
        "--exact-memory",
        action="store_true",
        help="the peak is what is needed, without what malloc keeps to be fast, as it does in runs",
    )
    options = parser.parse_args()
    if not options.exact_memory:
        host_memory.keep_freed_memory()
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.hidden, dtype=dtype) / 32).requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    # Allocates the buffers that matrix products keep.
    linear_log_probs(hidden[:64], weight, targets[:64], vocab_size=options.vocabulary)[0].sum()
    host_memory.return_freed_memory()
    forget_peak()
    before, began = resident("VmRSS"), time.perf_counter()
    layer = OutputLayer(
        hidden=hidden, weight=weight, vocab_size=options.vocabulary, chunk=options.chunk
    )
    if options.divergence:
        # The teacher's hidden states are inputs, which were there before.
        teacher = replace(layer, hidden=hidden.detach().flip(1), weight=weight.detach())
        before = resident("VmRSS")
        loss = layer.divergence_from(teacher, options.divergence, 1.0).sum()
    else:
        log_probs, entropy = layer.log_probs(targets, 1.0)
        loss = log_probs.sum() + 0.01 * entropy.sum()
    forward = time.perf_counter()
    loss.backward()
    took = forward - began, time.perf_counter() - forward
    peak = resident("VmHWM") - before
    states = hidden.numel() * hidden.element_size()
    chunk = 4 * options.chunk * options.vocabulary
    print(f"forward {took[0]:.1f} s, backward {took[1]:.1f} s")
    print(
        f"peak {peak / 2**20:.0f} MiB; hidden states {states / 2**20:.0f} MiB, a chunk of logits "
        f"{chunk / 2**20:.0f} MiB; the peak is {peak / states:.2f} times the hidden states, "
        f"{(peak - chunk) / states:.2f} times without the chunk; without the hidden states' "
        f"gradient it is {(peak - states) / chunk:.2f} chunks"
    )


if __name__ == "__main__":
    main()
