"""Reads tensors, or rectangles of them, from the safetensors files of an HF directory."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ctrl_megatron.errors import UserError, convert_input_errors, read_json
from ctrl_megatron.models.families import kept_names, left_out_names
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
        self._stacks: dict[str, list[list[str]]] = {}
        path = self.directory / "config.json"
        # A folder of weights alone has none.
        config = read_json(path) if path.is_file() else {}
        self.block = parse_weight_block_size(config, str(path))
        """Rows and columns with one scale; None if the weights are not quantised."""
        self._left_out = left_out_names(config, str(path))
        self._kept = kept_names(config, str(path))

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

    @staticmethod
    def names_in(path: Path) -> list[str]:
        """The tensors of a file."""
        with safe_open(path, framework="pt") as file:
            return list(file.keys())

    def kept(self) -> dict[str, torch.Tensor]:
        """The tensors of ``kept_names``, in the type of the files or, of 8 bits, in bfloat16."""
        names = [n for n in self._file_of if self._kept.match(n) and not n.endswith(SCALES)]
        quantised = {n for n in names if n + SCALES in self._file_of}
        return {n: self.read(n).bfloat16() if n in quantised else self.read(n) for n in names}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that models have; reads only the files' headers."""
        return {n: self._shape(n) for n in self._file_of if not self._left_out.match(n)}

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._stacks:
            sizes = [[self._shape(part) for part in parts] for parts in self._stacks[name]]
            if all(own == sizes[0] for own in sizes) and len({s[1:] for s in sizes[0]}) == 1:
                return len(sizes), sum(size[0] for size in sizes[0]), *sizes[0][0][1:]
            raise UserError(f"{self.directory}: the experts of {name} have several shapes")
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
        self._stacks = self._stacks_of_experts(wanted)
        within = {name for experts in self._stacks.values() for own in experts for name in own}
        missing = [n for n in wanted if n not in self._file_of and n not in self._stacks]
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
            if name not in wanted
            and name not in harmless
            and name.removesuffix(SCALES) not in within
            and not name.endswith(".inv_freq")
        ]
        if missing or unexpected:
            raise UserError(
                f"{self.directory} does not fit its config.json: missing {missing[:5]}, "
                f"unexpected {unexpected[:5]} ({len(missing)} and {len(unexpected)} in all)"
            )
        for name, expected in wanted.items():
            for own in itertools.chain(*self._stacks.get(name, [[name]])):
                self._require_scales(own)
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

    def _stacks_of_experts(self, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Tensor of all experts of a layer -> by expert the tensors of ``PARTS_OF_STACKS`` that the
        files have in place of it, as transformers writes them."""
        found = {}
        for name, size in wanted.items():
            module, _, leaf = name.rpartition(".")
            if name in self._file_of or leaf not in PARTS_OF_STACKS:
                continue
            parts = [[f"{module}.{e}.{p}" for p in PARTS_OF_STACKS[leaf]] for e in range(size[0])]
            if all(own in self._file_of for own in itertools.chain(*parts)):
                found[name] = parts
        return found

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
        if name in self._stacks:
            return self.read_part(name, (slice(None),) * 3)
        if self.block is not None and name + SCALES in self._file_of:
            return self.read_part(name, (slice(None),) * 2)
        return self._handle(name).get_tensor(name)

    def read_part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        if name in self._stacks:
            experts, rows, columns = part
            return torch.stack(
                [self._rows(own, rows, columns) for own in self._stacks[name][experts]]
            )
        found = self._handle(name).get_slice(name)[part]
        if self.block is None or (scales := name + SCALES) not in self._file_of:
            return found
        begins = [index.start or 0 for index in part] + [0] * (2 - len(part))
        whole = self._handle(scales).get_tensor(scales)
        return dequantise(found, whole, (begins[0], begins[1]), self.block)

    def _rows(self, names: list[str], rows: slice, columns: slice) -> torch.Tensor:
        """Rows and columns of the tensors ``names``, one above the other."""
        found, above = [], 0
        last = sum(self._shape(name)[0] for name in names) if rows.stop is None else rows.stop
        for name in names:
            count = self._shape(name)[0]
            first, end = max(0, (rows.start or 0) - above), min(count, last - above)
            if first < end:
                found.append(self.read_part(name, (slice(first, end), columns)))
            above += count
        return torch.cat(found)


PARTS_OF_STACKS = {
    "gate_up_proj": ["gate_proj.weight", "up_proj.weight"],
    "down_proj": ["down_proj.weight"],
}
"""The name of a tensor of all experts -> those of one expert's tensors that it consists of."""


def stacked_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``shapes`` of files, with the tensor of all experts in the place of each expert's own."""
    leaf_of = {part: leaf for leaf, parts in PARTS_OF_STACKS.items() for part in parts}
    found, rows = dict[str, tuple[int, ...]](), dict[tuple[str, str], int]()
    for name, size in shapes.items():
        named = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+\.weight)", name)
        if named is None or named[3] not in leaf_of:
            found[name] = size
            continue
        stack = f"{named[1]}.{leaf_of[named[3]]}"
        rows[stack, named[3]] = size[0]
        count = max(int(named[2]) + 1, found.get(stack, (0,))[0])
        found[stack] = (count, sum(n for (of, _), n in rows.items() if of == stack), *size[1:])
    return found


@cache
def _warn_of_left_out(directory: str, count: int, first: str) -> None:
    """Log the warning once in a process, and in no other rank than the first."""
    # An engine's process imports this file, and its environment may lack what config imports.
    from ctrl_megatron.config.environment import read_launch

    if read_launch().rank == 0:
        _log.warning(
            "%s: left out %d tensor(s), %s the first of them, which take no part in training",
            directory,
            count,
            first,
        )
