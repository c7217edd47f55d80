"""Every command of README, docs and the first comments of configurations works as it is printed:
its arguments are parsed, and the configuration that it names is loaded and checked. What is cheap
runs. The journeys run whole (``tests/integration/test_journeys.py``), as do README's commands and
those of the configurations (``tests/integration/test_shown_commands.py``), the rest where this file
says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from shown_commands import CONFIGS, ROOT, blocks

from ctrl_megatron.config import check_world_size, load_config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRAINING = {"train_rl": "rl", "train_sft": "sft"}
NOT_HERE = {
    "tools/check_gpu.py": "a GPU",
    "tools/check_env.py": "what it finds depends on the machine; tests/commands/test_check_env.py",
    "curl": "the service that the block before starts; tests/sandbox/test_sandbox_operations.py, "
    "tests/generation/test_critic_service.py",
    "docker": "Docker; tools/check/container.py",
    "hf": "a model hub",
    "tensorboard": "a browser; tests/integration/test_journeys.py looks for its files",
    "tools/demo_diffusion.py": "minutes; tests/tools/test_demo_diffusion.py",
    "examples/study_smollm2/study.py": "hours; tests/tools/test_study.py",
    "examples/journeys/mbpp_to_critic.sh": "MBPP's own file, and an hour",
}
"""Commands that these tests do not run, with what they need."""
SHELL = {"export", "mv", "ln", "mkdir", "source"}
CONFIG_OF = {
    "ctrl_7b": "examples/ctrl_7b.yaml",
    "ctrl_70b": "examples/ctrl_70b.yaml",
    "sft_70b": "examples/ctrl_70b.yaml",
}
JOURNEYS = {
    "own_problems": "docs/own_problems.md",
    "own_reward": "docs/own_reward.md",
    "own_pipeline": "docs/own_pipeline.md",
    "from_verl": "docs/coming_from.md",
    "one_node": "docs/one_node.md",
    "resume_elsewhere": "docs/checkpoints.md",
    "export_and_load": "docs/checkpoints.md",
}
SAY_WORDS = """
command_not_found_handle() { printf '%s\\0' ${CONFIG:+"CONFIG=$CONFIG"} "$@"; printf '\\n'; }
source() { :; }
PATH=/nowhere
"""


def words_of(block: str, folder: Path) -> list[list[str]]:
    """The commands of a block as the shell would start them."""
    plain = block.replace(".venv/bin/python", "python")
    done = subprocess.run(
        ["/bin/bash", "-uc", SAY_WORDS + plain], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line.split("\0")[:-1] for line in done.stdout.split("\n") if line]


def paragraphs(script: str) -> list[str]:
    """The parts of a journey that follow its header."""
    text = (ROOT / f"examples/journeys/{script}.sh").read_text()
    return text.partition("set -euo pipefail\n")[2].strip().split("\n\n")


def shown() -> Iterator[tuple[str, str]]:
    """(page or configuration, block) of every block that is no part of a journey."""
    parts = {part for script in JOURNEYS for part in paragraphs(script)}
    for page in (*PAGES, *CONFIGS):
        for block in blocks(page):
            if block not in parts:
                yield page.relative_to(ROOT).as_posix(), block


@pytest.mark.parametrize("script", JOURNEYS)
def test_the_page_of_a_journey_shows_its_script(script: str) -> None:
    """The page has every paragraph of the script, in order, and the script's path."""
    page = ROOT / JOURNEYS[script]
    found, wanted = blocks(page), paragraphs(script)
    assert [block for block in found if block in wanted] == wanted
    assert f"examples/journeys/{script}.sh" in page.read_text()


