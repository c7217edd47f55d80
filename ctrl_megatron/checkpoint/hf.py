"""Reads and writes Hugging Face directories."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ctrl_megatron.checkpoint.files import atomic_directory
from ctrl_megatron.checkpoint.manifest import TRAINER, CheckpointOrigin, write_manifest
from ctrl_megatron.checkpoint.peft import base_identity, write_peft
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.lora import initial_value
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import CLASSIFIERS, AnyShape, value_model_shape
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.sources import ModelSource
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender

FILE_BYTES = 4 << 30
"""Largest size of a safetensors file, in bytes, unless one tensor is larger."""
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    ".index.json",
)
_OF_THE_SOURCE = ("README.md", "trainer_state.json", "adapter_config.json", "quantize_config.json")
"""Files that describe other weights: how they were made, or where loaders find them instead."""
LEFT_OUT_FILE = "left_out.safetensors"
"""In the side files of a checkpoint: the tensors that are not computed with
(``Family.left_out``), as they were in the model's directory."""
_FOLDERS = ("additional_chat_templates",)


def load_hf(model: ParallelModel, directory: str | Path) -> None:
    """Fill the model's shards from ``directory``; each rank reads only the slices it owns.

    A value model may start from a language model without its vocabulary head, where its own head is
    then zero, or from a reward model with its head. Adapters begin anew. Raises ValueError if the
    directory's config.json or tensors do not fit the model.
    """
    saved_shape = read_shape(directory, model.shape.strategy)
    trains = model.shape.value_head and model.shape.head_bias
    filled = value_model_shape(saved_shape) if trains else saved_shape
    if filled != model.shape.without_adapters:
        names = [field.name for field in fields(filled)]
        wrong = [n for n in names if getattr(filled, n) != getattr(model.shape.without_adapters, n)]
        raise UserError(
            f"{directory} holds another model than the one to fill: they differ in "
            + ", ".join(wrong)
        )
    tensors = SafetensorsDirectory(directory)
    tensors.check(saved_shape)
    if model.shape.lora is not None:
        model.base = base_identity(Path(directory), model.groups)
    there, own = hf_shapes(saved_shape), hf_shapes(model.shape)
    seed = model.shape.lora.seed if model.shape.lora else 0
    with torch.no_grad():
        for param, weight in model.shards():
            if tuple(weight.shape) != param.shape[-weight.dim() :]:
                raise RuntimeError(f"{param.name}: built {tuple(weight.shape)}, not {param.shape}")
            weight.zero_()  # rows that pad the vocabulary
            for piece in param.pieces:
                if piece.hf in there:
                    part = tensors.read_part(piece.hf, piece.hf_slices)
                else:
                    part = initial_value(piece.hf, own[piece.hf], seed)[piece.hf_slices]
                place = weight.view(param.shape)[piece.shard_slices]
                place.copy_(part.to(weight.device, weight.dtype))
    model.strategy.choose_row_packing()


def save_hf(
    model: ParallelModel,
    directory: str | Path,
    *,
    side_files: str | Path,
    file_bytes: int = FILE_BYTES,
    origin: CheckpointOrigin | None = None,
) -> None:
    """Write the weights as an HF directory that transformers and vLLM load. Collective.

    They go through three buckets of ``file_bytes`` in the hosts' shared memory; nothing else is
    gathered. config.json and the tokenizer are taken from ``side_files``; a value model becomes
    transformers' token classification model with one label. A manifest, which names ``origin``,
    has the hashes of all files. The directory appears completely or not at all.
    """
    dtype = model.options.build.dtype
    groups = model.groups
    model.onload("weights")
    layout = EngineLayout(dtype=dtype, bucket_bytes=file_bytes)
    with (
        atomic_directory(directory, active=groups.is_first) as folder,
        SharedMemorySender(groups).send(ModelSource(model, layout)) as buckets,
    ):
        files = HfDirectoryWriter(folder)
        for bucket in buckets:
            if groups.is_first:
                files.write_weights_file(dict(bucket.tensors))
        if groups.is_first:
            files.write_side_files(Path(side_files), dtype, model.shape)
            if not model.shape.value_head:
                add_turn_end_to_generation_config(folder)
            write_manifest(folder, TRAINER, origin=origin)
    groups.barrier()


