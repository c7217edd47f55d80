"""A run that loses hosts goes on, on as many as hold whole model copies and divide its batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import ACTOR, PATHS, messages

from ctrl_megatron.config import load_config
from ctrl_megatron.config.elastic import config_for_world_size, max_fitting_hosts
from ctrl_megatron.errors import UserError

MEGATRON = ACTOR + "megatron."


@settings(max_examples=40)
@given(
    left=st.integers(1, 9),
    planned=st.integers(1, 8),
    least=st.integers(1, 8),
    each=st.sampled_from([1, 2, 4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    batch=st.sampled_from([2, 12, 40, 64, 840]),
)
def test_as_many_hosts_are_used_as_fit(
    left: int, planned: int, least: int, each: int, tensor: int, pipeline: int, batch: int
) -> None:
    least = min(least, planned)
    config = load_config(
        None,
        [
            *PATHS,
            *(f"trainer.nnodes={planned}", f"trainer.min_nnodes={least}"),
            f"trainer.n_gpus_per_node={each}",
            f"{MEGATRON}tensor_model_parallel_size={tensor}",
            f"{MEGATRON}pipeline_model_parallel_size={pipeline}",
            *(f"data.train_batch_size={batch}", f"{ACTOR}ppo_mini_batch_size={batch}"),
        ],
    )

    def fits(hosts: int) -> bool:
        copies, rest = divmod(hosts * each, tensor * pipeline)
        return rest == 0 and batch % copies == 0

    able = [hosts for hosts in range(least, min(left, planned) + 1) if fits(hosts)]
    if not able:
        with pytest.raises(UserError):
            max_fitting_hosts(config, left)
        return
    hosts = max_fitting_hosts(config, left)
    assert hosts == max(able)
    # Ranks that are started there find a configuration that announces them.
    assert config_for_world_size(config, hosts * each).trainer.nnodes == hosts


@pytest.mark.parametrize(
    ("keys", "left", "words"),
    [
        ((), 3, "trainer.nnodes: the run needs 4 hosts, and 3 are left"),
        (("trainer.min_nnodes=2",), 1, "trainer.min_nnodes: the run needs 2 hosts, and 1 are left"),
        (("trainer.min_nnodes=3",), 3, "data.train_batch_size=32 does not divide over 3"),
    ],
)
def test_what_does_not_fit_is_named(keys: tuple[str, ...], left: int, words: str) -> None:
    batch = ("data.train_batch_size=32", ACTOR + "ppo_mini_batch_size=32")
    config = load_config(None, [*PATHS, *batch, "trainer.nnodes=4", *keys])
    with pytest.raises(UserError, match=words):
        max_fitting_hosts(config, left)


def test_a_run_needs_no_more_hosts_than_it_has() -> None:
    (line,) = messages("trainer.nnodes=2", "trainer.min_nnodes=3")
    assert line == "trainer.min_nnodes=3 is larger than trainer.nnodes=2; lower it"


def test_other_numbers_of_ranks_are_still_refused() -> None:
    config = load_config(None, [*PATHS, "trainer.nnodes=4", "trainer.min_nnodes=2"])
    for world_size in (1, 4, 5):
        assert config_for_world_size(config, world_size) is config
