"""The batch of a step: samples, the padded tensors made of them, and readers of its fields.

B rows are samples of this data rank; P and R are the longest prompt and response among them, in
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.graph.columns import select_rows, texts
from ctrl_megatron.steps.sample import ColumnMaker, Fields, Sample, SampleSize, weight_versions_text

OF_SAMPLES = ("prompts", "responses", "attention_mask", "input_ids", "position_ids")
"""Fields that follow from the tokens of the samples."""


def make_batch(samples: Sequence[Sample], *, pad_token_id: int) -> TensorDict:
    """The batch of a step: ``pad_rows`` of the samples, and their other values as fields.

    ``response_mask`` leaves out the tokens that the model did not draw (``Sample.drawn``). Adds
    ``rollout_log_probs`` (B, R) float32, ``mini_batch`` (B,) int64, the non-tensor fields
    ``uid``, ``problem_id`` (the id of the row, ``Sample.row_id``; the name is the reward model's
    ``id_key``), ``version`` (the weights that drew the response), ``sample`` (the samples
    themselves) and their own ``fields`` as columns.
    """
    batch = pad_rows(
        [s.prompt for s in samples],
        [s.completion.token_ids for s in samples],
        pad_token_id=pad_token_id,
    )
    log_probs = torch.zeros(batch["responses"].shape, dtype=torch.float32)
    for i, sample in enumerate(samples):
        log_probs[i, : len(sample.completion.log_probs)] = torch.tensor(sample.completion.log_probs)
        if sample.drawn:
            batch["response_mask"][i, : len(sample.drawn)] = torch.tensor(sample.drawn)
    batch["rollout_log_probs"] = log_probs
    batch["mini_batch"] = torch.tensor([s.mini_batch for s in samples])
    batch["uid"] = NonTensorStack(*[s.uid for s in samples])
    batch["problem_id"] = NonTensorStack(*[s.row_id for s in samples])
    batch["version"] = NonTensorStack(*[weight_versions_text(s.completion) for s in samples])
    batch["sample"] = NonTensorStack(*samples)
    for name, column in fields_from_rows([s.fields for s in samples]).items():
        batch[name] = column
    return batch


def samples_of(batch: TensorDict) -> list[Sample]:
    """The ``Sample`` of every row of the batch (B), its column ``sample``."""
    return batch["sample"].tolist()


def fields_of_samples(samples: Sequence[Sample], *makers: ColumnMaker) -> dict[str, Any]:
    """The fields of the batch for samples that a node has filled in: the column ``sample``, and the
    columns that ``makers`` make of each."""
    fields: dict[str, Any] = {"sample": NonTensorStack(*samples)}
    for make in makers:
        fields |= fields_from_rows([make(sample) for sample in samples])
    return fields


def sample_sizes(batch: TensorDict) -> list[SampleSize]:
    """The size of every row of the batch (B)."""
    attended, width = batch["attention_mask"], batch["prompts"].shape[1]
    prompts, responses = attended[:, :width].sum(dim=1), attended[:, width:].sum(dim=1)
    facts = (prompts.tolist(), responses.tolist(), batch["mini_batch"].tolist())
    return [
        SampleSize(uid=uid, mini_batch=mini_batch, prompt=prompt, response=response)
        for uid, prompt, response, mini_batch in zip(texts(batch["uid"]), *facts, strict=True)
    ]


def fields_from_rows(rows: Sequence[Fields]) -> dict[str, Any]:
    """The rows' fields as fields of the batch: texts become non-tensor data, truth values bool
    tensors, and numbers float32 tensors with NaN for None.
    """
    return {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _column(values: Sequence[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return NonTensorStack(*values)
    if all(isinstance(value, bool) for value in values):
        return torch.tensor(values)
    known = [float("nan") if value is None else float(value) for value in values]
    return torch.tensor(known, dtype=torch.float32)


def pad_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, pad_token_id: int
) -> TensorDict:
    """Token rows as a TensorDict of B rows: prompts padded on the left, responses on the right.

    Writes ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``,
    ``position_ids`` (B, P+R) int64 and ``response_mask`` (B, R) bool.
    """
    rows = len(prompts)
    width_p, width_r = max(map(len, prompts)), max(1, max(map(len, responses)))
    left = torch.full((rows, width_p), pad_token_id, dtype=torch.int64)
    right = torch.full((rows, width_r), pad_token_id, dtype=torch.int64)
    prompt_mask = torch.zeros((rows, width_p), dtype=torch.int64)
    response_mask = torch.zeros((rows, width_r), dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        left[i, width_p - len(prompt) :] = torch.tensor(prompt)
        prompt_mask[i, width_p - len(prompt) :] = 1
        right[i, : len(response)] = torch.tensor(response, dtype=torch.int64)
        response_mask[i, : len(response)] = True
    attention = torch.cat([prompt_mask, response_mask.long()], dim=1)
    return TensorDict(
        {
            "prompts": left,
            "responses": right,
            "input_ids": torch.cat([left, right], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": response_mask,
        },
        batch_size=[rows],
    )


def join_samples(
    parts: Sequence[Mapping[str, Any]], *, pad_token_id: int, rows: Sequence[int] | None = None
) -> TensorDict:
    """The batches ``parts`` as one, padded to the longest of its samples: all of their rows, or
    those with the numbers ``rows``, in that order.

    Texts are kept, and the tensors of ``join_tensors``.
    """
    prompts, responses, widths = [], [], [part["responses"].shape[1] for part in parts]
    for part, width in zip(parts, widths, strict=True):
        attended = part["attention_mask"].bool()
        start = attended.shape[1] - width
        for i, row in enumerate(attended):
            prompts.append(part["prompts"][i][row[:start]].tolist())
            responses.append(part["responses"][i][row[start:]].tolist())
    taken = range(len(prompts)) if rows is None else rows
    batch = pad_rows(
        [prompts[row] for row in taken],
        [responses[row] for row in taken],
        pad_token_id=pad_token_id,
    )
    others = [{n: v for n, v in part.items() if n not in OF_SAMPLES} for part in parts]
    for name, value in select_rows([join_tensors(others, widths)], taken).items():
        batch[name] = value[:, : batch["responses"].shape[1]] if value.dim() > 1 else value
    said = [{n: v for n, v in p.items() if not isinstance(v, torch.Tensor)} for p in parts]
    for name, value in select_rows(said, taken).items():
        batch[name] = value
    return batch


def join_tensors(
    parts: Sequence[Mapping[str, Any]], widths: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Tensors (B,), and (B, R) or (B, R, K), of all parts, the latter filled up with zeros; others
    are left out, because their padding is unknown. ``widths`` is R of each part.
    """
    longest, joined = max(widths, default=0), dict[str, torch.Tensor]()
    for name, first in parts[0].items() if parts else ():
        values = [part[name] for part in parts]
        if not isinstance(first, torch.Tensor):
            continue
        if all(value.dim() == 1 for value in values):
            joined[name] = torch.cat(values)
        elif all(v.dim() > 1 and v.shape[1] == w for v, w in zip(values, widths, strict=True)):
            filled = [pad_columns(value, longest) for value in values]
            joined[name] = torch.cat(filled)
    return joined


def pad_columns(values: torch.Tensor, width: int) -> torch.Tensor:
    """``values`` (B, R) or (B, R, K) with zeros behind, up to ``width`` columns."""
    behind = (0, 0) * (values.dim() - 2)
    return torch.nn.functional.pad(values, (*behind, 0, width - values.shape[1]))


def tensor_fields(batch: TensorDict) -> dict[str, torch.Tensor]:
    """The fields of the batch that are tensors, by name."""
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def data_rows_of(table: PromptTable, batch: TensorDict) -> list[Row]:
    """The data row of every row of the batch (B), found by the column ``problem_id``, which holds
    the row's id (``Row.id``), with the program that the row's critique is about."""
    rows = [table.row(row_id) for row_id in texts(batch["problem_id"])]
    if "sample" not in batch:
        return rows
    return [
        sample.row_with_program(row) for sample, row in zip(samples_of(batch), rows, strict=True)
    ]


def number_or_none(value: torch.Tensor) -> float | None:
    """The number in a tensor of one element; None for NaN."""
    return None if value.isnan() else float(value)
