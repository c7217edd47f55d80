"""Check in a quarter of an hour on a GPU what the tests cannot check without one.

``ctrl-check-gpu`` makes a random model, of the widths of a config.json with ``--shape
FILE``, or uses ``--model DIR``, a Hugging Face directory. Each item prints pass, FAIL or skip with
its figures; a failure does not end the check. On a machine without a GPU it runs the items that the
CPU platform supports and skips the others. Exit code: 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ctrl_megatron.commands.start import command_entry_point
from ctrl_megatron.config.flags import (
    CommandParser,
    existing_file,
    existing_path,
    float_flag,
    output_path,
)
from ctrl_megatron.engine_kinds import ENGINES, EngineName

MODULE = "ctrl_megatron.commands.check_gpu"
STEPS = 4
GROWTH_GIB = 0.25
WITHIN_GIB = 1.0
PLANNED = {
    "rollout_actor": "generate",
    "old_log_prob": "log-probs",
    "ref_log_prob": "log-probs",
    "actor_update": "update",
    "sync_weights": "sync",
    "save": "save",
}
"""Phase of a run -> phase of the plan."""
KL = 0.005
"""Largest KL divergence per token of the engine's distribution to the trainer's. With the random
model on a CPU it is 0.0002 in bfloat16, and 0.03 if the engine has the weights before one update.
"""
FP8_KL = 0.05
"""The same where engines have weights in 8 bits."""
SPREAD = 3.0
"""Standard deviation of the random model's logits: with transformers' own initialisation all tokens
are about equally likely, and unrelated models agree."""
ROUNDED = 1.5
"""Largest error of log-probs and gradients, as a multiple of what rounding costs transformers in
the same dtype."""
LOG_PROBS, ANGLE = 1e-4, 1e-5
"""Errors that pass in addition: of log-probs in the mean, and of a gradient's cosine similarity."""
SAME = 1e-3
"""Largest relative difference between metrics of a resumed and an uninterrupted run."""


ENGINE, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
VARIANTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "cuda_ipc": (1, (ENGINE + "weight_transport=cuda_ipc",)),
    "shared memory": (0, (ENGINE + "weight_transport=shared_memory",)),
    "shards": (0, (ENGINE + "weight_transport=shards",)),
    "fp8": (1, (ENGINE + "quantization=fp8", "algorithm.rollout_correction.rollout_is=token")),
    "adapters": (1, ("actor_rollout_ref.model.lora_rank=8", ENGINE + "adapter_push=true")),
    "experts": (0, ()),
    "fsdp": (0, (ACTOR + "strategy=fsdp",)),
    "optimizer on the host": (0, (ACTOR + "compute.optimizer_cpu_offload=true",)),
    "context parallel": (2, (ACTOR + "megatron.context_parallel_size=2",)),
    "pipeline parallel": (2, (ACTOR + "megatron.pipeline_model_parallel_size=2",)),
    "nccl": (
        2,
        (
            *(ENGINE + "weight_transport=nccl", ENGINE + "placement=dedicated"),
            ENGINE + "n_gpus_per_node=1",
        ),
    ),
}
"""Kind of run -> the GPUs that it needs, and its settings."""
SMALL = (
    *("data.train_batch_size=4", ACTOR + "ppo_mini_batch_size=4", "data.max_response_length=64"),
    *(ENGINE + "n=4", ENGINE + "max_num_seqs=16"),
)
"""Settings of the kinds of run."""


class ItemFailed(Exception):
    """An item did not pass."""


class ItemSkipped(Exception):
    """An item cannot run here."""


def checksum_reward(items: Sequence[Any]) -> list[float]:
    """A reward that differs within a group, whatever the texts are."""
    return [zlib.crc32(item.text.encode()) / 2**32 for item in items]


