"""A model's tensors in a checkpoint, written and read by all ranks in parallel.

They have the names and shapes of a Hugging Face directory with every layout, layer spec and
optimizer: ``NAME`` is a weight, ``optimizer.exp_avg.NAME``, ``.exp_avg_sq.`` and
``.main_param.`` its optimizer state. Every rank writes its own rectangles, one rank writes
each element, and nothing is gathered. The files are those of
``torch.distributed.checkpoint``, and files of tensors begin with a line that names run and step.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ctrl_megatron.checkpoint.hashes import HashingFile
from ctrl_megatron.checkpoint.manifest import (
    ANOTHER,
    CheckpointOrigin,
    DamagedFiles,
    ordinary_file_size,
    read_checkpoint_json,
)
from ctrl_megatron.checkpoint.peft import AdapterDescription, require_same_adapters
from ctrl_megatron.checkpoint.tensor_metadata import LoadedMetadataReader, read_tensor_metadata
from ctrl_megatron.errors import UserError, find_user_error, name_file_in_errors
from ctrl_megatron.models.optimizer import OwnedRange
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shards import Piece, ShardParam
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.layout import REPLICAS

STEPS_FILE = "optimizer.json"
"""The number of optimizer steps; a checkpoint of weights alone has none."""

PARTS_SUFFIX = ".distcp"
"""Ending of the files of tensors."""
_COUNTED = ("adam", "schedule")
_FILE_BYTES = 1 << 30


class TensorParts:
    """Rectangles of one whole tensor that this process writes or reads, by their offsets in it.

    torch.distributed.checkpoint calls the dunder methods of a sharded tensor.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.parts: dict[torch.Size, torch.Tensor] = {}

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offset, sizes=part.shape)
            for offset, part in self.parts.items()
        ]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def part(self, offset: torch.Size) -> torch.Tensor:
        return self.parts[offset]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The part of a model that one rank writes: what is trained."""

    tensors: Mapping[str, TensorParts]
    steps: Mapping[str, int] | None
    """``ModelOptimizer.adam_and_schedule_steps``; None for a model without an optimizer."""
    adapters: AdapterDescription | None = None
    """None if the tensors are the whole model."""

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(t.nbytes for whole in self.tensors.values() for t in whole.parts.values())


def take_snapshot(model: ParallelModel, *, copy: bool) -> Snapshot:
    """This rank's part of a checkpoint, as views of the model or, with ``copy``, in host memory:
    then training may continue while the snapshot is written. Collective.
    """
    tensors = state_tensors(model, saving=True)
    if copy:
        for whole in tensors.values():
            for offset, part in whole.parts.items():
                whole.parts[offset] = part.to("cpu", copy=True)
    steps = None
    if model.optimization is not None:
        # A rank without parameters has counted no steps.
        everyone = model.groups.all_gather(model.optimization.adam_and_schedule_steps())
        steps = {name: max(counted[name] for counted in everyone) for name in everyone[0]}
    adapters = None
    if model.shape.lora is not None:
        assert model.base is not None
        adapters = AdapterDescription(lora=model.shape.lora, base=model.base)
    return Snapshot(tensors=tensors, steps=steps, adapters=adapters)


def write_snapshot(
    taken: Snapshot, directory: Path, groups: ProcessGroups, origin: CheckpointOrigin | None = None
) -> dict[str, str]:
    """Write all ranks' snapshots into the existing, empty ``directory``. Collective.

    Returns the BLAKE3 of the files that this rank has written of tensors, by name.
    """
    if groups.is_first and taken.steps is not None:
        steps = {**taken.steps, **(asdict(origin) if origin else {})}
        (directory / STEPS_FILE).write_text(json.dumps(steps))
    if groups.is_first and taken.adapters is not None:
        taken.adapters.write(directory)
    return save_tensors(taken.tensors, directory, groups, origin)


def save_sharded(model: ParallelModel, directory: Path) -> None:
    """Write the model into the existing, empty ``directory``. Collective."""
    write_snapshot(take_snapshot(model, copy=False), directory, model.groups)


def load_sharded(model: ParallelModel, directory: Path) -> None:
    """Fill the model's weights and, if it learns, its optimizer from ``directory``. Collective.

    ValueError if the checkpoint lacks a tensor or has it in another shape or type.
    """
    steps = _steps(directory)
    if model.optimization is not None and steps is None:
        raise UserError(
            f"{directory} holds weights only and training cannot resume from it; convert it with "
            "ctrl-convert-megatron-to-hf and give the result as the model's path"
        )
    require_same_adapters(directory, model.shape, model.base)
    load_tensors(state_tensors(model, saving=False), directory, model.groups)
    if model.optimization is not None and steps is not None:
        model.optimization.set_adam_and_schedule_steps(**steps)


@torch.no_grad()
def state_tensors(model: ParallelModel, *, saving: bool) -> dict[str, TensorParts]:
    """The model's trained weights and optimizer state as rectangles of whole tensors, aliasing the
    model.

    For saving, each element is on one rank, and offloaded parts are read from host memory, so the
    engine keeps the device. For loading, each element is on all ranks that need it, and elements
    that no checkpoint has (the padding of the vocabulary) are zero.
    """
    if not saving:
        model.onload("weights", "optimizer")
    # No checkpoint has them, and a copy of the rest needs room.
    model.offload("gradients")
    found: dict[str, TensorParts] = {}
    owned: dict[int, list[OwnedRange]] = {}
    for owned_range in model.optimization.owned_ranges() if model.optimization is not None else ():
        owned.setdefault(id(owned_range.weight), []).append(owned_range)
    options, groups = model.options.optimizer, model.groups
    divided = options is not None and options.distributed
    turns, shapes = _Turns(groups.rank), hf_shapes(model.shape)
    for param, weight in model.shards_without_onload():
        if not param.trained or (saving and param.copy):
            continue
        flats = [("", weight.detach().view(-1), 0, param.at)]
        own_at = (*param.at, *groups.place.indices_on(*(REPLICAS[param.mesh] if divided else ())))
        for owned_range in owned.get(id(weight), ()):
            flats += [
                (f"optimizer.{name}.", flat, owned_range.start, own_at)
                for name, flat in owned_range.tensors.items()
            ]
        for prefix, device_flat, start, at in flats:
            flat, holders = (
                model.current_tensor(device_flat),
                groups.layout.ranks_at(param.mesh, at),
            )
            if not saving:
                flat.zero_()
            for piece in param.pieces:
                name = prefix + piece.hf
                for offset, part in _rectangles(param, piece, flat, start):
                    if saving and not turns.mine(holders, part.nbytes):
                        continue
                    whole = TensorParts(shapes[piece.hf], flat.dtype)
                    found.setdefault(name, whole).parts[torch.Size(offset)] = part
    return found


class _Turns:
    """Decides which of the ranks with the same part writes it: the one with the fewest bytes so
    far. All of them go through their parts in the same order, so that they agree."""

    def __init__(self, rank: int) -> None:
        self._rank, self._loads = rank, dict[tuple[int, ...], list[int]]()

    def mine(self, holders: tuple[int, ...], size: int) -> bool:
        """Assign ``size`` bytes to one of ``holders``; True if that is this rank."""
        loads = self._loads.setdefault(holders, [0] * len(holders))
        writer = loads.index(min(loads))
        loads[writer] += size
        return holders[writer] == self._rank


def _rectangles(
    param: ShardParam, piece: Piece, flat: torch.Tensor, start: int
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offset in the HF tensor, view of ``flat``) of the elements of ``piece`` in ``flat``.

    ``flat`` (n,) holds the elements ``start`` to ``start + n`` of the flattened shard. A run of
    elements is at most three rectangles in each dimension: the end of a row, whole rows, the
    beginning of a row.
    """
    try:
        yield from _boxes(param.shape, piece.start, piece.extent, piece.hf_start, flat, start)
    except ValueError as error:
        raise ValueError(f"{param.name}: {piece.hf} does not fill the shard's rows") from error


