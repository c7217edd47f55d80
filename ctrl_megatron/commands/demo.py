"""Train a small model to criticise code on one machine (no GPU is needed): data, SFT, RL, tests.

``ctrl-demo`` runs in a checkout, or in a folder that ``ctrl-init`` has made. Right programs are
changed by one edit. One model is fine-tuned to name faults and to follow critiques. A copy of it
stays the proxy; the other, the critic, is then trained by GRPO on the results of its critiques.

Finished stages are not repeated; ``--fresh`` removes earlier demo runs. ``--seeds 1 2 3 4 5``
repeats the reinforcement with five seeds and gives the mean gain with its interval.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctrl_megatron.checkpoint.files import remove_tool_files
from ctrl_megatron.commands.init import require_examples
from ctrl_megatron.commands.start import CommandParser, command_entry_point, run_child
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import evaluate_turns
from ctrl_megatron.eval.transcripts import read_evaluation
from ctrl_megatron.metrics.report.run_files import read_run_files
from ctrl_megatron.rollout.engine import available_engines, default_engine

CONFIG = "examples/study_smollm2/mutants.yaml"
MODEL, DATA = "runs/models/smollm2", "runs/demo_data"
SFT_RUN, RL_RUN = "demo_sft", "demo"
TUNED = f"runs/{SFT_RUN}/hf"
WEIGHTS = "model.safetensors"
STEPS, DRAWN, TESTED, SAMPLES = 8, 8, 60, 2
LONGEST = 90
"""Most characters of a program in RL: the proxy seldom repairs longer ones."""
RANKS = 2
"""Ranks of training: one per GPU on a machine with fewer, and on one without GPUs as many."""


def stages(engine: str, seed: int) -> list[tuple[str, list[str], str]]:
    """(title, command, product) of each stage; an existing product skips the stage, "" never
    does.
    """
    run = rl_run_name(seed)
    data = (f"data.train_files={DATA}/rl.parquet", f"data.val_files={DATA}/unseen_mutants.parquet")
    drawn = (
        *(f"actor_rollout_ref.rollout.name={engine}", *data),
        *(f"actor_rollout_ref.model.path={TUNED}", f"actor_rollout_ref.proxy.model.path={TUNED}"),
    )
    ranks = min(RANKS, _gpus()) or RANKS
    trained = (
        *("--nproc-per-node", str(ranks), "--config", CONFIG),
        f"trainer.n_gpus_per_node={ranks}",
    )

    return [
        ("prepare SmolLM2-135M", [*command_words("prepare_smollm2"), "--out", MODEL], ""),
        (
            "make training and test files of programs with one fault",
            [
                *(*command_words("prepare_mutants"), "--out", DATA),
                *("--test-size", str(TESTED), "--longest-attempt", str(LONGEST)),
            ],
            f"{DATA}/rl.parquet",
        ),
        (
            "teach one model to name faults and to follow critiques (SFT)",
            [
                *(*command_words("train_sft"), *trained),
                *(f"trainer.experiment_name={SFT_RUN}", f"actor_rollout_ref.model.path={MODEL}"),
                f"sft.train_files=[{DATA}/critic_sft.parquet,{DATA}/proxy_sft.parquet]",
            ],
            f"{TUNED}/{WEIGHTS}",
        ),
        (
            "reward critiques that lead to right programs (GRPO)",
            [
                *(*command_words("train_rl"), *trained, *drawn),
                *(f"trainer.experiment_name={run}", f"trainer.total_training_steps={STEPS}"),
                f"actor_rollout_ref.rollout.n={DRAWN}",
                *(f"trainer.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"),
                *(f"trainer.save_hf_freq={STEPS}", "data.val_files=[]"),
                "algorithm.norm_adv_by_std_in_grpo=false",
            ],
            f"runs/{run}/hf_exports/global_step_{STEPS}/{WEIGHTS}",
        ),
        (
            f"compare on {TESTED} unseen programs, {SAMPLES} critiques each",
            [
                *(*command_words("evaluate"), "--config", CONFIG),
                *("--out", f"runs/{run}_evaluation"),
                *("--samples", str(SAMPLES), "--temperature", "1"),
                *(f"after SFT={TUNED}", f"after RL=runs/{run}/hf_exports/global_step_{STEPS}"),
                f"oracle={DATA}/oracle.jsonl",
                *("--set", *drawn),
            ],
            "",
        ),
    ]


def command_words(command: str) -> list[str]:
    """The first words of one of the package's commands."""
    return [sys.executable, "-m", f"ctrl_megatron.commands.{command}"]


