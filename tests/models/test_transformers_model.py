"""Which models of transformers have a shape, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.models.rules import hf_shapes, trained_names
from ctrl_megatron.models.shards import distinct_shards
from ctrl_megatron.parallel.layout import Layout

SMALL = {
    **{"vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
}

LLAMA = transformers.LlamaConfig(**SMALL)


def directory(tmp_path: Path, config: Any, **changed: Any) -> Path:
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return tmp_path


@pytest.mark.parametrize("data", [1, 2, 5, 40])
def test_the_data_ranks_have_every_element_of_every_tensor_once(tmp_path: Path, data: int) -> None:
    config = transformers.Olmo2Config(**SMALL, pad_token_id=0)
    shape = read_shape(directory(tmp_path, config), "fsdp")
    built = transformers.AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(weight.shape) for name, weight in built.named_parameters()}
    assert dict(hf_shapes(shape)) == wanted and trained_names(shape) == set(wanted)
    assert list(hf_shapes(shape)) == list(wanted)
    rows: dict[str, list[int]] = {name: [] for name in wanted}
    for param in distinct_shards(shape, Layout(data=data), pp=0, chunk=0):
        for piece in param.pieces:
            first = piece.hf_start[0]
            rows[piece.hf] += range(first, first + piece.extent[0])
            assert piece.extent[1:] == wanted[piece.hf][1:]
    assert {name: sorted(found) for name, found in rows.items()} == {
        name: list(range(size[0])) for name, size in wanted.items()
    }


def test_names_of_tokens_and_files_do_not_distinguish_models(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL)
    own = read_shape(directory(tmp_path, config), "fsdp")
    same = read_shape(directory(tmp_path, config, eos_token_id=[1, 2], dtype="bfloat16"), "fsdp")
    other = read_shape(directory(tmp_path, config, rms_norm_eps=0.1), "fsdp")
    assert own == same != other


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (
            LLAMA,
            {"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "modeling.Theirs"}},
            "'theirs' is not supported: its code is in the directory, .*; name a language model",
        ),
        (LLAMA, {"model_type": "no"}, "transformers does not have it; name a language model"),
        (LLAMA, {"model_type": "Dream"}, "does not have it; set .*strategy=megatron"),
        (transformers.ViTConfig(), {}, "no language model of type 'vit'; name a language model"),
        (transformers.Gemma3Config(), {}, "'gemma3' reads more than text; name a text model"),
        (LLAMA, {"model_type": "qwen3_5"}, "the object 'text_config' is missing"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantised .*; name .* in bfloat16"),
        (transformers.MambaConfig(num_hidden_layers=1), {}, "is missing; name a language model"),
        (LLAMA, {"hidden_size": "wide"}, "transformers refuses it: .*hidden_size"),
        (LLAMA, {"hidden_act": "none"}, "transformers refuses it: .*none"),
        (
            # Too large for any host's memory: shapes are read without weights.
            transformers.MixtralConfig(**SMALL | {"hidden_size": 8192}, num_local_experts=1 << 30),
            {},
            r"experts\.\w+ of 'mixtral' in another form than files, .*; set .*strategy=megatron",
        ),
        (
            transformers.OlmoeConfig(**SMALL, num_experts=2, num_experts_per_tok=1),
            {},
            r"experts\.\w+ of 'olmoe' in another form than files, .*; name a language model",
        ),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, config: Any, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        read_shape(directory(tmp_path, config, **changed), "fsdp")


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: must be a JSON object, is list"):
        read_shape(tmp_path, "fsdp")


def test_code_in_a_directory_is_not_needed_where_transformers_has_the_family(
    tmp_path: Path,
) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Theirs"}}
    (tmp_path / "own").mkdir()
    (tmp_path / "plain").mkdir()
    own = read_shape(directory(tmp_path / "own", LLAMA, **code), "fsdp")
    assert own == read_shape(directory(tmp_path / "plain", LLAMA), "fsdp")


def test_megatron_names_the_other_strategy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'olmo2' is not supported .*strategy=fsdp takes"):
        read_shape(directory(tmp_path, transformers.Olmo2Config(**SMALL)), "megatron")
