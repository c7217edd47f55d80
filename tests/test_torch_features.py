"""Features that older versions of torch lack are not used there."""

from __future__ import annotations

import argparse

import pytest
import torch.distributed.run
from torch.nn.attention import varlen

from ctrl_megatron import torch_features
from ctrl_megatron.torch_features import exact_pinned_memory_variables

SETTING = "pinned_max_round_threshold_mb"
PINNED = torch.__version__.startswith("2.13")


FLAGS = ["--nnodes", "2", "--shutdown-timeout", "3600", "train.py", "--config", "x"]


@pytest.mark.skipif(not PINNED, reason="an older stack")
def test_the_pinned_torch_has_every_feature() -> None:
    assert torch_features.torchrun_arguments(FLAGS) == FLAGS
    assert torch_features.varlen_attention_needs_enable_gqa()


def test_an_older_torch_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", argparse.ArgumentParser)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, window_size: None)
    monkeypatch.setattr(torch_features.metadata, "version", lambda name: "2.11.0+cu130")
    assert torch_features.torchrun_arguments(FLAGS) == [*FLAGS[:2], *FLAGS[4:]]
    assert not torch_features.varlen_attention_needs_enable_gqa.__wrapped__()
    assert exact_pinned_memory_variables({}) == {}


@pytest.mark.skipif(not PINNED, reason="an older stack")
def test_page_locked_memory_of_an_engine_is_not_rounded_up() -> None:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    assert exact_pinned_memory_variables({}) == {new: f"{SETTING}:1"}
    assert exact_pinned_memory_variables({old: "max_split_size_mb:64"}) == {
        old: f"max_split_size_mb:64,{SETTING}:1"
    }
    assert exact_pinned_memory_variables({old: f"{SETTING}:512"}) == {}
