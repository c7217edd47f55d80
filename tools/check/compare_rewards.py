"""Compare what configurations learn, over several seeds: ``python tools/check/compare_rewards.py
--variant actor_rollout_ref.rollout.staleness=1``.

A tiny Llama with random weights, whose tokens are bytes, is reinforced to write the letter e, with
engine ``hf`` in a process of its own, one rank and one thread; the first variant, to which the
others are compared, draws every step's samples from the weights that train on them. ``--variant``
gives the overrides of another one, separated by blanks. A finished run is not repeated, so that the
same command goes on after a stop.

A run whose samples are drawn by older weights earns later what it has learned. So every variant is
compared twice: at equal steps, and at equal numbers of updates of the weights that drew the samples
(the step before less ``rollout/staleness``), where nothing but worse learning makes a difference.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.commands.start import CommandParser, command_entry_point, run_child
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.json_lines import read_json_lines
from tools.bench.step import WORDS, Task, write_prompts

FIRST = "synchronous"
REWARD, STALENESS = "reward/mean", "rollout/staleness"
_LAST = 3
"""A run's reward is the mean over the last of so many equal parts of its steps."""


def make_model(folder: Path) -> None:
    """A Llama of two layers and 64 dimensions in float32, always with the same weights, whose
    tokens are bytes.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    whole.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    config = LlamaConfig(
        **{"vocab_size": len(whole), "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 256, "tie_word_embeddings": True},
        **{"pad_token_id": whole.pad_token_id, "eos_token_id": whole.eos_token_id},
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    ).save_pretrained(folder)
    whole.save_pretrained(folder)


def settings(out: Path, task: Task, rate: float) -> dict[str, Any]:
    """The configuration of all runs as nested keys."""
    return {
        "data": {
            "train_files": str(out / "prompts.parquet"),
            "max_prompt_length": task.prompt,
            "max_response_length": task.response,
            "train_batch_size": task.prompts,
        },
        "actor_rollout_ref": {
            "model": {"path": str(out / "model"), "dtype": task.dtype},
            "actor": {
                "ppo_mini_batch_size": task.prompts,
                "ppo_max_token_len_per_gpu": 4096,
                "optim": {"lr": rate},
            },
            "rollout": {
                **{"name": "hf", "n": task.group, "max_num_seqs": task.rows},
                **{"placement": "dedicated", "n_gpus_per_node": 1},
            },
        },
        "algorithm": {"rollout_correction": {"rollout_is": "token"}},
        "reward": {"reward_funcs": ["tools.bench.step:letters"]},
        "dag": {"custom_pipeline_fn": "ctrl_megatron.pipeline:grpo_pipeline"},
        "trainer": {
            **{"default_local_dir": str(out), "total_training_steps": task.steps},
            **{"n_gpus_per_node": 1, "logger": ["jsonl"], "peak_tflops_per_device": 0.1},
        },
    }


Run = list[tuple[float, float]]
"""Step by step (mean number of updates of the weights that drew the samples, mean reward)."""


def read_run(folder: Path, steps: int) -> Run:
    """The steps of a finished run; nothing if it is not finished."""
    path = folder / "metrics.jsonl"
    lines = read_json_lines(path) if path.is_file() else []
    found = [line["metrics"] for line in lines if REWARD in line["metrics"]]
    if len(found) < steps:
        return []
    # Without steps ahead there is no such metric: every sample is drawn by the newest weights.
    return [(step - m.get(STALENESS, 0.0), m[REWARD]) for step, m in enumerate(found)]


def last(run: Run) -> Run:
    """The steps whose mean is a run's reward."""
    return run[-(len(run) // _LAST) :]


def reward_of(run: Run) -> float:
    """The mean reward of the last steps."""
    return statistics.fmean(reward for _, reward in last(run))


def reward_after(run: Run, updates: Sequence[float]) -> float:
    """The mean reward of a synchronous run after so many updates, between which it is a line."""

    def at(number: float) -> float:
        low = int(number)
        return run[low][1] + (number - low) * (run[min(low + 1, len(run) - 1)][1] - run[low][1])

    return statistics.fmean(map(at, updates))


def train(out: Path, name: str, seed: int, overrides: Sequence[str]) -> None:
    """One run, from its beginning."""
    shutil.rmtree(out / name, ignore_errors=True)
    given = [sys.executable, "tools/train_rl.py", "--config", str(out / "config.json"), *overrides]
    given += [f"trainer.experiment_name={name}", f"trainer.seed={seed}"]
    os.environ["OMP_NUM_THREADS"] = "1"
    code = run_child([*given, f"actor_rollout_ref.rollout.seed={seed}"], ROOT)
    if code:
        raise UserError(f"the run {name} ended with exit code {code}", remedy="see above")


def table(runs: dict[str, list[Run]]) -> str:
    """The rewards by variant. The interval is that of one more synchronous run: their mean and
    twice their deviation to both sides. Differences at equal updates are those of equal seeds.
    """
    found = {name: list(map(reward_of, own)) for name, own in runs.items()}
    first = found[FIRST]
    middle, wide = statistics.fmean(first), 2 * statistics.stdev(first)
    lines = [f"interval of {FIRST} runs: {middle - wide:.4f} to {middle + wide:.4f}"]
    for name, rewards in found.items():
        inside = sum(abs(reward - middle) <= wide for reward in rewards)
        error = statistics.stdev(rewards) / len(rewards) ** 0.5
        each = ", ".join(f"{reward:.4f}" for reward in rewards)
        lines.append(
            f"{name}: {statistics.fmean(rewards):.4f} (standard error {error:.4f}), {inside} of "
            f"{len(rewards)} seeds inside: {each}"
        )
        later = [
            reward_of(run) - reward_after(synchronous, [updates for updates, _ in last(run)])
            for run, synchronous in zip(runs[name], runs[FIRST], strict=True)
        ]
        error = statistics.stdev(later) / len(later) ** 0.5
        lines.append(
            f"    less the synchronous rewards at equal updates: {statistics.fmean(later):+.4f} "
            f"(standard error {error:.4f})"
        )
    return "\n".join(lines)


@command_entry_point("compare_rewards", stopped="the same command goes on")
def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that are missing and print the table."""
    parser = CommandParser(__doc__)
    parser.add_argument("--variant", action="append", default=[], metavar="'KEY=VALUE ...'")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/compare_rewards")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    task = Task(
        **{"model": "tiny", "dtype": "float32", "prompts": 8, "group": 8},
        **{"prompt": 40, "response": 16, "steps": options.steps},
    )
    if not (out / "config.json").is_file():
        make_model(out / "model")
        draw = random.Random(0)
        asked = [" ".join(draw.choices(WORDS, k=3)) for _ in range(task.prompts * task.steps)]
        write_prompts(asked, out / "prompts.parquet")
        write_text_atomically(out / "config.json", json.dumps(settings(out, task, options.lr)))
    variants = {FIRST: [], **{given: given.split() for given in options.variant}}
    found: dict[str, list[Run]] = {name: [] for name in variants}
    for seed in range(1, options.seeds + 1):
        for number, (variant, overrides) in enumerate(variants.items()):
            name = f"variant{number}.seed{seed}"
            if not read_run(out / name, options.steps):
                train(out, name, seed, overrides)
            found[variant].append(read_run(out / name, options.steps))
            print(f"{variant}, seed {seed}: {reward_of(found[variant][-1]):.4f}", flush=True)
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
