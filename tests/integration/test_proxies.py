"""Runs whose proxy is another model: on engines of its own, and on servers that fail."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from forked_run import ForkedRun, run_forked
from free_port import free_port
from launched_run import Job
from proxy_server import Server, serving
from tiny_run import PROGRAM, byte_chat_model

from ctrl_megatron.config import KEYS
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.metrics import read_json_lines
from ctrl_megatron.steps.proxy import EngineProxy
from ctrl_megatron.types import Completion, Message, VersionSpan

P = "actor_rollout_ref.proxy."
_SHARED = (f"{P}model.path",)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proxy of another architecture than the actor's, with other tokens and another template."""
    folder = tmp_path_factory.mktemp("proxies")
    return byte_chat_model(folder / "stranger", [PROGRAM], experts=4)


def examples(run: ForkedRun) -> list[dict[str, str]]:
    """The examples with a revision."""
    found = read_json_lines(run.folder / "examples.jsonl")
    return [example for example in found if example["judgment"] == "valid"]


def are_read(reads: Path, group: str) -> bool:
    """Whether the run read every key of the group."""
    seen = reads.read_text().splitlines()
    return {key for key in KEYS if key.startswith(group)} <= set(seen)


def rendered(messages: list[Message]) -> str:
    """The conversation in the stranger's template."""
    return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[bot]"


def shown(stranger: Path, tokens: list[int]) -> str:
    """The text of the stranger's tokens, special ones included."""
    return TextCodec(stranger).tokenizer.decode(tokens, skip_special_tokens=False)


