"""A run's metrics over HTTP, read with Prometheus's own parser, and the answers to probes."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from free_port import free_port
from prometheus_client.parser import text_string_to_metric_families

from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics import Gauge, MetricsServer
from ctrl_megatron.metrics.names import METRICS
from ctrl_megatron.metrics.server import step_gauges


@dataclass
class Served:
    """A server and what a test sets and asks."""

    port: int = field(default_factory=free_port)
    trouble: str = ""

    def __post_init__(self) -> None:
        self.server = MetricsServer("127.0.0.1", self.port, trouble=lambda: self.trouble)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def samples(self) -> dict[tuple[str, ...], float]:
        status, text = self.get("/metrics")
        assert status == 200
        families = list(text_string_to_metric_families(text))
        names = [family.name for family in families]
        assert len(names) == len(set(names)) and all(family.documentation for family in families)
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.close()


def test_every_number_of_a_step_has_a_series(served: Served) -> None:
    assert served.samples() == {}
    served.server.log(
        7,
        {
            "reward/mean": 0.1,
            "time/step": 2.5,
            "time/actor_update": 1.25,
            "memory/ref_log_prob_peak_gib": 3.0,
            "mine/length": math.inf,
        },
    )
    served.server.log(7, {"val/solved_after": 0.5, "val/easy.parquet/solved_after": 0.75})
    samples = served.samples()
    assert abs(samples.pop(("ctrl_step_timestamp_seconds",)) - 1.7e9) < 1e9
    assert samples == {
        ("ctrl_step",): 7,
        ("ctrl_reward_mean",): 0.1,
        ("ctrl_time_step",): 2.5,
        ("ctrl_time", "actor_update"): 1.25,
        ("ctrl_memory_peak_gib", "ref_log_prob"): 3.0,
        ("ctrl_own", "mine/length"): math.inf,
        ("ctrl_val_solved_after",): 0.5,
        ("ctrl_val_solved_after_of_file", "easy.parquet"): 0.75,
    }


def test_a_value_that_a_step_lacks_is_not_the_last_ones(served: Served) -> None:
    served.server.log(1, {"reward/mean": 0.1, "reward/judged_rate": 1.0, "checkpoint/seconds": 3.0})
    served.server.log(2, {"reward/mean": math.nan})
    samples = served.samples()
    assert samples[("ctrl_step",)] == 2 and math.isnan(samples[("ctrl_reward_mean",)])
    assert ("ctrl_reward_judged_rate",) not in samples
    assert samples[("ctrl_checkpoint_seconds",)] == 3.0


def test_no_two_metrics_share_a_series() -> None:
    names = [name.replace("NAME", "phase") for name in METRICS]
    gauges = step_gauges(dict.fromkeys(names, 1.0))
    series = [(g.name, *labels.items()) for g in gauges for labels, _ in g.samples]
    assert len(series) == len(set(series)) == len(names)


def test_gauges_are_measured_when_they_are_asked_for(served: Served) -> None:
    lengths = [3.0]
    served.server.add_gauges(
        lambda: [Gauge("ctrl_queue", "Waiting.", [({"of": 'a"\\b'}, lengths[0])])]
    )
    assert served.samples() == {("ctrl_queue", 'a"\\b'): 3}
    lengths[0] = 4
    assert served.samples() == {("ctrl_queue", 'a"\\b'): 4}


def test_probes_learn_that_a_run_is_about_to_end(served: Served) -> None:
    assert served.get("/healthz") == (200, "ok\n")
    served.trouble = "a stop was requested"
    assert served.get("/healthz?verbose=1") == (503, "a stop was requested\n")
    assert served.get("/other")[0] == 404


def test_a_taken_port_is_the_users_error(served: Served) -> None:
    with pytest.raises(UserError, match=rf"metrics_port={served.port}: cannot listen on 127\.0"):
        MetricsServer("127.0.0.1", served.port, trouble=str)
    with pytest.raises(UserError, match=r"metrics_host"):
        MetricsServer("192.0.2.7", served.port, trouble=str)
    second = MetricsServer("::1", served.port, trouble=str)
    second.close()
