"""Short runs with fixed seeds and the numbers and texts they must give, to the last digit.

``python tests/integration/golden_runs.py`` records ``golden/*.json`` again. Use it after a change
that intends to change what a run computes, and never to make a refactoring pass.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch
from forked_run import ForkedRun, run_forked
from launched_run import Job
from tiny_run import JUDGMENTS, PROGRAM, chain_model, smollm2, write_problems

from ctrl_megatron.metrics import read_json_lines

FOLDER = Path(__file__).with_name("golden")
STEPS = 4
COMPUTED = ("actor/", "critic/", "advantage/", "reward/", "critique/", "revision/")
COMPUTED += ("pass_rate/", "rollout/", "sampling/", "sft/")
"""Prefixes of metrics that depend on nothing but configuration and seeds."""
DIFFERENT_MACHINE = {"rel": 1e-3, "abs": 1e-5}
"""Tolerance where another processor rounds differently."""
# Rounding must not draw other tokens. The tail's tokens have room in the last digits only, so none
# of them is drawn; the temperature leaves the others enough to differ in.
DRAWN = ("actor_rollout_ref.rollout.top_k=8", "actor_rollout_ref.rollout.temperature=1.3")
_A = "actor_rollout_ref.actor."
RL: dict[str, tuple[str, ...]] = {
    "ctrl_grpo": (),
    "ppo": (
        *("algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "critic.optim.lr=1e-2"),
        *("algorithm.kl_ctrl.type=adaptive", "critic.ppo_epochs=2"),
        *(_A + "use_kl_loss=false", "algorithm.use_kl_in_reward=true"),
    ),
    "dapo": (
        *("algorithm.filter_groups.enable=true", "data.gen_batch_size=6"),
        *("actor_rollout_ref.rollout.n=4", _A + "clip_ratio_high=0.28"),
        *("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=8"),
        "algorithm.rollout_correction.rollout_is=token",
    ),
    # Every row with a copy of its prompt.
    "rloo": (
        *("algorithm.adv_estimator=rloo", _A + "ppo_epochs=2"),
        "actor_rollout_ref.model.shared_prefix=false",
    ),
}


def make_job(folder: Path) -> Job:
    """Models and data of every golden run."""
    source = smollm2(folder)
    return Job(
        actor=chain_model(folder / "actor", source, JUDGMENTS, 0.8),
        proxy=chain_model(folder / "proxy", source, [PROGRAM], 0.9),
        data=write_problems(folder / "train.parquet"),
        folder=folder / "runs",
    )


def run_rl(
    job: Job,
    name: str,
    folder: str,
    stops: tuple[int, ...] = (),
    *,
    extra: tuple[str, ...] = (),
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """The steps of the RL run of that name; it ends after each of ``stops`` and is resumed."""
    for last in (*stops, steps):
        run = run_forked(job, folder, steps=last, extra=(*DRAWN, *RL[name], *extra))
        assert run.codes == (0, 0), run.output[-8000:]
    return steps_of(run)


def sft_examples(path: Path) -> Path:
    """Twelve rows to fine-tune on."""
    from ctrl_megatron.sft.examples import SftExample, write_examples

    examples = [
        SftExample(
            id=f"golden/{number}",
            prompt=({"role": "user", "content": f"Is {number} + {number % 3} = 7 right?"},),
            response=f"It is {JUDGMENTS[number % 2]}" * (1 + number % 3),
        )
        for number in range(12)
    ]
    write_examples(path, examples)
    return path


def run_sft(
    job: Job, folder: str = "golden_sft", extra: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The steps of a fine-tuning run."""
    path = sft_examples(job.folder.parent / "sft.parquet")
    extra = (f"sft.train_files={path}", *extra)
    run = run_forked(job, folder, steps=STEPS, extra=extra, purpose="sft")
    assert run.codes == (0, 0), run.output[-8000:]
    return steps_of(run)


def steps_of(run: ForkedRun) -> list[dict[str, Any]]:
    """Per step: what it computed, and the texts that were drawn."""
    examples = run.folder / "examples.jsonl"
    drawn = read_json_lines(examples) if examples.is_file() else []
    return [
        {
            "metrics": {
                name: value
                for name, value in record["metrics"].items()
                if name.startswith(COMPUTED) and name != "reward/cached_rate"
            },
            "texts": [
                {key: example[key] for key in ("critique", "revision", "reward")}
                for example in drawn
                if example["step"] == record["step"]
            ],
        }
        for record in run.metrics()
    ]


def machine() -> str:
    """The properties of the machine that rounding depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # A virtual machine's processors of different kinds may share a name.
    processor = ", ".join(f"{key} {said[key]}" for key in ("model name", "cpu family", "model"))
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def load(name: str) -> dict[str, Any]:
    """The recorded run: ``machine`` and ``steps``."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def record() -> None:
    """Run everything and write what came of it."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder))
        runs = {name: run_rl(job, name, name) for name in RL} | {"sft": run_sft(job)}
    for name, steps in runs.items():
        text = json.dumps({"machine": machine(), "steps": steps}, indent=1)
        (FOLDER / f"{name}.json").write_text(text + "\n")
        print(f"{FOLDER / name}.json: {len(steps)} steps")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    record()
