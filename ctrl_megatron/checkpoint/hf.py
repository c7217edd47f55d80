"""Hugging Face directories in and out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ctrl_megatron.checkpoint.files import whole_directory
from ctrl_megatron.models.families import hf_names
from ctrl_megatron.models.hf_config import read_model_shape, value_shape
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.resharding.buckets import fill_buckets, shared_segments
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.sources import MegatronSource

_SIDE_FILES = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja"),
]


def load_hf(model: ParallelModel, directory: str | Path) -> None:
    """Fill the model's shards from ``directory``; each rank reads only the slices it owns.

    A value model may start from a language model, whose vocabulary head it leaves; its own head is
    then zero. Raises ValueError if the directory's config.json or tensors do not fit the model.
    """
    given = read_model_shape(directory)
    starts = model.shape.value_head and not given.value_head
    if (value_shape(given) if starts else given) != model.shape:
        raise ValueError(f"{directory} holds another model than the one to fill: {given}")
    tensors = SafetensorsDirectory(directory)
    tensors.check(given)
    there = set(hf_names(given))
    with torch.no_grad():
        for param, weight in model.shards():
            if tuple(weight.shape) != param.shape:
                raise RuntimeError(f"{param.name}: built {tuple(weight.shape)}, not {param.shape}")
            weight.zero_()  # rows that pad the vocabulary, and a new value head
            for piece in (p for p in param.pieces if p.hf in there):
                part = tensors.read_part(piece.hf, piece.hf_slices)
                weight[piece.slices].copy_(part.to(weight.device, weight.dtype))


def save_hf(
    model: ParallelModel,
    directory: str | Path,
    *,
    side_files: str | Path,
    file_bytes: int = 4 << 30,
) -> None:
    """Write the weights as an HF directory that transformers and vLLM load. Collective.

    config.json and the tokenizer are taken from ``side_files``; a value model becomes transformers'
    token classification model with one label. The directory appears whole.
    """
    dtype = str(next(model.models[0].parameters()).dtype).removeprefix("torch.")
    groups = model.groups
    layout = EngineLayout(dtype=dtype, bucket_bytes=file_bytes)
    source = MegatronSource(model, layout, readers=(groups.hosts.of_rank[0],))
    with (
        whole_directory(directory, active=groups.is_first) as folder,
        shared_segments(source.places, groups) as segments,
    ):
        names: dict[str, str] = {}
        for bucket in fill_buckets(source, segments, groups):
            if groups.is_first:
                file = f"model-{bucket.number + 1:05d}.safetensors"
                tensors = {name: tensor.clone() for name, tensor in bucket.tensors()}
                save_file(tensors, folder / file, metadata={"format": "pt"})
                names |= dict.fromkeys(tensors, file)
        if groups.is_first:
            _finish(folder, Path(side_files), names, dtype, value_head=model.shape.value_head)
    groups.barrier()


def _finish(
    folder: Path, side_files: Path, names: dict[str, str], dtype: str, *, value_head: bool
) -> None:
    files = sorted(set(names.values()))
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
    else:
        total = sum((folder / file).stat().st_size for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    copy_side_files(side_files, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    if value_head:
        kind = config["model_type"].capitalize() + "ForTokenClassification"
        config |= {"architectures": [kind], "id2label": {"0": "value"}, "label2id": {"value": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy config.json and the tokenizer's files, those that exist."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
