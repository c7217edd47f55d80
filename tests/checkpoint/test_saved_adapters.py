"""A checkpoint of adapters belongs to the rank, scale, layers and weights that saved it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ctrl_megatron.checkpoint.manifest import DamagedFiles
from ctrl_megatron.checkpoint.peft import (
    ADAPTERS_FILE,
    AdapterDescription,
    read_adapter_description,
    require_same_adapters,
)
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.lora import LoraBaseWeights
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.shape import Dense, GroupedQueryAttention, ModelShape
from ctrl_megatron.types import Lora

LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
BASE = LoraBaseWeights(path="models/first", hashes={"model.safetensors": "aa"})
PLAIN = ModelShape(
    family="llama",
    hidden_size=8,
    vocab_size=8,
    max_position_embeddings=8,
    norm_epsilon=1e-5,
    rope=Rope(theta=1e4),
    tied_embeddings=False,
    attention=GroupedQueryAttention(heads=2, groups=1, head_dim=4),
    feed_forward=(Dense(width=8),),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AdapterDescription(lora=LORA, base=BASE).write(tmp_path)
    return tmp_path


def test_equal_adapters_resume_whatever_their_seed_and_directory(folder: Path) -> None:
    shape = replace(PLAIN, lora=replace(LORA, seed=7))
    require_same_adapters(folder, shape, replace(BASE, path="moved"))
    require_same_adapters(folder, shape, None)


@pytest.mark.parametrize(
    ("lora", "base", "words"),
    [
        (replace(LORA, rank=8), BASE, "lora_rank: .* have rank 4, the run's 8"),
        (replace(LORA, alpha=4.0), BASE, "lora_alpha: .* have alpha 8.0, the run's 4.0"),
        (replace(LORA, targets=("q_proj",)), BASE, "target_modules: .* have targets"),
        (LORA, replace(BASE, hashes={"model.safetensors": "ab"}), "beside the weights of models/"),
        (LORA, replace(BASE, hashes={"other.safetensors": "aa"}), "model.path: .* differ"),
        (None, None, "lora_rank: .* has adapters"),
    ],
)
def test_others_are_refused_by_key(
    folder: Path, lora: Lora | None, base: LoraBaseWeights | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        require_same_adapters(folder, replace(PLAIN, lora=lora), base)


def test_whole_weights_are_no_start_of_adapters(tmp_path: Path) -> None:
    require_same_adapters(tmp_path, PLAIN, None)
    with pytest.raises(UserError, match=r"has whole weights.*resume with 0"):
        require_same_adapters(tmp_path, replace(PLAIN, lora=LORA), BASE)


@pytest.mark.parametrize("content", ["{", "[]", '{"lora": {}}', '{"lora": {"rank": 4}, "base": 1}'])
def test_a_file_that_cannot_be_read_is_damaged(folder: Path, content: str) -> None:
    (folder / ADAPTERS_FILE).write_text(content)
    with pytest.raises(DamagedFiles, match=ADAPTERS_FILE):
        read_adapter_description(folder)
