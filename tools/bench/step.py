"""Measure a GRPO step phase by phase, and TRL's step on the same task: ``python
tools/bench/step.py --peer trl``.

Both train the same model on the same prompts, with the same reward function, a KL to the reference,
and completions of exactly the same length: they use a copy of the model's directory whose
end-of-text token is never drawn, and both check the length. Ours is ``tools/train_rl.py`` with
``grpo_pipeline``, from the command line like any run. TRL is its GRPOTrainer with its defaults
(generation by transformers, activation checkpointing, eight sequences per micro-batch) in bfloat16,
in an environment that the first use creates.

Ours and TRL alternate, so that a slower phase of the machine affects both; the first step of a turn
is not counted. A step contains everything between two batches of prompts: weights to the engine,
completions, rewards, log-probs, update. ``--set`` and ``--against`` compare two configurations of
ours in the same way; with ``--config`` they are settings of that run, whatever it trains. Seeds
make both draw the same, so its texts may have any length.

    python tools/bench/step.py --peer trl --ctrl
    python tools/bench/step.py --group 4 --prompt 1024 --response 256 --against KEY=VALUE
    python tools/bench/step.py --config FILE --steps 3 \\
        --against actor_rollout_ref.proxy.keep_in_host_memory=false
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs/bench_step"
RUNS = FOLDER / "runs"
TRL_LOCK = ROOT / "requirements/trl.txt"
TRL_DEFAULTS: dict[str, Any] = {"per_device_train_batch_size": 8}
LEARNING_RATE, KL_COEFFICIENT = 1e-6, 0.001
WORDS = (
    *("river", "lamp", "stone", "quiet", "seven", "garden", "letter", "winter", "copper", "bridge"),
    *(
        "music",
        "paper",
        "window",
        "early",
        "market",
        "silver",
        "forest",
        "number",
        "island",
        "story",
    ),
)
SENT, GEMM = "GB sent to engines", "GEMM share"
"""Figures of a step that are no seconds."""
UNDRAWN = "<jupyter_script>"
"""A token of SmolLM2's vocabulary that is never drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The size of a step."""

    model: str
    dtype: str
    prompts: int
    group: int
    prompt: int
    """Tokens of every prompt, chat template included."""
    response: int
    """Tokens of every completion."""
    steps: int
    """Steps of a turn, including the first, which is not counted."""

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts x {self.group} completions, {self.prompt} + {self.response} "
            f"tokens, {self.dtype}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A program that alternates with others."""

    name: str
    run: Callable[[], Iterator[dict[str, float]]]
    """Yields the seconds of each step by phase, including ``step``, when the step ends."""


def letters(items: Sequence[Any]) -> list[float]:
    """The reward of completions: the share of the letter e in each."""
    return [share_of_e(item.text) for item in items]


def share_of_e(text: str) -> float:
    """A cheap reward that differs for almost any two texts."""
    return text.count("e") / (1 + len(text))


# The task


