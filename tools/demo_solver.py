"""Train a small model to solve programming problems by plain GRPO: ``python tools/demo_solver.py``.

SmolLM2-135M answers problems of ``examples/problems``, and the share of tests that its program
passes is the reward. An epoch is as long as the first and the last steps that are compared, so both
are about the same problems. Finished runs are not repeated, and the same command continues a
stopped one.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.commands.start import CommandParser, command_entry_point, run_child
from ctrl_megatron.data.rows import row_of_attempt, write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.json_lines import read_json_lines
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.preparation.task_rows import make_solving_rows
from ctrl_megatron.rollout.engine import available_engines, default_engine
from ctrl_megatron.types import Attempt

MODEL, RUNS = Path("runs/models/smollm2"), Path("runs/demo_solver")
STEPS, COMPARED = 20, 5
"""Steps of a run, and how many of the first and of the last are compared."""
PROMPTS, SAMPLES = 8, 8
"""Problems of a step, and programs drawn for each."""
REWARD = "reward/mean"


def write_problems(problems: Path, out: Path) -> None:
    """Write the training file: the first functions of the problem file, one epoch of them.
    UserError if there are fewer.
    """
    size = PROMPTS * COMPARED
    functions = [p for p in read_problems(problems) if p.prompter_type == "mbppplus"][:size]
    if len(functions) < size:
        raise UserError(
            f"{problems} has {len(functions)} problems of functions, and an epoch is {size}",
            remedy="give another file with --problems",
        )
    attempts = (Attempt(id=problem.id, problem=problem, solution="") for problem in functions)
    write_rows(out, make_solving_rows(map(row_of_attempt, attempts)))


def run_of(seed: int) -> Path:
    """The directory of the run of a seed."""
    return RUNS / f"seed{seed}"


def training(seed: int, data: Path, engine: str, ranks: int) -> list[str]:
    """The command of a run, which saves its state whenever an epoch ends."""
    return [
        *(sys.executable, "tools/train_rl.py", "--nproc-per-node", str(ranks)),
        *("--config", "examples/ctrl_smollm2_cpu.yaml"),
        "dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",
        *("reward.reward_funcs=[code]", f"data.train_files={data}", "data.val_files=[]"),
        *("data.max_prompt_length=224", "data.max_response_length=96"),
        *(f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.model.path={MODEL}"),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        *("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.optim.lr=5e-5"),
        *(f"actor_rollout_ref.rollout.name={engine}", f"actor_rollout_ref.rollout.n={SAMPLES}"),
        *("actor_rollout_ref.rollout.max_num_seqs=64", f"actor_rollout_ref.rollout.seed={seed}"),
        *(f"trainer.default_local_dir={RUNS}", f"trainer.experiment_name={run_of(seed).name}"),
        *(f"trainer.seed={seed}", f"trainer.total_training_steps={STEPS}"),
        *(f"trainer.save_freq={COMPARED}", "trainer.max_ckpt_to_keep=1"),
        f"trainer.n_gpus_per_node={ranks}",
    ]


def rewards_of(run: Path) -> list[float]:
    """The mean reward of every step that the run has made."""
    path = run / "metrics.jsonl"
    lines = read_json_lines(path) if path.is_file() else []
    # A run that was killed makes the steps after its last checkpoint anew.
    of_step = {line["step"]: line["metrics"] for line in lines}
    return [metrics[REWARD] for _, metrics in sorted(of_step.items()) if REWARD in metrics]


def compared(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean reward of the first and of the last ``COMPARED`` steps."""
    return statistics.fmean(rewards[:COMPARED]), statistics.fmean(rewards[-COMPARED:])


@command_entry_point("demo_solver", stopped="the same command goes on with this run")
def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing and print their rewards; 1 if a seed has learned nothing."""
    parser = CommandParser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="trainer processes")
    parser.add_argument("--problems", type=Path, default=ROOT / "examples/problems/level0.jsonl")
    parser.add_argument(
        "--engine", choices=available_engines(denoising=False), default=default_engine()
    )
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    code = run_child([sys.executable, "tools/prepare_smollm2.py", "--out", str(MODEL)], ROOT)
    if code:
        return code
    data, learned = RUNS / "problems.parquet", True
    if not data.exists():
        write_problems(options.problems, data)
    for seed in range(1, options.seeds + 1):
        run = run_of(seed)
        if len(rewards_of(run)) < STEPS:
            code = run_child(training(seed, data, options.engine, options.ranks), ROOT)
            if code:
                return code
        rewards = rewards_of(run)
        first, last = compared(rewards)
        learned &= last > first
        print(
            f"seed {seed}: {first:.3f} in the first {COMPARED} steps, {last:.3f} in the last "
            f"{COMPARED}: {', '.join(f'{reward:.2f}' for reward in rewards)}",
            flush=True,
        )
    return 0 if learned else 1


if __name__ == "__main__":
    raise SystemExit(main())
