"""Measure the speed of an update: ``python tools/bench/update.py --nproc-per-node 2``.

Runs optimizer steps of the actor as in a run (GRPO's loss with its KL, Megatron's DDP and
distributed optimizer) on random tokens of a given shape; a group's prompt is computed once
(``--group``). Prints tokens per second, the rate as a share of the device's peak (a CPU's is that
of matrix products of the same type in the same processes), the kernel's share of processor time,
and memory. ``--baseline DIR`` also measures another checkout, and ``--strategies megatron fsdp``
both ways of computing the model: both stay in memory and alternate steps, so that a slower phase of
the machine affects both. ``--phases`` also says what part of a step each phase takes, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ctrl_megatron.models.policy import Policy
    from ctrl_megatron.parallel.groups import ProcessGroups
    from ctrl_megatron.steps.losses import ActorLoss

HERE = Path(__file__).resolve().parents[2]


class Trainer:
    """The ranks of one checkout; each runs one step per line of input."""

    def __init__(self, root: Path, strategy: str, options: argparse.Namespace) -> None:
        ranks, arguments = options.nproc_per_node, [*sys.argv[1:], "--strategies", strategy]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        launch = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        # torchrun sets this too.
        launch |= (
            {"OMP_NUM_THREADS": 1} if ranks > 1 and "OMP_NUM_THREADS" not in os.environ else {}
        )
        self.name, self.ranks = f"{root}, {strategy}", []
        for rank in range(ranks):
            own = {**launch, "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, __file__, *arguments, "--rank-of", str(root)],
                    env=os.environ | {name: str(value) for name, value in own.items()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, word: str) -> list[dict[str, float]]:
        """Send ``word`` to every rank; return their answers."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(word, file=rank.stdin, flush=True)
        return self.answers()

    def answers(self) -> list[dict[str, float]]:
        """The next line of every rank."""
        lines = [rank.stdout.readline() for rank in self.ranks if rank.stdout]
        if not all(lines):
            raise SystemExit(f"a rank of {self.name} ended; see its output above")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


def learner(
    options: argparse.Namespace, groups: ProcessGroups, *, chunk: int, lr: float
) -> tuple[Policy, ActorLoss]:
    """The actor of ``options.model`` with its optimizer, and GRPO's loss with its KL."""
    from ctrl_megatron.checkpoint.hf import load_hf
    from ctrl_megatron.config import load_config
    from ctrl_megatron.models import hf_config
    from ctrl_megatron.models.build import BuildOptions
    from ctrl_megatron.models.optimizer import OptimizerOptions
    from ctrl_megatron.models.parallel_model import ModelOptions
    from ctrl_megatron.models.policy import Policy

    # Older checkouts have the steps in the pipeline's room.
    room = "steps" if find_spec("ctrl_megatron.steps") else "pipeline"
    losses = import_module(f"ctrl_megatron.{room}.losses")
    (strategy, *_) = getattr(options, "strategies", ["megatron"])
    # Older checkouts have one strategy.
    shape = (
        hf_config.read_model_shape(options.model)
        if strategy == "megatron"
        else hf_config.read_shape(options.model, strategy)
    )
    if getattr(options, "lora_rank", 0):
        from ctrl_megatron.models.lora import shape_with_adapters
        from ctrl_megatron.types import Lora

        rank = options.lora_rank
        shape = shape_with_adapters(
            shape, Lora(rank=rank, alpha=2 * rank, targets=("all-linear",), seed=1)
        )
    # Older checkouts have no such option.
    away = getattr(options, "optimizer_cpu_offload", False)
    on_host: dict[str, Any] = {"on_host": True} if away else {}
    policy = Policy(
        shape,
        groups,
        ModelOptions(
            build=BuildOptions(
                dtype=options.dtype, recompute_granularity=getattr(options, "recompute", None)
            ),
            token_budget=options.budget,
            logprob_chunk=chunk,
            optimizer=OptimizerOptions(lr=lr, total_steps=1000, **on_host),
        ),
    )
    load_hf(policy, options.model)
    policy.start_optimizer()
    config = load_config(None, ["actor_rollout_ref.actor.use_kl_loss=true"], purpose="none")
    actor = config.actor_rollout_ref.actor
    return policy, losses.ActorLoss(actor, response_limit=options.response)


