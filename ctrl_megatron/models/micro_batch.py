"""From padded rows to packed micro-batches under a token budget: no flop is spent on padding, and a
prompt that rows of a micro-batch share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ctrl_megatron.data.packing import pack_groups
from ctrl_megatron.models.packed_layout import (
    PackedLayout,
    PackedLayoutParams,
    build_packed_layout,
    layout_params,
)

Fields = Mapping[str, torch.Tensor]
EXPERT_ROUTES = "expert_routes"
"""The field (B, P+R, layers with experts, top_k) int16 of recorded choices of experts, -1 where a
token has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """T packed tokens of b rows, in N of whose places response tokens are predicted.

    Where context ranks share the rows (``packed_layout.ContextShardedTokens``), T and N count this
    rank's tokens.
    """

    rows: torch.Tensor
    """(b,) int64: the rows' indices in the batch."""
    tokens: torch.Tensor
    """(1, T) int64."""
    positions: torch.Tensor
    """(1, T) int64, counted from 0 in every row."""
    padding: torch.Tensor
    """(1, T) bool: on for the tokens that belong to no row."""
    num_tokens: int
    """Number of tokens that belong to rows, those of all context ranks together."""
    num_predicted: int
    """N of all context ranks together."""
    packed: PackedLayoutParams
    predictors: torch.Tensor
    """(N,) int64: index in T of the hidden state that predicts each response token."""
    targets: torch.Tensor
    """(N,) int64: the response tokens."""
    row_of: torch.Tensor
    """(N,) int64: index in ``rows`` of each response token."""
    column_of: torch.Tensor
    """(N,) int64: column of each response token in the (B, R) fields."""
    width: int
    """R."""
    weights: torch.Tensor | float = 1.0
    """(N,) float32, or one number: the factor of a token's log-prob in its row."""
    occurrences: int = 1
    """How often every response token is predicted."""
    routes: torch.Tensor | None = None
    """(tokens of all context ranks, layers with experts, top_k) int16, on the host: the recorded
    choice of experts (``EXPERT_ROUTES``); None where nothing is replayed or recorded."""
    keys: torch.Tensor | None = None
    """(1, T) int64: where each token is in ``routes``, -1 for padding; None without these."""
    key_of: torch.Tensor | None = None
    """(b, P+R) int64, on the host: the key of every token of the rows, -1 where there is none."""

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) values as a (b, R) matrix with zeros elsewhere, those of a token that is predicted
        several times added up; differentiable."""
        out = values.new_zeros((len(self.rows), self.width))
        places = (self.row_of, self.column_of)
        return out.index_put(places, values, accumulate=self.occurrences > 1)


def split_into_micro_batches(
    batch: Fields,
    *,
    token_budget: int,
    shared_prefix: bool,
    multiple: int,
    count: Callable[[int], int],
    device: torch.device,
    context: Any = None,
    apart: bool = False,
) -> list[MicroBatch]:
    """Micro-batches that cover every row of ``batch`` once.

    batch: ``input_ids``, ``attention_mask`` (B, P+R) and ``response_mask`` (B, R), prompts padded
    on the left, responses on the right. ``shared_prefix``: rows with equal prompts follow one copy
    of it (``models.packed_layout``). ``multiple``: packed lengths are filled up to a multiple of it
    (``Layout.token_multiple``). ``count``: from the number of micro-batches with rows to the number
    of all; empty ones are appended. ``context``: the process group of the ranks that share the
    rows, if there are several. ``apart``: every row has a micro-batch of its own.
    ``response_mask`` selects the tokens that are predicted, any of the attended response tokens: a
    row may contain tokens that the model only reads, such as an environment's observations.
    With the field ``expert_routes`` micro-batches have ``routes``; rows that share a prompt have
    the first one's for it.
    Raises ValueError for a row above the token budget, for a mask that selects a token which is not
    attended, and for a selected token without a token before it.
    """
    attended = batch["attention_mask"].bool().cpu()
    answered = batch["response_mask"].bool().cpu()
    width = answered.shape[1]
    start = attended.shape[1] - width
    predicted = [
        _predicted(row, *masks)
        for row, masks in enumerate(zip(attended[:, start:], answered, strict=True))
    ]
    prompts, responses = split_attended_values(batch["input_ids"].cpu(), attended, start)
    for row, (prompt, chosen) in enumerate(zip(prompts, predicted, strict=True)):
        if not len(prompt) and 0 in chosen.places:
            raise ValueError(f"row {row} has response tokens to predict but no prompt token")
    names: list[object] = list(range(len(prompts)))
    if shared_prefix:
        # Rows without a prompt have nothing to share.
        names = [prompt.numpy().tobytes() or row for row, prompt in enumerate(prompts)]
    # Longest first: a micro-batch that needs too much memory fails at once, not after minutes.
    sizes = [*map(len, prompts)], [*map(len, responses)]
    micro_batches = pack_groups(*sizes, names, token_budget)
    if apart:
        micro_batches = [[[row]] for groups in micro_batches for own in groups for row in own]
    micro_batches += [[] for _ in range(count(len(micro_batches)) - len(micro_batches))]
    packed = [
        _pack(groups, prompts, responses, predicted, width, multiple, device, context)
        for groups in micro_batches
    ]
    if EXPERT_ROUTES not in batch:
        return packed
    return [_with_routes(micro, batch[EXPERT_ROUTES].cpu(), attended) for micro in packed]


def _with_routes(micro: MicroBatch, routes: torch.Tensor, attended: torch.Tensor) -> MicroBatch:
    """``micro`` with the choices ``routes`` (B, P+R, ...) of its rows, of whose tokens ``attended``
    (B, P+R) are on."""
    shared = micro.packed.shared
    layout = micro.packed.layout
    table = torch.full((layout.num_tokens, *routes.shape[2:]), -1, dtype=torch.int16)
    key_of = torch.full((len(micro.rows), attended.shape[1]), -1, dtype=torch.int64)
    start = attended.shape[1] - micro.width
    # Backwards, so that the first row of a group writes its prompt last.
    for local in reversed(range(len(micro.rows))):
        row, place = int(micro.rows[local]), layout.rows[local]
        columns = attended[row].nonzero().flatten()
        prompt = int((columns < start).sum())
        keys = torch.cat(
            [
                torch.arange(place.prompt_end - prompt, place.prompt_end),
                torch.arange(place.start, place.end),
            ]
        )
        key_of[local, columns] = keys
        table[keys] = routes[row, columns]
    own = torch.arange(layout.num_tokens) if shared is None else shared.own_tokens.cpu()
    keys = torch.where(micro.padding.cpu(), -1, own.unsqueeze(0))
    return replace(micro, routes=table, keys=keys.to(micro.padding.device), key_of=key_of)


def split_attended_values(
    values: torch.Tensor, attended: torch.Tensor, start: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``values`` (B, P+R) of the attended tokens of every row, before column ``start`` and from it
    on."""
    pairs = zip(values, attended, strict=True)
    split = [(row[:start][seen[:start]], row[start:][seen[start:]]) for row, seen in pairs]
    return [prompt for prompt, _ in split], [response for _, response in split]