def test_every_journey_has_a_page() -> None:
    scripts = {f"examples/journeys/{p.name}" for p in (ROOT / "examples/journeys").glob("*.sh")}
    assert {f"examples/journeys/{script}.sh" for script in JOURNEYS} <= scripts
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [script for script in scripts if script not in texts] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a checkout in which nothing has been made yet, and nothing begins to work."""
    for name in ("examples", "tools", "slurm", "ctrl_megatron"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def starts(*_: object, **__: object) -> None:
        raise RuntimeError("the arguments are right")

    for place in (
        *(
            "ctrl_megatron.commands.synthesize.select_judgeable_problems",
            "ctrl_megatron.commands.prepare_data.write_text_atomically",
        ),
        *(
            "ctrl_megatron.commands.prepare_smollm2.convert_gguf_to_hf",
            "ctrl_megatron.sandbox.__main__.serve_sandbox",
        ),
    ):
        monkeypatch.setattr(place, starts)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "block"), list(shown()), ids=lambda v: re.sub(r"\W+", "-", v)[:70]
)
def test_a_command_can_be_given(
    page: str, block: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = words_of(block, folder)
    assert commands or block.startswith(("export", "source")), block
    for words in commands:
        check(words, capfd)


def check(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Fails unless the command is known and accepts what it is given."""
    place, tool = program(words)
    given = words[place + 1 :]
    if tool == "make":
        subprocess.run(["make", "-n", *given], cwd=ROOT, check=True, capture_output=True)
    elif tool in SHELL or tool in NOT_HERE or f"tools/{tool}.py" in NOT_HERE:
        return
    elif tool.startswith("slurm/"):
        assert (ROOT / tool).is_file(), words
        config = CONFIG_OF.get(Path(tool).stem)
        if config is not None:
            purpose = "sft" if "sft" in tool else "rl"
            file = words[0].removeprefix("CONFIG=") if "CONFIG=" in words[0] else config
            load_config(ROOT / file, given, purpose)
    elif tool in TRAINING:
        train(tool, words[:place], given)
    else:
        code, said = run(tool, given, capfd)
        assert code in (0, 2) and "--help shows what there is" not in said, said
        assert "unknown key" not in said and " is not read " not in said, said
        # Every other refusal is about a file that does not exist here.
        missing = ("not exist", "not found", "No such file", "is not a", "is no", "has none of")
        assert code == 0 or any(text in said for text in missing), said


def program(words: list[str]) -> tuple[int, str]:
    """(its place, the command or the tool that the words run)."""
    for place, word in enumerate(words):
        if re.fullmatch(r"ctrl-[a-z-]+", word):
            return place, word.removeprefix("ctrl-").replace("-", "_")
        if word in NOT_HERE or re.fullmatch(r"slurm/\w+\.sh", word):
            return place, word
        if re.fullmatch(r"tools/\w+\.py", word):
            return place, Path(word).stem
    assert words[0] in SHELL or words[0] in ("make", "curl"), f"unknown command {words}"
    return 0, words[0]


def train(tool: str, launcher: list[str], given: list[str]) -> None:
    """The configuration is loaded, checked and fits the number of ranks."""
    file = given[given.index("--config") + 1]
    every = [*launcher, *given]
    ranks = int(every[every.index("--nproc-per-node") + 1])
    path = ROOT / ("examples/ctrl_smollm2_cpu.yaml" if file == "FILE" else file)
    purpose = TRAINING[tool]
    config = load_config(path, [word for word in given if re.match(r"[\w.]+=", word)], purpose)  # type: ignore[arg-type]
    if "--launcher" in every:
        # Ray starts the ranks of all machines.
        ranks *= config.trainer.nnodes
    check_world_size(config, ranks, purpose)  # type: ignore[arg-type]


def run(tool: str, given: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, what was said) of a command in this process."""
    command = ROOT / f"ctrl_megatron/commands/{tool}.py"
    module = f"ctrl_megatron.commands.{tool}" if command.is_file() else f"tools.{tool}"
    try:
        code = import_module(module).main(given)
    except RuntimeError as error:
        assert str(error) == "the arguments are right"
        code = 0
    out, errors = capfd.readouterr()
    return code, out + errors
