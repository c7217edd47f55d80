"""A reward model against transformers, in several layouts, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_policy import LAYOUTS, assert_same_weights, ranks
from tiny_reward_models import save_reward_model, transformers_rewards
from world import run_world

PROMPTS = (
    [{"role": "user", "content": "What is 3 + 4?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour of it"},
    ],
)
ANSWERS = ("7", "It is seven, because 3 + 4 = 7.\n", "", "Red. " * 12, "no", "7 or 8?")
ROWS = [(PROMPTS[i % 2], answer) for i, answer in enumerate(ANSWERS * 2)]
CONVERSATIONS = [[*prompt, {"role": "assistant", "content": a}] for prompt, a in ROWS]


FEWER = {"tp2": ("qwen2", "qwen3"), "pp2": ("llama",), "dp2": ("qwen3",)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("reward_models")
    families = {"qwen2": {}, "llama": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 20}}
    return {f: save_reward_model(root / f, f, **keys) for f, keys in families.items()}


def rewards(directories: dict[str, Path], layout: dict[str, Any], **options: Any) -> list[Any]:
    return run_world(
        "reward_parity",
        ranks(layout),
        layout=layout,
        directories={name: str(path) for name, path in directories.items()},
        rows=ROWS,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("tp2", "megatron"),
        ("pp2", "megatron"),
        ("dp2", "fsdp"),
        *(
            pytest.param(name, "megatron", marks=pytest.mark.long)
            for name in ("tp1", "dp2", "tp2_sp", "vpp2", "cp2", "tp2_pp2_sp")
        ),
    ],
)
def test_rewards_are_those_of_transformers(
    directories: dict[str, Path], tmp_path: Path, name: str, strategy: str
) -> None:
    """Of conversations of all lengths, whose last tokens are padding; and files survive."""
    layout = LAYOUTS[name]
    if "virtual_pipeline" in layout:
        deep = {"num_hidden_layers": 4}
        directories = {"qwen2": save_reward_model(tmp_path / "deep", "qwen2", **deep)}
    elif name in FEWER:
        directories = {family: directories[family] for family in FEWER[name]}
    results = rewards(directories, layout, out=str(tmp_path / "out"), strategy=strategy)
    for family, path in directories.items():
        expected = transformers_rewards(path, CONVERSATIONS)
        assert expected.std() > 0.1, expected
        for result in results:
            torch.testing.assert_close(torch.tensor(result[family]), expected, atol=1e-5, rtol=1e-5)
        assert_same_weights(path, tmp_path / "out" / family, rel=0)
        assert torch.equal(transformers_rewards(tmp_path / "out" / family, CONVERSATIONS), expected)


def test_what_is_too_long_has_no_reward(directories: dict[str, Path], tmp_path: Path) -> None:
    """60 bytes of "Red. " and what the template adds are too many for 60 tokens, nothing else."""
    (found,) = rewards({"qwen2": directories["qwen2"]}, {}, out=str(tmp_path), longest=60)
    expected = transformers_rewards(directories["qwen2"], CONVERSATIONS).tolist()
    for (prompt, answer), reward, wanted in zip(ROWS, found["qwen2"], expected, strict=True):
        size = sum(2 + len(m["content"]) for m in prompt) + 1 + len(answer)
        assert (reward is None) == (size > 60), (size, answer)
        assert reward is None or reward == pytest.approx(wanted, abs=1e-5)
    assert None in found["qwen2"] and found["qwen2"] != [None] * len(ROWS)


def test_a_value_model_may_start_from_a_reward_model(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """Before training its last value is the reward; its head gets a bias."""
    path = directories["qwen2"]
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.int64),
        "response_mask": torch.tensor([[False, True]]),
    }
    (found,) = run_world(
        "value_parity",
        1,
        layout={},
        directories={"started": str(path)},
        batch=batch,
        out=str(tmp_path),
    )
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        wanted = model(batch["input_ids"][:, :4]).logits
    torch.testing.assert_close(found["started"][:, 1:], wanted, atol=1e-5, rtol=1e-5)
    made = load_file(tmp_path / "started/model.safetensors")
    assert made.keys() - load_file(path / "model.safetensors").keys() == {"score.bias"}
