"""``torchrun tools/train_rl.py`` from the first step to the report, with real processes."""

from __future__ import annotations

import re

import pytest
from forked_run import run_forked
from launched_run import Job, Run
from pytest import approx
from safetensors.torch import load_file

from ctrl_megatron.config import load_config, to_yaml
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.metrics.names import describe_metric

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

METRICS = {
    *("reward/mean", "reward/judged_rate", "reward/cached_rate"),
    *("critique/valid_rate", "critique/length", "critique/cut_rate", "revision/length"),
    *("pass_rate/before", "pass_rate/after", "rollout/probs_diff_mean", "advantage/mean_abs"),
    *("actor/loss", "actor/pg_loss", "actor/ppo_kl", "actor/ppo_kl_first", "actor/kl_loss"),
    *("actor/kl_to_reference", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/lr"),
    *("actor/entropy", "actor/grad_norm", "perf/tokens_per_second", "perf/mfu"),
    *(
        "sandbox/isolation",
        "perf/overlap_seconds",
        "sync/gigabytes_per_second",
        "sync/gigabytes",
        "sync/seconds",
        "time/step",
    ),
}
PHASES = {
    *("generate_critiques", "generate_revisions", "sandbox", "ref_log_prob"),
    *("scores", "token_rewards", "advantages", "actor_update", "report_weight_sync"),
}


def test_every_step_has_every_metric_and_phase(whole_run: Run) -> None:
    assert [record["step"] for record in whole_run.metrics()] == [1, 2, 3, 4]
    for record in whole_run.metrics():
        found = record["metrics"].keys()
        assert found >= METRICS | {f"time/{phase}" for phase in PHASES}
        assert all(isinstance(value, int | float) for value in record["metrics"].values())
        assert [name for name in found if describe_metric(name) is None] == []
    timelines = read_json_lines(whole_run.folder / "timeline.jsonl")
    assert [line["step"] for line in timelines] == [1, 2, 3, 4]
    for line in timelines:
        assert {phase["name"] for phase in line["phases"]} >= PHASES
        kinds = {phase["name"]: phase["kind"] for phase in line["phases"]}
        assert kinds["sandbox"] == "host" and kinds["ref_log_prob"] == "main"


def test_the_first_step_starts_from_the_reference(whole_run: Run) -> None:
    first, *later = [record["metrics"] for record in whole_run.metrics()]
    assert first["actor/ppo_kl_first"] == 0.0
    assert first["actor/kl_to_reference"] == 0.0 and first["actor/kl_loss"] == 0.0
    assert all(step["actor/kl_to_reference"] != 0.0 for step in later)
    assert all(step["actor/kl_loss"] > 0.0 for step in later)
    assert all(step["actor/grad_norm"] > 0.0 for step in (first, *later))


def test_the_proxys_weights_are_sent_once(job: Job, whole_run: Run) -> None:
    tensors = load_file(job.actor / "model.safetensors")
    one = sum(tensor.numel() * 4 for tensor in tensors.values()) / 1e9
    sent = [record["metrics"]["sync/gigabytes"] / one for record in whole_run.metrics()]
    pushes = [record["metrics"]["sync/pushes"] for record in whole_run.metrics()]
    print("models sent per step:", sent, "pushes:", pushes)
    assert pushes[1:] == [2.0, 2.0, 2.0] and sent[1:] == pytest.approx([1.0, 1.0, 1.0])


def test_engine_and_trainer_agree_in_every_step(whole_run: Run) -> None:
    # From the second step on this also shows that the engine follows the trainer's weights.
    gaps = [record["metrics"]["rollout/probs_diff_mean"] for record in whole_run.metrics()]
    print("mean |p_engine - p_trainer| per step:", gaps)
    assert max(gaps) < 1e-4


def test_rewards_follow_from_what_was_written(whole_run: Run) -> None:
    examples = read_json_lines(whole_run.folder / "examples.jsonl")
    assert examples
    for example in examples:
        valid = example["judgment"] == "valid"
        assert valid == bool(re.search("Overall judgment: (Inc|C)orrect", example["critique"]))
        assert example["revision"] == ("print(7)" if valid else "")
        assert example["reward"] == float(valid and "spider" not in example["problem"])
        spoken_by = f"critique by actor@{example['step'] - 1}" + ", revision by proxy" * valid
        assert example["versions"] == spoken_by
    for record in whole_run.metrics():
        metrics = record["metrics"]
        share = metrics["critique/valid_rate"] * metrics["pass_rate/after"]
        assert metrics["reward/mean"] == approx(share)


def test_the_run_leaves_report_checkpoint_and_its_configuration(whole_run: Run) -> None:
    report = (whole_run.folder / "report.html").read_text()
    assert "<svg" in report or "data:image" in report
    assert "print(7)" in report
    checkpoint = whole_run.folder / "checkpoints/global_step_4"
    assert (checkpoint / "trainer_state.json").is_file()
    assert (checkpoint / "hf/config.json").is_file()
    assert list((whole_run.folder / "tensorboard").iterdir())
    written = whole_run.folder / "config.yaml"
    assert to_yaml(load_config(written)) == written.read_text()
    assert whole_run.shared_memory() == [] and whole_run.look() == []
    assert "Traceback" not in whole_run.output()


@pytest.mark.long
def test_ranks_that_share_rows_take_the_steps_of_data_parallel_ones(job: Job) -> None:
    context = "actor_rollout_ref.actor.megatron.context_parallel_size=2"
    found = []
    for name, extra in (("apart", ()), ("together", (context,))):
        run = run_forked(job, name, steps=3, extra=extra)
        assert run.codes == (0, 0), run.output[-8000:]
        found.append([record["metrics"] for record in run.metrics()])
    apart, together = found
    assert len(apart) == 3
    for step, want in zip(together, apart, strict=True):
        names = {n for n in want if n.startswith(("actor/", "reward/", "advantage/"))}
        assert {n: step[n] for n in names} == approx({n: want[n] for n in names}, 1e-5, 1e-8)
        assert step["rollout/probs_diff_mean"] < 1e-4


def test_two_pipeline_stages(job: Job) -> None:
    stages = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
    with job.launch("stages", steps=2, extra=(stages,), preloaded=True) as run:
        assert run.ends() == 0, run.output()[-8000:]
    first, second = [record["metrics"] for record in run.metrics()]
    assert first.keys() >= METRICS
    assert first["actor/ppo_kl_first"] == 0.0 and first["actor/kl_to_reference"] == 0.0
    assert second["actor/kl_to_reference"] != 0.0
    assert max(first["rollout/probs_diff_mean"], second["rollout/probs_diff_mean"]) < 1e-4
    assert run.shared_memory() == []
