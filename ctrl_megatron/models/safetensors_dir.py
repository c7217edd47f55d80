"""Reads tensors, or rectangles of them, from the safetensors files of an HF directory."""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ctrl_megatron.errors import UserError, convert_input_errors, read_json
from ctrl_megatron.models.families import left_out_names
from ctrl_megatron.models.fp8 import SCALES, dequantise, parse_weight_block_size
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import AnyShape

_log = logging.getLogger(__name__)


class SafetensorsDirectory:
    """Opens each file once. Weights in blocks of 8 bits are read as float32.

    Files are memory-mapped: only the requested bytes are read, but they count as this process's
    memory as long as the file is open. Without ``mapped`` whole tensors are read into separate
    memory, also if only a part of one is requested.
    """

    def __init__(self, directory: str | Path, *, mapped: bool = True) -> None:
        self.directory, self._backend = Path(directory), "mmap" if mapped else "pread"
        self._open: dict[str, Any] = {}
        self._file_of = self._index()
        path = self.directory / "config.json"
        # A folder of weights alone has none.
        config = read_json(path) if path.is_file() else {}
        self.block = parse_weight_block_size(config, str(path))
        """Rows and columns with one scale; None if the weights are not quantised."""
        self._left_out = left_out_names(config, str(path))

    def _index(self) -> dict[str, str]:
        index = self.directory / "model.safetensors.index.json"
        single = self.directory / "model.safetensors"
        if index.is_file():
            try:
                file_of = dict(read_json(index)["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"is no index of safetensors files: {error!r}", file=index
                ) from error
            for file in file_of.values():
                if not isinstance(file, str) or Path(file).name != file or file == "..":
                    raise UserError(f"names {file!r}, which is no file beside it", file=index)
            if single.is_file() and single.name not in file_of.values():
                raise UserError(
                    f"{self.directory} holds two models: model.safetensors, and the files that "
                    f"{index.name} names",
                    remedy="remove the one that is not meant",
                )
            return file_of
        if not single.is_file():
            raise UserError(
                f"{self.directory} has neither model.safetensors nor model.safetensors.index.json; "
                "save the model with save_pretrained(..., safe_serialization=True)"
            )
        return dict.fromkeys(self._opened(single).keys(), single.name)

    def _opened(self, path: Path) -> Any:
        if path.name not in self._open:
            with convert_input_errors(), path.open("rb"):
                pass  # safetensors reports every failure to open a file as a missing file
            try:
                handle = safe_open(path, framework="pt", backend=self._backend).__enter__()
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"is no whole safetensors file: {error}", file=path, remedy="copy it anew"
                ) from error
            self._open[path.name] = handle
        return self._open[path.name]

    def _handle(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            path = self.directory / file
            if not path.is_file():
                raise UserError(f"{path} is missing, though the index names it for {name}")
            self._opened(path)
        return self._open[file]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that models have; reads only the files' headers."""
        return {n: self._shape(n) for n in self._file_of if not self._left_out.match(n)}

    def _shape(self, name: str) -> tuple[int, ...]:
        try:
            return tuple(self._handle(name).get_slice(name).get_shape())
        except SafetensorError as error:
            path = self.directory / self._file_of[name]
            raise UserError(f"lacks {name}, which the index says it holds", file=path) from error

    def check(self, shape: AnyShape) -> None:
        """ValueError that names tensors that are missing, unexpected or of another shape; also for
        an output head that differs from the embedding to which config.json ties it. Without such a
        head only headers are read.
        """
        wanted = hf_shapes(shape)
        missing = [name for name in wanted if name not in self._file_of]
        # Old exports carry the rotary buffer, and tied ones may repeat the embedding.
        harmless = {"lm_head.weight"} if shape.tied_embeddings else set()
        harmless |= {name + SCALES for name in wanted if self.block is not None}
        left_out = [name for name in self._file_of if self._left_out.match(name)]
        if left_out:
            _warn_of_left_out(str(self.directory), len(left_out), min(left_out))
        harmless |= set(left_out)
        unexpected = [
            name
            for name in self._file_of
            if name not in wanted and name not in harmless and not name.endswith(".inv_freq")
        ]
        if missing or unexpected:
            raise UserError(
                f"{self.directory} does not fit its config.json: missing {missing[:5]}, "
                f"unexpected {unexpected[:5]} ({len(missing)} and {len(unexpected)} in all)"
            )
        for name, expected in wanted.items():
            self._require_scales(name)
            if (actual := self._shape(name)) != expected:
                raise UserError(
                    f"{self.directory}: {name} has shape {actual}, config.json implies {expected}"
                )

        if "lm_head.weight" in harmless & self._file_of.keys() and not torch.equal(
            self.read("lm_head.weight"), self.read("model.embed_tokens.weight")
        ):
            raise UserError(
                f"{self.directory}: lm_head.weight differs from the embedding, though config.json "
                "says tie_word_embeddings=true; engines would compute with the one, the trainer "
                "with the other",
                remedy="set tie_word_embeddings to false, or remove the tensor",
            )

    def _require_scales(self, name: str) -> None:
        """UserError for a weight in 8 bits that cannot be converted."""
        kind = self._handle(name).get_slice(name).get_dtype()
        if not kind.startswith("F8"):
            return
        scales = name + SCALES
        if kind != "F8_E4M3" or self.block is None or scales not in self._file_of:
            raise UserError(
                f"{self.directory}: {name} has type {kind}, which is read only as F8_E4M3 with "
                f"{scales} and with a weight_block_size in config.json"
            )
        sizes = zip(self._shape(name), self.block, strict=True)
        if self._shape(scales) != (want := tuple(-(-size // block) for size, block in sizes)):
            raise UserError(
                f"{self.directory}: {scales} has shape {self._shape(scales)}, not {want} as "
                f"weight_block_size={list(self.block)} implies"
            )

    def fingerprint(self) -> str:
        """16 hex digits from the tensors' names, shapes, dtypes and first rows. They change with
        the weights, do not depend on the files, and large models need not be read completely."""
        digest = hashlib.sha256()
        for name in sorted(self._file_of):
            shape = self._shape(name)
            row = self.read_part(name, (slice(0, 1),)) if shape else self.read(name)
            digest.update(repr((name, shape, str(row.dtype))).encode())
            digest.update(row.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def read(self, name: str) -> torch.Tensor:
        if self.block is not None and name + SCALES in self._file_of:
            return self.read_part(name, (slice(None),) * 2)
        return self._handle(name).get_tensor(name)

    def read_part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        found = self._handle(name).get_slice(name)[part]
        if self.block is None or (scales := name + SCALES) not in self._file_of:
            return found
        begins = [index.start or 0 for index in part] + [0] * (2 - len(part))
        whole = self._handle(scales).get_tensor(scales)
        return dequantise(found, whole, (begins[0], begins[1]), self.block)


@cache
def _warn_of_left_out(directory: str, count: int, first: str) -> None:
    """Log the warning once in a process, and in no other rank than the first."""
    # An engine's process imports this file, and its environment may lack what config imports.
    from ctrl_megatron.config.environment import read_launch

    if read_launch().rank == 0:
        _log.warning(
            "%s: left out %d tensor(s), %s the first of them, which take no part in training; "
            "exports lack them",
            directory,
            count,
            first,
        )
