"""Named scalars, phase timers, arithmetic counts, and where the numbers go."""

from ctrl_megatron.metrics.display import Display
from ctrl_megatron.metrics.flops import (
    device_peak,
    measure_peak_flops,
    mfu,
    model_flops,
    peak_flops,
)
from ctrl_megatron.metrics.json_lines import JsonLines, read_json_lines
from ctrl_megatron.metrics.scalars import MetricBag, Partial, Reduction, State, merge, reduce
from ctrl_megatron.metrics.sinks import Sink, build_sinks
from ctrl_megatron.metrics.timeline import (
    Phase,
    Timeline,
    hidden_seconds,
    overlap_seconds,
    seconds_by_name,
)

__all__ = [
    "Display",
    "JsonLines",
    "MetricBag",
    "Partial",
    "Phase",
    "Reduction",
    "Sink",
    "State",
    "Timeline",
    "build_sinks",
    "device_peak",
    "hidden_seconds",
    "measure_peak_flops",
    "merge",
    "mfu",
    "model_flops",
    "overlap_seconds",
    "peak_flops",
    "read_json_lines",
    "reduce",
    "seconds_by_name",
]
