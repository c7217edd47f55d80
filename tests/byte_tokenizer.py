"""A byte-level tokenizer with a chat template, made without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(
    path: Path, *, pad: str | None = None, template: str | None = TEMPLATE, eos: str | None = "<e>"
) -> Path:
    inner = Tokenizer(models.BPE({b: i for i, b in enumerate(BYTES)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    specials: dict[str, Any] = {"eos_token": eos, "pad_token": pad}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        additional_special_tokens=["<s>", "<e>"],
        **{name: token for name, token in specials.items() if token},
    )
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path