def random_batch(
    options: argparse.Namespace, policy: Policy, rows: int, *, seed: int
) -> dict[str, Any]:
    """The batch of an update: random tokens, each prompt common to ``options.group`` rows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    size = rows, options.prompt + options.response
    ids = torch.randint(100, policy.shape.vocab_size, size, generator=generator)
    first = torch.arange(rows) // options.group * options.group
    ids[:, : options.prompt] = ids[first, : options.prompt]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(rows, options.response, dtype=torch.bool),
        "advantages": torch.randn(rows, options.response, generator=generator),
    }
    batch["old_log_probs"] = policy.log_probs(batch)[0]
    batch["ref_log_prob"] = batch["old_log_probs"].clone()
    return batch


class Phases:
    """Attributes a thread's time to the innermost of the phases that it is in."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()
        self._stack, self._since = ["rest"], time.perf_counter()

    def _turn(self) -> None:
        now = time.perf_counter()
        phase = self._stack[-1]
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count what ``owner.name`` does as ``phase``."""
        inner = getattr(owner, name)

        def outer(*arguments: Any, **named: Any) -> Any:
            self._turn()
            self._stack.append(phase)
            try:
                return inner(*arguments, **named)
            finally:
                self._turn()
                self._stack.pop()

        setattr(owner, name, outer)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self._turn()
        taken, self.seconds = self.seconds, {}
        return {f"in {phase}": seconds for phase, seconds in taken.items()}


def watched(policy: Policy) -> Phases:
    """The phases of the optimizer steps of ``policy`` from now on."""
    import torch
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from ctrl_megatron.models import parallel_model

    phases = Phases()
    phases.watch(parallel_model, "forward_with_loss", "forward")
    phases.watch(torch.autograd, "backward", "backward")
    for name in ("grad_norm", "step"):
        phases.watch(policy.optimization, name, "optimizer")
    # Copies into and out of what is sent.
    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
        phases.watch(FSDPParamGroup, name, "gathering and summing")
    for name in ("start_grad_sync", "finish_grad_sync"):
        phases.watch(_ParamAndGradBucketGroup, name, "gathering and summing")
    phases.watch(torch.distributed.Work, "wait", "waiting for other ranks")
    return phases


def peak_of(device: torch.device, dtype: str, tflops: float | None) -> float:
    """Peak flop/s of this rank's device; ``tflops`` is given for one that is not known."""
    import torch

    from ctrl_megatron.metrics import device_peak_flops

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return device_peak_flops(name, configured_tflops=tflops, dtype=dtype)


