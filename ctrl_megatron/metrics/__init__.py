"""Metrics of a run: phase timers, arithmetic counts, sinks, and the report."""

from ctrl_megatron.metrics.display import Display, byte_bar
from ctrl_megatron.metrics.flops import device_peak, measure_peak_flops, mfu
from ctrl_megatron.metrics.json_lines import JsonlWriter, read_json_lines
from ctrl_megatron.metrics.server import Gauge, MetricsServer
from ctrl_megatron.metrics.sinks import build_sinks
from ctrl_megatron.metrics.timeline import Meter, Phase, Timeline, hidden_seconds, seconds_by_name

__all__ = [
    "Display",
    "Gauge",
    "JsonlWriter",
    "Meter",
    "MetricsServer",
    "Phase",
    "Timeline",
    "build_sinks",
    "byte_bar",
    "device_peak",
    "hidden_seconds",
    "measure_peak_flops",
    "mfu",
    "read_json_lines",
    "seconds_by_name",
]