def _boxes(
    shape: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    there: tuple[int, ...],
    flat: torch.Tensor,
    start: int,
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """``_rectangles`` of an array of ``shape`` and its box of ``extent`` from ``begin`` on, which
    is at ``there`` in the HF tensor. ValueError for several rows of which the box has a part."""
    tail, width = shape[1:], prod(shape[1:])
    filled = extent[1:] == tail
    if not filled and extent[0] != 1:
        raise ValueError(shape)
    first = max(start, begin[0] * width)
    last = min(start + len(flat), (begin[0] + extent[0]) * width)
    while first < last:
        row, column = divmod(first, width)
        rows = (last - first) // width
        hf_row = row - begin[0] + there[0]
        if filled and rows and not column:
            count = rows * width
            view = flat[first - start : first - start + count]
            yield (hf_row, *there[1:]), view.view(rows, *tail)
        else:
            count = min(width - column, last - first)
            part = flat[first - start : first - start + count]
            inner = _boxes(tail, begin[1:], extent[1:], there[1:], part, column)
            yield from (((hf_row, *offset), view.unsqueeze(0)) for offset, view in inner)
        first += count


class _Saving(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].part(index.offset)


class _HashedFiles(FileSystem):
    """A file system that hashes what is written to it; files of tensors begin with the origin."""

    def __init__(self, origin: CheckpointOrigin | None, aside: ThreadPoolExecutor) -> None:
        self._header, self._aside = b"" if origin is None else origin.header_line(), aside
        self.hashes: dict[str, str] = {}
        """BLAKE3 of every file that is complete, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        # torch's error for a failed write does not mention the disk.
        with (
            name_file_in_errors(path),
            closing(HashingFile(Path(path), self._aside)) as stream,
            stream.reraise_write_errors(),
        ):
            if Path(path).suffix == PARTS_SUFFIX:
                stream.write(self._header)
            yield stream
        self.hashes[Path(path).name] = stream.hexdigest()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.hashes[Path(new_path).name] = self.hashes.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """Writes each rank's items in files of bounded size. Host memory has the tensors of one file,
    copied from the device or read from elsewhere, until the file is complete."""

    def __init__(
        self, directory: Path, origin: CheckpointOrigin | None, aside: ThreadPoolExecutor
    ) -> None:
        super().__init__(directory)
        self.fs = self.hashed = _HashedFiles(origin, aside)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        files: list[list[WriteItem]] = []
        room = 0
        for item in plan.items:
            assert item.tensor_data is not None and item.tensor_data.chunk is not None
            size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            if size > room:
                files.append([])
                room = _FILE_BYTES
            files[-1].append(item)
            room -= size
        results: list[WriteResult] = []
        for number, items in enumerate(files):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _Loading(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        # The default planner requests only tensors of its own kinds.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].part(index.offset)


def save_tensors(
    tensors: Mapping[str, TensorParts],
    directory: Path,
    groups: ProcessGroups | None,
    origin: CheckpointOrigin | None = None,
) -> dict[str, str]:
    """Write every rank's parts; together they must be whole. Collective, or alone for None.

    Returns the BLAKE3 of the files that this rank has written, by name.
    """
    alone = _alone() if groups is None else nullcontext()
    with _one_error("writing", directory), alone, ThreadPoolExecutor(1) as aside:
        writer = _Writer(directory, origin, aside)
        save(
            dict(tensors),
            storage_writer=writer,
            planner=_Saving(),
            process_group=None if groups is None else groups.host,
            no_dist=groups is None,
        )
    return writer.hashed.hashes


def load_tensors(
    tensors: Mapping[str, TensorParts], directory: Path, groups: ProcessGroups | None
) -> None:
    """Fill the parts from ``directory``; each rank reads its own parts. Collective, or alone.

    ValueError if a tensor is missing there or has another shape or type.
    """
    table = read_tensor_metadata(directory)
    held = _tensors_in(table)
    for name, whole in tensors.items():
        found = held.get(name)
        if found is None:
            raise UserError(f"{directory} is no checkpoint of this model: it lacks {name}")
        there = (tuple(found.size), found.properties.dtype)
        if there != (tuple(whole.shape), whole.dtype):
            raise UserError(
                f"{directory} holds {name} as {there[0]} {there[1]}, the run needs "
                f"{tuple(whole.shape)} {whole.dtype}; resume with the model and dtype that saved it"
            )
    with _one_error("reading", directory), _alone() if groups is None else nullcontext():
        load(
            dict(tensors),
            storage_reader=LoadedMetadataReader(directory, table),
            planner=_Loading(),
            process_group=None if groups is None else groups.host,
            no_dist=groups is None,
        )


def saved_tensor_metadata(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Every tensor in ``directory``, by name; UserError if it is no checkpoint."""
    return _tensors_in(read_tensor_metadata(directory))


def _tensors_in(table: Metadata) -> dict[str, TensorStorageMetadata]:
    held = table.state_dict_metadata
    return {name: t for name, t in held.items() if isinstance(t, TensorStorageMetadata)}


def require_complete_files(directory: Path) -> None:
    """DamagedFiles unless every file in the checkpoint's metadata exists with its full size."""
    _steps(directory)
    ends: dict[str, int] = {}
    for stored in read_tensor_metadata(directory).storage_data.values():
        end = stored.offset + stored.length
        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    for name, size in ends.items():
        there = ordinary_file_size(directory / name) or 0
        if there < size:
            raise DamagedFiles(
                f"has {there} of {size} bytes: the checkpoint is not whole",
                file=directory / name,
                remedy=ANOTHER,
            )


def _steps(directory: Path) -> dict[str, int] | None:
    """The number of optimizer steps; None for a checkpoint of weights alone."""
    file = directory / STEPS_FILE
    if ordinary_file_size(file) is None:
        return None
    found = read_checkpoint_json(file)
    if not isinstance(found, dict) or not all(type(found.get(n)) is int for n in _COUNTED):
        raise DamagedFiles("holds no counted steps", file=file, remedy=ANOTHER)
    return {name: found[name] for name in _COUNTED}


@contextmanager
def _one_error(doing: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        # torch's CheckpointException is no Exception, and lists the tracebacks of all ranks.
        causes = sorted(error.failures.items(), key=lambda item: item[0])
        for _, (cause, _) in causes:
            if find_user_error(cause) is not None:
                raise cause from None
        rank, (cause, _) = causes[0]
        raise RuntimeError(f"{doing} {directory} failed on rank {rank}: {cause!r}") from cause


def _alone() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore", category=UserWarning)  # that there are no ranks