def test_an_engine_proxy_is_asked_in_its_own_template(stranger: Path) -> None:
    asked: list[list[int]] = []

    class Engine:
        async def generate(self, prompts: Any, params: Any, finished: Any) -> Any:
            asked.extend(prompts)
            assert params.stop_token_ids == (0,)
            drawn = VersionSpan(version="initial", start=0, end=1)
            one = Completion(token_ids=(0,), log_probs=(), finish_reason="stop", spans=(drawn,))
            for number in range(len(prompts)):
                finished(number, one)
            return [[one] for _ in prompts]

    talks: list[list[Message]] = [[{"role": "user", "content": f"Größe {i}?"}] for i in range(2)]
    engine: Any = Engine()
    proxy = EngineProxy(engine, TextCodec(stranger), max_model_len=999, joins_calls=True)
    asyncio.run(proxy.answer(talks, 9, lambda place, answer: None))
    assert [shown(stranger, tokens) for tokens in asked] == [rendered(talk) for talk in talks]


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.long)])
def test_a_stranger_revises_on_engines_of_its_own(
    job: Job, stranger: Path, tmp_path: Path, engine: str
) -> None:
    assert TextCodec(stranger).tokenizer.get_vocab() != TextCodec(job.actor).tokenizer.get_vocab()
    extra = (f"{P}kind=engine", f"{P}model.path={stranger}")
    extra += (f"{P}engine.name={engine}", f"{P}engine.threads=1")
    reads = tmp_path / "reads"
    run = run_forked(job, engine, steps=3, extra=extra, without=_SHARED, reads=str(reads))
    assert run.codes == (0, 0), run.output[-6000:]
    assert f"1 hf engine, 1 {engine} engine of the proxy" in run.output
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


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """The address of vLLM's own server of the model."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"]
    command += ["--max-model-len=2048", "--max-num-seqs=16", "--served-model-name=stranger"]
    chosen = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    chosen |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | chosen, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 900
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        # Its EngineCore computes on if it did not answer in time.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def revised_by(
    server: Server, job: Job, run: str, reads: Path, *extra: str, others: tuple[str, ...] = ()
) -> ForkedRun:
    """A run of three steps whose proxy is the server, which fails and is asked only once."""
    keys = (f"base_url={server.url}", "model=stranger", "attempts=1", *extra)
    settings = (f"{P}kind=api", *(f"{P}api.{key}" for key in keys), *others)
    settings += ("reward.max_failed_share=0.9",)
    return run_forked(job, run, steps=3, extra=settings, without=_SHARED, reads=str(reads))


def check_failing(run: ForkedRun, server: Server, model: str) -> None:
    """The run was not lost, its failures are no rewards, and the other rewards are right."""
    assert run.codes == (0, 0), run.output[-6000:]
    assert f"proxy api:{model} on 1 of 1 servers" in run.output
    assert 0.2 < server.failures / len(server.bodies) < 0.4
    assert all(body["temperature"] == 0.0 for body in server.bodies)
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 3 and min(r.get("reward/judged_rate", 1.0) for r in records) < 1.0
    asked = [body for body in server.bodies if body["max_tokens"] > 1]
    assert sum(record["proxy/requests"] for record in records) == len(asked)
    found = examples(run)
    assert found and {e["reward"] for e in found} <= {0.0, 1.0, None}
    for example in found:
        if example["revision"]:
            assert example["versions"].endswith(f"revision by api:{model}")
            assert example["reward"] == float("spider" not in example["problem"])
        else:
            assert example["reward"] is None and "no memory" in example["detail"]


def test_a_server_that_fails_loses_no_run_and_scores_no_row_0(job: Job, tmp_path: Path) -> None:
    hidden = ("password-of-the-server", "key-in-the-body", "token-of-the-engine")
    with serving(fails=True) as server:
        address = server.url.replace("://", f"://me:{hidden[0]}@")
        secrets = (f"base_url={address}", f"extra_body={{user: {hidden[1]}}}")
        others = (f"actor_rollout_ref.rollout.engine_kwargs.token={hidden[2]}",)
        others += ("trainer.dump_steps=all",)
        run = revised_by(server, job, "api", tmp_path / "reads", *secrets, others=others)
        assert all(body["user"] == hidden[1] for body in server.bodies)
        given = base64.b64encode(f"me:{hidden[0]}".encode()).decode()
        assert server.credentials == {f"Basic {given}"}
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 20 and any(path.parent.parent.name == "dumps" for path in files)
    said = [run.output.encode(), *(path.read_bytes() for path in files)]
    assert not [secret for secret in hidden for text in said if secret.encode() in text]
    assert "*** is not written" in (run.folder / "config.yaml").read_text()
    check_failing(run, server, "stranger-7b-v2")
    assert are_read(tmp_path / "reads", f"{P}api.")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["shared", "api"])
def test_a_run_learns_the_same_with_and_without_streaming(job: Job, kind: str) -> None:
    drawn, learned, weights = [], [], []
    for streaming in ("true", "false"):
        with serving(fails=False) as server:
            served = (f"{P}kind=api", f"{P}api.base_url={server.url}", f"{P}api.model=stranger")
            run = run_forked(
                job,
                f"streaming_{kind}_{streaming}",
                steps=3,
                extra=(
                    *(served if kind == "api" else ()),
                    *(f"actor_rollout_ref.rollout.streaming={streaming}", "trainer.save_hf_freq=3"),
                ),
                without=_SHARED if kind == "api" else (),
            )
        assert run.codes == (0, 0), run.output[-6000:]
        drawn.append(examples(run))
        told = ("actor/loss", "actor/grad_norm", "reward/mean", "revision/length")
        learned.append([{k: r["metrics"].get(k) for k in told} for r in run.metrics()])
        file = run.folder / "hf_exports/global_step_3/model.safetensors"
        weights.append(file.read_bytes())
    assert drawn[0] and drawn[0] == drawn[1]
    assert len(learned[0]) == 3 and learned[0] == learned[1]
    assert weights[0] == weights[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_vllms_own_server_revises_in_the_models_template_and_may_fail(
    job: Job, stranger: Path, tmp_path: Path
) -> None:
    with (
        vllm_server(stranger, tmp_path / "vllm.log") as address,
        serving(fails=True, behind=address) as server,
    ):
        body = "extra_body={return_token_ids: true}"
        run = revised_by(server, job, "api_vllm", tmp_path / "reads", body)
    check_failing(run, server, "stranger")
    assert len(server.answered) == len(server.bodies) - server.failures
    for body, answer in server.answered:
        assert shown(stranger, answer["prompt_token_ids"]) == rendered(body["messages"])
    revisions = [a["choices"][0]["message"] for b, a in server.answered if b["max_tokens"] > 1]
    assert {message["content"] for message in revisions} == {PROGRAM}
