"""A step's batch as files: what its update and its judging can be repeated from (``replay.py``).

``RUN/dumps/global_step_N/`` holds

    dump.json                   step, layout, device, where the weights before the step are
    config.yaml                 the run's configuration
    rows.parquet                the rows of the data that the batch is about
    batch_0000.safetensors      tensors of data rank 0 just before the first update of the step
    texts_0000.jsonl            its texts, a line for each sample, with its numbers to read along
    updated_0000.safetensors    tensors that later nodes of the step have added
    metrics.json                the metrics of the step's nodes

The directory appears whole before the update begins, so a step whose update fails leaves it too;
the last two files appear when the step has ended, ``metrics.json`` last.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.checkpoint.files import (
    atomic_directory,
    require_free_disk_bytes,
    write_text_atomically,
)
from ctrl_megatron.config import to_yaml
from ctrl_megatron.data.rows import Row, read_rows, write_rows
from ctrl_megatron.errors import UserError, convert_input_errors, read_json
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.steps.batch import join_samples, join_tensors, tensor_fields
from ctrl_megatron.steps.worker import DAGWorker

FOLDER = "dumps"
_FORMAT = 1
_PREFIX = "global_step_"
ROW_ID = "problem_id"
"""The field of the batch that names each sample's row."""
_DERIVED = ("input_ids", "position_ids")
"""Tensors that follow from the others."""
_NEEDED = ("prompts", "responses", "attention_mask", "response_mask", "mini_batch")


class StepDump:
    """A ``loop.StepWatcher`` that writes the batches of one policy of the steps of
    ``trainer.dump_steps``; those of a further policy into ``global_step_N_agent1``."""

    def __init__(self, worker: DAGWorker, total_steps: int) -> None:
        self._worker, self._total_steps = worker, total_steps
        self._policy = next(n for n, agent in enumerate(worker.agents) if agent is worker)
        self._end = f"_{worker.role}" if self._policy else ""
        self._folder = Path(worker.config.trainer.run_dir) / FOLDER
        self._kept: frozenset[str] = frozenset()

    def begin(self, step: int) -> None:
        """Nothing is known of the step yet."""

    def before_update(self, step: int, batch: TensorDict, policy: int) -> None:
        """Write everything that the update is computed from. Collective.

        UserError where the disk has no room for it.
        """
        if policy != self._policy or not self._worker.config.trainer.is_dump_step(step):
            return
        with self._worker.timeline.phase("dump"):
            self._write(step, batch)

    def write_step(self, step: int, batch: TensorDict) -> Path:
        """Write the batch of any step, as it was just before the update. Collective. Returns the
        directory.
        """
        if not self._worker.config.trainer.is_dump_step(step):
            self._write(step, batch)
        return self._directory(step)

    def _directory(self, step: int) -> Path:
        return self._folder / f"{_PREFIX}{step}{self._end}"

    def _write(self, step: int, batch: TensorDict) -> None:
        worker, groups = self._worker, self._worker.groups
        kept = {n: t for n, t in tensor_fields(batch).items() if n not in _DERIVED}
        self._kept = frozenset(map(str, batch.keys()))
        sizes = groups.all_gather(_num_bytes(kept) if groups.is_leader else 0)
        counts = groups.gather_data_ranks(len(batch))
        ids = groups.gather_data_ranks(texts(batch[ROW_ID]) if ROW_ID in batch else [])
        target = self._directory(step)
        if groups.is_first:
            require_free_disk_bytes(self._folder, sum(sizes), f"the dump of step {step}")
        with atomic_directory(target, active=groups.is_first) as work:
            work = Path(groups.broadcast_from_first(str(work)))
            if groups.is_leader:
                part = groups.place.dp
                _save(kept, work / f"batch_{part:04}.safetensors")
                lines = (json.dumps(line, ensure_ascii=False) for line in _lines(batch))
                write_text_atomically(
                    work / f"texts_{part:04}.jsonl", "".join(f"{x}\n" for x in lines)
                )
            if groups.is_first:
                known = dict.fromkeys(row_id for part in ids for row_id in part)
                if known:
                    write_rows(work / "rows.parquet", [worker.train.row(id_) for id_ in known])
                write_text_atomically(work / "config.yaml", to_yaml(worker.agents[0].config))
                write_text_atomically(
                    work / "dump.json", json.dumps(self._facts(step, counts), indent=1)
                )
            groups.barrier()

    def _facts(self, step: int, counts: Sequence[int]) -> dict[str, Any]:
        layout = self._worker.groups.layout
        return {
            "format": _FORMAT,
            "step": step,
            "policy": self._policy,
            "total_steps": self._total_steps,
            "rows": list(counts),
            "layout": {
                "tensor": layout.tensor,
                "context": layout.context,
                "pipeline": layout.pipeline,
                "data": layout.data,
            },
            "device": self._worker.groups.device.type,
            "torch": torch.__version__,
            "pad_token_id": self._worker.codec.pad_token_id,
        }

    def end(self, step: int, batches: Sequence[TensorDict], metrics: Mapping[str, float]) -> None:
        """Add what the update has written. Collective."""
        batch = batches[self._policy]
        worker, groups = self._worker, self._worker.groups
        if not worker.config.trainer.is_dump_step(step):
            return
        target, part = self._directory(step), groups.place.dp
        if groups.is_leader:
            new = {n: t for n, t in tensor_fields(batch).items() if n not in self._kept}
            _save(new, target / f"updated_{part:04}.safetensors")
        groups.barrier()
        if groups.is_first:
            write_text_atomically(target / "metrics.json", json.dumps(dict(metrics), indent=1))


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"is no whole safetensors file: {error}", file=path, remedy="copy it anew"
        ) from error


