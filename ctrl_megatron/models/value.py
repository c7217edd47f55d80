"""Models with a scalar in place of the vocabulary head: PPO's value model, and reward models."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.micro_batch import Fields, MicroBatch
from ctrl_megatron.models.parallel_model import ParallelModel


class ValueLossFn(Protocol):
    """The loss of ``ParallelModel.step``, called once per micro-batch on the last pipeline stage.

    ``values`` is (b, R) float32 with gradients; the rest is as for ``models.policy.LossFn``.
    """

    def __call__(
        self, values: torch.Tensor, rows: dict[str, torch.Tensor], counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


class ValueModel(ParallelModel):
    """V(state before each response token) of a ``shape.value_model_shape``; arXiv 1506.02438.

    Its output layer is ``models.layer_spec.ValueOutputLayer``; a model initialised from a language
    model predicts 0 everywhere at first.
    """

    load_metrics = "critic/moe"

    def values(self, rows: Fields) -> torch.Tensor:
        """(B, R) float32 on the host, 0 off the mask: column t is read before token t is known.

        Every rank of the model copy calls this with the same rows and gets the same result.
        """
        return self.infer(rows, self._head, 1)[0]

    def _head(
        self, module: Any, micro: MicroBatch, output: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor]:
        """(values before the response tokens,)."""
        return (self.strategy.values(module, micro, output),)


class RewardModel(ParallelModel):
    """r(conversation), of a ``hf_config`` shape of a sequence classification model; frozen.

    Its head is read at one token of a row, as transformers reads it at the last one.
    """

    def rewards(self, rows: Fields) -> torch.Tensor:
        """(B,) float32 on the host: the head's number for everything before the one token of each
        row that ``response_mask`` selects.

        Every rank of the model copy calls this with the same rows and gets the same result.
        """
        return self.infer(rows, self._head, 1)[0].sum(dim=1)

    def _head(
        self, module: Any, micro: MicroBatch, output: torch.Tensor, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor]:
        return (self.strategy.values(module, micro, output),)
