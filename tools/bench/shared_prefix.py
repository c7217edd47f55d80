"""Measure time and memory that shared prompts save: ``python tools/bench/shared_prefix.py --group
8``.

Groups of rows with a common prompt go through a log-prob pass and an optimizer step of the actor:
once with the prompt computed once per group, once with the prompt computed per row
(``actor_rollout_ref.model.shared_prefix``). Both alternate, so that a slower phase of the machine
affects both. Prints the ratios of seconds, of processor seconds (which other work affects less) and
of floating-point operations (``models.flops``), and peak memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.config.flags import ToolParser


def measured(work: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds and processor seconds of ``work``, and the peak memory of the process in GiB."""
    from tools.bench.log_probs import forget_peak, resident

    forget_peak()
    began, used = time.perf_counter(), time.process_time()
    work()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    return seconds, used, resident("VmHWM") / 2**30


def main() -> None:
    """Parse, build, measure, print."""
    parser = ToolParser(__doc__)
    parser.add_argument("--model", default="runs/models/smollm2")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--groups", type=int, default=1, help="prompts")
    parser.add_argument("--group", type=int, default=8, help="responses of each")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of a response")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()

    import torch

    from ctrl_megatron.parallel.groups import initialize_groups, shutdown_groups
    from ctrl_megatron.parallel.layout import Layout
    from tools.bench.update import learner, random_batch

    groups = initialize_groups(Layout(), seed=1, timeout_seconds=600)
    policy, loss = learner(options, groups, chunk=1024, lr=0.0)
    batch = random_batch(options, policy, options.groups * options.group, seed=0)
    policy.step(batch, loss)
    policy.take_flops()

    works: dict[str, Callable[[], Any]] = {
        "log-probs": lambda: policy.log_probs(batch),
        "update": lambda: policy.step(batch, loss),
    }
    found: dict[tuple[str, bool], list[tuple[float, float, float]]] = {}
    flops: dict[tuple[str, bool], int] = {}
    print(
        f"{options.groups} x {options.group} x (P={options.prompt}, R={options.response}), "
        f"{options.dtype}, {torch.get_num_threads()} threads"
    )
    for turn in range(options.turns):
        for shared in (True, False):
            policy.options = replace(policy.options, shared_prefix=shared)
            for name, work in works.items():
                seconds, used, peak = measured(work)
                found.setdefault((name, shared), []).append((seconds, used, peak))
                flops[name, shared] = sum(policy.take_flops())
                print(
                    f"turn {turn + 1}, {name}, {'shared' if shared else 'off'}: {seconds:.2f} s, "
                    f"{used:.2f} of the processors, {peak:.2f} GiB",
                    flush=True,
                )
    for name in works:
        off, on = ([*zip(*found[name, shared], strict=True)] for shared in (False, True))
        ratios = [statistics.median(off[i]) / statistics.median(on[i]) for i in (0, 1)]
        # Memory of the first turn: the process keeps freed memory, so later turns count both.
        print(
            f"{name}: {ratios[0]:.2f} times as fast, {ratios[1]:.2f} by processor seconds, of "
            f"{flops[name, False] / flops[name, True]:.2f} by arithmetic; "
            f"{on[2][0]:.2f} GiB, not {off[2][0]:.2f}"
        )
    shutdown_groups()


if __name__ == "__main__":
    main()
