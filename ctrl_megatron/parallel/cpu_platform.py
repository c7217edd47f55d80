"""Lets stock Megatron-Core run on a machine without CUDA.

Megatron-Core uses CUDA in three ways: it allocates on ``device="cuda"``, it compares
``Tensor.type()`` with the ``torch.cuda.*`` names, and it calls streams, events and RNG functions of
``torch.cuda``. ``install()`` provides all three on the CPU. ``parallel.groups.initialize_groups``
calls it once, only on a machine without a CUDA device; no other code of the package depends on the
platform.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ctrl_megatron.parallel import gloo, host_memory, weight_gradient

_CPU = torch.device("cpu")
_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.DoubleTensor": "torch.cuda.DoubleTensor",
}
_ASKING = {torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to}
"""Methods whose arguments may name a device; every operation is compared with them."""
_installed: _CudaOnCpu | None = None


def _means_cuda(device: object) -> bool:
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _CudaOnCpu(TorchFunctionMode):
    """Redirects every request for a CUDA device to the CPU."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if kwargs and _means_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func in _ASKING:
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                name = func(*args)
                return _TYPE_NAMES.get(name, name)
            if func is torch.Tensor.to and len(args) > 1 and _means_cuda(args[1]):
                args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


class _Event:
    """An event or stream that does nothing: operations on a CPU run in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: _Stream | None = None) -> None: ...

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Event):
    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _nothing() -> Callable[..., None]:
    """A new function that does nothing: torch's tracer refuses one object under two names."""
    return lambda *args, **kwargs: None


def _rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _count_in_numpy() -> None:
    """Make Megatron's exchange of tokens get its counts as on a GPU, where numpy arrays are made of
    them on their way to the host."""
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def cpu_platform_installed() -> bool:
    """Whether ``install_cpu_platform`` has been called in this process."""
    return _installed is not None


def install_cpu_platform() -> None:
    """Make ``torch.cuda`` use the CPU for the rest of this process and thread.

    Raises RuntimeError if a CUDA device exists, which must never be hidden.
    """
    global _installed
    if _installed is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform must not be installed where a CUDA device exists")
    stream = _Stream()
    stand_ins: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "set_device": _nothing(),
        "synchronize": _nothing(),
        "empty_cache": host_memory.return_memory_if_scarce,
        "manual_seed": _nothing(),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, stand_ins[name])
    # Megatron compiles small functions; on a CPU that costs minutes of C++ compilation.
    torch.compiler.set_stance("force_eager")
    # Megatron reaches past torch.cuda for its RNG states; on a CPU there is only the CPU generator.
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = _rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    gloo.install_in_place_reduction()
    gloo.install_uneven_collectives()
    _count_in_numpy()
    weight_gradient.install_weight_gradient()
    _installed = _CudaOnCpu()
    _installed.__enter__()
