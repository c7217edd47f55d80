"""Random small reward models with a tokenizer and a chat template of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_DIMS = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 1024, "head_dim": 12},
}


def save_reward_model(directory: Path, family: str = "qwen2", **keys: Any) -> Path:
    """transformers' own sequence classification model with one label, whose tokens are bytes. A
    conversation ends with ``[end]``, which is its padding too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["[end]", "[user]", "[assistant]", "[system]"]
    vocabulary = {name: number for number, name in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    config = transformers.CONFIG_MAPPING[family](
        **{
            # transformers' tokenizer of a family may add tokens of its own.
            **{"vocab_size": len(vocabulary) + 12, "num_hidden_layers": 2, "num_labels": 1},
            **{"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0},
            **_DIMS,
            **keys,
        }
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.3 if name.startswith("score") else 0.08)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[end]"}
    settings["pad_token"] = "[end]"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return directory


@torch.no_grad()
def transformers_rewards(
    directory: Path, conversations: Sequence[Sequence[dict[str, str]]]
) -> torch.Tensor:
    """(B,) float32: transformers' own numbers for whole conversations, padded on the right."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    rendered = [tokenizer.apply_chat_template(c, tokenize=False) for c in conversations]
    tokens = tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False)
    return model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits[:, 0]
