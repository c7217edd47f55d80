"""Lets SGLang start on a CPU without the GPU libraries that it imports but never calls there.

SGLang's package on PyPI is built for CUDA: its modules import Triton (1 GB), its compiled kernels
(without a build for CPUs), torchvision and IPython. On a CPU it computes a dense model in plain
torch. ``install_stand_ins`` replaces those that are not installed by empty modules. Their
decorators return the function unchanged, calls of kernels raise, and other calls return an object
that cannot be used as a number. Without compiled kernels SGLang does not use AMX
(``cpu_has_amx_support``) and computes the same on every CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

LIBRARIES = ("triton", "sgl_kernel", "torchvision", "IPython")


class StandInUsed(RuntimeError):
    """A stand-in was called to compute something."""


class _Attribute:
    """Any attribute of a stand-in: a decorator, an annotation, a namespace."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Attribute:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attribute(f"{self._name}.{name}")

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._name.startswith("sgl_kernel.") or not (given or named):
            raise StandInUsed(f"{self._name} is not installed; SGLang needs it for this call")
        if len(given) == 1 and callable(given[0]) and not named:
            return given[0]
        return self

    def __getitem__(self, key: Any) -> _Attribute:
        return self

    def __or__(self, other: Any) -> _Attribute:
        return self

    __ror__ = __or__


class _StandIn(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"stand-in {self.__name__} has no {name}")
        full = f"{self.__name__}.{name}"
        # SGLang inherits from classes and uses them with isinstance.
        is_class = name[0].isupper() and not name.isupper()
        made = type(name, (), {"__init__": _take_anything}) if is_class else _Attribute(full)
        setattr(self, name, made)
        return made


def _take_anything(self: object, *given: Any, **named: Any) -> None:
    """A constructor that accepts any arguments; its objects are never used."""


class _Finder:
    """Finds every module of the given libraries."""

    def __init__(self, libraries: Sequence[str]) -> None:
        self._libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._libraries:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""


class UnpinnedTorch:
    """``torch`` for modules that pin host memory for a GPU, wherever the model is."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("tensor", "empty", "zeros", "ones", "arange"):
            return found
        return lambda *given, pin_memory=False, **named: found(*given, **named)


def install_stand_ins() -> None:
    """Replace those of ``LIBRARIES`` that are not installed; call it before SGLang is imported.

    On a machine without CUDA it also selects SGLang's CPU platform, for this process and its
    children.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # Otherwise small functions are compiled on first use, which needs a C++ compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    stand_in_for(LIBRARIES)


def stand_in_for(libraries: Sequence[str]) -> None:
    """Replace those of ``libraries`` that are not installed, unless that has been done before."""
    from torch.utils._triton import has_triton_package
    from transformers.utils.import_utils import is_torchvision_available

    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    absent = [name for name in libraries if find_spec(name) is None]
    # These two cache their answer; later they would mistake a stand-in for the library.
    has_triton_package()
    is_torchvision_available()
    if absent:
        sys.meta_path.append(_Finder(absent))
