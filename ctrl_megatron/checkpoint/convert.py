"""Conversions between Hugging Face directories and checkpoints, outside a run.

Both have the same tensors under the same names, so a conversion builds no model: it reads and
writes one tensor (to a checkpoint) or one file (to an HF directory) after another. The folder
``hf`` of a checkpoint has the small HF files (config, tokenizer), so that the conversion back needs
no other directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ctrl_megatron.checkpoint.files import (
    require_free_disk_bytes,
    require_replaceable_directory,
    tool_output_directory,
)
from ctrl_megatron.checkpoint.hf import FILE_BYTES, HfDirectoryWriter, copy_side_files
from ctrl_megatron.checkpoint.peft import (
    AdapterDescription,
    base_identity,
    read_adapter_description,
    require_same_base,
    write_peft,
)
from ctrl_megatron.checkpoint.sharded import (
    TensorParts,
    load_tensors,
    save_tensors,
    saved_tensor_metadata,
)
from ctrl_megatron.checkpoint.store import (
    HF_FOLDER,
    POLICY_FOLDER,
    STATE_FILE,
    VALUE_FOLDER,
    hf_folder,
    verify_in_one_process,
)
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.build import DTYPES
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.lora import shape_with_adapters
from ctrl_megatron.models.rules import adapter_names
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import AnyShape, value_model_shape
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
    require_replaceable_directory(out, "convert_hf_to_megatron", overwrite=overwrite)
    shape = read_shape(hf, None)
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

    require_free_disk_bytes(out, total, "the checkpoint")
    with tool_output_directory(out, "convert_hf_to_megatron", overwrite=overwrite) as work:
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
    base: Path | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Export the weights of a checkpoint's ``folder`` in the type in which they were trained.

    Memory has one file of at most ``file_bytes``. A value model becomes transformers'
    token classification model with one label. Adapters are merged into the weights of ``base``, by
    default the directory beside whose weights they were trained. Raises UserError for a checkpoint
    that is damaged, for a ``base`` with other weights, and for ``out`` as ``hf_to_megatron`` does.
    """
    require_replaceable_directory(out, "convert_megatron_to_hf", overwrite=overwrite)
    source = _source(checkpoint, folder)
    side, shape, dtype = source.side, source.shape.without_adapters, source.dtype
    read = partial(_read_whole, folder=source.folder)
    if source.adapters is not None:
        read = _Merging(source, base).read
    elif base is not None:
        raise UserError(f"{source.folder} has whole weights", key="--base", remedy="leave it out")
    places = place_in_buckets(hf_specs(shape, dtype), file_bytes)
    done, total = 0, sum(spec_bytes(place.spec) for place in places)
    require_free_disk_bytes(out, total, "the model")
    with tool_output_directory(out, "convert_megatron_to_hf", overwrite=overwrite) as work:
        files = HfDirectoryWriter(work)
        for _, bucket in groupby(places, key=lambda place: place.bucket):
            specs = [place.spec for place in bucket]
            files.write_weights_file(read(specs))
            done += sum(spec_bytes(spec) for spec in specs)
            progress(done, total)
        files.write_side_files(side, dtype, shape)


def megatron_to_peft(
    checkpoint: Path, out: Path, *, folder: str = POLICY_FOLDER, overwrite: bool = False
) -> None:
    """Export the adapters of a checkpoint's ``folder`` as PEFT's files. Raises UserError for a
    model without adapters, and as ``megatron_to_hf``."""
    require_replaceable_directory(out, "convert_megatron_to_hf", overwrite=overwrite)
    source = _source(checkpoint, folder)
    if source.adapters is None:
        raise UserError(
            f"{source.folder} has whole weights, no adapters",
            key="--adapters",
            remedy="leave it out",
        )
    specs = hf_specs(source.shape, source.dtype, "trained")
    require_free_disk_bytes(out, sum(map(spec_bytes, specs)), "the adapters")
    with tool_output_directory(out, "convert_megatron_to_hf", overwrite=overwrite) as work:
        write_peft(
            work,
            source.adapters.lora,
            source.adapters.base,
            _read_whole(specs, folder=source.folder),
            value_head=source.shape.value_head,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedModel:
    """A model in an undamaged checkpoint."""

    folder: Path
    side: Path
    """The directory with its config.json and tokenizer."""
    shape: AnyShape
    dtype: str
    adapters: AdapterDescription | None


def _source(checkpoint: Path, model: str) -> _SavedModel:
    """The model in the folder ``model`` of a checkpoint; UserError as ``megatron_to_hf``."""
    side, folder = checkpoint / hf_folder(model), checkpoint / model
    if not side.is_dir():
        side = checkpoint / HF_FOLDER  # an older version saved it, with one kind of model
    if not folder.is_dir() or not side.is_dir():
        raise UserError(
            f"{checkpoint} is not a checkpoint with a {model} model: it holds no {model}/ and "
            f"{HF_FOLDER}/; give a directory like runs/NAME/checkpoints/global_step_N"
        )
    shape = read_shape(side, None)
    if model.endswith(VALUE_FOLDER) and not shape.value_head:
        shape = value_model_shape(shape)
    verify_in_one_process(checkpoint)
    adapters = read_adapter_description(folder)
    shape = shape_with_adapters(shape, adapters and adapters.lora)
    held, first = saved_tensor_metadata(folder), hf_specs(shape, "float32", "trained")[0].name
    if first not in held:
        raise UserError(f"{folder} does not fit {side}/config.json: no {first}")
    dtype = str(held[first].properties.dtype).removeprefix("torch.")
    return _SavedModel(folder=folder, side=side, shape=shape, dtype=dtype, adapters=adapters)


class _Merging:
    """Reads weights with adapters merged into them."""

    def __init__(self, source: _SavedModel, base: Path | None) -> None:
        """UserError if the directory ``base`` has other weights than the adapters' own."""
        assert source.adapters is not None
        saved = source.adapters.base
        directory = base or Path(saved.path)
        if not directory.is_dir():
            raise UserError(
                f"{directory}, beside whose weights the adapters were trained, does not exist",
                key="--base",
                remedy="name the directory with the same safetensors files",
            )
        require_same_base(saved, base_identity(directory, None), source.folder, key="--base")
        self._source, self._lora = source, source.adapters.lora
        self._base = SafetensorsDirectory(directory, mapped=False)
        self._trained = {s.name: s for s in hf_specs(source.shape, source.dtype, "trained")}

    def read(self, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
        return {spec.name: self._merged(spec) for spec in specs}

    def _merged(self, spec: TensorSpec) -> torch.Tensor:
        pair = adapter_names(spec.name, self._lora)
        names = [name for name in (spec.name, *pair) if name in self._trained]
        tensors = _read_whole([self._trained[name] for name in names], folder=self._source.folder)
        if spec.name in tensors:
            return tensors[spec.name]
        weight = self._base.read(spec.name)
        if tensors:
            down, up = (tensors[name].float() for name in pair)
            weight = self._lora.scale * (up @ down) + weight
        return weight.to(DTYPES[spec.dtype])


def _read_whole(specs: Iterable[TensorSpec], *, folder: Path) -> dict[str, torch.Tensor]:
    tensors, wanted = {}, {}
    for spec in specs:
        kind = DTYPES[spec.dtype]
        tensors[spec.name] = torch.empty(spec.shape, dtype=kind)
        wanted[spec.name] = whole = TensorParts(spec.shape, kind)
        whole.parts[torch.Size([0] * len(spec.shape))] = tensors[spec.name]
    load_tensors(wanted, folder, None)
    return tensors
