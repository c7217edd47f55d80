"""Time and peak memory of every estimator and policy loss, beside a per-sample loop and beside one
masked copy of the memory it touches.

Losses are timed with their backward pass. The loops look at one row after the other, recursions
along a row at one token after the other; ``--no-loops`` leaves them out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    estimator_inputs,
    get_adv_estimator,
    get_policy_loss,
    policy_loss_names,
    policy_loss_options,
)

CONFIG = SimpleNamespace(
    **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0},
    **{"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    **{"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0},
)
WARM_UP_SECONDS = 0.5
LOOP_REPEATS = 3
LOSS_INPUTS = ("old_log_prob", "log_prob", "advantages")
Work = Callable[[], Any]
Data = dict[str, Any]


def batch(rows: int, columns: int, device: str, samples: int = 8) -> Data:
    """Ragged rows with a 0 or 1 on their last token, ``samples`` rows per group."""
    torch.manual_seed(0)
    lengths = torch.randint(columns // 4, columns + 1, (rows,), device=device)
    rewards = torch.zeros(rows, columns, device=device)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), device=device).float()
    old = -torch.rand(rows, columns, device=device) * 3
    return {
        "token_level_rewards": rewards,
        "response_mask": torch.arange(columns, device=device) < lengths[:, None],
        "index": [f"prompt {i // samples}" for i in range(rows)],
        "values": torch.randn(rows, columns, device=device),
        "reward_baselines": torch.rand(rows, device=device),
        "gamma": 0.99,
        "lam": 0.95,
        "old_log_prob": old,
        "log_prob": (old + 0.1 * torch.randn_like(old)).requires_grad_(),
        "advantages": torch.randn(rows, 1, device=device).expand(rows, columns).contiguous(),
    }


def memory_pass(read: list[torch.Tensor], mask: torch.Tensor, written: int) -> Work:
    """Reads every tensor and the mask once and writes ``written`` tensors of their shape: masked
    copies, and plain reads of the rest."""
    read = [x.detach() for x in read]
    zero = read[0].new_zeros(())

    def work() -> None:
        kept = [torch.where(mask, x, zero) for x in read[:written]]
        for other in read[written:]:
            other.max()
        del kept

    return work


def whitened(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loop's whitening: moments over all tokens, then row by row."""
    tokens = torch.cat(rows)
    mean, scale = tokens.mean(), (tokens.var() + 1e-8).rsqrt()
    return [(row - mean) * scale for row in rows]


def discounted(rewards: list[float], discount: float) -> list[float]:
    """Sums from a token to the end, token by token."""
    found, running = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + discount * running
        found[t] = running
    return found


def group_rule(name: str, score: float, mates: list[float], lengths: list[int]) -> float:
    """One row's advantage from its group."""
    mean, spread = statistics.fmean(mates), statistics.stdev(mates) + 1e-6
    if name == "rloo":
        return score - (sum(mates) - score) / (len(mates) - 1)
    if name == "opo":
        return score - sum(n * s for n, s in zip(lengths, mates, strict=True)) / sum(lengths)
    if name == "grpo_passk":
        best, second = sorted(mates)[:-3:-1]
        return (best - second) / spread if score == best else 0.0
    return (score - mean) / (spread if name in ("grpo", "cpgd") else 1.0)


def estimator_loop(name: str, data: Data) -> Work:
    """The estimator one row at a time."""
    rewards, mask, index = (data[k] for k in ("token_level_rewards", "response_mask", "index"))

    def recursion(i: int) -> torch.Tensor:
        own = rewards[i][mask[i]].tolist()
        if name == "gae":
            v = [*data["values"][i][mask[i]].tolist(), 0.0]
            own = [r + data["gamma"] * v[t + 1] - v[t] for t, r in enumerate(own)]
            return torch.tensor(discounted(own, data["gamma"] * data["lam"]))
        baseline = float(data["reward_baselines"][i]) if name == "remax" else 0.0
        discount = 1.0 if name == "remax" else data["gamma"]
        return torch.tensor(discounted(own, discount)) - baseline

    def grouped() -> list[torch.Tensor]:
        members: dict[str, list[int]] = {}
        scores, lengths = [], []
        for i, group in enumerate(index):
            own = rewards[i][mask[i]]
            members.setdefault(group, []).append(i)
            scores.append(float(own.sum()))
            lengths.append(len(own))
        mates = [members[group] for group in index]
        found = [
            group_rule(name, scores[i], [scores[j] for j in m], [lengths[j] for j in m])
            for i, m in enumerate(mates)
        ]
        if name == "gpg":
            alpha = len(found) / max(1, sum(a != 0 for a in found))
            found = [a * alpha for a in found]
        return [torch.full((n,), a) for n, a in zip(lengths, found, strict=True)]

    def work() -> torch.Tensor:
        recursive = name in ("gae", "remax", "reinforce_plus_plus")
        found = [recursion(i) for i in range(len(mask))] if recursive else grouped()
        if name == "gae" or name.startswith("reinforce"):
            found = whitened(found)
        result = torch.zeros_like(rewards)
        for i, row in enumerate(found):
            result[i, mask[i]] = row.to(rewards)
        return result

    return work


