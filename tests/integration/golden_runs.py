"""Short runs with fixed seeds and the numbers and texts they must give, to the last digit.

``python tests/integration/golden_runs.py [NAME ...]`` records ``golden/NAME.json`` again, and for
the runs that dump a step ``golden/batches/NAME.json.xz``: the batch of step 2 before its update.
Use it after a change that intends to change what a run computes, and never to make a refactoring
pass.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch
from forked_run import ForkedRun, run_forked
from launched_run import Job
from tiny_run import JUDGMENTS, PROGRAM, chain_model, smollm2, write_problems

from ctrl_megatron.checkpoint.diffusion_start import hf_to_masked_diffusion
from ctrl_megatron.data.rows import read_rows, write_rows
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.preparation.task_rows import make_solving_rows
from ctrl_megatron.record.dump import FOLDER as DUMPS
from ctrl_megatron.record.dump import read_dump

FOLDER = Path(__file__).with_name("golden")
STEPS, DUMPED = 4, 2
COMPUTED = ("actor/", "critic/", "advantage/", "reward/", "critique/", "revision/")
COMPUTED += ("pass_rate/", "rollout/", "sampling/", "sft/", "episode/", "response/")
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
REPAIR = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:repair_pipeline",
    "dag.options={turns: 3, turn_tokens: 12}",
    *("reward.reward_funcs=[code]", "data.max_response_length=160"),
    "actor_rollout_ref.rollout.n=4",
)
COUPLED = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:coupled_grpo_pipeline",
    *("actor_rollout_ref.rollout.name=diffusion", "data.max_response_length=8"),
    *("reward.reward_funcs=[diffusion_rewards:variety]", "algorithm.adv_estimator=rloo"),
    *("actor_rollout_ref.rollout.engine_kwargs={steps: 3}", "data.max_prompt_length=256"),
)
TWICE = (
    *(_A + "ppo_epochs=2", _A + "ppo_mini_batch_size=2", _A + "clip_ratio=0.5"),
    *("actor_rollout_ref.ref.sync_steps=2", "actor_rollout_ref.ref.sync_mix=0.5"),
)
PROXY_MODEL = "actor_rollout_ref.proxy.model.path"
NO_REVISIONS = (PROXY_MODEL, "actor_rollout_ref.rollout.revision_max_tokens")
NO_PROGRAMS = (*NO_REVISIONS, "sandbox.workers")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: its settings, those of the job that it leaves out, its ranks, and the models and data
    that it starts from (a name of ``STARTS``)."""

    extra: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    ranks: int = 2
    start: str = "critic"
    dumps: bool = True
    """False for two policies, of which a dump would lack one."""

    def on(self, ranks: int) -> Case:
        """The same on so many ranks."""
        devices = f"trainer.n_gpus_per_node={ranks}"
        return replace(self, ranks=ranks, extra=(*self.extra, devices))


PAIR = (
    *("dag.custom_pipeline_fn=examples.two_agents:build", "actor_rollout_ref.proxy.kind=agent1"),
    *("agent1.optim.lr=2e-3", "agent1.rollout.n=3"),
)
_MORE: dict[str, Case] = {
    "remax": Case(extra=("algorithm.adv_estimator=remax",)),
    "stale": Case(
        extra=(
            "actor_rollout_ref.rollout.staleness=1",
            "actor_rollout_ref.rollout.placement=dedicated",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "algorithm.rollout_correction.rollout_is=token",
        )
    ),
    "repair": Case(extra=REPAIR, without=NO_REVISIONS, start="solver"),
    "coupled": Case(extra=(*COUPLED, *TWICE), without=NO_PROGRAMS, start="denoiser"),
    "two_policies": Case(extra=PAIR, without=(PROXY_MODEL,), start="pair", dumps=False),
}
_MORE |= {name: Case(extra=extra) for name, extra in RL.items()}
CASES: dict[str, Case] = {
    **{
        f"{name}_{n}rank{'s' * (n > 1)}": case.on(n) for name, case in _MORE.items() for n in (1, 2)
    },
    # The value model has the last rank for itself.
    "ppo_apart_2ranks": Case(extra=(*RL["ppo"], "placement.critic=[1]")).on(2),
    "ppo_apart_3ranks": Case(extra=(*RL["ppo"], "placement.critic=[2]")).on(3),
}
"""Long runs of which the batch of step ``DUMPED`` is compared too."""


