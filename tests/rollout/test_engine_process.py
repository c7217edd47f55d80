"""An engine's process: its start, requests without its token, and its end with the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from forked_ranks import fork_context
from preloaded import reserve
from rollout_models import save, tiny_llama

from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.parent_watch import process_gone, process_group_members
from ctrl_megatron.rollout import interpreter
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineDied, EngineSpec
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine, root_cause
from ctrl_megatron.types import SamplingParams

STUBBORN = """
import os, subprocess, sys, time
from ctrl_megatron.parallel.parent_watch import end_with_parent
end_with_parent()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(0), tmp_path_factory.mktemp("model"))


def tiny_spec(model_path: Path, **changes: object) -> EngineSpec:
    spec = EngineSpec(name="hf", model_path=str(model_path), dtype="float32", threads=1)
    return replace(spec, **changes)  # type: ignore[arg-type]


def wait_until_empty(group: int) -> None:
    deadline = time.monotonic() + 20
    while process_group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_group_members(group) == []


def test_an_engine_that_refuses_its_model_is_one_line_with_the_cause(
    model_path: Path, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    wrong = {"attn_implementation": "no_such_attention"}
    with pytest.raises(UserError, match=f"^engine hf refuses the model {model_path}: .*") as caught:
        launch_engine(tiny_spec(model_path, log_path=str(log), extra=wrong))
    said = str(caught.value)
    assert "ValueError: " in said and "no_such_attent" in said
    assert str(log) in said and "\n" not in said
    assert "Traceback" in log.read_text()


def test_a_call_of_ours_that_is_wrong_keeps_its_traceback(model_path: Path) -> None:
    with pytest.raises(EngineDied, match=r"(?s)not start \(TypeError.*Traceback.*no_such_key"):
        launch_engine(tiny_spec(model_path, extra={"no_such_key": 1}))


def test_the_cause_is_the_error_that_a_process_of_the_engine_logged(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "INFO starts\n"
        "(EngineCore pid=3) ERROR 11-25 17:33:01 [core.py:1512]     return self._op()\n"
        "(EngineCore pid=3) ERROR 11-25 17:33:01 [core.py:1512] ValueError: Head size 16 is bad\n"
        "(Main pid=2) ERROR 11-25 17:33:01 [a.py:9] v1.EngineDeadError: See above, the root cause\n"
    )
    pointing = "RuntimeError: Engine core initialization failed. See root cause above."
    assert root_cause(pointing, str(log)) == "ValueError: Head size 16 is bad"
    assert root_cause("OSError: no file", str(log)) == "OSError: no file"
    assert root_cause(pointing, str(tmp_path / "none")) == pointing


def test_a_start_that_takes_too_long_is_ended(model_path: Path) -> None:
    process = EngineProcess(tiny_spec(model_path, startup_timeout=0.3))
    with pytest.raises(EngineDied, match=r"was not ready within 0\.3 s"):
        process.wait_ready()
    assert process_group_members(process.pid) == []


def test_a_bad_model_path_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        launch_engine(tiny_spec(tmp_path))


async def give_up_and_ask(engine: RemoteEngine) -> int:
    """The length of an answer after a caller gave up, whose call must not hold up the next."""
    endless = engine.generate([[1]], SamplingParams(max_tokens=500_000))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(endless, 0.5)
    next_call = engine.generate([[1]], SamplingParams(max_tokens=2))
    ((completion,),) = await asyncio.wait_for(next_call, 60)
    await engine.close()
    return len(completion.token_ids)


def test_two_start_together_and_only_their_own_token_opens_them(model_path: Path) -> None:
    spec = tiny_spec(model_path, max_model_len=10**6)
    first, second = (EngineProcess(spec) for _ in range(2))
    try:
        first.wait_ready()
        second.wait_ready()
        thief = RemoteEngine(replace(first.address, token=second.address.token))

        async def ask() -> None:
            with pytest.raises(ValueError, match="refused /health with status 401"):
                await thief.health()
            await thief.close()
            # A second client from plain data, as another rank would make it.
            other = RemoteEngine(second.address)
            await other.health()
            await other.close()

        asyncio.run(ask())
        assert first.address.token not in repr(first.address)
        assert first.address.token.encode() not in Path(f"/proc/{first.pid}/cmdline").read_bytes()
        assert asyncio.run(give_up_and_ask(first.connect())) == 2
    finally:
        first.stop()
        second.stop()
    assert (
        not first.alive()
        and process_group_members(first.pid) == process_group_members(second.pid) == []
    )


def launch_and_wait(model_path: Path, started: Connection) -> None:
    """An engine's parent; both are forks of a process that has imported what they need."""
    reserve(1)
    started.send(launch_engine(tiny_spec(model_path)).pid)
    time.sleep(600)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_its_parent(
    model_path: Path, sign: signal.Signals, guarded: bool
) -> None:
    forks = fork_context()
    told, started = forks.Pipe(duplex=False)
    parent = forks.Process(target=launch_and_wait, args=(model_path, started))
    parent.start()
    started.close()
    try:
        group = told.recv()
        engine, guard = sorted(process_group_members(group))
        assert engine == group
        if not guarded:
            os.kill(guard, signal.SIGKILL)
    finally:
        assert parent.pid is not None
        os.kill(parent.pid, sign)
    wait_until_empty(group)
    parent.join(10)
    assert parent.exitcode == -sign


@pytest.mark.parametrize("end", ["leader killed", "pipe closed"])
def test_the_guard_ends_children_that_would_outlive_the_engine(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as leader:
        assert leader.stdout is not None and leader.stdin is not None
        child = int(leader.stdout.readline())
        assert not process_gone(child)
        if end == "leader killed":
            leader.kill()
        else:
            leader.stdin.close()
        wait_until_empty(leader.pid)
        assert process_gone(child)
        leader.wait(10)


def other_environment(folder: Path) -> str:
    """The interpreter of a separate environment that finds our libraries."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin/python")


def test_an_engine_runs_in_an_interpreter_of_its_own(model_path: Path, tmp_path: Path) -> None:
    python = other_environment(tmp_path / "environment")
    with launch_engine(tiny_spec(model_path, python=python)) as process:
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert command[0].decode() == python
        engine = process.connect()
        ((completion,),) = asyncio.run(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4)))
        assert len(completion.token_ids) == 4


def test_an_interpreter_that_cannot_run_the_engine_is_refused(
    model_path: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    key = r"actor_rollout_ref\.rollout\.python="
    for python, said in (
        (str(bare / "bin/python"), r".*lacks transformers, aiohttp, .*make env-sglang-cuda"),
        (str(tmp_path / "absent"), r".*does not run: .*No such file"),
        ("/bin/false", r".*is no usable Python: exit code 1"),
        (str(tmp_path), r".*does not run: .*Permission denied"),
    ):
        with pytest.raises(ValueError, match=key + said):
            EngineProcess(tiny_spec(model_path, python=python))


def test_another_interpreter_does_not_see_the_packages_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreter, "_PACKAGE_PARENT", Path("/env/lib/python3.11/site-packages"))
    assert interpreter.engine_python_path("/other/bin/python", "/mine") == "/mine"
    assert (
        interpreter.engine_python_path(None, "/mine") == "/env/lib/python3.11/site-packages:/mine"
    )
    monkeypatch.setattr(interpreter, "_PACKAGE_PARENT", Path("/checkout"))
    assert interpreter.engine_python_path("/other/bin/python", None) == "/checkout"


def test_an_engines_process_needs_no_more_than_its_interpreter_is_asked_for() -> None:
    code = (
        "import sys\n"
        "import ctrl_megatron.rollout.server, ctrl_megatron.rollout.hf_engine\n"
        "import ctrl_megatron.rollout.held_tensors, ctrl_megatron.models.offload\n"
        "print({'omegaconf', 'megatron', 'tensordict', 'rich'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr
