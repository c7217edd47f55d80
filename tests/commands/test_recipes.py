"""The table of recipes for GPUs: its figures are those of the memory plan and of the models'
arithmetic, and every configuration of ``examples/`` is a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.memory.budget import memory_budget
from ctrl_megatron.memory.engine import GIB
from ctrl_megatron.memory.shapes import model_shapes
from ctrl_megatron.models.flops import model_flops
from ctrl_megatron.parallel.layout import worlds_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text()
ROWS = re.findall(
    r"\(\.\./(examples/\S+\.yaml)\) \| (\S+) \| (\d+) \| (.+), (\S+) GiB \| (\S+) s \|$", PAGE, re.M
)
H100 = 989e12
"""Dense bfloat16 flop/s."""


@pytest.mark.parametrize(("file", "shape", "gpus", "phase", "gib", "seconds"), ROWS)
def test_a_row_has_the_figures_of_the_plan(
    file: str, shape: str, gpus: str, phase: str, gib: str, seconds: str
) -> None:
    config = load_config(ROOT / file, [], "rl")
    trainer, data = config.trainer, config.data
    assert int(gpus) == trainer.nnodes * trainer.n_gpus_per_node
    given = ROOT / f"examples/shapes/{shape}.json"
    shapes = model_shapes(config, "rl", single_file=given, proxy_file=given)
    budget = memory_budget(config, shapes, gpu_memory=80 * GIB, purpose="rl")
    fullest = budget.fullest_phase
    assert fullest.total <= budget.limit_bytes
    assert (phase, gib) == (fullest.phase, f"{fullest.total / GIB:.1f}")

    rows = data.train_batch_size * config.actor_rollout_ref.rollout.n
    prompt, response = data.max_prompt_length, data.max_response_length
    tokens = data.train_batch_size * prompt + rows * response
    pairs = data.train_batch_size * prompt * (prompt + 1) // 2
    pairs += rows * (response * prompt + response * (response + 1) // 2)
    if shapes.actor.diffusion:
        # Three versions of every row, in which all tokens see each other, in each of two passes.
        versions = 2 * 3 * rows
        tokens, pairs = versions * (prompt + response), versions * (prompt + response) ** 2
    flops = model_flops(
        shapes.actor, tokens=tokens, pairs=pairs, projected_tokens=rows * response, backward=True
    )
    training = len(worlds_of(int(gpus), config)[0].ranks)
    found = flops / (training * 0.4 * H100)
    assert float(seconds) == pytest.approx(found, rel=0.1)


def test_every_configuration_is_a_recipe() -> None:
    names = {file.name for file in (ROOT / "examples").glob("*.yaml")}
    assert {name for name in names if f"examples/{name})" not in PAGE} == set()
    assert len(ROWS) == 10