def prepare_model(source: Path, folder: Path) -> None:
    """A copy of the model's directory whose end-of-text token is never drawn."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    tokens = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    (end,) = [token["id"] for token in tokens if token["content"] == UNDRAWN]
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"eos_token_id": end},
        "generation_config.json": {"eos_token_id": end},
        "tokenizer_config.json": {"eos_token": UNDRAWN},
    }
    for name, changed in changes.items():
        content = json.loads((source / name).read_text()) | changed
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(content))


def questions(folder: Path, task: Task) -> list[str]:
    """Questions of random words that fill the chat template to exactly ``task.prompt`` tokens, for
    all steps of a turn."""
    from ctrl_megatron.data.tokens import TextCodec

    codec, draw = TextCodec(folder), random.Random(0)

    def length(words: list[str]) -> int:
        return len(codec.encode_chat([{"role": "user", "content": " ".join(words)}]))

    spare = task.prompt - length([""])
    if spare < 1:
        raise SystemExit(f"--prompt: the chat template alone takes {length([''])} tokens")
    texts = []
    for _ in range(task.prompts * task.steps):
        words = [draw.choice(WORDS) for _ in range(spare)]
        while (left := task.prompt - length(words)) != 0:
            words = words[:left] if left < 0 else [*words, *draw.choices(WORDS, k=left)]
        texts.append(" ".join(words))
    return texts


def write_prompts(texts: list[str], path: Path) -> None:
    """The questions as rows of training data."""
    from ctrl_megatron.data.rows import row_of_attempt, write_rows
    from ctrl_megatron.types import Attempt, Problem

    rows = []
    for number, text in enumerate(texts):
        problem = Problem(
            id=str(number), statement=text, prompter_type="mbppplus", selected_uts=("assert True",)
        )
        attempt = Attempt(id=str(number), problem=problem, solution="")
        rows.append(row_of_attempt(attempt, [{"role": "user", "content": text}]))
    write_rows(path, rows)


# Ours


def ours(task: Task, ranks: int, overrides: Sequence[str], through: list[str]) -> Turn:
    """``tools/train_rl.py`` with these overrides."""
    name = " ".join(["ours", *overrides])

    def run() -> Iterator[dict[str, float]]:
        config = FOLDER / "ours.json"
        config.write_text(json.dumps(our_config(task, ranks, RUNS)))
        for metrics in steps_of(name, ranks, [str(config), *overrides], through):
            yield our_phases(metrics, task)

    return Turn(name=name, run=run)


def steps_of(
    name: str, ranks: int, words: Sequence[str], through: list[str]
) -> Iterator[dict[str, float]]:
    """The metrics of the steps of a run; ``words`` are its file and overrides."""
    shutil.rmtree(RUNS, ignore_errors=True)
    command = [sys.executable, "tools/train_rl.py", "--nproc-per-node", str(ranks), "--config"]
    for line in started([*through, *command, *words], RUNS / "run/metrics.jsonl", name):
        if "time/step" in line["metrics"]:
            yield line["metrics"]


def our_config(task: Task, ranks: int, runs: Path) -> dict[str, Any]:
    """The configuration of our runs as nested keys."""
    return {
        "data": {
            "train_files": str(FOLDER / "prompts.parquet"),
            "max_prompt_length": task.prompt,
            "max_response_length": task.response,
            "train_batch_size": task.prompts,
        },
        "actor_rollout_ref": {
            "model": {"path": str(FOLDER / "model"), "dtype": task.dtype},
            "actor": {
                "ppo_mini_batch_size": task.prompts,
                "ppo_max_token_len_per_gpu": 2048,
                "use_kl_loss": True,
                "kl_loss_coef": KL_COEFFICIENT,
                "optim": {"lr": LEARNING_RATE},
            },
            "rollout": {
                "name": "vllm",
                "n": task.group,
                "max_num_seqs": task.rows,
                "kv_cache_gib": 2.0,
            },
        },
        "reward": {"reward_funcs": ["tools.bench.step:letters"]},
        "dag": {"custom_pipeline_fn": "ctrl_megatron.pipeline:grpo_pipeline"},
        "trainer": {
            "experiment_name": "run",
            "default_local_dir": str(runs),
            "total_training_steps": task.steps,
            "n_gpus_per_node": ranks,
            "logger": ["jsonl"],
            "resume_mode": "disable",
        },
    }


def our_phases(metrics: dict[str, float], task: Task) -> dict[str, float]:
    """Seconds by phase. Raises RuntimeError if a completion has another length."""
    if metrics["response/length"] != task.response:
        raise RuntimeError(f"completions have {metrics['response/length']} tokens on average")
    sync = metrics.get("sync/seconds", 0.0)
    seconds = {
        "step": metrics["time/step"],
        "weights to engine": sync,
        "generation": metrics["time/rollout_actor"] - sync,
    }
    for phase in ("old_log_prob", "ref_log_prob", "actor_update"):
        seconds[phase] = metrics.get(f"time/{phase}", 0.0)
    return seconds | {GEMM: metrics["perf/mfu"]}


def configured(
    config: str, ranks: int, steps: int, overrides: Sequence[str], through: list[str]
) -> Turn:
    """``tools/train_rl.py`` with a configuration file and these overrides."""
    own = (
        *(f"trainer.default_local_dir={RUNS}", "trainer.experiment_name=run"),
        *(f"trainer.total_training_steps={steps}", f"trainer.n_gpus_per_node={ranks}"),
        *("trainer.resume_mode=disable", "trainer.save_freq=-1", "data.val_files=[]"),
    )
    name = " ".join(["the run", *overrides])
    words = [config, *overrides, *own]
    return Turn(name=name, run=lambda: map(phases_of, steps_of(name, ranks, words, through)))


def phases_of(metrics: dict[str, float]) -> dict[str, float]:
    """Seconds of the step, of its pushes and of its nodes, which contain pushes."""
    pushes = {"step": metrics["time/step"], "weights to engine": metrics.get("sync/seconds", 0.0)}
    nodes = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
    return {**pushes, **nodes, SENT: metrics.get("sync/gigabytes", 0.0)}


# TRL


def trl(task: Task, settings: dict[str, Any], through: list[str]) -> Turn:
    """TRL's GRPOTrainer in a process of its own environment."""
    python = FOLDER / "trl" / "bin" / "python"

    def run() -> Iterator[dict[str, float]]:
        out = FOLDER / "trl.jsonl"
        out.unlink(missing_ok=True)
        spec = {"task": asdict(task), "settings": TRL_DEFAULTS | settings, "out": str(out)}
        command = [str(python), __file__, "--trl-worker", json.dumps(spec)]
        yield from started([*through, *command], out, "TRL")

    name = " ".join(["TRL", *(f"{key}={value}" for key, value in settings.items())])
    return Turn(name=name, run=run)


