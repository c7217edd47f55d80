"""The whole story on one machine without a GPU: model, data, SFT, RL, report.

Stages that are done already are not repeated; ``--fresh`` forgets earlier demo runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.table import Table

from ctrl_megatron.checkpoint.files import remove_own_files
from ctrl_megatron.metrics import measure_peak_flops
from ctrl_megatron.rollout.engine import available_engines, default_engine

CONFIG = "examples/ctrl_smollm2_cpu.yaml"
MODEL, DATA = "runs/models/smollm2", "runs/data"
SFT_RUN, RL_RUN, EVALUATION = "demo_sft", "demo", "demo_evaluation"
CRITIC = f"runs/{SFT_RUN}/hf"
PYTHON, RANKS = sys.executable, "2"
ON_RANKS = ("--nproc-per-node", RANKS)


def stages(dtype: str, engine: str) -> list[tuple[str, list[str], str]]:
    """(title, command, the file whose presence means it is done, empty for never) of each."""
    typed = f"actor_rollout_ref.model.dtype={dtype}"
    drawn = f"actor_rollout_ref.rollout.name={engine}"
    configured = ("--config", CONFIG)
    return [
        ("prepare SmolLM2-135M", [PYTHON, "tools/prepare_smollm2.py", "--out", MODEL], ""),
        (
            "judge the first solutions, synthesise critiques",
            [
                *(PYTHON, "tools/prepare_data.py", "--out", DATA),
                *("--max-difficulty", "1", "--val-size", "32"),
            ],
            f"{DATA}/train.parquet",
        ),
        (
            "teach the critique format (SFT)",
            [
                *(PYTHON, "tools/train_sft.py", *ON_RANKS, *configured),
                typed,
                f"trainer.experiment_name={SFT_RUN}",
                f"actor_rollout_ref.model.path={MODEL}",
            ],
            f"{CRITIC}/model.safetensors",
        ),
        (
            "measure before and after SFT on held-out problems",
            [
                PYTHON,
                "tools/evaluate.py",
                *configured,
                f"before SFT={MODEL}",
                f"after SFT={CRITIC}",
                *("--out", f"runs/{EVALUATION}", "--overwrite", "--set", typed, drawn),
            ],
            "",
        ),
        (
            "train the critic (GRPO)",
            [
                *(PYTHON, "tools/train_rl.py", *ON_RANKS, *configured),
                typed,
                drawn,
                f"actor_rollout_ref.model.path={CRITIC}",
                f"actor_rollout_ref.proxy.model.path={MODEL}",
            ],
            "",
        ),
    ]


def faster_dtype(console: Console) -> str:
    """The type this CPU multiplies faster in; without bfloat16 instructions that is float32."""
    rates = {name: measure_peak_flops(name) for name in ("bfloat16", "float32")}
    chosen = max(rates, key=rates.__getitem__)
    measured = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in rates.items())
    console.print(f"this CPU multiplies matrices at {measured}: the models are {chosen}")
    return chosen


def main() -> int:
    """Run the stages in order; the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget earlier demo runs")
    parser.add_argument("--engine", choices=available_engines(), default=default_engine())
    arguments = parser.parse_args()
    if arguments.fresh:
        remove_own_files(ROOT / DATA, "prepare_data")
        for folder in (f"runs/{SFT_RUN}", f"runs/{RL_RUN}", f"runs/{EVALUATION}"):
            shutil.rmtree(ROOT / folder, ignore_errors=True)
    console, begin, took = Console(), time.monotonic(), {}
    todo = stages(faster_dtype(console), arguments.engine)
    for number, (title, command, product) in enumerate(todo, start=1):
        console.rule(f"{number}/{len(todo)} {title}")
        if product and (ROOT / product).exists():
            console.print(f"{product} is there already")
            continue
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            console.print(f"stage {number} ({title}) ended with exit code {code}", style="bold red")
            return code
        took[title] = time.monotonic() - start
    _summary(console, took, time.monotonic() - begin)
    return 0


def _summary(console: Console, took: dict[str, float], total: float) -> None:
    path = ROOT / "runs" / RL_RUN / "summary.json"
    evaluated = ROOT / "runs" / EVALUATION / "summary.json"
    rows = [row for file in (evaluated, path) for row in json.loads(file.read_text())["table"]]
    table = Table(title=f"{int(rows[0]['rounds'])} held-out attempts, greedy critiques")
    for column in (
        "stage",
        "valid critiques",
        "judgment right",
        "pass rate before",
        "after revision",
    ):
        table.add_column(column, justify="left" if column == "stage" else "right")
    keys = ("valid_critique_rate", "judgment_accuracy", "pass_rate_before", "revision_pass_rate")
    for row in rows:
        table.add_row(row["stage"], *(f"{row[key]:.1%}" for key in keys))
    console.print(table)
    for title, seconds in took.items():
        console.print(f"{seconds:6.0f} s  {title}")
    console.print(f"{total:6.0f} s  in all")
    console.print(f"report: {path.parent / 'report.html'}")


if __name__ == "__main__":
    raise SystemExit(main())
