"""A sandbox that dies within a run: nothing is learned from the step, and the run can go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from forked_run import run_forked
from launched_run import Job

SERVICE = 14
_OWN = ("sandbox.workers",)


class Sandbox:
    """A service that passes every program, as long as the file ``until`` is empty."""

    def __init__(self, until: Path | None = None) -> None:
        self._until = until

    async def submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._until is not None and self._until.stat().st_size:
            return web.json_response({"detail": "the disk of workers is gone"}, status=500)
        data = body["config"]["provided_data"]
        cases = data.get("test_list") or data["test"]
        passed = {"passed": True, "exec_info": {"status": "Success", "message": ""}}
        answer = {"id": body["id"], "accepted": True, "extracted_code": ""}
        return web.json_response({**answer, "tests": [passed] * len(cases)})

    async def hello(self, _: web.Request) -> web.Response:
        return web.json_response({"identity": "scripted"})


@contextmanager
def serving(sandbox: Sandbox) -> Iterator[str]:
    """The address of the service, which a thread serves."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/submit", sandbox.submit)
    app.router.add_get("/", sandbox.hello)
    app.router.add_get("/v1/ping", sandbox.hello)
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def settings(address: str) -> tuple[str, ...]:
    return (f"sandbox.endpoint={address}", "reward.judging_retries=0", "trainer.save_freq=-1")


def saved_steps(folder: Path) -> set[int]:
    states = (folder / "checkpoints").glob("global_step_*/trainer_state.json")
    return {int(path.parent.name.rpartition("_")[2]) for path in states}


def test_a_sandbox_that_dies_ends_the_run_before_anything_is_learned(job: Job) -> None:
    with serving(Sandbox()) as address:
        whole = run_forked(job, "passed", steps=2, extra=settings(address), without=_OWN)
    assert whole.codes == (0, 0), whole.output[-4000:]
    first = [x["metrics"]["reward/judged_rate"] for x in whole.metrics() if x["step"] == 1]
    assert first == [1.0]
    # The metrics of a step are written when it has ended.
    with serving(Sandbox(job.folder / "broken" / "metrics.jsonl")) as address:
        broken = run_forked(job, "broken", steps=2, extra=settings(address), without=_OWN)
    assert broken.codes == (SERVICE, SERVICE), broken.output[-4000:]
    assert [record["step"] for record in broken.metrics()] == [1]
    assert broken.output.count("programs could not be judged, and reward.max_failed_share=0.2") == 1
    assert "the disk of workers is gone" in broken.output
    assert "Traceback" not in broken.output
    assert saved_steps(broken.folder) == {1}
    # Repaired, the run draws the rows of the lost step and ends as if nothing had happened.
    with serving(Sandbox()) as address:
        resumed = run_forked(job, "broken", steps=2, extra=settings(address), without=_OWN)
    assert resumed.codes == (0, 0), resumed.output[-4000:]
    compared = ("actor/loss", "actor/grad_norm", "reward/mean", "critique/length")
    for ours, theirs in zip(resumed.metrics(), whole.metrics(), strict=True):
        assert {n: ours["metrics"][n] for n in compared} == {
            n: theirs["metrics"][n] for n in compared
        }
