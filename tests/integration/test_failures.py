"""One process of a run, in which no service is started again, is killed in the middle of a step;
nothing of the run is left."""

from __future__ import annotations

import os
import re
import resource
import signal
import time

import psutil
import pytest
from launched_run import Job, Run

from ctrl_megatron.errors import FAILED
from ctrl_megatron.rollout.engine import available_engines

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

WITHIN = 30.0
"""Seconds from the kill to the launcher's end."""


def _in_a_push(run: Run) -> bool:
    return bool(run.shared_memory())


def _in_a_step(run: Run) -> bool:
    return True


@pytest.mark.parametrize(
    ("victim", "moment", "message"),
    [
        # The owner of the shared memory, while it is in use.
        ("rank 0", _in_a_push, r"rank 0 \(pid {pid}\) died"),
        pytest.param("rank 1", _in_a_push, r"rank 1 \(pid {pid}\) died", marks=pytest.mark.long),
        ("engine", _in_a_step, r"(rollout engine|engine hf) \(pid {pid}\b.* (died|is gone|killed)"),
        # The process that computes inside the vLLM engine; its server notices that it has ended.
        pytest.param(
            "vllm core",
            _in_a_step,
            r"(rollout engine|engine vllm) \(pid \d+\b.* (died|is gone|exited)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "sglang scheduler",
            _in_a_step,
            r"(rollout engine|engine sglang) \(pid \d+\b.* (died|is gone|exited)",
            marks=pytest.mark.long,
        ),
        # The process is alive but silent; no collective waits for it and could time out.
        pytest.param(
            "silent engine",
            _in_a_step,
            r"rollout engine \(pid {pid}\) runs but has not answered",
            marks=pytest.mark.long,
        ),
        # Suspended, it neither ends nor obeys the launcher's signal.
        pytest.param(
            "silent rank",
            _in_a_step,
            r"rank 0 stops because rank 1 has not been heard of for 8 s",
            marks=pytest.mark.long,
        ),
        ("sandbox", _in_a_step, r"sandbox service \(pid {pid}\) died"),
        pytest.param(
            "silent sandbox",
            _in_a_step,
            r"sandbox service \(pid {pid}\) runs but has not answered",
            marks=pytest.mark.long,
        ),
        ("launcher", _in_a_step, r"launcher"),
    ],
    ids=[
        *("rank 0", "rank 1", "engine", "vllm core", "sglang scheduler", "silent engine"),
        *("silent rank", "sandbox", "silent sandbox", "launcher"),
    ],
)
def test_a_killed_process_ends_the_run(job: Job, victim: str, moment, message: str) -> None:
    engine = {"vllm core": "vllm", "sglang scheduler": "sglang"}.get(victim, "hf")
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    rollout = "actor_rollout_ref.rollout."
    cache = () if engine == "hf" else (rollout + "kv_cache_gib=0.1",)
    silent = victim.startswith("silent")
    patience = ("trainer.failure_timeout=8",) if silent else ()
    # ``test_recovery`` is about services that are started again.
    extra = (f"{rollout}name={engine}", *cache, *patience, "trainer.service_restarts=0")
    name = f"without {victim}".replace(" ", "_")
    # Another test covers the start of a launcher and its ranks; this one covers its death.
    preloaded = victim != "launcher"
    with job.launch(name, steps=10_000, extra=extra, preloaded=preloaded) as run:
        run.wait_for_steps(1)
        process = _process(run, victim)
        assert len(run.look()) >= 5
        run.wait_for(lambda: moment(run), pause=0.0005)
        process.suspend() if silent else process.kill()
        killed = time.monotonic()
        code = run.ends(WITHIN)
        while run.look() and time.monotonic() < killed + WITHIN:
            time.sleep(0.1)
        print(f"{victim}: all gone {time.monotonic() - killed:.1f} s after the kill")
        assert run.look() == []
        assert run.shared_memory() == []
        assert code != 0
        assert re.search(message.format(pid=process.pid), run.output()), run.output()[-8000:]
        if silent:
            assert f"the Python stacks of the ranks at this moment are in {run.folder}/stacks/" in (
                run.output()
            )
            assert "in _watch" in (run.folder / "stacks/rank_0.txt").read_text()
        # Without the launcher's store every rank speaks for itself.
        reasons = run.output().count("stops because")
        assert reasons == 1 or (victim == "launcher" and reasons <= 2), run.output()[-8000:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        (
            resource.RLIMIT_AS,
            1 << 26,
            r"a thread that does not begin|MemoryError|not enough memory",
        ),
        (resource.RLIMIT_NOFILE, 8, r"Too many open files"),
    ],
    ids=["memory", "descriptors"],
)
def test_a_rank_that_the_system_gives_nothing_more_ends_the_run(
    job: Job, limit: int, most: int, message: str
) -> None:
    extra = ("trainer.failure_timeout=8",)
    with job.launch(f"limited{limit}", steps=10_000, extra=extra, own=True, preloaded=True) as run:
        run.wait_for_steps(1)
        resource.prlimit(run.rank(0).pid, limit, (most, most))
        assert run.ends(WITHIN) == FAILED, run.output()[-8000:]
        assert re.search(f"rank 0 stops because[^$]*({message})", run.output()), run.output()
        deadline = time.monotonic() + WITHIN
        while run.look() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run.look() == []


HANGS = """
import pathlib
import time


def score(items):
    pathlib.Path(__file__).with_name("called").touch()
    time.sleep(600)
"""


def test_the_first_signal_ends_a_run_whose_reward_function_hangs(job: Job) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    reward, called = job.folder / "mine.py", job.folder / "called"
    reward.write_text(HANGS)
    extra = (f"reward.reward_funcs=[critic,{reward}:score]",)
    with job.launch("hung", steps=2, extra=extra, preloaded=True) as run:
        run.wait_for(called.exists)
        time.sleep(1)
        os.kill(run.process.pid, signal.SIGTERM)
        asked = time.monotonic()
        run.ends(WITHIN)
        while run.look() and time.monotonic() < asked + WITHIN:
            time.sleep(0.1)
        assert run.look() == []
        assert "stopped as asked before the first step ended" in run.output()
        print(f"gone {time.monotonic() - asked:.1f} s after the signal")
        assert time.monotonic() - asked < 20


def _process(run: Run, name: str) -> psutil.Process:
    if name.startswith("rank"):
        return run.rank(int(name.split()[1]))
    if name == "silent rank":
        return run.rank(1)
    if name == "launcher":
        return psutil.Process(run.process.pid)
    patterns = {
        "engine": r"^engine|rollout\.server",
        "silent engine": r"^engine|rollout\.server",
        "vllm core": r"EngineCore",
        "sglang scheduler": r"sglang::scheduler",
        "sandbox": r"ctrl_megatron\.sandbox",
        "silent sandbox": r"ctrl_megatron\.sandbox",
    }
    return run.find(patterns[name])