def save_adapters(
    model: ParallelModel, directory: str | Path, *, origin: CheckpointOrigin | None = None
) -> None:
    """Write the adapters as PEFT's files. Collective. The directory appears completely or not at
    all, with a manifest as in ``save_hf``."""
    assert model.shape.lora is not None
    dtype = model.options.build.dtype
    groups, tensors = model.groups, dict[str, torch.Tensor]()
    model.onload("weights")
    layout = EngineLayout(dtype=dtype, bucket_bytes=FILE_BYTES, sends="trained")
    with (
        atomic_directory(directory, active=groups.is_first) as folder,
        SharedMemorySender(groups).send(ModelSource(model, layout)) as buckets,
    ):
        for bucket in buckets:
            if groups.is_first:
                tensors |= {name: tensor.clone() for name, tensor in bucket.tensors}
        if groups.is_first:
            head = model.shape.value_head
            write_peft(folder, model.shape.lora, model.base, tensors, value_head=head)
            write_manifest(folder, TRAINER, origin=origin)
    groups.barrier()


class HfDirectoryWriter:
    """The files of an HF directory, written one after another into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}

    def write_weights_file(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the next file; the tensors are in host memory and are not copied."""
        number = len(set(self._file_of.values())) + 1
        path = self._folder / f"model-{number:05d}.safetensors"
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors creates files that only their owner can read
        self._file_of |= dict.fromkeys(tensors, path.name)

    def write_side_files(self, side_files: Path, dtype: str, shape: AnyShape) -> None:
        """Write the files beside the weights: index, config.json, the tokenizer's files."""
        folder = self._folder
        copy_side_files(side_files, folder)
        if (left_out := folder / LEFT_OUT_FILE).is_file():
            names = SafetensorsDirectory.names_in(left_out)
            path = folder / f"model-{len(set(self._file_of.values())) + 1:05d}.safetensors"
            left_out.rename(path)
            self._file_of |= dict.fromkeys(names, path.name)
        files = sorted(set(self._file_of.values()))
        if len(files) == 1:
            (folder / files[0]).rename(folder / "model.safetensors")
        else:
            total = sum((folder / file).stat().st_size for file in files)
            index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        config = json.loads((folder / "config.json").read_text())
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        if "dtype" in (inner := config.get("text_config", {})):
            inner["dtype"] = dtype
        # Weights are written as they are trained, and layers that predict further tokens are not.
        config.pop("quantization_config", None)
        if config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0
        if shape.value_head:
            (end,) = [end for end, bias in CLASSIFIERS.items() if bias == shape.head_bias]
            name = "value" if shape.head_bias else "reward"
            labels = {"id2label": {"0": name}, "label2id": {name: 0}}
            config |= {"architectures": [_stem(config) + end], **labels}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def add_turn_end_to_generation_config(folder: Path) -> None:
    """Let ``generation_config.json`` name the token with which the chat template ends an answer, so
    that other programs stop at it too: a model that was fine-tuned writes no other.
    """
    config = json.loads((folder / "config.json").read_text())
    if not any(folder.glob("tokenizer*")):
        return
    codec, file = TextCodec(folder), folder / "generation_config.json"
    try:
        end = codec.turn_end_token_id
    except UserError:
        return  # the tokenizer of no chat model
    given = json.loads(file.read_text()) if file.is_file() else {}
    named = given.get("eos_token_id", config.get("eos_token_id"))
    ends = [token for token in (named if isinstance(named, list) else [named]) if token is not None]
    if end is not None and end not in ends:
        given["eos_token_id"] = [*ends, end]
        file.write_text(json.dumps(given, indent=2) + "\n")


def _stem(config: dict[str, Any]) -> str:
    """The prefix of a family's class names in transformers, such as ``Qwen2``."""
    architecture = (config.get("architectures") or [""])[0]
    return architecture.split("For")[0] or config["model_type"].title().replace("_", "")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the files beside the weights: config.json and all files that tokenizers and processors
    may read, including named chat templates. Tensors that the family leaves out become one file.
    """
    target.mkdir(parents=True, exist_ok=True)
    if (source / LEFT_OUT_FILE).is_file():
        shutil.copyfile(source / LEFT_OUT_FILE, target / LEFT_OUT_FILE)
    elif any(path.suffix == ".safetensors" for path in source.iterdir()) and (
        tensors := SafetensorsDirectory(source).kept()
    ):
        save_file(tensors, target / LEFT_OUT_FILE, metadata={"format": "pt"})
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name in _FOLDERS:
            copy_side_files(path, target / path.name)
        elif path.is_file() and not _is_others(path.name):
            shutil.copyfile(path, target / path.name)


def _is_others(name: str) -> bool:
    return name.startswith(".") or name in _OF_THE_SOURCE or name.endswith(_WEIGHTS)
