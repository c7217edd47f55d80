"""Installed, the package is imported and its commands run from any folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tools.make_env import install_checkout, pip_install

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/ctrl_smollm2_cpu.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS, VERSION = PROJECT["scripts"], PROJECT["version"]


@pytest.fixture(scope="module", params=["editable", "plain"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the package installed from a copy of the checkout; the libraries are
    those of the running one.
    """
    folder = tmp_path_factory.mktemp(request.param)
    venv, checkout = folder / "env", folder / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    if request.param == "editable":
        # As the images do it, which have the sources last.
        image = (ROOT / "container/Dockerfile.cpu").read_text()
        (places,) = re.findall(r"^RUN (mkdir .*) \\$", image, re.MULTILINE)
        subprocess.run(["sh", "-euc", places], cwd=checkout, check=True)
        install_checkout(venv, checkout)
    nothing_compiled = shutil.ignore_patterns("__pycache__")
    for name in ("ctrl_megatron", "examples"):
        shutil.copytree(ROOT / name, checkout / name, ignore=nothing_compiled, dirs_exist_ok=True)
    shutil.copy(ROOT / "README.md", checkout)
    if request.param == "plain":
        plain = [*pip_install(venv), "--no-build-isolation", "--quiet", str(checkout)]
        subprocess.run(plain, check=True)
    return venv / "bin/python"


def files_of(package: Path) -> set[Path]:
    """Modules, pages and templates."""
    found = {p.relative_to(package) for p in package.rglob("*") if p.is_file()}
    assert Path("eval/templates/evaluation.html.jinja") in found
    return {path for path in found if "__pycache__" not in path.parts}


def run(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_package_is_imported_from_another_folder(python: Path, tmp_path: Path) -> None:
    code = "import ctrl_megatron, ctrl_megatron.sandbox.jail; print(ctrl_megatron.__file__)"
    done = run([python, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(python.parents[2])
    installed = Path(done.stdout.strip()).parent
    found = {file for file in files_of(installed) if file.parts[0] != "examples"}
    assert found == files_of(ROOT / "ctrl_megatron")


def test_a_folder_to_begin_in_has_what_the_readme_names(python: Path, tmp_path: Path) -> None:
    done = run([python.parent / "ctrl-init", "begin"], tmp_path)
    assert done.returncode == 0 and "cd begin" in done.stdout, done.stderr
    folder = tmp_path / "begin"
    for name in ("ctrl_smollm2_cpu.yaml", "study_smollm2/mutants.yaml", "problems/level0.jsonl"):
        assert (folder / "examples" / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    assert "short_answers" in (folder / "mine.py").read_text()
    again = run([python.parent / "ctrl-init", "begin"], tmp_path)
    assert again.returncode == 2 and "is there already" in again.stderr
    words = ["--problems", "examples/problems", "--solutions", "examples/solutions/smollm2.jsonl"]
    rows = run([python.parent / "ctrl-synthesize", *words, "--help"], folder)
    assert rows.returncode == 0
    lost = run([python.parent / "ctrl-demo"], tmp_path)
    assert lost.returncode == 2 and "ctrl-init DIR" in lost.stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "python", [pytest.param("editable", marks=pytest.mark.long), "plain"], indirect=True
)
def test_every_console_script_helps(python: Path, tmp_path: Path, script: str) -> None:
    done = run([python.parent / script, "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script} ")


@pytest.mark.parametrize("place", SCRIPTS.values(), ids=list(SCRIPTS))
def test_every_command_says_the_version(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = place.partition(":")
    with pytest.raises(SystemExit) as ended:
        getattr(import_module(module), function)(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ctrl_megatron {VERSION}\n"


def test_the_package_says_its_version_and_its_commands(python: Path, tmp_path: Path) -> None:
    done = run([python, "-m", "ctrl_megatron"], tmp_path)
    first, *lines, _ = done.stdout.splitlines()
    assert first == f"ctrl_megatron {VERSION}", done.stderr
    assert {line.split()[0] for line in lines} == set(SCRIPTS)
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize("name", ["train_rl", "train_sft"])
def test_a_wrong_key_is_refused_from_another_folder(
    python: Path, tmp_path: Path, name: str
) -> None:
    script = python.parent / f"ctrl-{name.replace('_', '-')}"
    for command in ([script], [python, "-m", f"ctrl_megatron.commands.{name}"]):
        done = run([*command, "--config", CONFIG, "trainer.sead=1"], tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{name}: ") and "'trainer.sead'" in done.stderr
        assert "Traceback" not in done.stderr
