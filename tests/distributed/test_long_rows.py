"""Every family against transformers in float64 on rows as long as those of training.

Only long rows reach attention in several pieces, attention apart from a prompt, and several tiles
of logits with many tokens each.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_masked_diffusion import SHIFTED
from test_policy import LAYOUTS, ranks
from tiny_models import (
    DELTA_FAMILIES,
    EXPERTS,
    FAMILIES,
    llada_name,
    random_batch,
    reference_gradients,
    reference_log_probs,
    reference_scores,
    save_masked,
    save_tiny,
    weights_of,
    widest_gap,
    with_masks,
)
from world import run_world

from ctrl_megatron.models.attention import _APART, _TOGETHER
from ctrl_megatron.parallel.vocab import _tiles

VOCAB, CHUNK = 2051, 128
MODEL = {"num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 4096}
LIMIT = 1e-5
"""The largest error of a log-prob or an entropy, and of a gradient relative to its norm, twice as
large as float32's rounding makes."""
STATES = 2e-5
"""The same of log-probs with gated delta nets, which for the longest rows transformers in float32
has 1.4e-5 away from float64."""
LONGER: dict[str, dict[str, Any]] = {"deepseek_v32": {"index_topk": 4096}}
LONG = {"seed": 55, "rows": 4, "group": 2, "prompt": 400, "response": 400}
"""Rows of 207 to 742 tokens."""
LONGEST = {"seed": 1732, "rows": 6, "group": 3, "prompt": 1600, "response": 1500}
"""Rows of 109 to 3,077 tokens."""
KINDS = ("qwen3", "qwen3_5_text", "glm4_moe", "deepseek_v3")
"""A family of each kind of attention and of experts; the longest rows are those of all families."""
every_size = pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param("tp1", LONG, id="long"),
        pytest.param("tp1", LONGEST, marks=pytest.mark.long, id="longest"),
        pytest.param("tp2_cp2_sp", LONGEST, marks=pytest.mark.long, id="longest tp2_cp2_sp"),
    ],
)


def long_batch(size: dict[str, int], *, holes: bool) -> dict:
    """Rows with prompts and responses on both sides of the bounds of attention."""
    batch = random_batch(**size, holes=holes, vocab=VOCAB)
    parts = batch["attention_mask"].split([size["prompt"], size["response"]], dim=1)
    prompts, responses = (part.sum(1) for part in parts)
    kinds = zip((prompts >= _APART).tolist(), (responses > _TOGETHER).tolist(), strict=True)
    assert len(set(kinds)) == 4
    tokens, columns = _tiles(int(responses.sum()), VOCAB, CHUNK, torch.device("cpu"))
    assert tokens < responses.max() and columns < VOCAB
    return batch


def assert_equal_values(
    found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor], model: str, limit: float = LIMIT
) -> None:
    for ours, theirs in zip(found, exact, strict=True):
        gap = float((ours - theirs.detach()).abs().max())
        assert gap <= limit, (model, gap)


@every_size
def test_log_probs_and_gradients_are_those_of_transformers(
    tmp_path: Path, layout: str, size: dict[str, int]
) -> None:
    """Of rows that share prompts, and of rows apart."""
    batch = long_batch(size, holes=True)
    models = {
        family: save_tiny(family, tmp_path / family, **MODEL, **LONGER.get(family, {}))
        for family in (KINDS if size is LONG else {**FAMILIES, **EXPERTS})
    }
    given: dict[str, Any] = {
        "directories": {family: str(path) for family, path in models.items()},
        "batch": batch,
        # No group is cut.
        "token_budget": size["prompt"] + size["group"] * size["response"],
        "logprob_chunk": CHUNK,
    }
    results = run_world(
        "in_turn",
        ranks(LAYOUTS[layout]),
        layout=LAYOUTS[layout],
        out=str(tmp_path / "ours"),
        calls={"parity": {**given, "temperature": 0.7}, "gradients": given},
    )
    for family, path in models.items():
        exact = reference_log_probs(path, batch, 0.7)
        for result in results:
            limit = STATES if family in DELTA_FAMILIES else LIMIT
            assert_equal_values(result["parity"][family], exact, family, limit)
        theirs = reference_gradients(path, batch, tmp_path / "theirs" / family)
        gradients = weights_of(theirs)
        for way in ("shared", "apart"):
            found = weights_of(tmp_path / "ours/gradients" / way / family)
            gap, weight = widest_gap(found, gradients)
            assert gap <= LIMIT, (family, way, weight, gap)


@every_size
def test_coupled_scores_and_gradients_are_those_of_transformers(
    tmp_path: Path, layout: str, size: dict[str, int]
) -> None:
    batch = with_masks({k: v[-2:] for k, v in long_batch(size, holes=False).items()}, seed=4)
    models = {name: save_masked(name, tmp_path / name, **MODEL) for name in SHIFTED}
    results = run_world(
        "coupled",
        ranks(LAYOUTS[layout]),
        layout=LAYOUTS[layout],
        directories={name: str(own) for name, (own, _) in models.items()},
        batch=batch,
        temperature=0.7,
        out=str(tmp_path / "ours"),
        # A row has three versions.
        token_budget=3 * (size["prompt"] + size["response"]),
        logprob_chunk=CHUNK,
    )
    for name, (_, path) in models.items():
        model, *exact = reference_scores(path, batch, shifted=SHIFTED[name], temperature=0.7)
        for result in results:
            assert_equal_values(result[name], exact, name)
        (-(exact[0] * batch["advantages"]).sum() / batch["response_mask"].sum()).backward()
        named = llada_name if name == "llada" else str
        gradients = {named(weight): given.grad for weight, given in model.named_parameters()}
        found = load_file(tmp_path / f"ours/{name}_gradients/model.safetensors")
        gap, weight = widest_gap(found, gradients)
        assert gap <= LIMIT, (name, weight, gap)