def make_trl(folder: Path) -> None:
    """The environment that ``requirements/trl.txt`` pins, once."""
    stamp = folder / "lock"
    if stamp.is_file() and stamp.read_text() == TRL_LOCK.read_text():
        return
    print(f"creating {folder} from {TRL_LOCK.relative_to(ROOT)} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-r", str(TRL_LOCK)], check=True)
    stamp.write_text(TRL_LOCK.read_text())


def train_with_trl(spec: dict[str, Any]) -> None:
    """In TRL's environment: train, and write the seconds of each step as one line."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    task = Task(**spec["task"])
    asked = json.loads((FOLDER / "questions.json").read_text())
    began: dict[str, float] = {}
    took: dict[str, float] = {}

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        if {len(ids) for ids in completion_ids} != {task.response}:
            raise RuntimeError(f"completions have {sorted(map(len, completion_ids))} tokens")
        return [share_of_e(completion[0]["content"]) for completion in completions]

    class Timed(GRPOTrainer):
        """Measures the phases of its step."""

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate(*args, **kwargs)
            took["generation"] = time.perf_counter() - start
            return result

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate_and_score_completions(*args, **kwargs)
            took["ref_log_prob"] = time.perf_counter() - start - took["generation"]
            return result

    class Clock(TrainerCallback):
        """A step begins with its prompts and ends with the optimizer."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began["step"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            took["step"] = time.perf_counter() - began["step"]
            took["actor_update"] = took["step"] - took["generation"] - took["ref_log_prob"]
            with open(spec["out"], "a") as file:
                print(json.dumps(took), file=file, flush=True)

    settings = spec["settings"]
    settings["gradient_accumulation_steps"] = task.rows // settings["per_device_train_batch_size"]
    trainer = Timed(
        model=str(FOLDER / "model"),
        args=GRPOConfig(
            output_dir=str(FOLDER / "trl_run"),
            model_init_kwargs={"dtype": task.dtype},
            num_generations=task.group,
            max_completion_length=task.response,
            beta=KL_COEFFICIENT,
            learning_rate=LEARNING_RATE,
            max_steps=task.steps,
            use_cpu=True,
            bf16=task.dtype == "bfloat16",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}]} for text in asked]
        ),
        callbacks=[Clock()],
    )
    print(f"TRL computes with {torch.get_num_threads()} threads", flush=True)
    trainer.train()


# Turns


def started(command: list[str], lines: Path, name: str) -> Iterator[dict[str, Any]]:
    """Run the command; yields the JSON lines that it writes to ``lines``, as they come."""
    log = FOLDER / "log.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    seen = 0
    try:
        while True:
            ended = process.poll() is not None
            there = lines.read_text().splitlines(keepends=True) if lines.is_file() else []
            whole = [line for line in there if line.endswith("\n")]
            for line in whole[seen:]:
                yield json.loads(line)
            seen = len(whole)
            if ended:
                break
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    if process.returncode:
        end = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{end}")


