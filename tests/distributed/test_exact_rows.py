"""Transformers' models with this package's functions for packed rows, in float64 throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import exact_models, save_tiny
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from ctrl_megatron.models import fsdp
from ctrl_megatron.models.packed_layout import build_packed_layout, layout_params

FAMILIES = {
    "qwen3_5_text": modeling_qwen3_5,
    "qwen3_5_moe_text": modeling_qwen3_5_moe,
    "qwen3_next": modeling_qwen3_next,
    "glm4_moe": modeling_glm4_moe,
}
PROMPT, RESPONSES = 70, (3, 66, 9)


class _Wide:
    """torch, whose single precision is double."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def sum_of(logits: torch.Tensor) -> torch.Tensor:
    """A sum of the log-probs of all tokens with different weights."""
    weights = torch.linspace(-1, 2, logits.numel(), dtype=torch.float64).view(logits.shape)
    return (logits.log_softmax(-1) * weights).sum()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_rows_alone_to_nine_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, shared: bool
) -> None:
    """Logits and the gradients of all weights."""
    monkeypatch.setattr(FAMILIES[family], "torch", _Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    directory = save_tiny(family, tmp_path / family, num_hidden_layers=2)
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(90, (PROMPT,), generator=draw)
    responses = [torch.randint(90, (size,), generator=draw) for size in RESPONSES]
    with exact_models() as load:
        model = load(directory)
        rows = [model(torch.cat([prompt, own])[None]).logits[0] for own in responses]
        # The prompt's tokens count once.
        alone = sum_of(torch.cat([rows[0][:PROMPT], *(row[PROMPT:] for row in rows)]))
        wanted = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True)
    groups = [(PROMPT, list(RESPONSES))] if shared else [(PROMPT, [size]) for size in RESPONSES]
    layout = build_packed_layout(groups)
    tokens = [prompt, *responses] if shared else [t for own in responses for t in (prompt, own)]
    with exact_models() as load:
        model = load(directory, attn_implementation=fsdp._PACKED)
    packed = model(
        torch.cat(tokens)[None],
        position_ids=layout.positions()[None],
        packed=layout_params(layout, torch.device("cpu")),
        use_cache=False,
    ).logits[0]
    first = layout.rows[0]
    own = [packed[first.prompt_end - PROMPT : first.prompt_end]]
    own += [packed[row.start : row.end] for row in layout.rows]
    found = sum_of(torch.cat(own))
    gradients = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
    for left, right in zip(own[1:], rows, strict=True):
        gap = (left - right[PROMPT:]).detach().norm() / right[PROMPT:].detach().norm()
        assert float(gap) < 1e-9
    for (name, _), mine, theirs in zip(model.named_parameters(), gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None), name
        if theirs is not None:
            assert float((mine - theirs).norm()) < 1e-9 * float(theirs.norm()) + 1e-12, name
