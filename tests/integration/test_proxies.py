"""Runs whose proxy is another model: on engines of its own, and on servers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job
from proxy_server import serving
from tiny_run import PROGRAM, byte_chat_model

from ctrl_megatron.config import KEYS
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


def are_read(reads: Path, group: str) -> bool:
    """Whether the run read every key of the group."""
    seen = reads.read_text().splitlines()
    return {key for key in KEYS if key.startswith(group)} <= set(seen)


def test_a_stranger_revises_on_engines_of_its_own(job: Job, stranger: Path, tmp_path: Path) -> None:
    name = TextCodec(stranger)
    assert name.tokenizer.get_vocab() != TextCodec(job.actor).tokenizer.get_vocab()
    extra = (f"{P}kind=engine", f"{P}model.path={stranger}", f"{P}engine.threads=1")
    reads = tmp_path / "reads"
    run = run_forked(job, "engine", steps=3, extra=extra, without=_SHARED, reads=str(reads))
    assert run.codes == (0, 0), run.output[-6000:]
    assert "1 hf engine, 1 hf engine of the proxy" in run.output
    assert (run.folder / "proxy.log").is_file() and (run.folder / "engine.log").is_file()
    assert examples(run)
    for example in examples(run):
        assert example["revision"] == PROGRAM
        assert example["versions"].endswith("revision by proxy:stranger")
        assert example["reward"] == float("spider" not in example["problem"])
    # Each step pushes the actor once, and the proxy never.
    pushes = [record["metrics"]["sync/pushes"] for record in run.metrics()]
    assert pushes == [1.0, 1.0, 1.0]
    assert are_read(reads, f"{P}engine.")


def test_a_server_that_fails_loses_no_run_and_scores_no_row_0(job: Job, tmp_path: Path) -> None:
    with serving(fails=True) as server:
        keys = (f"base_url={server.url}", "model=stranger", "attempts=1")
        extra = (f"{P}kind=api", *(f"{P}api.{key}" for key in keys))
        extra += ("reward.max_failed_share=0.9",)
        reads = tmp_path / "reads"
        run = run_forked(job, "api", steps=3, extra=extra, without=_SHARED, reads=str(reads))
    assert run.codes == (0, 0), run.output[-6000:]
    assert "proxy api:stranger-7b-v2 on 1 of 1 servers" in run.output
    assert are_read(reads, f"{P}api.")
    assert server.failures and all(b["temperature"] == 0.0 for b in server.bodies)
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 3 and min(r.get("reward/judged_rate", 1.0) for r in records) < 1.0
    found = examples(run)
    assert found and {e["reward"] for e in found} <= {0.0, 1.0, None}
    for example in found:
        if example["revision"]:
            assert example["versions"].endswith("revision by api:stranger-7b-v2")
            assert example["reward"] == float("spider" not in example["problem"])
        else:
            assert example["reward"] is None and "no memory" in example["detail"]
