"""A dumped step gives the recorded loss and gradient norm again, on other layouts too, and the
recorded rewards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job
from replayed import replay

from ctrl_megatron.checkpoint.manifest import MARKER
from ctrl_megatron.checkpoint.store import STATE_FILE
from ctrl_megatron.record.dump import read_dump

pytestmark = pytest.mark.timeout(600)

STEPS = 3
TO_1E_6 = {"rel": 1e-6, "abs": 1e-6}
COMPARED = ("actor/", "critic/", "advantage/", "reward/", "reward_share/", "rollout/")

_A, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
PPO = (
    *("algorithm.adv_estimator=gae", "algorithm.kl_ctrl.type=adaptive", "critic.optim.lr=1e-2"),
    *(_A + "use_kl_loss=false", "algorithm.use_kl_in_reward=true", "critic.ppo_epochs=2"),
    *("algorithm.filter_groups.enable=true", "data.gen_batch_size=8", _ROLLOUT + "n=4"),
    "algorithm.rollout_correction.rollout_is=token",
)


@pytest.fixture(scope="module")
def dumped(job: Job) -> ForkedRun:
    """Three steps on two data ranks, all dumped and saved."""
    extra = ("trainer.dump_steps=all", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=-1")
    extra += ("trainer.save_hf_freq=2",)
    done = run_forked(job, "dumped", steps=STEPS, extra=extra)
    assert done.codes == (0, 0), done.output[-8000:]
    return done


def dump_of(run: ForkedRun, step: int) -> Path:
    return run.folder / f"dumps/global_step_{step}"


def recorded(run: ForkedRun, step: int) -> dict[str, float]:
    return next(one["metrics"] for one in run.metrics() if one["step"] == step)


def replayed(dump: Path) -> dict[str, Any]:
    return json.loads((dump / "replay/replay.json").read_text())


def test_a_dump_holds_the_step(dumped: ForkedRun) -> None:
    for step in range(1, STEPS + 1):
        dump = read_dump(dump_of(dumped, step))
        assert dump.step == step and dump.total_steps == STEPS and len(dump.batch) == 8
        assert dump.layout == {"tensor": 1, "pipeline": 1, "context": 1, "data": 2}
        assert dump.metrics is not None
        known = recorded(dumped, step)
        assert {n: known[n] for n in dump.metrics} == dict(dump.metrics)
        # A field that the update computes is no input of the update.
        assert "old_log_probs" in dump.updated and "old_log_probs" not in dump.batch
        assert {row.id for row in dump.rows} == set(dump.batch["problem_id"].tolist())
        # Texts, as drawn: each of two samples for four rows.
        shown = [json.loads(x) for x in (dump.path / "texts_0000.jsonl").read_text().splitlines()]
        assert len(shown) == 4 and all(line["version"] == f"actor@{step - 1}" for line in shown)
        assert float(dump.batch["score"].mean()) == pytest.approx(known["reward/mean"])


@pytest.mark.parametrize(
    ("step", "ranks", "tensor"),
    [
        (3, 1, 1),
        (1, 2, 2),
        pytest.param(1, 1, 1, marks=pytest.mark.long),
        pytest.param(3, 2, 2, marks=pytest.mark.long),
    ],
)
def test_the_update_of_a_dump_gives_the_same_loss_and_gradient_norm(
    dumped: ForkedRun, tmp_path: Path, step: int, ranks: int, tensor: int
) -> None:
    dump = dump_of(dumped, step)
    arguments = [str(dump), "--update", "--tolerance=1e-5"]
    codes, said = replay(arguments, tmp_path / "log", ranks=ranks, tensor=tensor)
    assert codes == (0,) * ranks, said[-8000:]
    assert "agree within 1e-05" in said
    found = replayed(dump)
    pairs = {pair["name"]: pair for pair in found["metrics"]}
    known = recorded(dumped, step)
    assert pairs.keys() == {n for n in known if n.startswith(COMPARED)} - {
        "reward/cached_rate",
        "reward/judged_rate",
        "reward/unjudgeable_rate",
    }
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/pg_loss"):
        assert pairs[name]["recorded"] == known[name]
        assert pairs[name]["replayed"] == pytest.approx(known[name], **TO_1E_6), name
    assert pairs["actor/grad_norm"]["replayed"] > 0
    gaps = {field["name"]: field["gaps"] for field in found["fields"]}
    assert {"old_log_probs", "ref_log_prob", "advantages"} <= gaps.keys()
    assert all(len(of_field) == 8 and max(of_field) < 1e-5 for of_field in gaps.values())


def test_an_exported_model_serves_as_the_weights_before(dumped: ForkedRun, tmp_path: Path) -> None:
    dump = Path(shutil.copytree(dump_of(dumped, 3), tmp_path / "dump"))
    exported = dumped.folder / "hf_exports/global_step_2"
    arguments = [str(dump), "--update", f"--weights={exported}", "--tolerance=1e-5"]
    codes, said = replay(arguments, tmp_path / "log")
    assert codes == (0,) and f"replayed from {exported}" in said, said[-8000:]


@pytest.mark.long
def test_a_step_of_ppo_that_samples_dynamically(job: Job, tmp_path: Path) -> None:
    """Two models, several optimizer steps whose result depends on the optimizers' state, a KL
    coefficient that adapts, and a node that draws and judges at once.
    """
    extra = ("trainer.dump_steps=[2]", "trainer.save_freq=1", "data.train_batch_size=8")
    run = run_forked(job, "dumped_ppo", steps=2, extra=(*PPO, *extra))
    assert run.codes == (0, 0), run.output[-8000:]
    assert [path.name for path in (run.folder / "dumps").iterdir()] == ["global_step_2"]
    dump = dump_of(run, 2)
    arguments = [str(dump), "--update", "--tolerance=1e-5"]
    codes, said = replay(arguments, tmp_path / "log", ranks=2, tensor=2)
    assert codes == (0, 0), said[-8000:]
    pairs = {pair["name"]: pair for pair in replayed(dump)["metrics"]}
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert pairs[name]["replayed"] == pytest.approx(recorded(run, 2)[name], rel=1e-5), name
    assert pairs["actor/kl_coef"]["replayed"] == recorded(run, 2)["actor/kl_coef"] != 0.001
    codes, said = replay([str(dump), "--judge"], tmp_path / "log2")
    assert codes == (0,) and "score: 0 of " in said, said[-8000:]


def test_a_step_whose_update_failed_is_replayed(dumped: ForkedRun, tmp_path: Path) -> None:
    """Then there is nothing to compare with, but the numbers of the update are shown."""
    dump = Path(shutil.copytree(dump_of(dumped, 1), tmp_path / "dump"))
    (dump / "metrics.json").unlink()
    for path in dump.glob("updated_*"):
        path.unlink()
    codes, said = replay([str(dump), "--update"], tmp_path / "log")
    assert codes == (0,), said[-8000:]
    assert "the recorded update did not end" in said and "actor/grad_norm" in said


def test_the_judging_of_a_dump_gives_the_same_rewards(dumped: ForkedRun, tmp_path: Path) -> None:
    dump = dump_of(dumped, 1)
    codes, said = replay([str(dump), "--judge"], tmp_path / "log")
    assert codes == (0,), said[-8000:]
    assert "reward/critic: 0 of 8 samples differ; largest difference 0" in said


def test_a_reward_that_was_changed_is_found(dumped: ForkedRun, tmp_path: Path) -> None:
    """One of the dump's revisions is another text: its sample is named, and the update of the other
    rewards has another gradient.
    """
    dump = Path(shutil.copytree(dump_of(dumped, 1), tmp_path / "dump"))
    file = dump / "texts_0001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    place = next(i for i, line in enumerate(lines) if line["reward/critic"] == 1.0)
    lines[place]["revision"] = "```python\nprint('another')\n```"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    codes, said = replay([str(dump), "--judge"], tmp_path / "log")
    assert codes == (1,), said[-8000:]
    sample = f"sample {4 + place} of row {lines[place]['problem_id']}: 1"
    assert "reward/critic: 1 of 8 samples differ" in said and sample in said


def test_other_weights_are_found(dumped: ForkedRun, tmp_path: Path) -> None:
    dump = Path(shutil.copytree(dump_of(dumped, 2), tmp_path / "dump"))
    start = tmp_path / "checkpoints/global_step_1"
    shutil.copytree(dumped.folder / "checkpoints/global_step_2", start)
    # As an older version would have saved them: nothing in them names their step.
    (start / MARKER).unlink()
    state = json.loads((start / STATE_FILE).read_text())
    del state["run"]
    (start / STATE_FILE).write_text(json.dumps(state))
    arguments = [str(dump), "--update", f"--weights={start}"]
    codes, said = replay(arguments, tmp_path / "log")
    assert codes == (1,), said[-8000:]
    assert "old_log_probs: 8 of 8 samples differ" in said and "do not all agree" in said


def test_missing_weights_are_reported(dumped: ForkedRun, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere/dumps/global_step_3"
    shutil.copytree(dump_of(dumped, 3), folder)
    kept = tmp_path / "elsewhere/checkpoints"
    shutil.copytree(dumped.folder / "checkpoints/global_step_1", kept / "global_step_1")
    codes, said = replay([str(folder), "--update"], tmp_path / "log")
    assert codes == (2,), said
    assert "step 3 was computed from the weights after step 2" in said
    assert "steps that can be replayed: 1, 2; name the weights after step 2 with --weights" in said
    wrong = f"--weights={kept / 'global_step_1'}"
    codes, said = replay([str(folder), "--update", wrong], tmp_path / "log2")
    assert codes == (2,) and "name the checkpoint global_step_2" in said


def test_a_directory_that_is_no_dump_is_refused(tmp_path: Path) -> None:
    codes, said = replay([str(tmp_path), "--update"], tmp_path / "log")
    assert codes == (2,) and "is not a dump: it has no config.yaml" in said