def _lines(batch: TensorDict) -> list[dict[str, Any]]:
    """The texts of each sample and, for the reader, its numbers; None for NaN."""
    columns: dict[str, list[Any]] = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 1:
                columns[name] = [None if v != v else v for v in value.tolist()]
        elif all(isinstance(text, str) for text in texts(value)):
            columns[name] = texts(value)
    return [
        {name: column[i] for name, column in sorted(columns.items())} for i in range(len(batch))
    ]


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A dump that has been read. Its samples are numbered through over the data ranks' parts."""

    path: Path
    step: int
    policy: int = 0
    """The number of the policy whose batch it is."""
    total_steps: int
    """Training steps of the run, on which the learning rate depends."""
    layout: Mapping[str, int]
    """Tensor, pipeline and data-parallel size of the run."""
    device: str
    batch: TensorDict
    """All samples just before the update."""
    updated: Mapping[str, torch.Tensor]
    """Further tensors of all samples after it; none where the update did not end."""
    metrics: Mapping[str, float] | None
    """None where the update did not end."""
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def run_dir(self) -> Path:
        """The run that wrote it, as long as the dump is where it was written."""
        return self.path.absolute().parent.parent


def read_dump(path: Path) -> Dump:
    """The dump in the directory ``path``. UserError for one that is not whole."""
    file = path / "dump.json"
    if not file.is_file():
        raise UserError(
            f"{path} is not a dump: it has no dump.json",
            remedy=f"name a directory RUN/{FOLDER}/{_PREFIX}N, which trainer.dump_steps=[N] writes",
        )
    facts = read_json(file)
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise UserError(
            f"has another format than {_FORMAT}", file=file, remedy="use the version that wrote it"
        )
    with convert_input_errors(str(path)):
        return _read(path, facts)


def _read(path: Path, facts: Mapping[str, Any]) -> Dump:
    parts = range(len(facts["rows"]))
    before = [_load(path / f"batch_{part:04}.safetensors") for part in parts]
    lines = [line for part in parts for line in read_json_lines(path / f"texts_{part:04}.jsonl")]
    missing = [name for name in _NEEDED if name not in before[0]]
    if missing:
        raise UserError(
            f"the batch has no {', '.join(missing)}",
            remedy="only pipelines that make their batch with make_batch can be replayed",
        )
    for part, count in enumerate(facts["rows"]):
        if len(before[part]["prompts"]) != count:
            raise UserError(f"part {part} does not have {count} samples", remedy="copy it anew")
    if len(lines) != sum(facts["rows"]):
        raise UserError("has other numbers of texts and of samples", remedy="copy it anew")
    ended, table = path / "metrics.json", path / "rows.parquet"
    after = [_load(path / f"updated_{n:04}.safetensors") for n in parts if ended.is_file()]
    widths = [part["responses"].shape[1] for part in before]
    batch = join_samples(before, pad_token_id=facts["pad_token_id"])
    names = [name for name, value in (lines[0] if lines else {}).items() if isinstance(value, str)]
    for name in names:
        batch[name] = NonTensorStack(*[line[name] for line in lines])
    return Dump(
        path=path,
        step=facts["step"],
        policy=facts.get("policy", 0),
        total_steps=facts["total_steps"],
        layout=facts["layout"],
        device=facts["device"],
        batch=batch,
        updated=join_tensors(after, widths),
        metrics=read_json(ended) if ended.is_file() else None,
        rows=tuple(read_rows(table)) if table.is_file() else (),
    )
