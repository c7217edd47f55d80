"""What a run refuses when it starts, since only then it can be known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctrl_megatron.algorithms import ADV_ESTIMATOR_REGISTRY
from ctrl_megatron.algorithms.policy_losses import registry as policy_losses
from ctrl_megatron.config import Config, load_config
from ctrl_megatron.pipeline.run import check_names, task_graph

LOSS = "actor_rollout_ref.actor.policy_loss"
OWN = """
from ctrl_megatron.algorithms import register_adv_est, register_policy_loss_terms
from ctrl_megatron.pipeline.builtin import ctrl_pipeline

@register_adv_est("names_its_score")
def score(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards

@register_policy_loss_terms("names_its_loss")
def loss(old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights=None):
    raise NotImplementedError

def build():
    return ctrl_pipeline()
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Config]]:
    """Configures a run with the module above, whose names are known until the test ends."""
    for registry in (ADV_ESTIMATOR_REGISTRY, policy_losses._TERMS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "names_of_its_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def configure(*overrides: str) -> Config:
        own = "dag.custom_pipeline_fn=names_of_its_own:build"
        config = load_config(None, [own, *overrides], "none")
        task_graph(config)
        return config

    yield configure
    del sys.modules["names_of_its_own"]


def test_names_that_the_module_registers_are_known(start: Callable[..., Config]) -> None:
    check_names(start("algorithm.adv_estimator=names_its_score", f"{LOSS}=names_its_loss"))
    check_names(start())


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", LOSS])
def test_a_name_that_nothing_registers_ends_the_run_at_its_start(
    start: Callable[..., Config], key: str
) -> None:
    with pytest.raises(ValueError) as caught:
        check_names(start(f"{key}=grop"))
    said = str(caught.value)
    assert said.startswith(f"{key}=grop: unknown ")
    assert "known: " in said and "names_its_" in said
    assert said.endswith("register it in the module of dag.custom_pipeline_fn")
