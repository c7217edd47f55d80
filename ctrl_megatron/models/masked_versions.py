"""Packed micro-batches of a masked-diffusion model: a row's three versions behind each other, so
that one pass computes its coupled score (``algorithms.coupled``), or a single version, from which
fine-tuning learns (``algorithms.denoising``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ctrl_megatron.algorithms.coupled import coupled_log_prob_weights
from ctrl_megatron.data.packing import pack_by_length
from ctrl_megatron.models.micro_batch import Fields, MicroBatch, micro_batch, split_attended_values
from ctrl_megatron.models.packed_layout import build_packed_layout
from ctrl_megatron.models.shape import MaskedDiffusion

VERSIONS = 3


def split_into_masked_versions(
    batch: Fields,
    diffusion: MaskedDiffusion,
    *,
    token_budget: int,
    multiple: int,
    count: Callable[[int], int],
    device: torch.device,
    context: Any = None,
    canvas: int = 0,
) -> list[MicroBatch]:
    """Micro-batches that cover every row of ``batch`` once, each with its three versions.

    batch, beside the fields of ``micro_batch.split_into_micro_batches``: ``masked`` (B, P+R) bool
    and ``mask_share`` (B,) float32 of ``algorithms.coupled.CoupledMasks``; or, for a single
    version, ``masked`` and ``mask_level`` (B,) float32 of ``algorithms.denoising``, with which a
    token that is not masked counts 0. Attended tokens behind the response's last one are the rest
    of the canvas on which it was generated: they are masked like the response and predicted
    nowhere. Mask tokens fill shorter rows up to ``canvas`` tokens
    behind the prompt in all versions: this is what a sampler that ends a row at its stop token
    sees, and versions without them would know the response's length. Other arguments as there; a
    row's versions count together for the token budget. Raises ValueError for a row whose versions
    exceed the budget, for one without a prompt token, for a mask with gaps, and for a batch without
    masks.
    """
    if "masked" not in batch:
        raise ValueError("a masked-diffusion model needs the masks of its rows: field 'masked'")
    attended = batch["attention_mask"].bool().cpu()
    answered = batch["response_mask"].bool().cpu()
    start = attended.shape[1] - answered.shape[1]
    _check_no_holes(answered)
    _check_no_holes(attended[:, start:])
    prompts, canvases = split_attended_values(batch["input_ids"].cpu(), attended, start)
    hidden_prompts, hidden = split_attended_values(batch["masked"].cpu(), attended, start)
    answers = answered.sum(dim=1).tolist()
    for row, (prompt, seen, answer) in enumerate(zip(prompts, canvases, answers, strict=True)):
        if len(seen) < answer:
            raise ValueError(f"row {row}: response_mask selects tokens that are not attended")
        if answer and not len(prompt):
            raise ValueError(f"row {row} has {answer} response tokens but no prompt token")
    canvases = [_filled(seen, canvas, diffusion.mask_token) for seen in canvases]
    hidden = [_filled(which, canvas, True) for which in hidden]
    lengths = [len(p) + len(c) for p, c in zip(prompts, canvases, strict=True)]
    coupled = "mask_level" not in batch
    count_of_versions = VERSIONS if coupled else 1
    micro_batches = pack_by_length([count_of_versions * length for length in lengths], token_budget)
    micro_batches += [[] for _ in range(count(len(micro_batches)) - len(micro_batches))]
    versions = [
        _Versions(*given, diffusion, coupled=coupled)
        for given in zip(
            *(prompts, canvases, hidden_prompts, hidden),
            batch["mask_share" if coupled else "mask_level"].cpu(),
            strict=True,
        )
    ]
    return [
        _pack(
            rows, versions, answers, answered.shape[1], multiple, device, context, count_of_versions
        )
        for rows in micro_batches
    ]


def _check_no_holes(mask: torch.Tensor) -> None:
    """ValueError for a (B, R) mask with gaps: scores are written back from column 0 on, so a gap
    would shift them."""
    wrong = (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"row {row}: response_mask must select tokens of the response from its first column "
            "on, without gaps"
        )


def _filled(values: torch.Tensor, length: int, value: int) -> torch.Tensor:
    rest = values.new_full((max(0, length - len(values)),), value)
    return torch.cat([values, rest])


class _Versions:
    """The versions of a row: three, or one where the row is not ``coupled``."""

    def __init__(
        self,
        prompt: torch.Tensor,
        canvas: torch.Tensor,
        hidden_prompt: torch.Tensor,
        hidden: torch.Tensor,
        share: torch.Tensor,
        diffusion: MaskedDiffusion,
        *,
        coupled: bool,
    ) -> None:
        self._coupled = coupled
        self.length = len(prompt) + len(canvas)
        self._canvas, self._hidden, self._share = canvas, hidden, share
        self._first = len(prompt) - diffusion.shifted
        mask = diffusion.mask_token
        shown = prompt.masked_fill(hidden_prompt, mask)
        wholly = torch.full_like(canvas, mask)
        partly = [canvas.masked_fill(which, mask) for which in (hidden, ~hidden)]
        canvases = [wholly, *partly] if coupled else partly[:1]
        self.tokens = torch.cat([part for c in canvases for part in (shown, c)])
        """(versions * length,) int64."""

    def predicted(self, count: int) -> tuple[torch.Tensor, ...]:
        """(predictors, counted from the row's first token; targets; columns; weights) of the first
        ``count`` response tokens: each occurs twice, or once if it is masked in the only
        version."""
        columns = torch.arange(count)
        if not self._coupled:
            columns = columns[self._hidden[:count]]
            weights = (1.0 / self._share).expand(len(columns))
            return self._first + columns, self._canvas[columns], columns, weights
        weight, weights = coupled_log_prob_weights(self._hidden[:count], self._share)
        # Numbers of the versions that mask the token: 1 or 2.
        partial = 2 - self._hidden[:count].long()
        places = self._first + columns
        return (
            torch.cat([places, partial * self.length + places]),
            self._canvas[:count].repeat(2),
            columns.repeat(2),
            torch.cat([torch.full((count,), weight), weights]),
        )


def _pack(
    rows: list[int],
    versions: list[_Versions],
    answers: list[int],
    width: int,
    multiple: int,
    device: torch.device,
    context: Any,
    count: int,
) -> MicroBatch:
    total = count * sum(versions[row].length for row in rows)
    filler = -total % multiple if total else multiple
    sequences = [(versions[row].length, [0]) for row in rows for _ in range(count)]
    none, here = torch.zeros(0, dtype=torch.int64), 0
    parts: list[tuple[torch.Tensor, ...]] = [(none, none, none, torch.zeros(0), none)]
    for local, row in enumerate(rows):
        predictors, *others = versions[row].predicted(answers[row])
        parts.append((here + predictors, *others, torch.full_like(predictors, local)))
        here += count * versions[row].length
    tokens = [*(versions[row].tokens for row in rows), torch.zeros(filler, dtype=torch.int64)]
    predictors, targets, columns, weights, row_of = map(torch.cat, zip(*parts, strict=True))
    return micro_batch(
        build_packed_layout(sequences, filler=filler, causal=False),
        torch.cat(tokens),
        predictors,
        targets,
        row_of,
        columns,
        rows=rows,
        num_tokens=total,
        width=width,
        device=device,
        context=context,
        weights=weights,
        occurrences=2 if count == VERSIONS else 1,
    )
