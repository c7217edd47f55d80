"""The files of the images, ``make container`` and the check of an image, without an engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
ENGINE = """#!/bin/sh
case "$*" in
  info) {info} ;;
  *"id -u") {first} ;;
  *seccomp=unconfined*ctrl-check-env | *SYS_ADMIN*ctrl-check-env) level=strict ;;
  *ctrl-check-env) level=standard ;;
  *python*) exit {step} ;;
esac
[ -z "$level" ] || echo "pass  sandbox    isolation $level, configured standard"
"""


def instructions(dockerfile: str) -> list[str]:
    """The instructions of an image, each on one line."""
    text = (ROOT / "container" / dockerfile).read_text().replace("\\\n", "")
    return re.findall(r"^[A-Z]+ .*", text, re.MULTILINE)


def test_an_image_gets_nothing_that_git_ignores() -> None:
    """Docker's patterns begin at the root of the checkout, git's anywhere."""
    ignored = (ROOT / ".gitignore").read_text().split()
    anywhere = ["**/" + line if line[0] != "/" else line[1:] for line in ignored]
    found = (ROOT / ".dockerignore").read_text().split()
    assert found == [".git", *(line.removesuffix("/") for line in anywhere)]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_a_changed_source_file_leaves_the_environment(dockerfile: str) -> None:
    lines = instructions(dockerfile)
    (made,) = (place for place, line in enumerate(lines) if "make_env.py --venv" in line)
    copied = [line.split()[1:-1] for line in lines[:made] if line.startswith("COPY")]
    (lock,) = re.findall(r"--lock (\S+)", lines[made])
    wanted = ["LICENSE", "pyproject.toml", "setup.py", lock, "tools/make_env.py"]
    assert [name for names in copied for name in names] == wanted
    assert all((ROOT / name).is_file() for name in wanted)
    later = lines[made + 1 :]
    assert later.index("ARG UID=1000") < later.index("COPY . .") < later.index("USER ctrl")
    # What tests/commands/test_installed.py does too.
    assert lines[made].replace("cuda.txt", "cpu.txt") in instructions("Dockerfile.cpu")


def made(*words: str, path: Path) -> subprocess.CompletedProcess[str]:
    """The end of ``make container`` with no program but those of ``path``."""
    environment = {**os.environ, "PATH": str(path)}
    make = shutil.which("make") or "make"
    command = [make, "container", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program called podman, to be written."""
    file = tmp_path / "podman"
    file.touch(mode=0o755)
    return file


def test_make_container_says_what_is_missing(tmp_path: Path) -> None:
    done = made(path=tmp_path)
    assert done.returncode != 0 and "found no podman, buildah or docker" in done.stderr


def test_make_container_passes_on_what_it_is_given(program: Path) -> None:
    program.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    done = made(path=program.parent)
    assert "build|-f|container/Dockerfile.cpu|-t|ctrl_megatron:cpu|--build-arg|PIP_FLAGS=|.|" in (
        done.stdout
    ), done.stderr
    words = ("IMAGE=mine", "BASE=other:1", "PIP_FLAGS=--index-url URL", "BUILD_FLAGS=-v a:b")
    done = made(*words, path=program.parent)
    given = "-t|mine|--build-arg|BASE=other:1|--build-arg|PIP_FLAGS=--index-url URL|-v|a:b|.|"
    assert given in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({}, 0, "pass  one step of GRPO"),
        ({"step": "1"}, 1, "FAIL  one step of GRPO"),
        ({"first": "echo 0"}, 1, "FAIL  user of the image: 0"),
        ({"info": "echo no daemon; exit 1"}, 3, "missing is a running Docker daemon"),
        ({"first": "echo setrlimit RLIMIT_NOFILE: EPERM; exit 126"}, 3, "CAP_SYS_RESOURCE"),
        ({"first": "echo odd; exit 125"}, 3, "that this tool does not know. podman: odd"),
    ],
)
def test_the_check_of_an_image_tells_a_fault_from_a_machine_that_cannot_run_it(
    program: Path, answers: dict[str, str], code: int, words: str
) -> None:
    right = {"info": "exit 0", "first": "echo 1000", "step": "0"}
    program.write_text(ENGINE.format(**right | answers))
    done = check(program.parent)
    assert done.returncode == code and words in done.stdout, done.stdout + done.stderr


def test_a_machine_without_an_engine_cannot_run_it(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 3 and "podman or docker is not installed" in done.stdout


def test_too_little_isolation_is_a_fault(program: Path) -> None:
    right = ENGINE.format(info="exit 0", first="echo 1000", step="0")
    program.write_text(right.replace("level=strict", "level=standard"))
    done = check(program.parent)
    assert done.returncode == 1 and done.stdout.count("isolation standard, expected strict") == 2


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """The end of the check of an image with no program but those of ``path``."""
    command = [sys.executable, "tools/check/container.py"]
    environment = {**os.environ, "PATH": str(path)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
