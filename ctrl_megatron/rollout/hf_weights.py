"""The tensors of a model directory inside the parameters that transformers makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ctrl_megatron.models.fp8 import (
    BLOCK,
    SCALES,
    block_maxima,
    block_scales,
    dequantise,
    quantise,
)
from ctrl_megatron.types import TensorSpec

_SHOWN = 5


def weight_views_by_name(model: Any, manifest: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """HF name -> the tensor of ``manifest`` in memory: a parameter of ``model``, or a view of an
    expert's part of one, because transformers stacks a layer's experts.

    ValueError for tensors that are neither.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    stacks = {
        pattern: (place, len(transform.source_patterns))
        for transform in transforms
        if isinstance(transform, WeightConverter) and _is_stack(transform)
        for place, pattern in enumerate(transform.source_patterns)
    }
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    held, views = model.state_dict(keep_vars=True), dict[str, torch.Tensor]()
    for spec in manifest:
        path, pattern = rename_source_key(spec.name, renamings, converters)
        view = held.get(path)
        if view is not None and pattern is not None:
            view = _expert(view, spec.name, pattern, stacks)
        if view is not None and tuple(view.shape) == spec.shape:
            views[spec.name] = view
    if lost := [spec.name for spec in manifest if spec.name not in views]:
        raise ValueError(
            f"engine 'hf' cannot update {len(lost)} tensors of {model.name_or_path}, which "
            f"transformers keeps in another form: {', '.join(lost[:_SHOWN])}"
        )
    return views


def _is_stack(converter: WeightConverter) -> bool:
    """Whether it stacks the experts' tensors and then joins those of one expert by rows."""
    merge, *join = converter.operations
    return (isinstance(merge, MergeModulelist) and merge.dim == 0) and (
        not join or (len(join) == 1 and isinstance(join[0], Concatenate) and join[0].dim == 1)
    )


def _expert(
    stack: torch.Tensor, name: str, pattern: str, stacks: dict[str, tuple[int, int]]
) -> torch.Tensor | None:
    """The view of the (experts, rows, columns) ``stack`` that holds the tensor ``name``; None if
    the part cannot be found."""
    number = re.search(pattern.rpartition(".*.")[0] + r"\.(\d+)\.", name)
    if number is None or pattern not in stacks:
        return None
    place, count = stacks[pattern]
    return stack[int(number[1])].chunk(count)[place]


class QuantisedWeights:
    """Weights in 8 bits, beside the parameters that transformers multiplies with: it has no kernels
    for these weights on every device, so that they are multiplied out."""

    def __init__(self, views: Mapping[str, torch.Tensor], manifest: Sequence[TensorSpec]) -> None:
        """``views`` are the model's parameters by name (``weight_views_by_name``); they become what
        the tensors of ``manifest`` say.
        """
        self._views = views
        self.held: dict[str, torch.Tensor] = {}
        """The tensors of ``manifest`` by name; those that are not quantised are views."""
        for spec in manifest:
            name, view = spec.name, views.get(spec.name)
            if view is None:
                weight = views[name.removesuffix(SCALES)]
                scales = block_scales(block_maxima(weight.detach(), (0, 0)))
                self.held[name.removesuffix(SCALES)] = quantise(weight, scales, (0, 0))
                self.held[name] = scales
            else:
                self.held[name] = view
        self.dequantise_into_model(self.held)

    @torch.no_grad()
    def dequantise_into_model(self, names: Iterable[str]) -> None:
        """Renew the parameters of which ``names`` has the scales; weights come before them."""
        for name in names:
            if name.endswith(SCALES):
                weight = name.removesuffix(SCALES)
                own = dequantise(self.held[weight], self.held[name], (0, 0), BLOCK)
                self._views[weight].copy_(own)
