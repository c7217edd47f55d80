"""The model card of an export: what the files of its run say about data, rewards and measures."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ctrl_megatron import __version__
from ctrl_megatron.config import parse_yaml
from ctrl_megatron.config.load import dump_yaml
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.names import METRICS
from ctrl_megatron.metrics.report.run_files import RunFiles, read_run_files

_MEASURES = ("val/", "reward/", "sft/loss")
_LIBRARIES = ("torch", "megatron-core", "transformers")
_PINNED = re.compile(r"\w[\w.-]*/\w[\w.-]*@[0-9a-f]{40}")
_AUTHOR = "fill in: licence, intended use, and what a reader must not expect of the model"


def model_card(checkpoint: Path, *, model: str, adapters: bool) -> str:
    """The text of README.md for the export of a run's checkpoint: the ``model`` of it (policy,
    value, agent1, ...), or its ``adapters`` alone.

    It has what config.yaml and metrics.jsonl of the run say, without the folders of absolute paths:
    each measure as last logged up to the checkpoint's step. The run has no record of the versions
    of libraries; the card names those of the export. UserError for a directory that is no
    ``RUN/checkpoints/global_step_N`` of a run with these files.
    """
    step = re.fullmatch(r"global_step_(\d+)", checkpoint.resolve().name)
    run_dir = checkpoint.resolve().parent.parent
    run = read_run_files(run_dir) if step and run_dir.is_dir() else None
    if step is None or run is None or run.config is None or run.series is None:
        raise UserError(
            f"{checkpoint} is no global_step_N of a run with config.yaml and metrics.jsonl, from "
            "which a model card says how the model was trained",
            key="--push",
            remedy="name RUN/checkpoints/global_step_N, or leave --push out and use hf upload",
        )
    tree = parse_yaml(run.config, str(run_dir / "config.yaml"))[0]
    base = _value(tree, "actor_rollout_ref.model.path")
    tuned = "sft/loss" in run.series
    learning = "supervised-fine-tuning" if tuned else "reinforcement-learning"
    facts: dict[str, Any] = {
        "library_name": "peft" if adapters else "transformers",
        "tags": ["ctrl_megatron", "code-critique", learning],
    }
    if not model.endswith("value"):
        facts["pipeline_tag"] = "text-generation"
    if _PINNED.fullmatch(base):
        facts["base_model"] = base.partition("@")[0]
    what = "Adapters of the" if adapters else "The"
    installed = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    rows = "".join(f"| {name} | {text} |\n" for name, text in _training(tree, base, tuned).items())
    return (
        f"---\n{dump_yaml(facts)}---\n\n# {run.name}\n\n"
        f"{what} {model} model of step {step[1]} of the run `{run.name}`, trained with "
        f"ctrl_megatron.\n\n<!-- {_AUTHOR} -->\n\n## Training\n\n| | |\n|---|---|\n{rows}\n"
        f"## Measures\n\n{_measures(run, int(step[1]))}\n"
        f"## Versions\n\nExported with ctrl_megatron {__version__}, {installed}.\n"
    )


def _training(tree: Any, base: str, tuned: bool) -> dict[str, str]:
    """Data, rewards and algorithm as the configuration has them; ``tuned``: of SFT."""
    data = "sft" if tuned else "data"
    facts = {
        "trained from": base,
        "training rows": _value(tree, f"{data}.train_files"),
        "validation rows": _value(tree, f"{data}.val_files"),
        "batch": _value(tree, f"{data}.train_batch_size"),
    }
    if not tuned:
        family = "actor_rollout_ref"
        facts |= {
            "rewards": _value(tree, "reward.reward_funcs"),
            "their weights": _value(tree, "reward.reward_weights"),
            "programs judged by": _value(tree, "reward.provider"),
            "revised by": _value(tree, f"{family}.proxy.model.path")
            or _value(tree, f"{family}.proxy.api.model"),
            "advantages": _value(tree, "algorithm.adv_estimator"),
            "policy loss": _value(tree, f"{family}.actor.policy_loss"),
            "samples of a prompt": _value(tree, f"{family}.rollout.n"),
            "learning rate": _value(tree, f"{family}.actor.optim.lr"),
        }
    else:
        facts |= {"method": "supervised fine-tuning", "learning rate": _value(tree, "sft.lr")}
    return {name: f"`{text}`" for name, text in facts.items() if text}


def _value(tree: Any, key: str) -> str:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    values = tree if isinstance(tree, list) else [tree]
    texts = ("" if value is None else str(value) for value in values)
    # An absolute path tells of the author's machine.
    return ", ".join(t.rpartition("/")[2] if t.startswith("/") else t for t in texts)


def _measures(run: RunFiles, step: int) -> str:
    lines = ""
    for name, points in sorted((run.series or {}).items()):
        past = [point for point in points if point[0] <= step]
        if past and name.startswith(_MEASURES):
            meaning = METRICS[name].meaning if name in METRICS else ""
            lines += f"| `{name}` | {format_number(past[-1][1])} | {past[-1][0]} | {meaning} |\n"
    return f"| measure | value | step | says |\n|---|---|---|---|\n{lines}"
