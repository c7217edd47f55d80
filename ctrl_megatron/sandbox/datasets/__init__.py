"""Data set kinds: reads the tests of a problem from the form of each kind. Nothing is run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ctrl_megatron.sandbox.datasets.functions import read_function_tests, read_human_eval
from ctrl_megatron.sandbox.datasets.problems import GradedProblem
from ctrl_megatron.sandbox.datasets.stdio import (
    read_code_contests,
    read_common_oj,
    read_input_output,
    read_ioi,
    read_live_code_bench,
)

READERS: dict[str, Callable[[Mapping[str, Any]], GradedProblem]] = {
    "APPSDataset": read_input_output,
    "CodeContestsDataset": read_code_contests,
    "CommonOJDataset": read_common_oj,
    "HumanEvalDataset": read_human_eval,
    "IOIDataset": read_ioi,
    "LiveCodeBenchDataset": read_live_code_bench,
    "MBPPDataset": read_function_tests,
    "TACODataset": read_input_output,
}
"""Readers by data set kind. Each raises ``ValueError`` for a record that cannot be judged."""