def make_job(folder: Path) -> Job:
    """Models and data of a critic's runs."""
    source = smollm2(folder)
    return Job(
        actor=chain_model(folder / "actor", source, JUDGMENTS, 0.8),
        proxy=chain_model(folder / "proxy", source, [PROGRAM], 0.9),
        data=write_problems(folder / "train.parquet"),
        folder=folder / "runs",
    )


def _solver(job: Job, folder: Path) -> Job:
    """The actor writes a right and a wrong program about as often."""
    rows = make_solving_rows(read_rows(job.data))
    write_rows(folder / "solving.parquet", rows)
    actor = chain_model(folder / "solver", job.actor, [PROGRAM, "print(8)"], 0.8)
    return replace(job, actor=actor, proxy=actor, data=folder / "solving.parquet")


def _denoiser(job: Job, folder: Path) -> Job:
    """The critic as the start of a masked-diffusion model."""
    hf_to_masked_diffusion(job.actor, folder / "start", mask_token="<|mask|>")
    return replace(job, actor=folder / "start")


def _pair(job: Job, folder: Path) -> Job:
    """A second policy, in the proxy's place, that writes the program that is right for seven of the
    eight problems, or a wrong one."""
    return replace(
        job, proxy=chain_model(folder / "second", job.actor, (PROGRAM, "print(6)"), 0.88)
    )


STARTS: dict[str, Callable[[Job, Path], Job]] = {
    "critic": lambda job, folder: job,
    "solver": _solver,
    "denoiser": _denoiser,
    "pair": _pair,
}
"""What each kind of run starts from, made of the critic's in a new directory."""


def run_case(job: Job, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The steps of the case of that name, and the batch of step ``DUMPED`` if it dumps; ``job`` has
    what ``STARTS`` makes for it."""
    case = CASES[name]
    extra = (*DRAWN, *case.extra)
    if case.dumps:
        extra += (f"trainer.dump_steps=[{DUMPED}]",)
    if case.start == "pair":
        extra += (f"agent1.model.path={job.proxy}",)
    run = run_forked(job, name, steps=STEPS, extra=extra, without=case.without, ranks=case.ranks)
    assert run.codes == (0,) * case.ranks, run.output[-8000:]
    dump = run.folder / DUMPS / f"global_step_{DUMPED}"
    return steps_of(run), batch_of(dump) if case.dumps else {}


def batch_of(dump: Path) -> dict[str, Any]:
    """Every field of a dumped batch: numbers as lists, texts, and the ids of its rows."""
    found = read_dump(dump)
    fields = {name: value.tolist() for name, value in found.batch.items()}
    return {"fields": fields, "rows": [row.id for row in found.rows]}


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
    """Per step: what it computed, and what its examples say."""
    examples = run.folder / "examples.jsonl"
    drawn = read_json_lines(examples) if examples.is_file() else []
    return [
        {
            "metrics": {
                name: value
                for name, value in record["metrics"].items()
                if name.removeprefix("agent1/").startswith(COMPUTED)
                and name != "reward/cached_rate"
            },
            "texts": [example for example in drawn if example["step"] == record["step"]],
        }
        for record in run.metrics()
    ]


def without_versions(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps without the names of the weights that drew a text."""
    return [
        {
            "metrics": step["metrics"],
            "texts": [{k: v for k, v in text.items() if k != "versions"} for text in step["texts"]],
        }
        for step in steps
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


def load_batch(name: str) -> dict[str, Any]:
    """The recorded batch of a case; nothing for one that does not dump."""
    if not CASES[name].dumps:
        return {}
    return json.loads(lzma.decompress(_batch_file(name).read_bytes()))


def _batch_file(name: str) -> Path:
    return FOLDER / "batches" / f"{name}.json.xz"


def record(names: list[str]) -> None:
    """Run everything, or what is named, and write what came of it."""
    (FOLDER / "batches").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        job = make_job(Path(scratch))

        @cache
        def start(kind: str) -> Job:
            folder = Path(scratch) / kind
            folder.mkdir()
            return STARTS[kind](job, folder)

        for name in names or [*RL, "sft", *CASES]:
            if name in CASES:
                steps, batch = run_case(start(CASES[name].start), name)
                if batch:
                    _batch_file(name).write_bytes(lzma.compress(json.dumps(batch).encode()))
            else:
                steps = run_sft(job) if name == "sft" else run_rl(job, name, name)
            text = json.dumps({"machine": machine(), "steps": steps}, indent=1)
            (FOLDER / f"{name}.json").write_text(text + "\n")
            print(f"{FOLDER / name}.json: {len(steps)} steps", flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    record(sys.argv[1:])
