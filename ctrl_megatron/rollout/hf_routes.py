"""The experts that a model of transformers chooses, by hooks on its routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ctrl_megatron.types import ExpertRoutes


class RouteRecorder:
    """Records the choice of every router in each pass of ``model``.

    Routers of transformers return logits, weights and the numbers of the chosen experts (tokens,
    top_k). ValueError for a model without any.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        if not routers:
            raise ValueError("returns_routes: no layer of the model has a router")
        self._seen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        self._seen.append(output[-1])

    def take_pass(self, rows: int) -> torch.Tensor:
        """(rows, tokens, layers, top_k) int16: the choices of the pass since the last call, whose
        tokens were those of so many rows."""
        seen, self._seen = torch.stack(self._seen, dim=1), []
        return seen.to("cpu", torch.int16).unflatten(0, (rows, -1))


def joined_routes(passes: Sequence[torch.Tensor], version: str) -> ExpertRoutes:
    """The record of (tokens, layers, top_k) int16 choices, one pass after the other."""
    ids = torch.cat(list(passes))
    wide = bool(ids.max() > 255)
    values = ids.numpy().astype("<i2" if wide else "u1")
    return ExpertRoutes(
        version=version,
        ids=values.tobytes(),
        layers=ids.shape[1],
        top_k=ids.shape[2],
        wide=wide,
    )
