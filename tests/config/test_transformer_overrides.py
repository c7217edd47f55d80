"""Overrides of Megatron's TransformerConfig change how a model is computed, never the model."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from refusals import ACTOR, messages

from ctrl_megatron.config import transformer_overrides as tables
from ctrl_megatron.config.schema import KEYS

SELECTIVE = ACTOR + "compute.recompute_granularity=selective"
HINTS = typing.get_type_hints(TransformerConfig)
DOCS = Path(__file__).parents[2] / "docs/cluster.md"


def refused(fields: dict[str, object], *more: str) -> list[str]:
    return messages(f"{tables.KEY}={json.dumps(fields)}", *more)


@pytest.mark.parametrize(
    ("field", "value", "fragments"),
    [
        ("num_moe_experts", 8, ["config.json", "remove it"]),
        ("num_layers", 2, ["config.json"]),
        ("window_size", [128, 0], ["config.json"]),
        ("fp8", "hybrid", ["low precision"]),
        ("attention_dropout", 0.1, ["log-probs"]),
        ("context_parallel_size", 2, ["megatron.context_parallel_size"]),
        ("tensor_model_parallel_size", 2, ["use that key", "megatron.tensor_model_parallel_size"]),
        ("expert_model_parallel_size", 2, ["megatron.expert_model_parallel_size"]),
        ("bf16", False, ["actor_rollout_ref.model.dtype"]),
        ("recompute_granularity", "full", ["compute.recompute_granularity"]),
        ("masked_softmax_fusion", True, ["no effect", "known: apply_rope_fusion"]),
        ("gradient_acumulation_fusion", False, ["did you mean 'gradient_accumulation_fusion'"]),
        ("gradient_accumulation_fusion", "no", ["'no'", "true or false"]),
        ("gradient_accumulation_fusion", 0, ["=0", "true or false"]),
        ("recompute_modules", "mlp", ["'mlp'", "list of core_attn, mlp"]),
        ("recompute_modules", [], ["list of core_attn, mlp"]),
        ("recompute_modules", ["mlp", "moe"], ["'moe'", "core_attn, mlp"]),
    ],
)
def test_a_field_that_may_not_be_set_is_refused_by_name(
    field: str, value: object, fragments: list[str]
) -> None:
    (line,) = refused({field: value}, SELECTIVE)
    for fragment in (f"{tables.KEY}.{field}", *fragments):
        assert fragment in line


def test_modules_that_nothing_recomputes_are_refused() -> None:
    assert refused({"recompute_modules": ["mlp"]}, SELECTIVE) == []
    (line,) = refused({"recompute_modules": ["mlp"]})
    assert "recompute_granularity=selective" in line


@pytest.mark.parametrize("value", [True, False])
def test_every_switch_is_accepted(value: bool) -> None:
    assert refused(dict.fromkeys(tables.SWITCHES, value)) == []


def test_the_tables_name_fields_of_megatron_and_keys_of_ours() -> None:
    assert all(HINTS[name] is bool for name in tables.SWITCHES)
    assert {*tables.OURS, *tables.REASONS, "recompute_modules"} <= set(HINTS)
    assert set(tables.OURS.values()) <= set(KEYS)
    assert not set(tables.SWITCHES) & {*tables.OURS, *tables.REASONS}


def test_the_page_has_every_field() -> None:
    page = DOCS.read_text()
    for name, effect in tables.SWITCHES.items():
        assert f"| `{name}` |" in page and effect.removeprefix("false: ") in page


@pytest.mark.parametrize("field", [{"num_moe_experts": 8}, {"bias_dropout_fusion": "yes"}])
def test_a_build_refuses_them_too(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        from ctrl_megatron.models.build import BuildOptions, check_options

        check_options(BuildOptions(dtype="float32", overrides=field))
