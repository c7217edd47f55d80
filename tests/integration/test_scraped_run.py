"""A run is scraped while it trains, and asked for its health until it ends."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request

import pytest
from free_port import free_port
from launched_run import Job
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.timeout(300)


def test_a_run_is_scraped_while_it_trains(job: Job) -> None:
    port = free_port()

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()
        except OSError:
            return 0, "not reached"

    extra = (f"trainer.metrics_port={port}", "trainer.n_gpus_per_node=1")
    with job.launch("scraped", steps=10_000, extra=extra, ranks=1, preloaded=True) as run:
        # Before the first step too, while models are loaded.
        run.wait_for(lambda: get("/healthz")[0] == 200)
        run.wait_for_steps(2)
        status, text = get("/metrics")
        assert status == 200 and get("/healthz") == (200, "ok\n")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        logged = run.metrics()[int(samples["ctrl_step",]) - 1]["metrics"]
        assert logged["reward/judged_rate"] == 1.0
        for name, series in (
            ("time/step", ("ctrl_time_step",)),
            ("time/sandbox", ("ctrl_time", "sandbox")),
            ("perf/tokens_per_second", ("ctrl_perf_tokens_per_second",)),
            ("reward/judged_rate", ("ctrl_reward_judged_rate",)),
        ):
            assert samples[series] == logged[name]
        assert logged["engine/tokens_per_second"] > 0 and "engine/cache_hit_rate" not in logged
        assert samples["ctrl_restarts",] == 0
        assert samples["ctrl_weights_version",] >= samples["ctrl_step",] - 1 >= 1
        assert samples["ctrl_engine_completions", "hf"] >= 0
        (waiting,) = (value for names, value in samples.items() if "ctrl_sandbox_waiting" in names)
        assert waiting >= 0
        os.kill(run.process.pid, signal.SIGTERM)
        answers = []
        run.wait_for(lambda: answers.append(get("/healthz")) or answers[-1][0] != 200, pause=0.02)
        assert answers[-1] == (503, "a stop was requested\n"), answers[-1]
        run.ends(60)
        assert get("/healthz")[0] == 0
