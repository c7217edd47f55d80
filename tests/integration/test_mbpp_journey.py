"""From MBPP's own file to an evaluated critic with a tiny model: whole, and killed everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from forked_script import Shell, forked_shell
from test_journeys import CONFIG, journey, steps, table
from tiny_run import JUDGMENTS, chain_model

pytestmark = pytest.mark.timeout(900)

THINGS = ("apples", "rivers", "stones", "clocks", "birds", "houses")
THINGS += ("trees", "candles", "lamps", "ships", "roads", "wheels")
ASKED = (
    ("how far it is from nothing", "abs(x)", "f(-3) == 3"),
    ("how it is written down", "str(x)", "str(f(3)) == '3'"),
    ("which whole number it is", "int(x)", "int(f(5)) == 5"),
)
FILES = "ctrl_megatron.checkpoint.files:os.replace"
MOMENTS = (
    f"prepare_data {FILES} 1",
    "synthesize ctrl_megatron.preparation.stages:synthesise_critique 5",
    "train_sft ctrl_megatron.models.policy:Policy.step 2",
    "train_sft ctrl_megatron.checkpoint.hf:HfDirectoryWriter.write_side_files 1",
    "train_rl ctrl_megatron.models.policy:Policy.step_with_log_probs 2",
    "train_rl ctrl_megatron.run.loop:TrainingLoop._validate 1",  # after the last step
    "convert_megatron_to_hf ctrl_megatron.checkpoint.convert:HfDirectoryWriter.write_side_files 1",
    "evaluate ctrl_megatron.run.evaluation:write_transcript_part 2",
)
"""In order: when each comes, everything before it is finished. ``test_synthesis_restart`` kills the
other stages of a synthesis."""
UNFINISHED = {
    "prepare_data": "problems.jsonl",
    "synthesize": "data/train.parquet",
    "train_sft": "sft/hf",
    "train_rl": "rl/report.html",
    "convert_megatron_to_hf": "critic",
    "evaluate": "evaluation/results.json",
}
"""Files that a stage writes only at its end."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("checkout")
    saving = CONFIG.replace("trainer: {", "trainer: {save_freq: 1, ")
    (folder / "tiny.yaml").write_text(saving.replace("_training_steps: 1}", "_training_steps: 2}"))
    rows = [
        {
            "text": f"Write a function that says of a number of {thing} {what}.",
            "code": f"def f(x):\r\n    return {code}",
            "task_id": 601 + number,
            "test_setup_code": "",
            "test_list": [f"assert {test}"],
            "challenge_test_list": [],
        }
        for number, (thing, (what, code, test)) in enumerate(
            (thing, asked) for thing in THINGS for asked in ASKED
        )
    ]
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with forked_shell(folder) as shell:
        yield shell


@pytest.fixture(scope="module")
def model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says a judgment or one of two programs, most likely the one that is right."""
    folder = tmp_path_factory.mktemp("both") / "model"
    return chain_model(folder, smollm2_path, (*JUDGMENTS, *3 * ("f = abs",), "f = str"), 0.7)


def from_mbpp(shell: Shell, model: Path, killed_at: str | None = None) -> Path:
    flags = {"MBPP": "mbpp.jsonl", "MODEL": model, "SYNTHESIZE": "--max-tokens 8"}
    return journey(shell, "mbpp_to_critic", killed_at, **flags)


@pytest.fixture(scope="module")
def whole(shell: Shell, model: Path) -> Path:
    return from_mbpp(shell, model).rename(shell.folder / "whole")


def final_files(out: Path) -> dict[str, bytes]:
    """What the stages leave at their ends, without what holds measured times, the pages and metrics
    of training, and without the minute that a report names.
    """
    parts = ("problems.jsonl", "data/*", "s*/hf/*", "*/summary.json", "critic/*", "evaluation/*")
    paths = {path for part in (*parts, "evaluation/transcripts/*") for path in out.glob(part)}
    own = (".lock", ".log", ".yaml")
    files = [path for path in paths if path.is_file() and path.suffix not in own]
    minute = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d")
    return {
        path.relative_to(out).as_posix(): minute.sub(b"(when)", path.read_bytes()) for path in files
    }


@pytest.mark.long
def test_every_stage_leaves_something_to_the_next(whole: Path) -> None:
    assert parquet.read_table(whole / "data/sft_train.parquet").num_rows > 4
    trained = steps(whole / "rl")
    assert len(trained) == 2 and any(step["actor/grad_norm"] > 0 for step in trained)
    assert set(table(whole / "evaluation")) == {"before", "after SFT", "after RL"}
    assert set(table(whole / "rl")) == {"after RL"}
    found = final_files(whole)
    assert found["critic/model.safetensors"] != found["sft/hf/model.safetensors"]


@pytest.mark.long
def test_kills_in_every_stage_change_no_final_file(shell: Shell, model: Path, whole: Path) -> None:
    for moment in MOMENTS:
        out = from_mbpp(shell, model, moment)
        program = moment.split()[0]
        assert not (out / UNFINISHED[program]).exists(), moment
        done = list(UNFINISHED)[: list(UNFINISHED).index(program)]
        assert all((out / UNFINISHED[stage]).exists() for stage in done), moment
    out = from_mbpp(shell, model)
    found, wanted = final_files(out), final_files(whole)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    # Nothing half-written is left.
    hidden = [path.relative_to(out).as_posix() for path in out.rglob(".*") if path.is_dir()]
    assert hidden == ["data/.synthesis"]
