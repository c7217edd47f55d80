"""Fields of a batch, as the executor needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack


def select_rows(parts: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> dict[str, Any]:
    """The fields of ``parts`` at ``rows``, whose numbers go through all parts. The tensors of a
    field have the same shape but for their first dimension.
    """
    taken: dict[str, Any] = {}
    for name, first in parts[0].items() if parts else ():
        if isinstance(first, torch.Tensor):
            whole = torch.cat([part[name] for part in parts])
            taken[name] = whole[torch.tensor(rows, dtype=torch.int64)]
        else:
            every = [text for part in parts for text in texts(part[name])]
            taken[name] = NonTensorStack(*[every[row] for row in rows])
    return taken


def texts(field: Any) -> list[str]:
    """A non-tensor field of the batch as a list."""
    return field.tolist() if hasattr(field, "tolist") else list(field)
