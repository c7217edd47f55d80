"""Conversions between Hugging Face directories and checkpoints, outside a run.

Both have the same tensors under the same names, so a conversion builds no model: it reads and
writes one tensor (to a checkpoint) or one file (to an HF directory) after another. The folder
``hf`` of a checkpoint has the small HF files (config, tokenizer), so that the conversion back needs
no other directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ctrl_megatron.checkpoint.files import new_directory, require_own, require_space
from ctrl_megatron.checkpoint.hf import FILE_BYTES, HfFiles, copy_side_files
from ctrl_megatron.checkpoint.sharded import (
    TensorParts,
    load_tensors,
    require_whole,
    save_tensors,
    saved_tensors,
)
from ctrl_megatron.checkpoint.store import (
    HF_FOLDER,
    POLICY_FOLDER,
    STATE_FILE,
    VALUE_FOLDER,
    verify_alone,
)
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.build import DTYPES
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import value_shape
from ctrl_megatron.resharding.plan import hf_specs, place_in_buckets
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all) -> None; called while the conversion runs."""


def hf_to_megatron(
    hf: Path,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write ``hf`` as a checkpoint (step 0, weights only); memory has one tensor of it.

    Raises UserError for a model that is not supported, for an ``out`` that this tool did not write
    (its own output is replaced with ``overwrite``), and for a disk that is too small.
    """
    require_own(out, "convert_hf_to_megatron", overwrite=overwrite)
    shape = read_model_shape(hf)
    folder = VALUE_FOLDER if shape.value_head else POLICY_FOLDER
    config = json.loads((hf / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"{hf}: dtype {dtype} is not supported; known: {', '.join(DTYPES)}")
    source = SafetensorsDirectory(hf, mapped=False)
    source.check(shape)
    specs, done = hf_specs(shape, dtype), 0
    types = {spec.name: DTYPES[spec.dtype] for spec in specs}
    total = sum(spec_bytes(spec) for spec in specs)

    def read(name: str) -> torch.Tensor:
        nonlocal done
        tensor = source.read(name).to(types[name])
        done += tensor.nbytes
        progress(done, total)
        return tensor

    require_space(out, total, "the checkpoint")
    with new_directory(out, "convert_hf_to_megatron", overwrite=overwrite) as work:
        (work / folder).mkdir()
        tensors = {s.name: _FileTensor(s.name, s.shape, types[s.name], read) for s in specs}
        save_tensors(tensors, work / folder, None)
        (work / STATE_FILE).write_text(json.dumps({"step": 0, "weights_only": True}))
        copy_side_files(hf, work / HF_FOLDER)


class _FileTensor(TensorParts):
    """A whole tensor that is read at the moment it is written."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read: Callable[[str], torch.Tensor],
    ) -> None:
        super().__init__(shape, dtype)
        self._name, self._read = name, read

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        zeros = torch.Size([0] * len(self.shape))
        return [ChunkStorageMetadata(offsets=zeros, sizes=self.shape)]

    def part(self, offset: torch.Size) -> torch.Tensor:
        return self._read(self._name)


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    folder: str = POLICY_FOLDER,
    file_bytes: int = FILE_BYTES,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Export the weights of a checkpoint's ``folder`` in the type in which they were trained.

    Memory has one file of at most ``file_bytes``. A value model becomes transformers'
    token classification model with one label. Raises UserError for a checkpoint that is damaged,
    and for ``out`` as ``hf_to_megatron`` does.
    """
    require_own(out, "convert_megatron_to_hf", overwrite=overwrite)
    side = checkpoint / HF_FOLDER
    if not (checkpoint / folder).is_dir() or not side.is_dir():
        raise UserError(
            f"{checkpoint} is not a checkpoint with a {folder} model: it holds no {folder}/ and "
            f"{HF_FOLDER}/; give a directory like runs/NAME/checkpoints/global_step_N"
        )
    shape = read_model_shape(side)
    if folder == VALUE_FOLDER:
        shape = value_shape(shape)
    if verify_alone(checkpoint) is None:
        require_whole(checkpoint / folder)
    held, first = saved_tensors(checkpoint / folder), hf_specs(shape, "float32")[0].name
    if first not in held:
        raise UserError(f"{checkpoint / folder} does not fit {side}/config.json: no {first}")
    dtype = str(held[first].properties.dtype).removeprefix("torch.")
    places = place_in_buckets(hf_specs(shape, dtype), file_bytes)
    done, total = 0, sum(spec_bytes(place.spec) for place in places)
    require_space(out, total, "the model")
    with new_directory(out, "convert_megatron_to_hf", overwrite=overwrite) as work:
        files = HfFiles(work)
        for _, bucket in groupby(places, key=lambda place: place.bucket):
            specs = [place.spec for place in bucket]
            files.add(_read_whole(specs, checkpoint / folder))
            done += sum(spec_bytes(spec) for spec in specs)
            progress(done, total)
        files.finish(side, dtype, value_head=shape.value_head)


def _read_whole(specs: Iterable[TensorSpec], folder: Path) -> dict[str, torch.Tensor]:
    tensors, wanted = {}, {}
    for spec in specs:
        kind = DTYPES[spec.dtype]
        tensors[spec.name] = torch.empty(spec.shape, dtype=kind)
        wanted[spec.name] = whole = TensorParts(spec.shape, kind)
        whole.parts[torch.Size([0] * len(spec.shape))] = tensors[spec.name]
    load_tensors(wanted, folder, None)
    return tensors
