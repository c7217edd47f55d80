"""From an engine's completions to the TensorDict that flows between nodes, and between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.data.balance import partition_groups
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class CritiqueRow:
    """One sampled critique before it is padded into the batch."""

    uid: str
    """Names the group: all critiques of one prompt in one step."""
    problem_id: str
    """The row of the data that is criticised."""
    mini_batch: int
    """Which optimizer step of this training step the row belongs to."""
    prompt: tuple[int, ...]
    completion: Completion

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt) + len(self.completion.token_ids)


AnyRow = TypeVar("AnyRow", bound="Grouped")


def versions_of(completion: Completion) -> str:
    """The weights that drew the completion, joined by ``+`` where there are several."""
    return "+".join(dict.fromkeys(span.version for span in completion.spans))


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


def make_batch(rows: Sequence[CritiqueRow], *, pad_token_id: int) -> TensorDict:
    """``pad_rows`` of the critiques with what else is known of them.

    Adds ``rollout_log_probs`` (B, R) float32, ``mini_batch`` (B,) int64 and the non-tensor fields
    ``uid``, ``problem_id``, ``critique_version``.
    """
    batch = pad_rows(
        [r.prompt for r in rows],
        [r.completion.token_ids for r in rows],
        pad_token_id=pad_token_id,
    )
    log_probs = torch.zeros(batch["responses"].shape, dtype=torch.float32)
    for i, row in enumerate(rows):
        log_probs[i, : len(row.completion.log_probs)] = torch.tensor(row.completion.log_probs)
    batch["rollout_log_probs"] = log_probs
    batch["mini_batch"] = torch.tensor([r.mini_batch for r in rows])
    batch["uid"] = NonTensorStack(*[r.uid for r in rows])
    batch["problem_id"] = NonTensorStack(*[r.problem_id for r in rows])
    batch["critique_version"] = NonTensorStack(*[versions_of(r.completion) for r in rows])
    return batch


def tensors_of(batch: TensorDict, rows: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The tensor fields of (some rows of) the batch as a plain mapping."""
    chosen = batch if rows is None else batch[rows]
    return {name: value for name, value in chosen.items() if isinstance(value, torch.Tensor)}


def share_prompts(
    num_prompts: int, mini_batch: int, groups: ProcessGroups
) -> list[tuple[int, int]]:
    """(prompt index, its mini-batch) for this rank: an equal part of every mini-batch."""
    part = mini_batch // groups.layout.data
    first = groups.place.dp * part
    return [
        (step * mini_batch + first + k, step)
        for step in range(num_prompts // mini_batch)
        for k in range(part)
    ]


class Grouped(Protocol):
    """What dealing needs to know of a row."""

    @property
    def uid(self) -> str: ...
    @property
    def mini_batch(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


def level_over_data_ranks(rows: list[CritiqueRow], groups: ProcessGroups) -> list[CritiqueRow]:
    """This rank's rows when all ranks' rows are dealt anew by ``deal``. Collective."""
    if groups.layout.data == 1:
        return rows
    return deal([row for part in groups.from_data_ranks(rows) for row in part], groups)


def deal(everything: Sequence[AnyRow], groups: ProcessGroups) -> list[AnyRow]:
    """This rank's share of the global rows, so that data-parallel ranks hold about equal tokens.

    Groups stay whole and inside their mini-batch, and every rank gets equally many of them: group
    statistics stay local, and no optimizer step lacks rows on a rank.
    """
    mine: list[AnyRow] = []
    for step in sorted({row.mini_batch for row in everything}):
        inside = [row for row in everything if row.mini_batch == step]
        parts = partition_groups(
            [row.num_tokens for row in inside],
            [row.uid for row in inside],
            groups.layout.data,
            equal_size=True,
        )
        mine += [inside[i] for i in sorted(parts[groups.place.dp])]
    return mine
