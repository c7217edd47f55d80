"""A run that does not go on leaves its directory as it was, and says what differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from forked_command import run
from mistaken_world import make_world, write_model

SFT = "ctrl_megatron.commands.train_sft"
RUN = Path("runs/mine")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world whose run has made its one step."""
    world = make_world(tmp_path_factory.mktemp("trained"))
    code, output = run(SFT, ["--config", "run.yaml", "sft.total_training_steps=1"], world)
    assert code == 0, output[-4000:]
    return world


def kept(world: Path) -> dict[str, bytes]:
    files = [path for path in (world / RUN).rglob("*") if path.is_file()]
    return {str(path.relative_to(world)): path.read_bytes() for path in files}


def test_nothing_to_do_says_what_was_trained_otherwise(trained: Path) -> None:
    before = kept(trained)
    given = ["--config", "run.yaml", "sft.total_training_steps=1"]
    code, output = run(SFT, given, trained)
    assert code == 0 and "nothing to do" in output and "other keys" not in output
    code, output = run(SFT, [*given, "sft.lr=0.125", "trainer.seed=7"], trained)
    told = next(line for line in output.splitlines() if "nothing to do" in line)
    assert (
        code == 0 and "-> 0.125" in told and "trainer.seed: 1 -> 7" in told and "sft.lr: " in told
    )
    assert kept(trained) == before


@pytest.mark.parametrize("what", ["another model", "a damaged file"])
def test_a_refused_resume_leaves_everything_as_it_was(
    trained: Path, tmp_path: Path, what: str
) -> None:
    world = Path(shutil.copytree(trained, tmp_path / "given"))
    if what == "another model":
        shutil.rmtree(world / "model")
        write_model(world / "model", hidden_size=32)
    else:
        state = world / RUN / "checkpoints/global_step_1/trainer_state.json"
        state.write_text(json.dumps({"step": 1, "sampler": {"epoch": "first"}}))
    before = kept(world)
    given = ["--config", "run.yaml", "sft.total_training_steps=3", "sft.lr=0.125"]
    code, _ = run(SFT, given, world)
    changed = {name for name, data in kept(world).items() if before.get(name) != data}
    assert code != 0
    assert not [name for name in changed if "config" in name or "checkpoints" in name]
    assert before.keys() <= kept(world).keys()


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(
    trained: Path, tmp_path: Path
) -> None:
    world = Path(shutil.copytree(trained, tmp_path / "given"))
    checkpoints = world / RUN / "checkpoints"
    given = ["--config", "run.yaml", "sft.total_training_steps=3"]
    code, output = run(SFT, given, world)
    assert code == 0, output[-4000:]
    file = next((checkpoints / "global_step_3/policy").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[-len(data) // 3] ^= 4
    file.write_bytes(data)
    further = ["--config", "run.yaml", "sft.total_training_steps=4"]
    named = f"trainer.resume_mode={RUN / 'checkpoints/global_step_3'}"
    code, output = run(SFT, [*further, named], world)
    (line,) = (line for line in output.splitlines() if line.startswith("the run stops:"))
    assert code == 2 and f"{file.relative_to(world)}: is not what was saved" in line
    assert "Traceback" not in output and data == file.read_bytes()
    code, output = run(SFT, further, world)
    assert code == 0, output[-4000:]
    for said in (
        f"{file.relative_to(world)}: is not what was saved",
        "an older checkpoint takes its place",
        f"continuing from {RUN / 'checkpoints/global_step_1'} after step 1",
    ):
        assert said in output.replace("\n", " "), output
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "abandoned",
        "global_step_1",
        "global_step_4",
    ]
