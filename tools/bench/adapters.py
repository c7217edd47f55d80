"""Compare a run that trains adapters with one that trains all weights: ``python
tools/bench/adapters.py``.

Three short runs of ``examples/own_pipeline.py`` (the reward is a completion's share of vowels) from
the same seed, one after the other, with the ``hf`` engine and the reference of a KL: all weights;
adapters that are merged into each push; adapters that are pushed alone. Prints the bytes and
seconds of the pushes after the first, the trainer's host memory at the last step beside what the
memory plan says of the models, the largest distance of rewards between both kinds of push, how far
the engine's probabilities are from the trainer's, and what rounding leaves of merged adapters:

    python tools/bench/adapters.py --steps 12 actor_rollout_ref.model.dtype=bfloat16

Model, data and all other keys are those of ``examples/ctrl_smollm2_cpu.yaml``, whose first lines
say how they are made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.checkpoint.convert import megatron_to_peft
from ctrl_megatron.memory.model_state import frozen_model_memory, trained_model_memory
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.lora import shape_with_adapters
from ctrl_megatron.models.rules import ADAPTED, LORA_A, LORA_B
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.types import Lora

# In float32 both kinds of push give the engine the same model up to the order of sums.
COMMON = (
    *(
        "dag.custom_pipeline_fn=examples.own_pipeline:build",
        "data.train_files=runs/data/solve.parquet",
    ),
    *("trainer.n_gpus_per_node=1", "actor_rollout_ref.model.dtype=float32"),
    *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=4"),
    *("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("data.max_prompt_length=192", "data.max_response_length=24"),
    *("actor_rollout_ref.actor.optim.lr=1e-4", "trainer.resume_mode=disable"),
)


def main() -> None:
    """Runs, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_adapters"))
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of every run")
    args = parser.parse_args()
    lora = f"actor_rollout_ref.model.lora_rank={args.rank}"
    push = "actor_rollout_ref.rollout.adapter_push="
    kinds = {
        "all weights": (),
        "adapters merged": (lora, push + "false"),
        "adapters alone": (lora, push + "true"),
    }
    runs = {kind: run(kind.replace(" ", "_"), keys, args) for kind, keys in kinds.items()}
    planned = planned_gib(Path("runs/models/smollm2"), args.rank)
    for kind, steps in runs.items():
        pushes = [step for step in steps[1:] if step["sync/gigabytes"]]
        rewards = ", ".join(f"{step['reward/vowels']:.3f}" for step in steps)
        print(
            f"{kind:15} push {statistics.median(s['sync/gigabytes'] for s in pushes) * 1e3:7.1f} MB"
            f" in {statistics.median(s['sync/seconds'] for s in pushes):5.2f} s; host memory "
            f"{steps[-1]['memory/host_gib']:.2f} GiB, planned for actor and reference "
            f"{planned[bool(kinds[kind])]:.2f} GiB; rewards {rewards}"
        )
        for name in ("rollout/kl", "rollout/probs_diff_mean"):
            found = [step[name] for step in steps]
            print(f"{kind:15} {name} {statistics.mean(found):.3g}, at most {max(found):.3g}")
    merged, apart = runs["adapters merged"], runs["adapters alone"]
    for name in ("reward/vowels", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
        gap = max(abs(one[name] - other[name]) for one, other in zip(merged, apart, strict=True))
        print(f"largest distance of {name} between the pushes: {gap:.2g}")
    checkpoint = args.out / f"adapters_alone/checkpoints/global_step_{args.steps}"
    lost, distance = merged_rounding(checkpoint, Path("runs/models/smollm2"))
    print(
        f"merged in bfloat16, {lost:.1%} of the changed weights are as they were; the change is "
        f"{distance:.1%} of its norm away from what was trained"
    )


def run(name: str, keys: tuple[str, ...], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The metrics of the steps of a run with this name."""
    command = [sys.executable, str(ROOT / "tools/train_rl.py"), "--nproc-per-node", "1"]
    command += ["--config", str(ROOT / "examples/ctrl_smollm2_cpu.yaml"), *COMMON, *keys]
    command += [f"trainer.total_training_steps={args.steps}", *args.overrides]
    command += [f"trainer.default_local_dir={args.out}", f"trainer.experiment_name={name}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = (args.out / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def merged_rounding(checkpoint: Path, model: Path) -> tuple[float, float]:
    """(share of the weights with a change whose bfloat16 value is the same after merging, norm of
    what rounding changes over the norm of the change), over all adapted layers."""
    with tempfile.TemporaryDirectory() as folder:
        megatron_to_peft(checkpoint, Path(folder) / "adapters")
        tensors = load_file(Path(folder) / "adapters/adapter_model.safetensors")
        config = json.loads((Path(folder) / "adapters/adapter_config.json").read_text())
    weights, scale = SafetensorsDirectory(model), config["lora_alpha"] / config["r"]
    changed = same = 0
    error = norm = 0.0
    for name, down in tensors.items():
        if not name.endswith(LORA_A):
            continue
        stem = name.removesuffix(LORA_A)
        base = weights.read(stem.removeprefix(ADAPTED) + ".weight").bfloat16()
        change = scale * tensors[stem + LORA_B].float() @ down.float()
        merged = (base.float() + change).bfloat16()
        changed += int((change != 0).sum())
        same += int(((change != 0) & (merged == base)).sum())
        error += float((merged.float() - base.float() - change).square().sum())
        norm += float(change.square().sum())
    return same / changed, (error / norm) ** 0.5


def planned_gib(model: Path, rank: int) -> dict[bool, float]:
    """GiB of the actor and its reference in float32, without adapters (False) and with (True)."""
    shape, layout = read_model_shape(model), Layout()
    lora = Lora(rank=rank, alpha=1.0, targets=("all-linear",))
    found = {}
    for has_adapters, own in {False: shape, True: shape_with_adapters(shape, lora)}.items():
        state = trained_model_memory(own, layout, pp=0, dtype="float32", distributed=True)
        held = state.parameters + state.gradients + state.optimizer_bytes
        if not has_adapters:
            held += frozen_model_memory(shape, layout, pp=0, dtype="float32").parameters
        found[has_adapters] = held / 2**30
    return found


if __name__ == "__main__":
    main()