@dataclass
class GpuChecks:
    """The items in order, and their common state."""

    work: Path
    gpus: int
    """The number of GPUs; 0 on a machine without one."""
    engine: EngineName
    given: Path | None
    """The directory of the model that is checked; None for a random model."""
    shape: Path | None
    """The config.json whose widths a random model has; None for the check's own."""
    timeout: float
    begun: bool = False
    """Whether the training run was begun, which is not repeated when it failed."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Its metrics, step by step; empty if it failed."""

    def items(self) -> dict[str, Callable[[], str]]:
        """Name -> function that returns figures or raises ``ItemFailed`` or ``ItemSkipped``."""
        return {
            "environment": self.environment,
            "logits and gradients": self.logits_and_gradients,
            "optimizer: save, resume": self.optimizer_resumes,
            **{f"run: {name}": partial(self.check_grpo_variant, name) for name in VARIANTS},
            "training run": self.training_run,
            "device memory by phase": self.memory_by_phase,
            "no growth over cycles": self.memory_does_not_grow,
            "engine agrees": self.engine_agrees,
            "stop in mid-generation": self.stop_in_generation,
            "rates": self.speed_of_last_step,
        }

    # The items

    def environment(self) -> str:
        """Run ``ctrl-check-env``."""
        done = self.run_python("-m", "ctrl_megatron.commands.check_env")
        wrong = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
        if done.returncode:
            raise ItemFailed("\n".join(wrong) or done.stderr[-2000:])
        return done.stdout.strip()

    def logits_and_gradients(self) -> str:
        """Log-probs and every tensor's gradient: transformers, Transformer Engine, local layers."""
        dtype = self.dtype
        variants = ["local"]
        if self.gpus and not _has("transformer_engine"):
            raise ItemFailed("transformer-engine is not installed; install requirements/cuda.txt")
        if self.gpus:
            variants.insert(0, "te")
        said = [] if self.gpus else ["Transformer Engine left out: it needs a GPU"]
        for layers in variants:
            done = self.run_python(
                "-m", MODULE, "--compare", layers, "--model", str(self.model), dtype
            )
            if done.returncode:
                raise ItemFailed(f"{layers}: {done.stderr[-3000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            ours, theirs = found["ours"], found["theirs"]
            text = (
                f"{layers} ({dtype}) against transformers in float32: log-probs differ by "
                f"{ours['mean']:.2g} in the mean ({dtype} in transformers: {theirs['mean']:.2g}), "
                f"{ours['most']:.2g} at most ({theirs['most']:.2g}); least cosine of a gradient "
                f"{ours['cosine']:.6f} ({theirs['cosine']:.6f}; {ours['tensor']})"
            )
            # Written so that what is not a number fails.
            near = ours["mean"] <= LOG_PROBS + ROUNDED * theirs["mean"]
            along = 1 - ours["cosine"] <= ANGLE + ROUNDED * (1 - theirs["cosine"])
            if not (near and along):
                raise ItemFailed(text)
            said.append(text)
        return "\n".join(said)

    def optimizer_resumes(self) -> str:
        """Compare fine-tuning of 4 steps with one that is saved after 2 and resumed."""
        whole = self.run_sft("whole", 4)
        self.run_sft("halves", 2)
        again = self.run_sft("halves", 4, wants="after step 2")
        for step in (3, 4):
            for name in ("sft/loss", "sft/grad_norm"):
                one, other = whole[step][name], again[step][name]
                if abs(one - other) > SAME * abs(one):
                    raise ItemFailed(
                        f"step {step}: {name} is {other} after a resume, {one} without"
                    )
        kind = json.loads(self.run_python("-c", _OPTIMIZER).stdout.splitlines()[-1])
        return f"{kind}: steps 3 and 4 after a resume equal those without to {SAME:g}"

    def check_grpo_variant(self, name: str) -> str:
        """Run three steps of GRPO in another way, of a model of two layers; engine and trainer must
        agree after each push."""
        needed, settings = VARIANTS[name]
        if needed > self.gpus:
            raise ItemSkipped(f"it needs {needed} GPU{'s' * (needed > 1)}")
        sizes = EXPERTS if name == "experts" else BLOCKS
        model = self.work / ("moe" if name == "experts" else "tiny")
        if not model.exists():
            write_random_model(model, large=False, sizes=sizes)
        word, ranks = name.replace(" ", "_"), 1 if name == "nccl" else max(1, needed)
        # CUDA graphs would take half of a short run.
        eager = [ENGINE + "enforce_eager=true"] if ENGINES[self.engine].reserves_cache else []
        own = (f"actor_rollout_ref.model.path={model}", *SMALL, *eager, *settings)
        self.output_of(self.grpo_command(word, 3, *own, ranks=ranks, tensor=1), word)
        steps = list(self.read_run_metrics(word).values())
        text = self.kl_of_each_step(steps, FP8_KL if name == "fp8" else KL)
        last = steps[-1]
        return (
            f"{text}; last step {last['time/step']:.2f} s, push "
            f"{last['sync/gigabytes_per_second']:.2f} GB/s"
        )

    def training_run(self) -> str:
        """Run GRPO: generate, sleep, log-probs, update, push. Returns figures of the last step."""
        steps = self.shared_run_metrics
        last = steps[-1]["time/step"]
        return f"{len(steps)} steps with {self.engine}, the last in {last:.1f} s"

    def memory_by_phase(self) -> str:
        """GiB in use by all processes on the fullest GPU at the end of each phase. Each figure must
        be within 1 GiB of the plan.
        """
        found, planned = self.device_memory()[-1], self.planned_gib_by_phase()
        lines, wrong = [], 0
        for name, gib in found.items():
            wanted = planned.get(PLANNED.get(name, ""))
            off = wanted is not None and abs(gib - wanted) > WITHIN_GIB
            wrong += off
            text = "" if wanted is None else f", planned {wanted:6.2f} GiB{' !' * off}"
            lines.append(f"{name:<24} {gib:6.2f} GiB{text}")
        if wrong:
            raise ItemFailed(
                "\n".join([f"{wrong} phases differ by more than {WITHIN_GIB} GiB", *lines])
            )
        return "\n".join(lines)

    def planned_gib_by_phase(self) -> dict[str, float]:
        """Phase -> GiB of the fullest GPU, by ``ctrl-plan``."""
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        total = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        done = self.run_python(
            *(
                "-m",
                "ctrl_megatron.commands.plan",
                "--config",
                str(self.work / "run.yaml"),
                "--nodes",
                "1",
            ),
            *("--gpus-per-node", str(self.gpus), "--gpu-memory", f"{int(total[0]) / 1024:.1f}"),
        )
        if done.returncode:
            raise ItemFailed(f"the plan refuses the run:\n{done.stdout}{done.stderr}")
        rows = re.findall(r"^(\S.*?) {2,}(\d+\.\d)[ !] +\d+  ", done.stdout, re.M)
        return {phase: float(gib) for phase, gib in rows}

    def memory_does_not_grow(self) -> str:
        """Push, generate, sleep three times: no phase uses more memory the last time."""
        first, *_, last = self.device_memory()[1:]
        growth = {name: last[name] - first[name] for name in first if name in last}
        name, most = max(growth.items(), key=lambda item: item[1])
        if most > GROWTH_GIB:
            raise ItemFailed(f"{name} holds {most:.2f} GiB more in step {STEPS} than in step 2")
        return f"at most {most:+.3f} GiB from step 2 to step {STEPS} ({name})"

    def engine_agrees(self) -> str:
        """Log-probs of the drawn tokens, engine against trainer, after pushes of new weights."""
        return self.kl_of_each_step(self.shared_run_metrics, KL)

    @staticmethod
    def kl_of_each_step(steps: Sequence[Mapping[str, float]], allowed: float) -> str:
        """The KL of each step; ItemFailed if one is above ``allowed`` or shows nothing."""
        if not all(step["actor/grad_norm"] > 0 for step in steps):
            raise ItemFailed("an update left the weights as they were, so that pushes show nothing")
        found = [step["rollout/kl"] for step in steps]
        text = f"KL per token by step {', '.join(f'{kl:.2g}' for kl in found)}; {allowed} allowed"
        if not all(kl <= allowed for kl in found):
            raise ItemFailed(text)
        return text

    def stop_in_generation(self) -> str:
        """Send SIGTERM while the engine generates, and resume from the saved checkpoint."""
        length = 2048 if self.gpus else 128
        long = ("trainer.save_freq=1", f"data.max_response_length={length}")
        log = self.work / "stopped.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.grpo_command("stopped", 100, *long),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        begun = r"^\[step 2/100\] +[\d.]+s rollout_actor"
        try:
            self.wait_for(process, log, begun)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            at = time.monotonic()
            process.wait(self.timeout)
        finally:
            if process.poll() is None:
                process.kill()
        seconds, text = time.monotonic() - at, log.read_text(errors="replace")
        saved = re.search(r"stopped as asked; the state after step (\d+) is saved", text)
        if saved is None:
            raise ItemFailed(f"it was not saved; the end of {log}:\n{text[-3000:]}")
        step = int(saved[1])
        done = self.output_of(self.grpo_command("stopped", step + 1, *long), "stopped_again")
        if f"after step {step}" not in done:
            raise ItemFailed(f"the run did not go on after step {step}:\n{done[-3000:]}")
        return f"stopped after step {step} in {seconds:.1f} s, went on to step {step + 1}"

    def speed_of_last_step(self) -> str:
        """Speed of the last step. Figures of other systems are for larger models."""
        last = self.shared_run_metrics[-1]
        tokens = last["perf/tokens_per_second"] / max(1, self.gpus)
        return (
            f"{tokens:,.0f} tokens/s a device over the whole step, MFU {last['perf/mfu']:.3f} in "
            f"the trainer, push {last['sync/gigabytes_per_second']:.2f} GB/s"
        )

    # Properties that several checks use

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.gpus else "float32"

    @property
    def tensor_size(self) -> int:
        return 2 if self.gpus and self.gpus % 2 == 0 else 1

    @cached_property
    def model(self) -> Path:
        """The directory of ``--model``, or a random model with a byte tokenizer."""
        if self.given is not None:
            return self.given
        directory = self.work / "model"
        sizes = None if self.shape is None else model_widths(self.shape)
        write_random_model(directory, large=self.gpus > 0, sizes=sizes)
        return directory

    @property
    def shared_run_metrics(self) -> list[dict[str, float]]:
        """The metrics of every step of one training run, which several items read."""
        if self.begun:
            if not self.steps:
                raise ItemSkipped("the training run failed, see above")
            return self.steps
        self.begun = True
        self.output_of(self.grpo_command("run", STEPS), "run")
        steps = self.read_run_metrics("run")
        if len(steps) != STEPS:
            raise ItemFailed(f"{len(steps)} of {STEPS} steps are recorded")
        self.steps = [steps[step] for step in sorted(steps)]
        return self.steps

    def device_memory(self) -> list[dict[str, float]]:
        """For each step: phase -> GiB in use by all processes on the fullest device."""
        if not self.gpus:
            raise ItemSkipped("no GPU, whose memory could be measured")
        end = "_device_gib"
        found = [
            {
                name.removeprefix("memory/").removesuffix(end): value
                for name, value in step.items()
                if name.startswith("memory/") and name.endswith(end)
            }
            for step in self.shared_run_metrics
        ]
        if not all(found):
            raise ItemFailed(f"the run has no metrics memory/*{end}")
        return found

    def grpo_command(
        self,
        name: str,
        steps: int,
        *extra: str,
        ranks: int | None = None,
        tensor: int | None = None,
    ) -> list[str]:
        """The command of a GRPO run; writes its configuration to NAME.yaml."""
        import yaml

        ranks, tensor = ranks or max(1, self.gpus), tensor or self.tensor_size
        divided: dict[str, Any] = {"tensor_model_parallel_size": tensor}

        rows = self.work / "problems.parquet"
        if not rows.exists():
            write_problems(rows)
        on_gpu = self.gpus > 0 and ENGINES[self.engine].reserves_cache
        share = {"gpu_memory_utilization": 0.5} if on_gpu else {}
        config = {
            "data": {
                "train_files": str(rows),
                "val_files": [],
                "max_prompt_length": 1024,
                "max_response_length": 512 if self.gpus else 16,
                "train_batch_size": 32 if self.gpus else 4,
            },
            "actor_rollout_ref": {
                "model": {"path": str(self.model), "dtype": self.dtype},
                "actor": {
                    "ppo_mini_batch_size": 32 if self.gpus else 4,
                    "ppo_max_token_len_per_gpu": 16384 if self.gpus else 2048,
                    "use_kl_loss": True,
                    "optim": {"lr": 1e-4},
                    "megatron": divided | {"sequence_parallel": True} if tensor > 1 else {},
                    "compute": {
                        "param_offload": True,
                        "grad_offload": True,
                        "optimizer_offload": True,
                    },
                },
                "rollout": {
                    "name": self.engine,
                    "n": 8 if self.gpus else 2,
                    **divided,
                    "max_num_seqs": 256 if self.gpus else 16,
                    **share,
                },
            },
            "dag": {"custom_pipeline_fn": "ctrl_megatron.pipeline:grpo_pipeline"},
            "reward": {"reward_funcs": [f"{MODULE}:checksum_reward"]},
            "trainer": {
                "experiment_name": name,
                "default_local_dir": str(self.work / "runs"),
                "total_training_steps": steps,
                "verify_weight_sync": True,
                "n_gpus_per_node": ranks,
            },
        }
        file = self.work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        return self.rank_launch_command(
            "ctrl_megatron.commands.train_rl", str(file), *extra, ranks=ranks
        )

    def run_sft(self, name: str, steps: int, *, wants: str = "") -> dict[int, dict[str, float]]:
        """Metrics by step of a fine-tuning run."""
        rows = self.work / "examples.parquet"
        if not rows.exists():
            write_sft_examples(rows)
        settings = (
            *(f"actor_rollout_ref.model.path={self.model}", "sft.train_batch_size=4"),
            *(f"actor_rollout_ref.model.dtype={self.dtype}", f"sft.train_files={rows}"),
            *("sft.val_files=[]", "sft.max_length=512"),
            *(
                f"sft.total_training_steps={steps}",
                "sft.lr=1e-4",
                "sft.lr_scheduler_type=constant",  # the same whatever the number of steps
                f"trainer.experiment_name={name}",
            ),
            f"trainer.default_local_dir={self.work / 'runs'}",
            f"trainer.n_gpus_per_node={max(1, self.gpus)}",
        )
        file = self.work / "sft.yaml"
        file.write_text("{}\n")
        command = self.rank_launch_command("ctrl_megatron.commands.train_sft", str(file), *settings)
        said = self.output_of(command, f"{name}_{steps}")
        if wants not in said:
            raise ItemFailed(f"the run did not go on {wants}:\n{said[-3000:]}")
        return self.read_run_metrics(name)

    def rank_launch_command(
        self, module: str, config: str, *settings: str, ranks: int | None = None
    ) -> list[str]:
        count = str(ranks or max(1, self.gpus))
        command = [sys.executable, "-m", module, "--nproc-per-node", count, "--config", config]
        return [*command, *settings]

    def run_python(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=self.timeout,
        )

    def output_of(self, command: list[str], name: str) -> str:
        """The output of a command that must succeed; also written to NAME.log."""
        log = self.work / f"{name}.log"
        with log.open("w") as output:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=self.timeout
            )
        text = log.read_text(errors="replace")
        if done.returncode:
            raise ItemFailed(f"exit code {done.returncode}; the end of {log}:\n{text[-3000:]}")
        return text

    def read_run_metrics(self, name: str) -> dict[int, dict[str, float]]:
        from ctrl_megatron.metrics import read_json_lines

        records = read_json_lines(self.work / "runs" / name / "metrics.jsonl")
        return {r["step"]: r["metrics"] for r in records if "time/step" in r["metrics"]}

    def wait_for(self, process: subprocess.Popen[Any], log: Path, pattern: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not re.search(pattern, text := log.read_text(errors="replace"), re.M):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ItemFailed(f"no {pattern!r} in {log}:\n{text[-3000:]}")
            time.sleep(0.05)


_OPTIMIZER = """
import json
from ctrl_megatron.models.kernels import kernel_providers
print(json.dumps(kernel_providers()["optimizer"]))
"""


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20}
SMALL_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""Widths that are whole blocks of weights in 8 bits."""
EXPERTS = BLOCKS | {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "norm_topk_prob": True,
}


def write_random_model(
    directory: Path, *, large: bool, sizes: Mapping[str, Any] | None = None
) -> None:
    """Write a byte tokenizer and a random model: small, ``large`` (0.9 billion parameters), or of
    the ``sizes`` of a config.json."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(254))]
    tokenizer.add_special_tokens(special)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=template,
    )
    given: dict[str, Any] = {"head_dim": 64, **(sizes or (LARGE if large else SMALL_MODEL))}
    given.setdefault("num_attention_heads", given["hidden_size"] // given["head_dim"])
    given.setdefault("num_key_value_heads", 8 if large else 2)
    kind = "Qwen3Moe" if "num_experts" in given else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        **given,
        vocab_size=len(fast),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=fast.eos_token_id,
    )
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
    torch.nn.init.normal_(model.lm_head.weight, std=SPREAD / config.hidden_size**0.5)
    model = model.to(torch.bfloat16 if large else torch.float32)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)


