"""The pipelines of siiRL's guide train as those of the package do, whose nodes run side by side."""

from __future__ import annotations

import golden_runs
import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

NOBODY_REVISES = (
    "actor_rollout_ref.proxy.model.path",
    "actor_rollout_ref.rollout.revision_max_tokens",
)
REWARDED = "reward.reward_funcs=[foreign_pipeline:brevity]"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
ON_A_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
DAPO = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4")
OURS = {
    "grpo": (),
    "ppo": ("algorithm.adv_estimator=gae",),
    "dapo": (*DAPO, "data.gen_batch_size=6"),
}
LOSSES = ("actor/loss", "actor/grad_norm", "critic/loss", "reward/mean")


def run(job: Job, name: str, function: str, *extra: str) -> ForkedRun:
    settings = (*golden_runs.DRAWN, f"dag.custom_pipeline_fn={function}", *extra)
    without = (*NOBODY_REVISES, *(() if REWARDED in extra else ("sandbox.workers",)))
    found = run_forked(job, name, steps=2, extra=settings, without=without)
    assert found.codes == (0, 0), found.output[-8000:]
    return found


@pytest.mark.parametrize("name", OURS)
def test_pipelines_typed_from_the_guide_learn_what_ours_learn(job: Job, name: str) -> None:
    settings = (REWARDED, *OURS[name])
    ours = run(job, f"ours_{name}", f"ctrl_megatron.pipeline:{name}_pipeline", *settings)
    typed: dict[str, tuple[str, ...]] = {"typed": (f"examples.guide.pipelines:{name}_pipeline",)}
    if name == "grpo":
        file = "dag.options.file=examples/guide/grpo_graph.yaml"
        typed["file"] = ("ctrl_megatron.pipeline:pipeline_from_file", file)
    for kind, (function, *options) in typed.items():
        theirs = run(job, f"{kind}_{name}", function, *settings, *options)
        for found, wanted in zip(theirs.metrics(), ours.metrics(), strict=True):
            known = {k: v for k, v in wanted["metrics"].items() if k in LOSSES}
            assert known.keys() >= {"actor/loss", "reward/mean"}
            got = {k: found["metrics"].get(k) for k in known}
            assert got == pytest.approx(known, rel=1e-5, abs=2e-7)


@pytest.mark.parametrize(
    ("function", "settings", "metric"),
    [
        (
            "extensions:my_custom_pipeline",
            (
                "algorithm.adv_estimator=my_custom_adv",
                "actor_rollout_ref.actor.policy_loss=my_custom_loss",
            ),
            "reward/mean_score",
        ),
        ("worker:build", (REWARDED, KL), "guide/length_share"),
    ],
)
def test_extensions_of_the_guide_train(
    job: Job, function: str, settings: tuple[str, ...], metric: str
) -> None:
    name = function.partition(":")[0]
    alone = () if KL in settings else ("actor_rollout_ref.actor.use_kl_loss=false",)
    steps = run(job, f"guide_{name}", f"examples.guide.{function}", *alone, *settings).metrics()
    assert len(steps) == 2
    for step in steps:
        assert step["metrics"]["actor/grad_norm"] > 0 and 0 < step["metrics"][metric] < 1
