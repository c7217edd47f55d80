"""Adapters in checkpoints and as PEFT's files.

A checkpoint of adapters lacks the weights beside which they were trained: it names their directory
and has the hashes of its files, so that a resume and a conversion notice other weights. PEFT's
files are ``adapter_model.safetensors`` and ``adapter_config.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ctrl_megatron.checkpoint.hashes import hash_files, num_hashing_threads
from ctrl_megatron.checkpoint.manifest import (
    DamagedFiles,
    ordinary_file_size,
    read_checkpoint_json,
    split_by_bytes,
)
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.lora import LoraBaseWeights
from ctrl_megatron.models.rules import ADAPTED
from ctrl_megatron.models.shape import AnyShape
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.types import Lora

ADAPTERS_FILE = "adapters.json"
"""The file in a model's folder of a checkpoint that says to which weights its adapters belong."""
_WEIGHTS = "*.safetensors"
_PATH = "actor_rollout_ref.model.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """The content of ``ADAPTERS_FILE``: the options of the adapters and the weights that they were
    trained beside, no tensor."""

    lora: Lora
    base: LoraBaseWeights

    def write(self, folder: Path) -> None:
        """Write ``ADAPTERS_FILE`` in ``folder``."""
        (folder / ADAPTERS_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_adapter_description(folder: Path) -> AdapterDescription | None:
    """The description of a model's adapters in its folder; None for a model without. DamagedFiles
    if the file cannot be read."""
    file = folder / ADAPTERS_FILE
    if ordinary_file_size(file) is None:
        return None
    found = read_checkpoint_json(file)
    try:
        return AdapterDescription(
            lora=Lora.from_json(found["lora"]), base=LoraBaseWeights(**found["base"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFiles(f"cannot be read: {error}", file=file) from error


def require_same_adapters(folder: Path, shape: AnyShape, base: LoraBaseWeights | None) -> None:
    """UserError unless the adapters in a checkpoint's ``folder`` are those of a model of ``shape``
    beside the weights ``base``."""
    saved = read_adapter_description(folder)
    if saved is None and shape.lora is None:
        return
    if saved is None or shape.lora is None:
        has, remedy = ("whole weights", "0") if saved is None else ("adapters", "its rank")
        raise UserError(
            f"{folder} has {has}",
            key="actor_rollout_ref.model.lora_rank",
            remedy=f"resume with {remedy}, or start over with trainer.resume_mode=disable",
        )
    for name, key in (
        ("rank", "lora_rank"),
        ("alpha", "lora_alpha"),
        ("targets", "target_modules"),
        ("shared_outer", "experts_shared_outer_loras"),
    ):
        then, now = getattr(saved.lora, name), getattr(shape.lora, name)
        if then != now:
            raise UserError(
                f"the adapters in {folder} have {name} {then}, the run's {now}",
                key=f"actor_rollout_ref.model.{key}",
                remedy="resume with the value that saved them",
            )
    if base is not None:
        require_same_base(saved.base, base, folder)


def require_same_base(
    saved: LoraBaseWeights, found: LoraBaseWeights, folder: Path, *, key: str = _PATH
) -> None:
    """UserError unless the directory ``found`` has the weights of ``saved``."""
    if saved.hashes != found.hashes:
        raise UserError(
            f"the adapters in {folder} were trained beside the weights of {saved.path}; those of "
            f"{found.path} differ",
            key=key,
            remedy="name the directory with the same safetensors files",
        )


def base_identity(directory: Path, groups: ProcessGroups | None) -> LoraBaseWeights:
    """The identity of a directory's weights. Collective: each rank reads a share of the files; one
    process reads them alone for None."""
    sizes = {path.name: path.stat().st_size for path in directory.glob(_WEIGHTS)}
    world, rank = (1, 0) if groups is None else (groups.size, groups.rank)
    mine = split_by_bytes(sizes, world)[rank]
    found = dict[str, str]()
    hashes = hash_files([directory / name for name in mine], num_hashing_threads())
    for name, one in zip(mine, hashes, strict=True):
        if isinstance(one, OSError):
            raise one
        found[name] = one
    parts = [found] if groups is None else groups.all_gather(found)
    whole = {name: one for part in parts for name, one in part.items()}
    return LoraBaseWeights(path=str(directory.resolve()), hashes=dict(sorted(whole.items())))


_OF_EXPERTS = re.compile(r"\.experts\.(?:(\d+)\.)?\w+\.lora_[AB]\.")


def with_own_matrices(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters ``tensors`` with every matrix that experts share under the name of each, as
    PEFT, vLLM and SGLang read them."""
    found = {name: _OF_EXPERTS.search(name) for name in tensors}
    experts = sorted({int(match[1]) for match in found.values() if match and match[1]})
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = found[name]
        if match is None or match[1]:
            own[name] = tensor
        else:
            names = [name.replace(".experts.", f".experts.{expert}.") for expert in experts]
            own |= {one: tensor.clone() for one in names}
    return own


def peft_config(lora: Lora, base: LoraBaseWeights | None, *, value_head: bool) -> dict[str, Any]:
    """The content of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if value_head else "CAUSAL_LM",
        "base_model_name_or_path": base and base.path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "modules_to_save": ["score"] if value_head else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def write_peft(
    folder: Path,
    lora: Lora,
    base: LoraBaseWeights | None,
    tensors: Mapping[str, torch.Tensor],
    *,
    value_head: bool,
) -> None:
    """Write PEFT's two files into ``folder``; ``tensors`` are a model's trained ones by their HF
    names. Every expert gets its own copy of a matrix that it shares."""
    named = {name if name.startswith(ADAPTED) else ADAPTED + name: t for name, t in tensors.items()}
    named = with_own_matrices(named)
    file = folder / "adapter_model.safetensors"
    file.touch()
    mode = file.stat().st_mode
    save_file(named, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors creates files that only their owner can read
    config = peft_config(lora, base, value_head=value_head)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
