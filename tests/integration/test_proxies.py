"""Runs whose proxy is another model: on engines of its own, and on servers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job
from tiny_run import PROGRAM, byte_chat_model

from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import read_json_lines

P = "actor_rollout_ref.proxy."
_SHARED = (f"{P}model.path",)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proxy of another shape, with another tokenizer and chat template than the actor's."""
    return byte_chat_model(tmp_path_factory.mktemp("proxies") / "stranger", [PROGRAM])


def examples(run: ForkedRun) -> list[dict[str, str]]:
    """The examples with a revision."""
    found = read_json_lines(run.folder / "examples.jsonl")
    return [example for example in found if example["judgment"] == "valid"]


def test_a_stranger_revises_on_engines_of_its_own(job: Job, stranger: Path) -> None:
    name = TextCodec(stranger)
    assert name.tokenizer.get_vocab() != TextCodec(job.actor).tokenizer.get_vocab()
    extra = (f"{P}kind=engine", f"{P}model.path={stranger}", f"{P}engine.threads=1")
    run = run_forked(job, "engine", steps=3, extra=extra, without=_SHARED)
    assert run.codes == (0, 0), run.output[-6000:]
    assert "1 hf engine, 1 hf engine of the proxy" in run.output
    assert (run.folder / "proxy.log").is_file() and (run.folder / "engine.log").is_file()
    assert examples(run)
    for example in examples(run):
        assert example["revision"] == PROGRAM
        assert example["versions"].endswith("revision by proxy:stranger")
        assert example["reward"] == float("spider" not in example["problem"])
    # One push before each step's critiques: nothing has to come back from the proxy.
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 3
