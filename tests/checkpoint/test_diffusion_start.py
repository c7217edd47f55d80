"""Autoregressive models that become masked-diffusion models compute the same with a full mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from ctrl_megatron.checkpoint.diffusion_start import hf_to_masked_diffusion
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.shape import MaskedDiffusion
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.hf_diffusion import load_denoiser
from tools import make_diffusion_start as tool

WORDS = 60
# The third one is a token that transformers gives every Qwen2.
NAMES = ["<unk>", "</s>", "<|endoftext|>", *(f"w{n}" for n in range(WORDS - 3))]
KINDS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True, "head_dim": 24}),
    "llama untied": (transformers.LlamaConfig, {"rms_norm_eps": 1e-5}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
}


def write(folder: Path, kind: str, rows: int, names: list[str]) -> Any:
    config_class, extra = KINDS[kind]
    torch.manual_seed(1)
    sizes = {
        **{"vocab_size": rows, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    }
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**sizes, **extra}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [WORDS, WORDS + 4])
def test_the_start_computes_what_the_model_does_with_a_full_mask(
    tmp_path: Path, kind: str, rows: int
) -> None:
    """Also with rows of the vocabulary that the tokenizer does not use."""
    model = write(tmp_path / "hf", kind, rows, NAMES)
    before = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    told = ["--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]
    assert tool.main(told) == 0
    shape = read_model_shape(tmp_path / "out")
    assert shape.diffusion == MaskedDiffusion(mask_token=WORDS, shifted=True)
    assert (shape.family, shape.vocab_size) == ("Dream", max(rows, WORDS + 1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mask|>", WORDS)
    assert tokenizer.convert_tokens_to_ids(NAMES) == list(range(WORDS))
    assert json.loads((tmp_path / "hf/tokenizer.json").read_text()) == before
    spec = EngineSpec(name="diffusion", model_path=str(tmp_path / "out"), dtype="float32")
    denoiser = load_denoiser(spec).batch.args[0]  # type: ignore[attr-defined]
    text = [3, 1, 4, 1, 5, 9]
    logits = denoiser.logits(torch.tensor([text]), torch.ones(1, 6).bool(), 5)[0]
    full = torch.zeros(1, 1, 6, 6)
    expected = model(torch.tensor([text]), attention_mask=full).logits[0, :-1]
    torch.testing.assert_close(logits[:, :WORDS], expected[:, :WORDS])
    tensors = load_file(tmp_path / "out/model.safetensors")
    theirs = load_file(tmp_path / "hf/model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        assert torch.equal(tensors[name][:WORDS], theirs[name][:WORDS])
        torch.testing.assert_close(tensors[name][WORDS], theirs[name][:WORDS].mean(0))


def test_a_mask_token_that_is_there_keeps_its_row(tmp_path: Path) -> None:
    names = [*NAMES[:3], "<mask>", *NAMES[4:]]
    write(tmp_path / "hf", "qwen2", WORDS, names)
    shape = hf_to_masked_diffusion(tmp_path / "hf", tmp_path / "out", mask_token="<mask>")
    assert shape.diffusion == MaskedDiffusion(mask_token=3, shifted=True)
    left, right = (load_file(tmp_path / f"{name}/model.safetensors") for name in ("hf", "out"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_cannot_become_one_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "hf", "qwen2", WORDS, NAMES)
    out = tmp_path / "out"
    hf_to_masked_diffusion(tmp_path / "hf", out, mask_token="<m>")
    with pytest.raises(UserError, match=r"of the Dream family; .* llama and qwen2"):
        hf_to_masked_diffusion(out, tmp_path / "again", mask_token="<m>")
    with pytest.raises(UserError, match="out"):
        hf_to_masked_diffusion(tmp_path / "hf", out, mask_token="<m>")
    (tmp_path / "hf/tokenizer.json").unlink()
    (tmp_path / "hf/tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        hf_to_masked_diffusion(tmp_path / "hf", tmp_path / "new", mask_token="<m>")
    assert not (tmp_path / "new").exists()
