"""Ctrl-C, SIGTERM and SIGHUP at exact moments: one line, exit code 130, nothing half-written, and
no checkpoint of weights that have not changed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_command import Interrupt, run
from mistaken_world import make_world

from ctrl_megatron.checkpoint.sharded import require_complete_files

ROOT = Path(__file__).parents[2]
SFT, RL = "ctrl_megatron.commands.train_sft", "ctrl_megatron.commands.train_rl"
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
WHILE_IMPORTING = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})

class Interrupting:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Interrupting())
from ctrl_megatron.commands.train_sft import main
raise SystemExit(main(["--config", "run.yaml"]))
"""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("right"))


@pytest.fixture
def world(right: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(right, tmp_path / "given"))


def half_written(folder: Path) -> list[str]:
    """Drafts of files and directories, and locks."""
    draft = (".global_step", ".new", ".config", ".run.lock", ".summary", ".mine")
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return [n for n in names if Path(n).name.startswith(draft) or n.endswith("run.lock")]


def said_once(output: str) -> None:
    assert "Traceback" not in output, output[-4000:]
    lines = [line for line in output.splitlines() if "stopped" in line]
    assert len(lines) == 1, output[-4000:]


def test_while_it_imports(world: Path) -> None:
    command = [sys.executable, "-c", WHILE_IMPORTING]
    done = subprocess.run(command, cwd=world, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "train_sft: stopped; nothing was changed\n" and done.stdout == ""
    assert not (world / "runs").exists()


@pytest.mark.parametrize(
    ("moment", "interrupt"),
    [
        ("reading rows", Interrupt("ctrl_megatron.sft.run:tokenise_examples", INT)),
        ("meeting", Interrupt("ctrl_megatron.run.session:join_worlds", TERM)),
        ("loading", Interrupt("ctrl_megatron.run.build:load_hf", INT)),
        ("before the first step", Interrupt("ctrl_megatron.run.loop:Executor", HUP)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_before_anything_has_changed(world: Path, moment: str, interrupt: Interrupt) -> None:
    code, output = run(SFT, ["--config", "run.yaml"], world, interrupt=interrupt)
    assert code == 130, output[-4000:]
    said_once(output)
    assert list(world.rglob("global_step_*")) == [] and half_written(world) == []


@pytest.mark.parametrize(
    ("moment", "interrupt", "code", "steps"),
    [
        ("updating", Interrupt("ctrl_megatron.models.policy:Policy.step", INT, 2), 130, 2),
        ("saving", Interrupt("ctrl_megatron.checkpoint.store:write_snapshot", HUP), 130, 1),
        # There is nothing left that a stop could spare.
        ("validating", Interrupt("ctrl_megatron.models.policy:Policy.log_probs", INT), 0, 4),
        ("exporting", Interrupt("ctrl_megatron.sft.run:save_hf", TERM), 0, 4),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_has_been_trained_is_saved_whole(
    world: Path, moment: str, interrupt: Interrupt, code: int, steps: int
) -> None:
    settings = ["sft.total_training_steps=4", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=-1"]
    if moment == "validating":
        settings.append("sft.val_files=[sft.parquet]")
    found, output = run(SFT, ["--config", "run.yaml", *settings], world, interrupt=interrupt)
    assert found == code and "Traceback" not in output, output[-4000:]
    if code:
        said_once(output)
    kept = sorted((world / "runs/mine/checkpoints").iterdir())
    assert [path.name for path in kept] == [f"global_step_{n + 1}" for n in range(steps)]
    for path in kept:
        require_complete_files(path / "policy")
    assert half_written(world) == []
    again, output = run(SFT, ["--config", "run.yaml", *settings], world)
    assert again == 0 and "Traceback" not in output, output[-4000:]
    said = "nothing to do" if code == 0 else f"after step {steps}"
    assert said in output


@pytest.mark.parametrize(
    ("module", "arguments", "interrupt"),
    [
        (
            "ctrl_megatron.commands.convert_hf_to_megatron",
            ["--hf", "model", "--out", "new"],
            Interrupt("ctrl_megatron.models.safetensors_dir:SafetensorsDirectory.read", INT, 5),
        ),
        (
            "ctrl_megatron.commands.convert_megatron_to_hf",
            ["--checkpoint", "checkpoint", "--out", "new"],
            Interrupt("ctrl_megatron.checkpoint.convert:load_tensors", TERM),
        ),
        (
            "ctrl_megatron.commands.prepare_data",
            ["--format", "ctrl", "--input", "problems.jsonl", "--out", "new"],
            Interrupt("ctrl_megatron.commands.prepare_data:select_problems", TERM),
        ),
    ],
    ids=["converting", "exporting", "reading"],
)
def test_a_tool_leaves_nothing_half_written(
    world: Path, module: str, arguments: list[str], interrupt: Interrupt
) -> None:
    before = sorted(path.name for path in world.iterdir())
    code, output = run(module, arguments, world, interrupt=interrupt)
    assert code == 130, output[-4000:]
    said_once(output)
    assert sorted(path.name for path in world.iterdir()) == before


@pytest.mark.parametrize(
    ("moment", "interrupt"),
    [
        ("services starting", Interrupt("ctrl_megatron.rollout.fleet:Services.wait", INT)),
        ("generating", Interrupt("ctrl_megatron.rollout.client:RemoteEngine.generate", TERM)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_engines_and_sandbox_end_with_the_run(
    world: Path, moment: str, interrupt: Interrupt
) -> None:
    short = ["data.max_response_length=8", "actor_rollout_ref.rollout.revision_max_tokens=8"]
    code, output = run(RL, ["--config", "run.yaml", *short], world, interrupt=interrupt)
    assert code == 130, output[-4000:]
    said_once(output)
    assert list(world.rglob("global_step_*")) == [] and half_written(world) == []


def test_an_evaluation_that_is_stopped_closes_its_connections(world: Path) -> None:
    arguments = ["--config", "run.yaml", "first=model", "--out", "evaluation"]
    arguments += ["--set", "data.val_files=[train.parquet]", "data.max_response_length=8"]
    arguments += ["actor_rollout_ref.rollout.revision_max_tokens=8"]
    interrupt = Interrupt("ctrl_megatron.rollout.client:RemoteEngine.generate", INT)
    code, output = run("ctrl_megatron.commands.evaluate", arguments, world, interrupt=interrupt)
    assert code == 130, output[-4000:]
    said_once(output)
    assert "finished transcripts are in evaluation" in output
    assert "asyncio" not in output, output[-4000:]
