"""The cache in a file: what it keeps, what it refuses, and several processes at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from reward_samples import CORRECT, ScriptedSandbox, block, function_record, function_row, write

from ctrl_megatron.rewards import RewardModelForCritic
from ctrl_megatron.rewards.cache import CacheFileError, VerdictCache, decode_verdict, encode_verdict
from ctrl_megatron.rewards.grading import CachedJudge, grading_job
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.types import Verdict


def verdict(passed: tuple[bool, ...] = (True, False), *, timed_out: bool = False) -> Verdict:
    detail = tuple("" if p else "wrong" for p in passed)
    return Verdict(passed=passed, total=len(passed), detail=detail, timed_out=timed_out)


def test_results_outlive_the_process_that_found_them(tmp_path: Path) -> None:
    path, runs = tmp_path / "cache.db", 0

    async def run() -> Verdict:
        nonlocal runs
        runs += 1
        return verdict()

    for expected in (False, True):
        cache = VerdictCache(path)
        assert asyncio.run(cache.get_or_run("k", run)) == (verdict(), expected)
        assert len(cache) == 1
    assert runs == 1


def test_equal_runs_under_way_are_shared_in_front_of_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        cache: VerdictCache = VerdictCache(tmp_path / "cache.db")
        runs = 0

        async def run() -> Verdict:
            nonlocal runs
            runs += 1
            await asyncio.sleep(0.01)
            return verdict()

        await asyncio.gather(*(cache.get_or_run("k", run) for _ in range(20)))
        await cache.get_or_run("k", run)
        assert runs == 1
        counters = cache.counters
        assert (counters.runs, counters.joined, counters.hits) == (1, 19, 1)

    asyncio.run(main())


def test_faults_and_time_outs_are_not_remembered(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "cache.db")

    async def fault() -> Verdict:
        raise SandboxError("gone")

    async def slow() -> Verdict:
        return verdict(timed_out=True)

    with pytest.raises(SandboxError):
        asyncio.run(cache.get_or_run("k", fault))
    assert asyncio.run(cache.get_or_run("k", slow)) == (verdict(timed_out=True), False)
    assert asyncio.run(cache.get_or_run("k", slow)) == (verdict(timed_out=True), False)
    assert len(cache) == 0


def test_the_oldest_go_when_the_file_is_full(tmp_path: Path) -> None:
    kept = VerdictCache(tmp_path / "cache.db", capacity=3)
    for number in range(10):
        kept.store(str(number), verdict())
        kept.store(str(number), verdict((True,)))  # there already
        assert len(kept) <= 3
    assert [kept.get_stored(str(number)) for number in range(7)] == [None] * 7
    assert [kept.get_stored(str(number)) for number in (7, 8, 9)] == [verdict()] * 3
    with pytest.raises(ValueError, match="capacity"):
        VerdictCache(tmp_path / "other.db", capacity=0)


def test_the_bytes_of_a_cache_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    long = Verdict(passed=(False,), total=1, detail=("x" * 2000,))
    with closing(VerdictCache(path, capacity_bytes=1 << 20)) as kept:
        for number in range(2000):
            kept.store(str(number), long)
        assert 100 < len(kept) < 600
        assert kept.get_stored("1999") == long and kept.get_stored("0") is None
    assert path.stat().st_size < 2 << 20
    with pytest.raises(ValueError, match="capacity_bytes"):
        VerdictCache(capacity_bytes=1)


TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too: programs print them


@given(
    st.lists(st.tuples(st.booleans(), TEXT, st.floats(0, 1)), min_size=1),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_a_verdict_survives_its_text(
    cases: list[tuple[bool, str, float]], unseen: int, timed_out: bool, partial: bool
) -> None:
    passed, detail, scores = zip(*cases, strict=True)
    verdict = Verdict(
        passed=passed,
        total=len(passed) + unseen,
        detail=detail,
        timed_out=timed_out,
        scores=scores if partial else (),
    )
    assert decode_verdict(encode_verdict(verdict)) == verdict


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "{}",
        "[]",
        '[1, [true], [""], false]',
        '[1, [true], [""], false, null]',
        "[1, [], [], false, []]",
        "[1, [1], [], false, []]",
        "[1, [true, true], [], false, []]",
        '[1, [true], [""], 0, []]',
        '[true, [true], [""], false, []]',
        '[1, [true], [""], false, ["1"]]',
    ],
)
def test_a_text_that_is_no_verdict_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_verdict(text)


def make_foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()


def make_marked(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 7")
        connection.execute("CREATE TABLE results (key TEXT, value TEXT)")
    connection.close()


def make_newer(path: Path) -> None:
    VerdictCache(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def make_damaged(path: Path) -> None:
    kept = VerdictCache(path)
    for number in range(200):
        kept.store(str(number), verdict((True, False) * 50))
    kept.close()
    data = bytearray(path.read_bytes())
    data[4096:20480] = b"\xff" * 16384
    path.write_bytes(data)


def make_cut(path: Path) -> None:
    kept = VerdictCache(path)
    for number in range(200):
        kept.store(str(number), verdict((True, False) * 50))
    kept.close()
    path.write_bytes(path.read_bytes()[:10000])


@pytest.mark.parametrize(
    "make",
    [
        make_foreign,
        make_marked,
        make_newer,
        make_damaged,
        make_cut,
        lambda path: path.write_text("dear diary"),
        lambda path: path.write_bytes(b"SQLite format 3\0" + b"\0" * 50),
        lambda path: path.mkdir(),
    ],
)
def test_a_file_that_is_not_a_sound_cache_is_refused(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(CacheFileError, match=r"cache\.db") as caught:
        VerdictCache(path)
    assert "delete" in str(caught.value)
    assert not path.is_file() or path.read_bytes() == before


def test_a_missing_folder_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="create it"):
        VerdictCache(tmp_path / "none" / "cache.db")
    empty = tmp_path / "cache.db"
    empty.touch()
    assert len(VerdictCache(empty)) == 0


def test_a_file_that_breaks_later_is_an_error_for_those_who_wait(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    cache = VerdictCache(path, busy_seconds=0.05)

    async def run() -> Verdict:
        return verdict()

    asyncio.run(cache.get_or_run("k", run))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE results SET value = 'nonsense'")
    with pytest.raises(CacheFileError, match="cannot be read"):
        asyncio.run(cache.get_or_run("k", run))
    other.execute(
        "BEGIN IMMEDIATE"
    )  # another connection locks the file for longer than the cache waits
    with pytest.raises(CacheFileError, match="locked"):
        asyncio.run(cache.get_or_run("k2", run))
    other.execute("ROLLBACK")
    other.execute("DROP TABLE results")
    with pytest.raises(CacheFileError, match="no such table"):
        asyncio.run(cache.get_or_run("k3", run))
    other.close()


RACE = """
import os, sys, time, traceback
from pathlib import Path
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.types import Verdict

