"""Reads ``.metadata``, the table of a checkpoint's tensors, without running code of it.

torch.distributed.checkpoint writes the table as a pickle, and reads it without any restriction.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as tables
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from ctrl_megatron.checkpoint.manifest import ANOTHER, DamagedFiles, read_ordinary_file

METADATA_FILE = ".metadata"

_RECORDS = (
    *(tables.Metadata, tables.MetadataIndex, tables.StorageMeta, tables.TensorStorageMetadata),
    *(tables.TensorProperties, tables.ChunkStorageMetadata, _StorageInfo),
)
_FORMATS = tables._MEM_FORMAT_ENCODING


def _format(kind: Any, name: str) -> Any:
    """The member of that ``name``, which Python 3.11.0 to 3.11.3 pickle as a call of getattr."""
    if kind is not _FORMATS:
        raise ValueError("it takes an attribute, which no table of tensors needs")
    return _FORMATS[name]


_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in (*_RECORDS, _FORMATS)} | {
    ("builtins", "getattr"): _format,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Where the checkpoint was written; Python 3.13 has moved the class.
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}
_TYPE = re.compile(r"[a-z]+[a-z0-9_]*")


# The unpickler in Python: its instructions can be replaced, and its memo is a dict, while in the C
# version an index can reserve memory.
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _TableUnpickler(_Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        known_type = _KNOWN.get((module, name))
        if known_type is None and module == "torch" and _TYPE.fullmatch(name):
            known_type = getattr(torch, name, None)
            known_type = known_type if isinstance(known_type, torch.dtype) else None
        if known_type is None:
            raise ValueError(f"it refers to {module}.{name}, which no table of tensors needs")
        return known_type

    def load_build(self) -> None:
        # Otherwise a state could be set on a class, which is then changed for the whole process.
        if type(self.stack[-2]) not in _RECORDS:
            raise ValueError(f"it sets attributes of a {type(self.stack[-2]).__name__}")
        super().load_build()

    dispatch = {**_Unpickler.dispatch, pickle.BUILD[0]: load_build}  # noqa: RUF012


class LoadedMetadataReader(FileSystemReader):
    """torch's reader of a checkpoint's files, with the table of ``read_tensor_metadata``."""

    def __init__(self, directory: Path, table: tables.Metadata) -> None:
        super().__init__(directory)
        self._table = table

    def read_metadata(self, *args: Any, **kwargs: Any) -> tables.Metadata:
        """The table; nothing is read again."""
        return self._table


def read_tensor_metadata(directory: Path) -> tables.Metadata:
    """The table of the tensors in ``directory``. DamagedFiles if it is missing, cut off, or
    anything but a table whose files are in ``directory``; UserError if it cannot be read now.
    """
    file = directory / METADATA_FILE
    data = read_ordinary_file(file)
    try:
        found = _TableUnpickler(io.BytesIO(data)).load()
        _require_table(found)
    except Exception as error:  # a hostile pickle may raise whatever it likes
        text = f"{type(error).__name__}: {error}"[:300]
        raise DamagedFiles(
            f"is no table of a checkpoint's tensors: {text}", file=file, remedy=ANOTHER
        ) from error
    return found


def _require_table(found: Any) -> None:
    """Require that the parts that are used have the types that torch writes."""
    _is(found, tables.Metadata)
    _is(found.state_dict_metadata, dict)
    for name, tensor in found.state_dict_metadata.items():
        _is(name, str)
        if type(tensor) is not tables.TensorStorageMetadata:
            raise ValueError(f"{name} is no tensor")
        _is(tensor.properties, tables.TensorProperties)
        _is(tensor.properties.dtype, torch.dtype)
        _is(tensor.size, torch.Size)
        for chunk in _is(tensor.chunks, list):
            _is(chunk, tables.ChunkStorageMetadata)
            _is(chunk.offsets, torch.Size)
            _is(chunk.sizes, torch.Size)
    for index, part in _is(found.storage_data, dict).items():
        _is(index, tables.MetadataIndex)
        _is(part, _StorageInfo)
        name = _is(part.relative_path, str)
        if PurePosixPath(name).parts != (name,) or name == "..":
            raise ValueError(f"it names the file {name!r}, which is not beside it")
        if part.transform_descriptors:
            raise ValueError(f"it wants the content of {name} transformed")
        if min(_is(part.offset, int), _is(part.length, int)) < 0:
            raise ValueError(f"it names a negative place in {name}")


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it holds a {type(value).__name__} in place of a {kind.__name__}")
    return value
