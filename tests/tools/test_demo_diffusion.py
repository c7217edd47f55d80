"""The stages of the demo load, are skipped once they are done, and end in the rewards of the run's
dumps."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from ctrl_megatron.config import load_config
from tools import demo_diffusion as demo

SIZES = demo.Sizes(folder=Path("elsewhere"), sft_steps=7, steps=3)


def test_the_runs_train_what_the_stages_before_made() -> None:
    *_, sft, rl = (stage.words for stage in demo.stages(SIZES))
    assert all(words[2] == "2" and words[4] == demo.CONFIG for words in (sft, rl))
    tuning = load_config(demo.ROOT / demo.CONFIG, sft[5:], "sft")
    assert tuning.actor_rollout_ref.model.path == str(SIZES.start)
    assert tuning.sft.train_files == (str(SIZES.data / "sft.parquet"),)
    assert tuning.sft.canvas == tuning.data.max_response_length
    assert Path(tuning.trainer.run_dir) / "hf" == SIZES.tuned
    run = load_config(demo.ROOT / demo.CONFIG, rl[5:], "rl")
    assert run.actor_rollout_ref.model.path == str(SIZES.tuned)
    assert run.data.val_set_names == ("rl", "unseen") and Path(run.trainer.run_dir) == SIZES.run
    assert (tuning.sft.total_training_steps, run.trainer.total_training_steps) == (7, 3)


def test_a_stage_whose_product_is_there_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, codes = [], iter([0, 5])
    made = tmp_path / "made"
    made.touch()
    stages = [
        demo.Stage(title="one", words=["one.py"], product=made),
        demo.Stage(title="two", words=["two.py"], product=tmp_path / "two"),
        demo.Stage(title="three", words=["three.py"]),
        demo.Stage(title="four", words=["four.py"]),
    ]
    monkeypatch.setattr(demo, "stages", lambda sizes: stages)
    monkeypatch.setattr(demo, "run_child", lambda words, cwd: ran.append(words[-1]) or next(codes))
    assert demo.main(["--folder", str(tmp_path / "runs")]) == 5
    assert ran == ["two.py", "three.py"]
    told = "".join(capsys.readouterr().out.split())
    assert "madeistherealready" in told and "exitcode5" in told


def test_rewards_come_from_the_dumps_with_intervals_over_groups(tmp_path: Path) -> None:
    scores = {1: {"a": [0.0, 1.0], "b": [2.0, 2.0]}, 2: {"c": [2.5]}}
    for step, groups in scores.items():
        folder = tmp_path / f"dumps/global_step_{step}"
        folder.mkdir(parents=True)
        for rank, (name, own) in enumerate(groups.items()):
            lines = [json.dumps({"problem_id": name, "score": score}) + "\n" for score in own]
            (folder / f"texts_{rank:04}.jsonl").write_text("".join(lines))
    steps = demo.groups_by_step(tmp_path)
    assert steps == [[(1.0, 2), (4.0, 2)], [(2.5, 1)]]
    first, second = map(demo.mean_reward, steps)
    assert first.value == pytest.approx(fmean([0, 1, 2, 2]))
    assert (first.low, first.high) == (0.5, 2.0)
    assert (second.value, second.low) == (2.5, None)
