"""The commands of README.md and of the first comments of configurations run as they are printed, in
a checkout whose models, files and settings are tiny."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_script import Shell, forked_shell
from free_port import free_port
from omegaconf import OmegaConf
from shown_commands import CONFIGS, ROOT, blocks
from test_journeys import CONFIG, steps
from tiny_run import JUDGMENTS, PROGRAM, byte_chat_model, chain_model

from ctrl_megatron.checkpoint.diffusion_start import hf_to_masked_diffusion
from ctrl_megatron.commands import prepare_smollm2
from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)

README, MODEL = ROOT / "README.md", "runs/models/smollm2"
TRAINED = [file for file in CONFIGS if file.name != "diffusion_smollm2_cpu.yaml"]
"""Its command, a demonstration, has stages of its own: ``tests/tools/test_demo_diffusion.py``."""
PROBLEMS = 36
"""So many problems of the easiest level take the place of all."""
RANKS = 2
"""At most so many take the place of all GPUs."""
LARGEST = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 2,
}
OF_VLLM = {"kv_cache_gib", "gpu_memory_utilization", "enforce_eager", "adapter_push"}
OF_VLLM |= {"tensor_model_parallel_size"}
BEFORE = f"""
set -euo pipefail
torchrun() {{ python -m torch.distributed.run "$@"; }}
sbatch() {{
  ctrl-train-rl --nproc-per-node {RANKS} --config "${{CONFIG:-examples/ctrl_70b.yaml}}"
}}
ctrl-generate() {{
  command ctrl-generate "$@" --engine hf --limit 2 \\
    --max-tokens 16 --critique-max-tokens 16 --revision-max-tokens 16
}}
ctrl-demo() {{ command ctrl-demo "$@" --engine hf; }}
ctrl-serve-critic() {{
  command ctrl-serve-critic "$@" --engine hf --max-tokens 16 --port $PORT > served.log 2>&1 &
  curl --silent --retry 99 --retry-connrefused --retry-delay 1 --fail \\
    http://127.0.0.1:$PORT/v1/critiques \\
    --json '{json.dumps({"problem": "Print seven.", "solution": "print(8)", "revise": True})}'
  kill $!
  wait $! || [ $? = 130 ]
}}
"""
"""What makes the commands tiny where no file does; a served critic is asked once.
``tests/architecture/test_slurm.py`` tests what sbatch submits."""


def shrink(folder: Path, name: str, **trainer: int) -> dict[str, Any]:
    """Make the configuration ``name`` of the checkout a tiny one; its keys."""
    tiny = yaml.safe_load(CONFIG)
    del tiny["actor_rollout_ref"]["actor"]["optim"]  # critiques would lose their form
    del tiny["trainer"]["n_gpus_per_node"]
    keys: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(ROOT / name), tiny))
    family, data, shown = keys["actor_rollout_ref"], keys["data"], keys["trainer"]
    for engine in (family["rollout"], family.get("proxy", {}).get("engine", {})):
        for key in OF_VLLM & engine.keys():
            del engine[key]
        if engine.get("name") == "vllm":
            engine["name"] = "hf"
    if "dag" in keys:  # it revises nothing
        del family["rollout"]["revision_max_tokens"]
    family["actor"]["ppo_max_token_len_per_gpu"] = 2048
    layout = family["actor"].get("megatron", {})
    layout |= {key: min(most, layout[key]) for key, most in LARGEST.items() if key in layout}
    data.setdefault("val_files", data["train_files"])
    shown.pop("total_epochs", None)
    shown |= {"nnodes": 1, "n_gpus_per_node": min(RANKS, shown["n_gpus_per_node"]), **trainer}
    (folder / name).write_text(yaml.safe_dump(keys))
    return keys


@pytest.fixture(scope="module")
def shell(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("checkout")
    with forked_shell(folder) as shell:
        examples = folder / "examples"
        examples.unlink()
        shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("transcripts"))
        level = examples / "problems/level0.jsonl"
        lines = level.read_text().splitlines()[:PROBLEMS]
        known = {json.loads(line)["id"] for line in lines}
        for file in level.parent.glob("*.jsonl"):
            file.unlink()
        level.write_text("\n".join(lines))
        for file in (examples / "solutions/smollm2.jsonl", examples / "mutants/builtin.jsonl"):
            kept = [one for one in read_json_lines(file) if one["problem_id"] in known]
            file.write_text("".join(json.dumps(one) + "\n" for one in kept))
        # The model is what the command that prepares it left there.
        model = folder / MODEL
        chain_model(model, smollm2_path, (*JUDGMENTS, PROGRAM), 0.8)
        _, stamp = prepare_smollm2.find_source()
        contents = {**stamp, "files": prepare_smollm2.sizes_in(model)}
        (model / prepare_smollm2.STAMP).write_text(json.dumps(contents))
        yield shell


def run(shell: Shell, name: str, *commands: str) -> str:
    """The output of the commands, one after the other."""
    script = shell.folder / f"{name}.sh"
    script.write_text("\n".join((BEFORE, *commands)))
    return shell.run(script, {"PORT": str(free_port())})


def test_the_commands_of_readme_make_and_use_a_critic(shell: Shell) -> None:
    """The check of the environment, the quickstart with the reward of ``mine.py``, and the rest."""
    text = README.read_text()
    (own,) = re.findall(r"^```python\n# mine.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (shell.folder / "mine.py").write_text(own)
    shrink(shell.folder, "examples/ctrl_smollm2_cpu.yaml", total_training_steps=5)
    quickstart, use = (b for b in blocks(README) if b.startswith(("python", "ctrl-convert")))
    (words,) = re.findall(r"`(reward\.reward_funcs=\S+)`", text)
    check = "ctrl-check-env || [ $? = 1 ]"  # its findings are the machine's
    said = run(shell, "readme", check, f"{quickstart} {words}", use)
    assert "kernel: optimizer" in said
    assert f"SmolLM2 is up to date in {MODEL}" in said
    assert "report: runs/critic/report.html" in said
    trained = steps(shell.folder / "runs/critic")
    assert len(trained) == 5
    assert all(step["reward/mine:short_answers"] > 0 for step in trained)
    assert any(step["critique/valid_rate"] > 0 for step in trained)
    assert '"judgment": ' in said and '"revision": ' in said
    assert (shell.folder / "runs/tree/nodes.parquet").is_file()


@pytest.mark.long
def test_the_demo_of_readme_compares_seeds(shell: Shell) -> None:
    (words,) = re.findall(r"`(ctrl-demo --seeds 1 2)[ \d]*`", README.read_text())
    shrink(shell.folder, "examples/study_smollm2/mutants.yaml")
    said = run(shell, "demo", words)
    assert "mean of 2 seeds: " in said and "groups with different rewards: " in said


@pytest.fixture(scope="module")
def rows(shell: Shell) -> None:
    """The files that configurations for GPUs name."""
    run(shell, "rows", "ctrl-synthesize --solutions examples/solutions/smollm2.jsonl")
    (shell.folder / "data").mkdir()
    for name in ("train", "val"):
        for kind, row in (("rl_", ""), ("sft_", "sft_")):
            source = shell.folder / f"runs/data/{row}{name}.parquet"
            (shell.folder / f"data/{kind}{name}.parquet").symlink_to(source)
    (shell.folder / "data/acecode_hard.parquet").symlink_to("rl_train.parquet")


def make_models(shell: Shell, keys: dict[str, Any], smollm2: Path) -> None:
    """The models that a configuration names and that no command of its comment makes."""
    family = keys["actor_rollout_ref"]
    experts = 4 if "expert_model_parallel_size" in family["actor"].get("megatron", {}) else 0
    for part, texts in ((family, JUDGMENTS), (family.get("proxy", {}), (PROGRAM,))):
        path = part.get("model", {}).get("path", MODEL)
        model = shell.folder / path
        if path == "runs/models/tinyllama":
            byte_chat_model(model, texts)
        elif path.startswith("runs/") or model.exists():
            continue
        elif family["rollout"]["name"] == "diffusion":
            hf_to_masked_diffusion(shell.folder / MODEL, model, mask_token="<|mask|>")
        else:
            chain_model(model, smollm2, texts, 0.8, experts=experts)


@pytest.mark.long
@pytest.mark.parametrize("file", TRAINED, ids=lambda file: file.stem)
def test_the_commands_of_a_configuration_train(
    file: Path, shell: Shell, rows: None, smollm2_path: Path
) -> None:
    """``tests/architecture/test_docs_commands.py`` runs plans, which are those of large models."""
    keys = shrink(shell.folder, file.relative_to(ROOT).as_posix())
    make_models(shell, keys, smollm2_path)
    (block,) = blocks(file)
    lines = block.replace("\\\n", "").splitlines()
    shown = "\n".join(line for line in lines if not re.search(r"\bplan\b", line))
    run(shell, file.stem, shown.replace("--nproc-per-node 8", f"--nproc-per-node {RANKS}"))
    trained = steps(shell.folder / "runs" / keys["trainer"]["experiment_name"])
    assert sum("actor/grad_norm" in step for step in trained) == 2