def _gpus() -> int:
    from ctrl_megatron.parallel.devices import visible_gpus  # it imports torch, which takes seconds

    return visible_gpus()


def rl_run_name(seed: int) -> str:
    """The name of the RL run of a seed. All seeds start from the same models."""
    return RL_RUN if seed == 1 else f"{RL_RUN}_seed{seed}"


@command_entry_point("demo", stopped="the same command goes on with this stage")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages in order; return the exit code of the first that fails."""
    parser = CommandParser(__doc__)
    parser.add_argument("--fresh", action="store_true", help="remove earlier demo runs")
    parser.add_argument(
        "--engine", choices=available_engines(denoising=False), default=default_engine()
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="seeds of reinforcement learning"
    )
    options = parser.parse_args(arguments)
    require_examples()
    runs = {seed: rl_run_name(seed) for seed in options.seeds}
    if options.fresh:
        remove_tool_files(Path(DATA), "prepare_mutants")
        for folder in (SFT_RUN, *runs.values(), *(f"{run}_evaluation" for run in runs.values())):
            shutil.rmtree(Path("runs") / folder, ignore_errors=True)
    console, begin, took = Console(), time.monotonic(), dict[str, float]()
    for seed in runs:
        if code := _run_stages(console, options.engine, seed, took):
            return code
    _summary(console, runs)
    for title, seconds in took.items():
        console.print(f"{seconds:6.0f} s  {title}")
    console.print(f"{time.monotonic() - begin:6.0f} s  in all")
    for run in runs.values():
        console.print(f"reports: runs/{run}/report.html, runs/{run}_evaluation/report.html")
    return 0


def _run_stages(console: Console, engine: str, seed: int, took: dict[str, float]) -> int:
    """Run the stages of a seed and add their seconds to ``took``; the exit code of the first that
    fails, else 0.
    """
    todo = stages(engine, seed)
    for number, (title, words, product) in enumerate(todo, start=1):
        console.rule(f"{number}/{len(todo)} {title}")
        if product and Path(product).exists():
            console.print(f"{product} is there already")
            continue
        start = time.monotonic()
        code = run_child(words, Path.cwd())
        if code:
            console.print(f"stage {number} ({title}) ended with exit code {code}", style="bold red")
            return code
        took[title] = took.get(title, 0.0) + time.monotonic() - start
    return 0


def _summary(console: Console, runs: Mapping[int, str]) -> None:
    # The seed of a transcript is that of its draws, which is the same in every evaluation.
    turns = [
        replace(turn, seed=seed)
        for seed, run in runs.items()
        for turn in read_evaluation(Path(f"runs/{run}_evaluation")).turns
    ]
    results = {result.critic: result for result in evaluate_turns(turns)}
    table = Table(title=f"tests passed, {TESTED} programs with a fault; 90 % intervals by problem")
    for column in ("critiques", "after revision", "named right or wrong"):
        table.add_column(column, justify="left" if column == "critiques" else "right")
    first = results["after SFT"]
    table.add_row("no critique (first solutions)", _told(first.curves[0]["pass_rate"]), "")
    for name, result in results.items():
        judged = result.last_turn_rates["judgment_accuracy"]
        table.add_row(name, _told(result.last_turn_rates["pass_rate"]), f"{judged.value:.1%}")
    console.print(table)
    gain = results["after RL"].gains["pass_rate"]
    of_seeds = f", mean of {len(runs)} seeds" if len(runs) > 1 else ""
    console.print(
        f"RL over SFT, the same {TESTED} programs in pairs{of_seeds}: {_told(gain, sign='+')}"
    )
    flat: list[float] = []
    for run in runs.values():
        series = read_run_files(Path("runs") / run).series or {}
        flat += [share for _, share in series["advantage/zero_std_rate"]]
    console.print(f"groups with different rewards: {1 - sum(flat) / len(flat):.0%}")


def _told(estimate: Estimate, sign: str = "") -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{sign}.3f}"
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


if __name__ == "__main__":
    raise SystemExit(main())