def row_loss(
    name: str, old: torch.Tensor, new: torch.Tensor, gain: torch.Tensor, picked: torch.Tensor
) -> torch.Tensor:
    """The loss of one row's tokens."""
    gap = new - old
    if name == "gpg":
        return -gain * new
    if name == "cispo":
        return -gain * new * gap.exp().clamp(0.8, 1.2).detach()
    if name == "cpgd":
        high, low = math.log(1.2), math.log(0.8)
        return -gain * torch.where(gain > 0, gap.clamp(max=high), gap.clamp(min=low))
    if name == "geo_mean":
        held = torch.where(gain > 0, gap.clamp(max=0.2), gap.clamp(min=-0.2))
        return -gain * held.mean().exp()
    if name == "kl_cov":
        return -gain * gap.exp() + picked * gap.abs()
    if name == "gspo":
        gap = new - new.detach() + gap.mean().detach()
    ratio = gap.exp()
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2))
    if name == "vanilla":
        return torch.where(gain < 0, torch.minimum(loss, -gain * 3.0), loss)
    return loss * ~picked if name == "clip_cov" else loss


def loss_loop(name: str, data: Data) -> Work:
    """The loss one row at a time, forward and backward."""
    mask, leaf = data["response_mask"], data["log_prob"]

    def work() -> None:
        leaf.grad = None
        total = torch.zeros((), device=leaf.device)
        # Taken apart once: indexing the leaf would make each row's gradient as large as the batch.
        for *row, on in zip(*(data[k].unbind() for k in LOSS_INPUTS), mask.unbind(), strict=True):
            old, new, gain = (values[on] for values in row)
            picked = torch.zeros_like(new, dtype=torch.bool)
            if name.endswith("_cov"):
                covariances = (new.detach() - new.detach().mean()) * (gain - gain.mean())
                picked[covariances.topk(1).indices] = True
            total = total + row_loss(name, old, new, gain, picked).sum()
        (total / mask.sum()).backward()

    return work


def estimator(name: str, data: Data) -> Work:
    """The estimator as it is called."""
    function, wanted = get_adv_estimator(name), estimator_inputs(name)
    given = {k: v for k, v in data.items() if k in wanted}
    return lambda: function(**given)


def loss(name: str, data: Data) -> Work:
    """The loss as it is called, and its backward pass."""
    function = get_policy_loss(name)
    given = {k: data[k] for k in (*LOSS_INPUTS, "response_mask")}

    def work() -> None:
        data["log_prob"].grad = None
        config = CONFIG if policy_loss_options(name) else None
        function(**given, config=config, loss_agg_mode="token-mean")[0].backward()

    return work


def seconds(works: list[Work], times: int, device: str) -> list[float]:
    """Median of ``times`` runs of each, in turns: a machine shared with others changes its speed
    within seconds. Half a second of runs before does not count: a virtual machine gets its memory
    from the host at first touch."""
    warm = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < warm:
        for work in works:
            work()
    turns = [[timed(work, device) for work in works] for _ in range(times)]
    return [statistics.median(taken) for taken in zip(*turns, strict=True)]


def timed(work: Work, device: str) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_bytes(work: Work, device: str) -> float:
    """Most memory held at a time beyond what was held before: of the process on a CPU; NaN where
    the kernel does not count."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    try:
        give_back_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return math.nan
    before = resident("VmRSS")
    work()
    return max(0, resident("VmHWM") - before)


def give_back_memory() -> None:
    """Free memory of the allocator goes to the kernel, or small tensors would be found in it and
    not be counted. Only glibc can; elsewhere they are not counted."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:"))


def cases(data: Data) -> list[tuple[str, Work, Work, Work]]:
    """(name, ours, the loop, the memory pass) of each."""
    found = []
    mask = data["response_mask"]
    for name in ADV_ESTIMATOR_REGISTRY:
        wanted = estimator_inputs(name)
        read = [data[k] for k in ("token_level_rewards", "values") if k in wanted]
        outputs = 2 if name in ("gae", "remax") or name.startswith("reinforce") else 1
        once = memory_pass([*read, read[0]][: max(outputs, len(read))], mask, outputs)
        found.append((name, estimator(name, data), estimator_loop(name, data), once))
    for name in policy_loss_names():
        once = memory_pass([data[k] for k in LOSS_INPUTS], mask, 1)
        found.append((f"loss {name}", loss(name, data), loss_loop(name, data), once))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096, help="sequences")
    parser.add_argument("--columns", type=int, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--repeats", type=int, default=15, help="runs of which the median counts")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", help="names to measure; all without")
    parser.add_argument("--no-loops", action="store_true", help="leave the loops out")
    args = parser.parse_args()
    table = Table(title=f"{args.rows} x {args.columns} tokens, {args.device}")
    for column in ("", "ms", "loop ms", "/ ours", "copy ms", "ours / copy", "MiB", "loop MiB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, ours, loop, once in cases(batch(args.rows, args.columns, args.device)):
        if args.only and name.split()[-1] not in args.only:
            continue
        took, once_took = seconds([ours, once], args.repeats, args.device)
        looped = math.nan if args.no_loops else seconds([loop], LOOP_REPEATS, args.device)[0]
        numbers = (took * 1e3, looped * 1e3, looped / took, once_took * 1e3, took / once_took)
        peaks = [peak_bytes(ours, args.device) / 2**20, math.nan]
        if not args.no_loops:
            peaks[1] = peak_bytes(loop, args.device) / 2**20
        table.add_row(name, *(f"{x:.1f}" for x in numbers), *(f"{x:.0f}" for x in peaks))
    console = Console()
    # A file has no width of its own, and numbers cut off are none.
    (console if console.is_terminal else Console(width=110)).print(table)


if __name__ == "__main__":
    main()
