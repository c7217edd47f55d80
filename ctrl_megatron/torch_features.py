"""Features of the installed torch, for stacks that are older than the pinned one.

The pinned torch has all of them; 2.11 lacks each. No other file of the package asks for torch's
version or for the arguments of its functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from inspect import signature

from packaging.version import Version

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables with the settings of PyTorch's allocator; the second is the older name."""
_EXACT = "pinned_max_round_threshold_mb"


def torchrun_arguments(words: Sequence[str]) -> list[str]:
    """The arguments of torchrun, without a ``--shutdown-timeout SECONDS`` before the user's program
    that it does not know; ranks then have its thirty seconds after a signal."""
    from torch.distributed.run import get_args_parser

    flag, known = "--shutdown-timeout", list(words)
    if flag in known and flag not in get_args_parser().format_help():
        place = known.index(flag)
        del known[place : place + 2]
    return known


@cache
def varlen_attention_needs_enable_gqa() -> bool:
    """Whether ``varlen_attn`` accepts fewer key heads than query heads only with ``enable_gqa``;
    before, it accepted them without."""
    from torch.nn.attention import varlen

    return "enable_gqa" in signature(varlen.varlen_attn).parameters


def exact_pinned_memory_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which PyTorch's allocator does not round page-locked memory above one MiB up
    to a power of two; the user's own settings stay. Empty where the user sets the threshold, and
    before torch 2.13, which ends a process whose settings have a word that it does not know.

    vLLM keeps the weights of a sleeping engine in such memory, tensor by tensor.
    """
    name = next((name for name in ALLOCATOR_VARIABLES if name in environ), ALLOCATOR_VARIABLES[0])
    settings = environ.get(name, "")
    if _EXACT in settings or Version(metadata.version("torch")).release < (2, 13):
        return {}
    return {name: ",".join(filter(None, (settings, f"{_EXACT}:1")))}
