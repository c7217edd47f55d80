"""Metrics of a run: phase timers, arithmetic counts, sinks, and the report."""

from ctrl_megatron.metrics.display import Display, byte_progress_bar
from ctrl_megatron.metrics.flops import device_peak_flops, measure_cpu_peak_flops, mfu
from ctrl_megatron.metrics.json_lines import JsonlWriter, read_json_lines
from ctrl_megatron.metrics.server import Gauge, MetricsServer
from ctrl_megatron.metrics.sinks import build_sinks
from ctrl_megatron.metrics.timeline import (
    Phase,
    PhaseMeter,
    Timeline,
    overlapped_host_seconds,
    seconds_by_name,
)

__all__ = [
    "Display",
    "Gauge",
    "JsonlWriter",
    "MetricsServer",
    "Phase",
    "PhaseMeter",
    "Timeline",
    "build_sinks",
    "byte_progress_bar",
    "device_peak_flops",
    "measure_cpu_peak_flops",
    "mfu",
    "overlapped_host_seconds",
    "read_json_lines",
    "seconds_by_name",
]
