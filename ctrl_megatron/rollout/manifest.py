"""Which HF tensors an engine expects (from safetensors headers), and checks against that."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctrl_megatron.rollout.engine import Chunk
from ctrl_megatron.types import TensorSpec

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
_SHOWN = 5


def read_model_config(model_path: str | Path) -> dict[str, Any]:
    """The directory's ``config.json``; ValueError if there is none."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; model_path must be an HF model directory")
    return json.loads(path.read_text())


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size))


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ValueError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json"
        )
    return [single]


def read_manifest(model_path: str | Path, dtype: str) -> tuple[TensorSpec, ...]:
    """The checkpoint's tensors with ``dtype``, without a tied head and old rotary buffers."""
    directory = Path(model_path)
    tied = read_model_config(directory).get("tie_word_embeddings", False)
    specs = []
    for file in _files(directory):
        for name, entry in _header(file).items():
            skipped = name == "__metadata__" or name.endswith(".inv_freq")
            if skipped or (tied and name == "lm_head.weight"):
                continue
            specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(entry["shape"])))
    return tuple(specs)


def check_specs(manifest: Sequence[TensorSpec], specs: Sequence[TensorSpec]) -> None:
    """ValueError naming every kind of disagreement between an update and the manifest."""
    wanted = {spec.name: spec for spec in manifest}
    given = {spec.name: spec for spec in specs}
    both = [(wanted[name], given[name]) for name in given if name in wanted]
    complaints = {
        "unknown": [name for name in given if name not in wanted],
        "missing": [name for name in wanted if name not in given],
        "mis-shaped": [
            f"{w.name} {g.shape} instead of {w.shape}" for w, g in both if w.shape != g.shape
        ],
        "of a dtype that is no weight's": [
            f"{g.name} {g.dtype}" for _, g in both if g.dtype not in WEIGHT_DTYPES
        ],
        "repeated": [] if len(given) == len(specs) else sorted({s.name for s in specs})[:_SHOWN],
    }
    found = [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for kind, names in complaints.items()
        if names
    ]
    if found:
        raise ValueError(
            "weight update refused, the engine is unchanged: " + "; ".join(found) + ". "
            "The sent tensors must be those of Engine.manifest()."
        )


class Coverage:
    """Sees that the chunks bring each announced tensor exactly once."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._open = {spec.name: spec for spec in specs}

    def take(self, chunk: Chunk) -> None:
        """Tick the chunk's tensors off; ValueError for one not announced or brought before."""
        for slot in chunk.slots:
            announced = self._open.pop(slot.spec.name, None)
            if announced != slot.spec:
                raise ValueError(
                    f"chunk in {chunk.segment} brings {slot.spec}, but "
                    + (f"{announced} was announced" if announced else "it was not due")
                )

    def finish(self) -> None:
        """ValueError if tensors were announced and not brought."""
        if self._open:
            names = list(self._open)
            raise ValueError(f"{len(names)} announced tensors never came: {names[:_SHOWN]}")
