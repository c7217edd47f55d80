"""Features that older versions of torch lack are not used there."""

from __future__ import annotations

import argparse

import pytest
import torch.distributed.run
from torch.nn.attention import varlen

from ctrl_megatron import torch_features
from ctrl_megatron.torch_features import exact_pinned_memory

SETTING = "pinned_max_round_threshold_mb"
PINNED = torch.__version__.startswith("2.13")


@pytest.mark.skipif(not PINNED, reason="an older stack")
def test_the_pinned_torch_has_every_feature() -> None:
    assert torch_features.launcher_takes_shutdown_timeout()
    assert torch_features.varlen_attention_takes_enable_gqa()


def test_an_older_torch_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for feature in (
        torch_features.launcher_takes_shutdown_timeout,
        torch_features.varlen_attention_takes_enable_gqa,
    ):
        feature.cache_clear()
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", argparse.ArgumentParser)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, window_size: None)
    monkeypatch.setattr(torch_features.metadata, "version", lambda name: "2.11.0+cu130")
    assert not torch_features.launcher_takes_shutdown_timeout()
    assert not torch_features.varlen_attention_takes_enable_gqa()
    assert exact_pinned_memory({}) == {}
    torch_features.launcher_takes_shutdown_timeout.cache_clear()
    torch_features.varlen_attention_takes_enable_gqa.cache_clear()


@pytest.mark.skipif(not PINNED, reason="an older stack")
def test_page_locked_memory_of_an_engine_is_not_rounded_up() -> None:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    assert exact_pinned_memory({}) == {new: f"{SETTING}:1"}
    assert exact_pinned_memory({old: "max_split_size_mb:64"}) == {
        old: f"max_split_size_mb:64,{SETTING}:1"
    }
    assert exact_pinned_memory({old: f"{SETTING}:512"}) == {}