@dataclass(frozen=True, slots=True)
class _Predicted:
    """The tokens of a row that are predicted."""

    places: torch.Tensor
    """(n,) int64: their places among the attended response tokens."""
    columns: torch.Tensor
    """(n,) int64: their columns in the (B, R) fields."""


def _predicted(row: int, attended: torch.Tensor, answered: torch.Tensor) -> _Predicted:
    """ValueError for a mask (R,) that selects a token which is not attended."""
    if (answered & ~attended).any():
        raise ValueError(f"row {row}: response_mask selects tokens that are not attended")
    columns = answered.nonzero().flatten()
    return _Predicted(attended.long().cumsum(0)[columns] - 1, columns)


def _pack(
    groups: list[list[int]],
    prompts: list[torch.Tensor],
    responses: list[torch.Tensor],
    predicted: list[_Predicted],
    width: int,
    multiple: int,
    device: torch.device,
    context: Any,
) -> MicroBatch:
    rows = [row for group in groups for row in group]
    parts = [t for group in groups for t in (prompts[group[0]], *(responses[r] for r in group))]
    total = sum(map(len, parts))
    # A micro-batch without rows is computed as well (``count``), and needs tokens.
    filler = -total % multiple if total else multiple
    parts.append(torch.zeros(filler, dtype=torch.int64))
    layout = build_packed_layout(
        [(len(prompts[group[0]]), [len(responses[row]) for row in group]) for group in groups],
        filler=filler,
    )
    predictors, targets, row_of, columns = ([torch.zeros(0, dtype=torch.int64)] for _ in range(4))
    for local, (row, place) in enumerate(zip(rows, layout.rows, strict=True)):
        chosen = predicted[row]
        predictors.append(place.predecessors(chosen.places))
        targets.append(responses[row][chosen.places])
        row_of.append(torch.full_like(chosen.columns, local))
        columns.append(chosen.columns)
    return micro_batch(
        layout,
        torch.cat(parts),
        *map(torch.cat, (predictors, targets, row_of, columns)),
        rows=rows,
        num_tokens=total,
        width=width,
        device=device,
        context=context,
    )


def micro_batch(
    layout: PackedLayout,
    tokens: torch.Tensor,
    predictors: torch.Tensor,
    targets: torch.Tensor,
    row_of: torch.Tensor,
    column_of: torch.Tensor,
    *,
    rows: list[int],
    num_tokens: int,
    width: int,
    device: torch.device,
    context: Any,
    weights: torch.Tensor | None = None,
    occurrences: int = 1,
) -> MicroBatch:
    """This rank's part of a micro-batch, whose whole fields are on the host: ``tokens`` in the
    order of the layout, and one number per predicted token in the others."""
    packed = layout_params(layout, device, context)
    local = torch.arange(len(tokens)) if packed.shared is None else packed.shared.own_tokens.cpu()
    # Where a token is among this rank's, -1 for another rank's.
    place_of = torch.full_like(tokens, -1)
    place_of[local] = torch.arange(len(local))
    places = place_of[predictors]
    here = places >= 0
    return MicroBatch(
        rows=torch.tensor(rows, dtype=torch.int64),
        tokens=tokens[local].unsqueeze(0).to(device),
        positions=packed.positions.unsqueeze(0),
        padding=(local >= num_tokens).unsqueeze(0).to(device),
        num_tokens=num_tokens,
        num_predicted=len(targets),
        packed=packed,
        predictors=places[here].to(device),
        targets=targets[here].to(device),
        row_of=row_of[here].to(device),
        column_of=column_of[here].to(device),
        width=width,
        weights=1.0 if weights is None else weights[here].to(device),
        occurrences=occurrences,
    )