def model_widths(shape: Path) -> dict[str, Any]:
    """The widths in a config.json of a dense model."""
    config = json.loads(shape.read_text())
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads"),
    )
    per_head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"head_dim": per_head, **{name: config[name] for name in names}}


def write_problems(path: Path) -> None:
    """Write a few problems that a random model cannot solve."""
    from ctrl_megatron.data.rows import row_of_attempt, write_rows
    from ctrl_megatron.types import Attempt, Problem

    rows = []
    for value in range(64):
        problem = Problem(
            id=f"check/{value}",
            statement=f"Write f(x) that returns x + {value}.",
            prompter_type="mbppplus",
            selected_uts=(f"assert f(1) == {value + 1}",),
            entry_point="f",
        )
        solution = "```python\ndef f(x):\n    return x\n```"
        rows.append(
            row_of_attempt(Attempt(id=f"{problem.id}/0", problem=problem, solution=solution))
        )
    write_rows(path, rows)


def write_sft_examples(path: Path) -> None:
    """Write supervised examples."""
    from ctrl_megatron.sft.examples import SftExample, write_examples

    examples = [
        SftExample(
            id=f"check/{value}",
            prompt=({"role": "user", "content": f"What is {value} + {value}?"},),
            response=f"{value} + {value} is {2 * value}.",
        )
        for value in range(32)
    ]
    write_examples(path, examples)


