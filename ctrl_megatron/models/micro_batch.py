"""From padded rows to packed micro-batches under a token budget; no flop is spent on padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ctrl_megatron.data.packing import pack

Fields = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """T packed tokens of b rows, N of which are predicted response tokens."""

    rows: torch.Tensor
    """(b,) int64: which rows of the batch."""
    tokens: torch.Tensor
    """(1, T) int64."""
    positions: torch.Tensor
    """(1, T) int64, counted from 0 in every sequence."""
    packed: PackedSeqParams
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

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) values as a (b, R) matrix with zeros elsewhere; differentiable."""
        out = values.new_zeros((len(self.rows), self.width))
        return out.index_put((self.row_of, self.column_of), values)


def split_into_micro_batches(
    batch: Fields, *, token_budget: int, multiple: int, count_multiple: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches that cover every row of ``batch`` once.

    batch: ``input_ids``, ``attention_mask`` (B, P+R) and ``response_mask`` (B, R), prompts padded
    on the left, responses on the right. ``multiple``: packed lengths are filled up to a multiple
    of it (sequence parallelism cuts them over the tensor ranks). ``count_multiple``: empty
    micro-batches are appended up to a multiple of it (the interleaved schedule needs that).
    Raises ValueError for a row above the token budget, without a prompt token, or whose response
    mask is neither empty nor exactly the attended response tokens.
    """
    attended = batch["attention_mask"].bool().cpu()
    answered = batch["response_mask"].bool().cpu()
    _check_responses(attended[:, attended.shape[1] - answered.shape[1] :], answered)
    lengths = attended.sum(dim=1).tolist()
    answers = answered.sum(dim=1).tolist()
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        if length <= answer:
            raise ValueError(f"row {row} has {answer} response tokens but no prompt token")
    # Longest first: the micro-batch that needs most memory fails at once, not after minutes.
    groups = pack(lengths, token_budget)
    groups += [[] for _ in range(-len(groups) % count_multiple)]
    ids, width = batch["input_ids"].cpu(), answered.shape[1]
    sequences = [row[seen] for row, seen in zip(ids, attended, strict=True)]
    return [_pack(rows, sequences, answers, width, multiple, device) for rows in groups]


def _check_responses(attended: torch.Tensor, answered: torch.Tensor) -> None:
    """Log-probs are put back from column 0 on, so a mask with holes would shift them."""
    holes = answered[:, 1:] & ~answered[:, :-1]
    wrong = holes.any(dim=1) | (answered.any(dim=1) & (attended != answered).any(dim=1))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"row {row}: response_mask must select no token or all attended tokens of the response "
            "from its first column on"
        )


def _pack(
    rows: list[int],
    sequences: list[torch.Tensor],
    answers: list[int],
    width: int,
    multiple: int,
    device: torch.device,
) -> MicroBatch:
    parts = [sequences[row] for row in rows]
    total = sum(map(len, parts))
    if filler := -total % multiple if total else multiple:
        parts.append(torch.zeros(filler, dtype=torch.int64))
    sizes = [len(part) for part in parts]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    predictors, row_of, columns = ([torch.zeros(0, dtype=torch.int64)] for _ in range(3))
    for local, row in enumerate(rows):
        answer, end = answers[row], int(bounds[local + 1])
        predictors.append(torch.arange(end - answer - 1, end - 1))
        row_of.append(torch.full((answer,), local))
        columns.append(torch.arange(answer))
    predictor, tokens = torch.cat(predictors), torch.cat(parts)
    cu_seqlens = bounds.to(device, torch.int32)
    return MicroBatch(
        rows=torch.tensor(rows, dtype=torch.int64),
        tokens=tokens.unsqueeze(0).to(device),
        positions=torch.cat([torch.arange(n) for n in sizes]).unsqueeze(0).to(device),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(sizes),
            max_seqlen_kv=max(sizes),
        ),
        predictors=predictor.to(device),
        targets=tokens[predictor + 1].to(device),
        row_of=torch.cat(row_of).to(device),
        column_of=torch.cat(columns).to(device),
        width=width,
    )
