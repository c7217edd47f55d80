"""The proposal of a placement: work, waiting, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.commands.plan import main
from ctrl_megatron.commands.start import _placed
from ctrl_megatron.config import Config, load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.memory.engine import GIB
from ctrl_megatron.memory.proposal import (
    StepFlops,
    choose_placement,
    placement_candidates,
    step_flops,
    step_time_and_idle_shares,
    with_auto_placement,
)
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.shape import value_model_shape
from ctrl_megatron.parallel.layout import Layout, World

EXAMPLES = Path(__file__).parents[2] / "examples"
PPO = ("algorithm.adv_estimator=gae",)
WORK = StepFlops(
    generate=8.0,
    old_log_prob=2.0,
    ref_log_prob=2.0,
    reward_model=0.0,
    values=2.0,
    critic_update=6.0,
    actor_update=6.0,
)


def world(ranks: int, *roles: str) -> World:
    return World(ranks=tuple(range(ranks)), layout=Layout(data=ranks), roles=roles)


def test_worlds_wait_for_the_longest_in_each_part_of_a_step() -> None:
    step, idle = step_time_and_idle_shares(WORK, (world(4, "actor"),))
    assert step == pytest.approx((8 + 6 + 12) / 4) and idle["actor"] == pytest.approx(0)
    # 2 ranks draw 4, then 2 (log-probs and reference) and update 3; the other two 1 and 3.
    step, idle = step_time_and_idle_shares(WORK, (world(2, "actor"), world(2, "critic")))
    assert step == pytest.approx(4 + 2 + 3)
    assert idle == {"actor": pytest.approx(0), "critic": pytest.approx(1 - 4 / 9)}
    step, idle = step_time_and_idle_shares(
        WORK, (world(2, "actor"), world(1, "critic"), world(1, "reference"))
    )
    assert step == pytest.approx(4 + 2 + 6)
    assert idle["reference"] == pytest.approx(1 - 2 / 12)


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 50))
def test_equal_ranks_are_never_faster_apart(actor: int, critic: int, generate: float) -> None:
    """All ranks are busy in one world; waiting is what worlds add."""
    work = StepFlops(**{**{n: getattr(WORK, n) for n in StepFlops.__slots__}, "generate": generate})  # type: ignore[attr-defined]
    one, _ = step_time_and_idle_shares(work, (world(actor + critic, "actor"),))
    two, idle = step_time_and_idle_shares(work, (world(actor, "actor"), world(critic, "critic")))
    assert two >= one * (1 - 1e-9)
    busy = actor * (1 - idle["actor"]) + critic * (1 - idle["critic"])
    assert busy * two == pytest.approx((actor + critic) * one)


def example(*overrides: str) -> tuple[Config, ModelShapes]:
    shape = parse_model_shape(json.loads((EXAMPLES / "shapes/qwen2.5-7b.json").read_text()))
    config = load_config(EXAMPLES / "ctrl_7b.yaml", [*PPO, *overrides])
    return config, ModelShapes(actor=shape, reference=shape, value=value_model_shape(shape))


def test_generation_has_the_named_share_of_a_step() -> None:
    config, shapes = example()
    work = step_flops(config, shapes, generation=0.75)
    rest = work.old_log_prob + work.ref_log_prob + work.values
    rest += work.critic_update + work.actor_update
    assert work.generate == pytest.approx(3 * rest)
    assert work.values < work.old_log_prob == work.ref_log_prob < work.actor_update


def test_one_world_is_kept_where_it_fits_and_left_where_it_does_not() -> None:
    config, shapes = example("actor_rollout_ref.ref.model.path=/other")
    found = placement_candidates(config, shapes, gpu_memory=100 * GIB, generation=0.5)
    assert not found[0].keys and found[0].step == pytest.approx(1)
    assert all(len(one.worlds) > 1 and one.step > 1 for one in found[1:])
    quarter = ["placement.critic={share: 0.25}", "critic.megatron.tensor_model_parallel_size=2"]
    assert any(one.overrides[:2] == quarter for one in found)
    assert choose_placement(found) is found[0]
    tight = placement_candidates(config, shapes, gpu_memory=88 * GIB, generation=0.5)
    assert tight[0].fault is not None and choose_placement(tight).overrides[:2] == quarter
    with pytest.raises(UserError, match=r"placement: no placement fits: .*; take more GPUs"):
        choose_placement(placement_candidates(config, shapes, gpu_memory=64 * GIB, generation=0.5))


def test_the_command_prints_worlds_steps_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model-config", str(EXAMPLES / "shapes/qwen2.5-7b.json")]
    given = ["--config", str(EXAMPLES / "ctrl_7b.yaml"), *shape, "--placement", *PPO]
    assert main([*given, "--generation", "0.2", "--gpu-memory", "100"]) == 0
    out = capsys.readouterr().out
    assert "actor (8, 0%)" in out and "in which generation takes 20%" in out
    assert "\nproposal: one world" in out
    assert main([*given, "--gpu-memory", "88"]) == 0
    assert "\nproposal: 'placement.critic={share: 0.25}'" in capsys.readouterr().out


def test_auto_is_the_proposal_written_out(tmp_path: Path) -> None:
    config, shapes = example("actor_rollout_ref.ref.model.path=/other", "placement=auto")
    assert config.placement.auto
    found, table = with_auto_placement(config, shapes, gpu_memory=88 * GIB)
    tight = placement_candidates(config, shapes, gpu_memory=88 * GIB, generation=0.5)
    written = choose_placement(tight).overrides
    same, _ = example("actor_rollout_ref.ref.model.path=/other", *written)
    assert found == same and found.placement.critic == {"share": 0.25}
    assert all(f"'{key}'" in table for key in written) and "idle" in table
    assert "placement.auto" in found.written
    roomy, table = with_auto_placement(config, shapes, gpu_memory=100 * GIB)
    assert roomy.placement == Config().placement and "proposal: one world" in table


def test_a_command_places_by_the_memory_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((EXAMPLES / "shapes/qwen2.5-7b.json").read_text())
    model = f"actor_rollout_ref.model.path={tmp_path}"
    for gib, apart in ((90, True), (1000, False)):
        config, shapes = example(model, "placement=auto", f"placement.gpu_memory={gib}")
        found, table = _placed(config)
        assert (found, table) == with_auto_placement(
            config, shapes, gpu_memory=gib * GIB, kernels="torch"
        )
        assert bool(found.placement.critic) is apart


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("placement.critic=[1]",), "leave placement.critic out"),
        (("trainer.min_nnodes=1",), "leave trainer.min_nnodes out"),
        (("actor_rollout_ref.ref.sync_steps=2",), "leave one of them out"),
    ],
)
def test_auto_excludes_what_it_decides(keys: tuple[str, ...], said: str) -> None:
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    with pytest.raises(ValueError, match=said):
        load_config(None, [*PPO, kl, "placement.auto=true", *keys], "none")
    with pytest.raises(ValueError, match=r"placement.gpu_memory"):
        load_config(None, ["placement.gpu_memory=3"], "none")


def test_engines_of_their_own_draw_while_the_others_train() -> None:
    worlds = (world(2, "actor"), world(1, "rollout", "sandbox"), world(2, "critic"))
    # 8 drawn by one rank; then 2 and 3 by the actor's two ranks.
    step, idle = step_time_and_idle_shares(WORK, worlds)
    assert step == pytest.approx(8 + 2 + 3) and idle["rollout"] == pytest.approx(5 / 13)
    step, idle = step_time_and_idle_shares(WORK, worlds, ahead=True)
    assert step == pytest.approx(8) and idle["rollout"] == pytest.approx(0)
    assert idle["actor"] == pytest.approx(3 / 8)
    # Engines on the actor's ranks can do nothing ahead.
    assert step_time_and_idle_shares(WORK, (world(4, "actor"),), ahead=True)[0] == 26 / 4