def compare_with_transformers(layers: str, directory: str, dtype: str) -> dict[str, Any]:
    """Log-probs and gradients of Megatron's model and of transformers' on one packed batch."""
    if layers == "local":
        # Hides an installed Transformer Engine.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoConfig

    from ctrl_megatron.checkpoint.hf import load_hf
    from ctrl_megatron.models.build import DTYPES, BuildOptions
    from ctrl_megatron.models.hf_config import read_model_shape
    from ctrl_megatron.models.optimizer import OptimizerOptions
    from ctrl_megatron.models.policy import Policy
    from ctrl_megatron.models.strategy import ModelOptions
    from ctrl_megatron.parallel.groups import initialize_groups, shutdown_groups
    from ctrl_megatron.parallel.layout import Layout

    groups = initialize_groups(Layout(), seed=1, timeout_seconds=300)
    shape = read_model_shape(directory)
    # Gradients are looked at, so nothing may scale them, and the weights stay.
    frozen = OptimizerOptions(lr=0.0, total_steps=1, clip_grad=1e9, weight_decay=0.0)
    options = ModelOptions(
        build=BuildOptions(dtype=dtype), token_budget=4096, logprob_chunk=256, optimizer=frozen
    )
    policy = Policy(shape, groups, options)
    load_hf(policy, directory)
    policy.start_optimizer()

    prompt, response, rows = 64, 64, 6
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, shape.vocab_size, (rows, prompt + response), generator=generator)
    # transformers gives a padding token's embedding no gradient.
    padding = AutoConfig.from_pretrained(directory, trust_remote_code=False).pad_token_id
    if padding is not None:
        ids[ids == padding] = (padding + 1) % shape.vocab_size
    # Half of the rows share a prompt, which Megatron computes once and transformers row by row.
    ids[: rows // 2, :prompt] = ids[0, :prompt]
    lengths = torch.randint(1, response + 1, (rows,), generator=generator)
    column = torch.arange(prompt + response)
    attention = (column < prompt + lengths[:, None]).long()
    mask = attention[:, prompt:].bool()
    batch = {"input_ids": ids, "attention_mask": attention, "response_mask": mask}

    def loss(log_probs, entropy, rows, counts):
        return -(log_probs * rows["response_mask"]).sum() / counts.tokens, {}

    ours = policy.log_probs(batch)[0][mask]
    policy.step(batch, loss)

    tokens = [ids[row, : prompt + int(lengths[row])].to(groups.device) for row in range(rows)]
    exact = transformers_result(directory, torch.float32, tokens, prompt)
    theirs = exact
    if DTYPES[dtype] is not torch.float32:
        theirs = transformers_result(directory, DTYPES[dtype], tokens, prompt)
    names, gradients = [], []
    for param, weight in policy.shards():
        for piece in param.pieces:
            names.append(piece.hf)
            own: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
            mine = own.view(param.shape)[piece.shard_slices]
            others = [found[1][piece.hf][piece.hf_slices] for found in (theirs, exact)]
            gradients.append((mine.cpu(), *others))
    shutdown_groups()
    return {
        "ours": log_prob_and_gradient_errors(
            ours - exact[0], names, [(m, e) for m, _, e in gradients]
        ),
        "theirs": log_prob_and_gradient_errors(
            theirs[0] - exact[0], names, [(t, e) for _, t, e in gradients]
        ),
    }


def log_prob_and_gradient_errors(
    log_probs: Any, names: Sequence[str], gradients: Sequence[tuple[Any, Any]]
) -> dict[str, Any]:
    """Mean and largest size of ``log_probs``, which are differences, and the tensor whose gradient
    has the least cosine similarity to the exact one (``gradients`` are pairs)."""
    import torch

    cosines = [
        float(
            torch.nn.functional.cosine_similarity(
                found.double().flatten(), exact.double().flatten(), dim=0
            )
        )
        for found, exact in gradients
    ]
    # torch's argmin takes what is not a number for the least.
    least, size = int(torch.tensor(cosines).argmin()), log_probs.abs()
    return {
        "mean": float(size.mean()),
        "most": float(size.max()),
        "cosine": cosines[least],
        "tensor": names[least],
    }


def transformers_result(
    directory: str, dtype: Any, rows: Sequence[Any], prompt: int
) -> tuple[Any, dict[str, Any]]:
    """The log-probs of all tokens behind the prompts, and the gradients of their negative mean."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, trust_remote_code=False
    ).to(rows[0].device)
    found, total = [], sum(len(tokens) - prompt for tokens in rows)
    for tokens in rows:
        logits = model(tokens[None]).logits[0, prompt - 1 : -1].float()
        log_probs = logits.log_softmax(-1).gather(-1, tokens[prompt:, None]).squeeze(-1)
        (-log_probs.sum() / total).backward()
        found.append(log_probs.detach().cpu())
    gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters()}
    return torch.cat(found), gradients


@command_entry_point("check_gpu")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the items; returns 0 if none failed."""
    parser = CommandParser(__doc__)
    parser.add_argument(
        "--model", type=existing_path, help="Hugging Face directory; else a random model"
    )
    parser.add_argument(
        "--shape", type=existing_file, metavar="FILE", help="config.json of a random model"
    )
    parser.add_argument("--engine", choices=("vllm", "hf"), help="default: vllm where installed")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="items whose name has"
    )
    parser.add_argument("--keep", type=output_path, metavar="DIR", help="leave logs and runs there")
    parser.add_argument(
        "--timeout", type=float_flag(1.0), default=600.0, help="seconds of one command"
    )
    parser.add_argument("--compare", choices=("te", "local"), help=argparse.SUPPRESS)
    parser.add_argument("dtype", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compare:
        print(
            json.dumps(
                compare_with_transformers(options.compare, str(options.model), options.dtype)
            )
        )
        return 0
    import torch

    from ctrl_megatron.parallel.devices import why_gpus_unusable

    if fault := why_gpus_unusable():
        print(f"FAIL  {fault}")
        return 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    work = options.keep or Path(tempfile.mkdtemp(prefix="check_gpu_"))
    work.mkdir(parents=True, exist_ok=True)
    checks = GpuChecks(
        work=work,
        gpus=gpus,
        engine=options.engine or ("vllm" if _has("vllm") else "hf"),
        given=options.model,
        shape=options.shape,
        timeout=options.timeout,
    )
    print(f"{gpus} GPUs" if gpus else "no GPU: the checks run on the CPU platform")
    failed, clear = 0, "\33[2K" if sys.stdout.isatty() else ""
    for name, item in checks.items().items():
        if options.only and not any(word in name for word in options.only):
            continue
        begun = time.monotonic()
        if clear:
            print(f"run   {name} ... (logs: {work})", end="\r", flush=True)
        try:
            status, text = "pass", item()
        except ItemSkipped as reason:
            status, text = "skip", str(reason)
        except Exception as error:  # an item that breaks must not keep the next from running
            status, text = "FAIL", str(error) if isinstance(error, ItemFailed) else repr(error)
            failed += 1
        first, *rest = text.splitlines() or [""]
        took = f"{time.monotonic() - begun:5.0f} s"
        print(f"{clear}{status}  {name:<24} {took}  {first}", flush=True)
        print("".join(f"      {line}\n" for line in rest), end="", flush=True)
    print(f"{failed} failed" if failed else "nothing failed")
    if options.keep is None and not failed:
        shutil.rmtree(work)
    elif failed:
        print(f"logs and runs: {work}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
