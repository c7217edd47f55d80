"""Text and tokens, with a byte-level tokenizer made here: no download, no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ctrl_megatron.data.tokens import TextCodec

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


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_conversation_ends_where_the_answer_starts(codec: TextCodec) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = "<s>user\nhi<e>\n<s>assistant\nyo<e>\n"
    prompt = codec.encode_chat(chat)
    assert codec.decode(prompt, skip_special_tokens=False) == text + "<s>assistant\n"
    closed = codec.encode_chat(chat, add_generation_prompt=False)
    assert codec.decode(closed, skip_special_tokens=False) == text
    assert prompt[: len(closed)] == closed
    assert all(type(token) is int for token in prompt)
    assert codec.decode(closed) == "user\nhi\nassistant\nyo\n"


def test_the_fingerprint_is_that_of_what_becomes_tokens(tmp_path: Path) -> None:
    first = TextCodec(save_tokenizer(tmp_path / "a")).fingerprint()
    assert len(first) == 16 and TextCodec(save_tokenizer(tmp_path / "b")).fingerprint() == first
    others = (
        save_tokenizer(tmp_path / "template", template=TEMPLATE.replace("<s>", "<s> ")),
        save_tokenizer(tmp_path / "end", eos="<s>"),
        save_tokenizer(tmp_path / "vocabulary", pad="<pad>"),
    )
    assert len({first, *(TextCodec(path).fingerprint() for path in others)}) == 4


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_untouched(codec: TextCodec, text: str) -> None:
    if "<s>" not in text and "<e>" not in text:
        assert codec.decode(codec.encode(text)) == text


@given(st.text("ab \n.,'!", max_size=12), st.text("ab \n.,'!", max_size=12))
def test_an_answer_follows_its_prompt(codec: TextCodec, question: str, answer: str) -> None:
    """Prompt tokens, answer tokens and the end token are the tokens of the whole conversation."""
    chat = [{"role": "user", "content": question}]
    whole = codec.encode_chat(
        [*chat, {"role": "assistant", "content": answer}], add_generation_prompt=False
    )
    parts = [*codec.encode_chat(chat), *codec.encode(answer), codec.eos_token_ids[0]]
    assert whole[: len(parts)] == parts


def test_end_and_padding_tokens(tmp_path: Path) -> None:
    first = TextCodec(save_tokenizer(tmp_path / "a"))
    end = first.tokenizer.convert_tokens_to_ids("<e>")
    assert first.eos_token_ids == (end,)
    assert first.pad_token_id == end
    folder = save_tokenizer(tmp_path / "b", pad="<s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, end]}))
    second = TextCodec(folder)
    assert second.eos_token_ids == (end, 3)
    assert second.pad_token_id == second.tokenizer.convert_tokens_to_ids("<s>") != end


def test_what_the_template_refuses(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match=r"refuses the roles \(system\): no system role"):
        codec.encode_chat([{"role": "system", "content": "x"}])
    with pytest.raises(ValueError, match="at least one message"):
        codec.encode_chat([])


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent not found"):
        TextCodec(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        TextCodec(tmp_path)
    no_template = TextCodec(save_tokenizer(tmp_path / "plain", template=None))
    with pytest.raises(ValueError, match="no chat template"):
        no_template.encode_chat([{"role": "user", "content": "x"}])
    endless = TextCodec(save_tokenizer(tmp_path / "endless", eos=None))
    with pytest.raises(ValueError, match="no end-of-text token"):
        _ = endless.eos_token_ids
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        TextCodec(tmp_path / "broken").encode("x")