def rank_of(root: Path, options: argparse.Namespace) -> None:
    """Run steps with the package of ``root`` until standard input ends."""
    sys.path.insert(0, str(root))
    answer_to, sys.stdout = sys.stdout, sys.stderr
    import torch

    from ctrl_megatron.parallel.groups import initialize_groups, shutdown_groups
    from ctrl_megatron.parallel.layout import Layout

    def answer(**figures: float) -> None:
        print(json.dumps(figures), file=answer_to, flush=True)

    ranks = options.nproc_per_node
    groups = initialize_groups(Layout(data=ranks), seed=1, timeout_seconds=600)
    on_gpu = groups.device.type == "cuda"
    policy, loss = learner(options, groups, chunk=options.chunk, lr=1e-6)
    batch = random_batch(options, policy, options.rows // ranks, seed=groups.rank)
    policy.step(batch, loss)
    phases = watched(policy) if options.phases else None
    groups.barrier()
    # Older checkouts do not count floating-point operations.
    counted = policy.take_flops()[1] if hasattr(policy, "take_flops") else 0
    answer(
        peak=peak_of(groups.device, options.dtype, options.peak_tflops),
        threads=torch.get_num_threads(),
        flops=counted,
    )
    for word in sys.stdin:
        groups.barrier()
        if phases:
            phases.take()
        used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        if word.strip() == "profile":
            with torch.profiler.profile(record_shapes=options.shapes) as found:
                policy.step(batch, loss)
            if groups.is_first:
                table = found.key_averages(group_by_input_shape=options.shapes)
                print(table.table(sort_by="self_cpu_time_total", row_limit=60), file=sys.stderr)
        elif word.strip() == "forward":
            policy.log_probs(batch)
        else:
            policy.step(batch, loss)
        if on_gpu:
            torch.cuda.synchronize()
        took, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        parts = phases.take() if phases else {}
        pages = Path("/proc/self/statm").read_text().split()
        answer(
            seconds=took,
            user=now.ru_utime - used.ru_utime,
            system=now.ru_stime - used.ru_stime,
            peak_gib=now.ru_maxrss / 2**20,
            resident_gib=int(pages[1]) * resource.getpagesize() / 2**30,
            device_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
            **parts,
        )
    shutdown_groups()


def report(name: str, tokens: int, start: list[dict[str, float]], turns: list[Any]) -> None:
    """Print one line for a checkout."""
    seconds = statistics.median(max(one["seconds"] for one in turn) for turn in turns)
    own = [one for turn in turns for one in turn]
    peak, flops = (sum(one[key] for one in start) for key in ("peak", "flops"))
    system = sum(one["system"] for one in own)
    device = max(one["device_gib"] for one in own)
    print(
        f"{name}: {tokens / seconds:.0f} tokens/s, {seconds:.2f} s, "
        f"{100 * flops / seconds / peak:.0f} % of {peak / 1e9:.0f} GFLOP/s, "
        f"{len(start)} x {start[0]['threads']:.0f} threads, "
        f"kernel {100 * system / (system + sum(one['user'] for one in own)):.0f} %, "
        f"{max(one['resident_gib'] for one in own):.2f} GiB a rank "
        f"(most {max(one['peak_gib'] for one in own):.2f})"
        f"{f', {device:.1f} GiB of its GPU' if device else ''}"
    )


def compare_phases(names: list[str], rounds: list[Any]) -> None:
    """Print the mean seconds of each phase of a step, over ranks and turns, for both trainers and
    the difference, which the phases explain."""
    sums: list[dict[str, float]] = []
    for number in range(len(names)):
        own = [one for turn in rounds for one in turn[number]]
        phases = sorted({key for one in own for key in one if key.startswith("in ")})
        sums.append({p: sum(one.get(p, 0.0) for one in own) / len(own) for p in phases})
    for name, phases in zip(names, sums, strict=True):
        words = ", ".join(f"{phase.removeprefix('in ')} {s:.3f}" for phase, s in phases.items())
        print(f"{name}: {sum(phases.values()):.3f} s: {words}")
    if len(sums) == 2:
        first, second = sums
        whole = sum(second.values()) - sum(first.values())
        for phase in sorted(first.keys() | second.keys()):
            more = second.get(phase, 0.0) - first.get(phase, 0.0)
            print(f"  {phase.removeprefix('in ')}: {more:+.3f} s of {whole:+.3f} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--recompute", choices=("selective", "full"), help="recompute_granularity")
    parser.add_argument(
        "--optimizer-cpu-offload", action="store_true", help="optimizer states in host memory"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--rows", type=int, default=12, help="sequences of a step, over all ranks")
    parser.add_argument("--group", type=int, default=1, help="sequences of one prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=192, help="tokens")
    parser.add_argument("--budget", type=int, default=1536, help="tokens of a micro-batch")
    parser.add_argument(
        "--chunk", type=int, default=1024, help="tokens whose logits are computed together"
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="a GPU's dense peak, where it is not known by name"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="log-probs instead of updates")
    parser.add_argument("--profile", action="store_true", help="print one step's profile instead")
    parser.add_argument("--shapes", action="store_true", help="with --profile: by input shapes")
    parser.add_argument("--phases", action="store_true", help="also print the time by phase")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=("megatron", "fsdp"),
        default=["megatron"],
        help="what computes the model; two are measured in turns",
    )
    parser.add_argument("--baseline", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_of(options.rank_of, options)
        return
    if options.baseline and len(options.strategies) > 1:
        parser.error("--baseline compares one of --strategies")
    sources = [(HERE, strategy) for strategy in options.strategies]
    if options.baseline:
        sources.append((options.baseline.resolve(), options.strategies[0]))
    starts, trainers = [], [Trainer(root, strategy, options) for root, strategy in sources]
    for trainer in trainers:
        starts.append(trainer.answers())
    if options.profile:
        trainers[0].ask("profile")
        rounds: list[Any] = []
    else:
        word = "forward" if options.forward else "step"
        rounds = [[trainer.ask(word) for trainer in trainers] for _ in range(options.rounds)]
    for trainer in trainers:
        trainer.close()
    if not rounds:
        return
    tokens = options.rows * (options.prompt + options.response)
    names = [trainer.name for trainer in trainers]
    for number, name in enumerate(names):
        for own, ours in zip(starts[number], starts[0], strict=True):
            own["flops"] = ours["flops"]
        report(name, tokens, starts[number], [one[number] for one in rounds])
    if options.phases:
        compare_phases(names, rounds)
    if len(trainers) == 2:
        slow, fast = (
            [max(one["seconds"] for one in turn[number]) for turn in rounds] for number in (1, 0)
        )
        ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
        print(
            f"{statistics.median(ratios):.2f} times the rate of {names[1]} (median of turns, "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