def named(name):
    return Verdict(passed=(True,), total=1, detail=(name,))

def work(path, me):
    store = VerdictCache(path, capacity=1000)
    for number in range(10):
        store.store(f"{me}/{number}", named(f"{me}:{number}"))
        store.store(f"both/{number}", named("both"))
        assert store.get_stored(f"{me}/{number}") == named(f"{me}:{number}")
    store.close()

for turn in range(20):
    path, start, children = Path(sys.argv[1]) / f"{turn}.db", time.monotonic() + 0.02, []
    for me in range(4):
        child = os.fork()
        if not child:
            try:
                while time.monotonic() < start:  # together: they make the file at the same time
                    pass
                work(path, me)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    store = VerdictCache(path, capacity=1000)
    assert len(store) == 50
    store.close()
"""


def test_processes_make_and_write_one_file_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def _judge_once(path: str, file: str, results: Any) -> None:
    judge = ScriptedSandbox(lambda request: [True, True, False])
    model = RewardModelForCritic(
        file, None, sandbox=judge, show_progress=False, cache=VerdictCache(path)
    )
    row = function_row()
    rewards = asyncio.run(model.get_reward_all([CORRECT] * 3, [block("x = 1")] * 3, [row] * 3))
    results.put((rewards, len(judge.requests)))


def test_a_second_run_of_a_critic_sends_no_request(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", function_record())
    context = multiprocessing.get_context("spawn")
    seen = []
    for _ in range(2):
        results = context.Queue()
        process = context.Process(
            target=_judge_once, args=(str(tmp_path / "cache.db"), str(file), results)
        )
        process.start()
        seen.append(results.get(timeout=PATIENCE))
        process.join(PATIENCE)
    assert seen == [([pytest.approx(2 / 3)] * 3, 1), ([pytest.approx(2 / 3)] * 3, 0)]


def test_the_key_contains_whatever_may_change_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(code: str = "x = 1", run_all: bool = True, identity: Any = None, **fields: Any) -> str:
        job = grading_job(block(code), function_row(**fields), run_all_cases=run_all)
        judge = ScriptedSandbox(lambda request: [True], identity=identity)
        return asyncio.run(CachedJudge(judge, VerdictCache()).cache_key(job))

    keys = [
        key(),
        key("x  = 1"),
        key("y = 1"),
        key(run_all=False),
        key(time_limit=3.0),
        key(selected_uts=["assert add(1, 2) == 3"]),
        key(test_setup="import os"),
        key(entry_point="plus"),
        key(comparison="livecodebench"),
        key(identity={"memory_mb": 64}),
        key(identity={"memory_mb": 65}),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    monkeypatch.setattr("ctrl_megatron.rewards.grading.GRADER_VERSION", "another")
    assert key() not in keys
