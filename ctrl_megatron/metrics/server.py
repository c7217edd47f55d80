"""The newest metrics of a run for Prometheus, and its health for a cluster's probes, over HTTP.

``/metrics`` has Prometheus's text format. ``/healthz`` answers 200 while the run works or waits and
503, with the reason, once it is about to end.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby

from ctrl_megatron.errors import UserError
from ctrl_megatron.exposition import CONTENT_TYPE, metric_lines
from ctrl_megatron.metrics.names import METRICS, metric_pattern, rate_name_of_all_sets

_REQUEST_SECONDS = 10.0
_POLL_SECONDS = 0.2
_OWN = "a metric of a pipeline, loss or reward function of one's own"


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that is measured when it is asked for."""

    name: str
    text: str
    samples: Sequence[tuple[Mapping[str, str], float]]
    """Labels and value of each series."""


class MetricsServer:
    """A ``Sink`` that serves the newest value of every metric, from threads of its own."""

    def __init__(self, host: str, port: int, *, trouble: Callable[[], str]) -> None:
        """Listen at once. ``trouble`` says why the run is about to end; empty while it is not.

        Raises UserError for an address at which this process cannot listen.
        """
        self._newest: dict[str, float] = {}
        self._gauges: list[Callable[[], Iterable[Gauge]]] = []
        self._trouble = trouble
        kind = type("Server", (_Server,), {"address_family": _family(host)})
        try:
            self._server: _Server = kind((host, port), _Handler)
        except OSError as error:
            raise UserError(
                f"trainer.metrics_port={port}: cannot listen on {host}: {error.strerror or error}",
                remedy="choose another port, or an address of this host as trainer.metrics_host",
            ) from error
        self._server.pages = {"/metrics": self._metrics, "/healthz": self._health}
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def add_gauges(self, gauges: Callable[[], Iterable[Gauge]]) -> None:
        """Ask the function for gauges in every answer from now on, in any thread."""
        self._gauges.append(gauges)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Serve the metrics from now on. They replace all of the same groups (the part of a name
        before its first slash), so that a value which a step does not have is not the last one's.
        """
        groups = {name.partition("/")[0] for name in metrics}
        kept = {n: v for n, v in self._newest.items() if n.partition("/")[0] not in groups}
        self._newest = {**kept, **metrics, "step": step, "step_timestamp_seconds": time.time()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _metrics(self) -> tuple[int, str, str]:
        lines: list[str] = []
        found = [*step_gauges(self._newest), *(g for ask in self._gauges for g in ask())]
        # The format has each name once.
        for name, text in {gauge.name: gauge.text for gauge in found}.items():
            samples = [sample for gauge in found if gauge.name == name for sample in gauge.samples]
            lines += metric_lines("gauge", name, text, *samples)
        return 200, CONTENT_TYPE, "\n".join([*lines, ""])

    def _health(self) -> tuple[int, str, str]:
        trouble = self._trouble()
        return 503 if trouble else 200, "text/plain; charset=utf-8", f"{trouble or 'ok'}\n"


def step_gauges(metrics: Mapping[str, float]) -> list[Gauge]:
    """The gauges of the metrics: ``reward/mean`` is ``ctrl_reward_mean``, ``time/save``, whose
    entry is ``time/NAME``, is ``ctrl_time{name="save"}``, and a name without an entry is
    ``ctrl_own{name="..."}``.
    """
    found = sorted(
        ((*_series(name), value) for name, value in metrics.items()), key=lambda found: found[0]
    )
    gauges = []
    for name, series in groupby(found, key=lambda found: found[0]):
        every = list(series)
        samples = [(labels, value) for _, labels, _, value in every]
        gauges.append(Gauge(name, every[0][2], samples))
    return gauges


_OF_THE_RUN = {
    "step": "Finished steps.",
    "step_timestamp_seconds": "Unix time of the newest metrics.",
}


def _series(name: str) -> tuple[str, dict[str, str], str]:
    """Name, labels and help of a metric's series."""
    if name in _OF_THE_RUN:
        return f"ctrl_{name}", {}, _OF_THE_RUN[name]
    rate = rate_name_of_all_sets(name)
    entry = metric_pattern(name if rate is None else rate)
    if entry is None:
        return "ctrl_own", {"name": name}, _OWN
    family, text = "ctrl_" + _plain(entry), METRICS[entry].meaning
    if rate is not None:
        return f"{family}_of_file", {"file": name[len("val/") : -len(rate) + 3]}, text
    if "NAME" not in entry:
        return family, {}, text
    before, after = entry.split("NAME")
    return family, {"name": name[len(before) : len(name) - len(after)]}, text


def _plain(entry: str) -> str:
    parts = "".join(c if c.isalnum() else "_" for c in entry.replace("NAME", "")).split("_")
    return "_".join(part for part in parts if part)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    pages: Mapping[str, Callable[[], tuple[int, str, str]]]


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # type: ignore[assignment]  # which makes every handler
    server_version, sys_version = "ctrl_megatron", ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        unknown = 404, "text/plain; charset=utf-8", "try /metrics or /healthz\n"
        status, kind, text = unknown if page is None else page()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the run's output is about training."""