def take_turns(turns: list[Turn], rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """The counted steps of every program."""
    found: dict[str, list[dict[str, float]]] = {turn.name: [] for turn in turns}
    lasted: dict[str, float] = {}
    order = [turn for _ in range(rounds) for turn in turns]
    for number, turn in enumerate(order):
        left = order[number:]
        known = [lasted[t.name] for t in left if t.name in lasted]
        eta = f", about {sum(known) / 60:.0f} min left" if len(known) == len(left) else ""
        print(f"turn {number + 1} of {len(order)}: {turn.name}{eta}", flush=True)
        began = time.monotonic()
        for step, seconds in enumerate(turn.run()):
            note = "" if step else " (not counted)"
            print(f"  step {step + 1} of {steps}: {seconds['step']:.1f} s{note}", flush=True)
            if step:
                found[turn.name].append(seconds)
        if not found[turn.name]:
            raise RuntimeError(
                f"{turn.name} ended without a counted step; see {FOLDER / 'log.txt'}"
            )
        lasted[turn.name] = time.monotonic() - began
    return found


def report(found: dict[str, list[dict[str, float]]], task: Task | None) -> None:
    """Print medians, ratios to the first program, and the rates of ``task``."""
    medians = {
        name: {
            phase: statistics.median(s.get(phase, 0.0) for s in steps)
            for phase in dict.fromkeys(phase for step in steps for phase in step)
        }
        for name, steps in found.items()
    }
    first = next(iter(medians.values()))
    for name, median in medians.items():
        share, sent = median.pop(GEMM, None), median.pop(SENT, None)
        step, all_steps = median["step"], sorted(s["step"] for s in found[name])
        span = f" ({all_steps[0]:.1f} to {all_steps[-1]:.1f})" if len(all_steps) > 1 else ""
        print(f"{name}: {step:.1f} s a step{span}, {step / first['step']:.2f} times the first")
        if task is not None:
            prompts, responses = (task.rows * n / step for n in (task.prompt, task.response))
            print(f"    {prompts:.0f} prompt and {responses:.0f} response tokens/s in a whole step")
        for phase, seconds in median.items():
            if seconds and phase != "step":
                print(f"    {phase:>17}: {seconds:5.1f} s{rate_of(phase, seconds, task)}")
        if sent is not None:
            print(f"    {SENT:>17}: {sent:.3f}")
        if share is not None:
            print(f"    log-probs and update at {share:.0%} of what matrix products reach")


def rate_of(phase: str, seconds: float, task: Task | None) -> str:
    """The tokens of a phase in a second, where the task says how many it has."""
    if task is None or phase.startswith("weights"):
        return ""
    tokens = task.response if phase == "generation" else task.prompt + task.response
    return f", {task.rows * tokens / seconds:.0f} tokens/s"


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE texts with values as JSON, or text."""
    found: dict[str, Any] = {}
    for text in given:
        key, _, value = text.partition("=")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="runs/models/smollm2", help="Hugging Face directory")
    add("--dtype", default="bfloat16")
    add("--prompts", type=int, default=8, help="of a step")
    add("--group", type=int, default=4, help="completions of a prompt")
    add("--prompt", type=int, default=45, help="tokens of a prompt")
    add("--response", type=int, default=168, help="tokens of a completion")
    add("--ctrl", action="store_true", help="8 x 4 completions, 400 + 100 tokens, as CTRL's")
    add("--config", help="file of a run that is measured, in place of the task above")
    add("--steps", type=int, default=1, help="counted steps of a turn")
    add("--turns", type=int, default=2, help="of each")
    add("--ranks", type=int, default=2, help="processes of ours")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of ours, in all turns")
    add("--against", nargs="+", default=[], metavar="KEY=VALUE", help="more keys, in turns of own")
    add("--peer", choices=["trl"], help="also measure this system")
    add("--peer-set", nargs="+", default=[], metavar="KEY=VALUE", help="fields of GRPOConfig")
    add("--only-peer", action="store_true", help="no turns of ours")
    add("--through", default="", help="command that every turn is started through, as nice -n 5")
    add("--trl-worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_worker:
        return train_with_trl(json.loads(options.trl_worker))
    sys.path.insert(0, str(ROOT))
    from ctrl_megatron.metrics import measure_cpu_peak_flops

    through, steps = options.through.split(), 1 + options.steps
    if options.config:
        keys = [options.set] + ([[*options.set, *options.against]] if options.against else [])
        turns = [configured(options.config, options.ranks, steps, own, through) for own in keys]
        return report(take_turns(turns, options.turns, steps), None)
    shape = (400, 100) if options.ctrl else (options.prompt, options.response)
    task = Task(
        model=options.model,
        dtype=options.dtype,
        prompts=options.prompts,
        group=options.group,
        prompt=shape[0],
        response=shape[1],
        steps=steps,
    )
    prepare_model(ROOT / task.model, FOLDER / "model")
    asked = questions(FOLDER / "model", task)
    (FOLDER / "questions.json").write_text(json.dumps(asked))
    write_prompts(asked, FOLDER / "prompts.parquet")
    turns = list[Turn]()
    if not options.only_peer:
        turns.append(ours(task, options.ranks, options.set, through))
        if options.against:
            turns.append(ours(task, options.ranks, [*options.set, *options.against], through))
    if options.peer:
        make_trl(FOLDER / "trl")
        turns.append(trl(task, settings_of(options.peer_set), through))
    print(f"{task}", flush=True)
    found = take_turns(turns, options.turns, steps)
    peak = measure_cpu_peak_flops(task.dtype)
    print(f"\n{task}; matrix products reach {peak / 1e9:.0f} GFLOP/s here")
    report(found, task)


if __name__ == "__main__":
    main()
