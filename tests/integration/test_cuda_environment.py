"""The environment for NVIDIA GPUs, made on a machine with nvcc and without a GPU: ``make
test-env-cuda``. What is installed there loads as far as no driver is needed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / "build/env-cuda/bin"

pytestmark = [
    pytest.mark.env_cuda,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (BIN / "python").exists(), reason="build/env-cuda is not there: make test-env-cuda"
    ),
]


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """The end of a command of that environment, run outside of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT / "build",
        env=environment,
    )


def test_every_library_is_the_one_for_gpus() -> None:
    code = (
        "import torch, transformer_engine.pytorch as te, megatron.core, vllm\n"
        "print(torch.version.cuda, te.__name__, vllm.__version__)"
    )
    done = ask("python", "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-3:] == ["13.0", "transformer_engine.pytorch", "0.32.0"]


def test_models_are_built_from_transformer_engine() -> None:
    names = "from ctrl_megatron.models.kernels import kernel_providers"
    code = f"{names}\nprint(*kernel_providers().values())"
    done = ask("python", "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    for provider in done.stdout.splitlines()[-1].split(" "):
        if "." in provider:
            assert provider.startswith(("transformer_engine", "megatron.core.extensions"))


def test_the_check_of_the_machine_misses_nothing_but_gpus() -> None:
    done = ask("ctrl-check-env")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == [], done.stdout + done.stderr[-2000:]
    assert "skip  torch and GPUs" in done.stdout
