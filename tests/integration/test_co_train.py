"""A critic and a solver of different families that learn in the same steps, or in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN, NO_REVISIONS
from launched_run import Job
from replayed import replay
from test_policies import computed
from test_recovery import ENGINE, hurt, services
from tiny_run import PROGRAM, byte_chat_model
from transformers import AutoConfig

from ctrl_megatron.checkpoint.convert import megatron_to_hf
from ctrl_megatron.data.tokens import TextCodec

pytestmark = pytest.mark.timeout(900)

_OWN = "policies.agent1."
_REVISED = "actor_rollout_ref.rollout.revision_max_tokens="
_BOTH = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:co_train_pipeline",
    *(f"{_OWN}actor_rollout_ref.rollout.name=hf", f"{_OWN}actor_rollout_ref.rollout.n=3"),
    f"{_OWN}data.max_prompt_length=2048",
    f"{_OWN}actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096",
    f"{_OWN}actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    f"{_OWN}actor_rollout_ref.actor.strategy=fsdp",
)
_VALIDATED = ("actor_rollout_ref.proxy.kind=agent1", _REVISED + "24")
_CUT = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.sequence_parallel=true",
)


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It writes a right or a wrong program about as often; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("solver") / "qwen"
    return byte_chat_model(folder, (PROGRAM, "print(6)"), family="qwen3")


@pytest.fixture(scope="module")
def own_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("co_train") / "runs")


def co_train(
    job: Job, solver: Path, name: str, steps: int, *extra: str, ranks: int = 2
) -> ForkedRun:
    settings = (*DRAWN, *_BOTH, f"{_OWN}actor_rollout_ref.model.path={solver}", *extra)
    run = run_forked(job, name, steps=steps, extra=settings, without=NO_REVISIONS, ranks=ranks)
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


@pytest.mark.parametrize(
    ("engine", "steps"), [("hf", 2), pytest.param("vllm", 3, marks=pytest.mark.long)]
)
def test_both_learn(own_job: Job, solver: Path, tmp_path: Path, engine: str, steps: int) -> None:
    """The critic is cut over two ranks, the solver's ranks have rows of their own; each draws from
    engines of its own, which have what was sent."""
    drawn = f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.rollout.kv_cache_gib=0.2"
    settings = (*_CUT, *_VALIDATED, *(drawn if engine == "vllm" else ()))
    settings = (*settings, f"data.val_files={own_job.data}", "trainer.save_freq=1")
    settings = (*settings, "trainer.save_hf_freq=2")
    whole = co_train(own_job, solver, f"{engine}_whole", steps, *settings)
    *trained, last = (record["metrics"] for record in whole.metrics())
    assert last["val/rounds"] == 8
    for step in trained:
        for agent in ("", "agent1/"):
            assert step[f"{agent}rollout/probs_diff_max"] < 1e-4
            assert step[f"{agent}actor/grad_norm"] > 0
    exported = whole.folder / "hf_exports/global_step_2_agent1"
    megatron_to_hf(whole.folder / "checkpoints/global_step_2", tmp_path / "solver", folder="agent1")
    for folder in (exported, tmp_path / "solver"):
        # Of its own family and tokenizer.
        assert AutoConfig.from_pretrained(folder).model_type == "qwen3"
        assert len(TextCodec(folder).tokenizer) == len(TextCodec(solver).tokenizer)
    if engine == "hf":
        return
    for end in (1, steps):
        parts = co_train(own_job, solver, f"{engine}_parts", end, *settings)
    assert list(filter(None, computed(parts))) == list(filter(None, computed(whole)))


def test_what_one_policy_may_have_two_may_have_too(
    own_job: Job, solver: Path, tmp_path: Path
) -> None:
    """Adapters, a value model, a teacher on a rank of its own, dynamic sampling and turns; dumps
    are replayed, and a run that is resumed equals one that is not."""
    extra = (
        *(
            *_CUT,
            "actor_rollout_ref.model.lora_rank=4",
            f"{_OWN}actor_rollout_ref.model.lora_rank=0",
        ),
        *(f"{_OWN}algorithm.adv_estimator=gae", f"{_OWN}critic.optim.lr=1e-3"),
        *("trainer.n_gpus_per_node=3", "placement.reference=[2]", "trainer.turn_steps=1"),
        *("algorithm.filter_groups.enable=true", "data.gen_batch_size=6"),
        *("algorithm.distillation.teacher=reference", "algorithm.distillation.estimator=top_k"),
        *("trainer.dump_steps=[2]", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=-1"),
    )
    whole = co_train(own_job, solver, "whole", 2, *extra, ranks=3)
    first, second = steps = computed(whole)
    # The critic's turn comes first.
    assert "actor/grad_norm" in first and "actor/grad_norm" not in second
    assert "agent1/actor/grad_norm" not in first and second["agent1/actor/grad_norm"] > 0
    assert "actor/kl_to_reference" in first
    assert whole.metrics()[0]["metrics"]["distillation/row_rate"] == 1
    assert all(step["agent1/critic/vf_loss"] > 0 for step in steps)
    for name, policy in (("global_step_2", "actor"), ("global_step_2_agent1", "agent1")):
        asked = [str(whole.folder / "dumps" / name), "--update", "placement.reference=[]"]
        codes, said = replay(asked, tmp_path / f"{policy}.log", ranks=2)
        assert codes == (0, 0), said[-6000:]
    for last in (1, 2):
        parts = co_train(own_job, solver, "parts", last, *extra, ranks=3)
    assert computed(parts) == steps


@pytest.mark.long
def test_engines_of_either_that_die_come_back(own_job: Job, solver: Path) -> None:
    whole = co_train(own_job, solver, "undisturbed", 3)
    settings = (*DRAWN, *_BOTH, f"{_OWN}actor_rollout_ref.model.path={solver}")
    with own_job.launch("disturbed", steps=3, extra=settings, preloaded=True) as run:
        for step in (1, 2):
            run.wait_for_steps(step)
            hurt(run, ENGINE)
        for process in services(run, ENGINE):
            process.kill()
        assert run.ends() == 0, run.output()[-8000:]
        assert run.look() == [] and run.shared_memory() == []
    assert run.output().count("is started again") >= 3
    assert "agent1 (hf)" in run.output()
    assert computed(run) == computed(whole)  # type: ignore[arg-type]
