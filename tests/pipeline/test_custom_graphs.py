"""What a run refuses when it starts, since only then it can be known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctrl_megatron.algorithms import ADV_ESTIMATOR_REGISTRY
from ctrl_megatron.algorithms import registry as registries
from ctrl_megatron.config import Config, load_config
from ctrl_megatron.pipeline.run import check_names, pipeline_of

LOSS = "actor_rollout_ref.actor.policy_loss"
OWN = """
from ctrl_megatron.algorithms import register_adv_est, register_policy_loss_terms
from ctrl_megatron.pipeline import Pipeline, ctrl_pipeline

@register_adv_est("names_its_score")
def score(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards

@register_policy_loss_terms("names_its_loss")
def loss(old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights=None):
    raise NotImplementedError

def build(config):
    return ctrl_pipeline(config)

def nothing(worker, batch):
    pass

def foreign():
    return Pipeline("foreign").add_node("only", nothing).build()

def wrong():
    return 3
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Config]]:
    """Configures a run with the module above, whose names are known until the test ends."""
    for registry in (ADV_ESTIMATOR_REGISTRY, registries._TERMS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "names_of_its_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def configure(*overrides: str, function: str = "build") -> Config:
        own = f"dag.custom_pipeline_fn=names_of_its_own:{function}"
        config = load_config(None, [own, *overrides], "none")
        pipeline_of(config)
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


DAPO = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4")


def test_a_graph_of_ones_own_may_take_the_configuration_or_nothing(
    start: Callable[..., Config],
) -> None:
    assert "dynamic_sampling" in pipeline_of(start(*DAPO)).nodes
    assert "generate_critiques" in pipeline_of(start()).nodes
    assert list(pipeline_of(start(function="foreign")).nodes) == ["only"]


def test_dynamic_sampling_without_a_node_for_it_is_refused(start: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"filter_groups.enable=true has no effect .* foreign"):
        start(*DAPO, function="foreign")


def test_a_function_that_returns_no_graph_is_named(start: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match="names_of_its_own:wrong returned int, not the TaskGraph"):
        start(function="wrong")
