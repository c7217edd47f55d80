"""Every flag of every command with what no flag can be: a line that names it, exit code 2, and
nothing is loaded, started or written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from ctrl_megatron.config import flags
from ctrl_megatron.config.flags import (
    CommandParser,
    count_flag,
    existing_file,
    float_flag,
    integer_flag,
)
from ctrl_megatron.errors import UserError

COMMANDS = {
    "ctrl_megatron.commands.train_rl": "--config run.yaml",
    "ctrl_megatron.commands.train_sft": "--config run.yaml",
    "ctrl_megatron.commands.plan": "--config run.yaml",
    "ctrl_megatron.commands.check_env": "",
    "ctrl_megatron.commands.evaluate": "--config run.yaml a=model",
    "ctrl_megatron.commands.generate": "--problems here --out new --generator model",
    "ctrl_megatron.commands.serve_critic": "--critic model",
    "ctrl_megatron.commands.replay": "here --update",
    "ctrl_megatron.commands.report": "runs/mine",
    "ctrl_megatron.commands.convert_hf_to_megatron": "--hf model --out new",
    "ctrl_megatron.commands.convert_megatron_to_hf": "--checkpoint here --out new",
    "ctrl_megatron.commands.check_checkpoint": "here",
    "ctrl_megatron.sandbox.__main__": "",
    "ctrl_megatron.commands.prepare_data": "--format ctrl --input here --out new",
    "ctrl_megatron.commands.synthesize": "",
    "tools.make_mutants": "--out new",
    "ctrl_megatron.commands.prepare_mutants": "",
    "ctrl_megatron.commands.demo": "",
    "ctrl_megatron.commands.init": "new",
    "ctrl_megatron.commands.prepare_smollm2": "",
}
NO_NUMBERS = ("nan", "inf", "-inf", "1e400", "99999999999999999999", "two", "")
NO_PLACES = ("/dev/full", "/dev/null", "/proc/x", "/proc/x/y", "n" * 300)
NO_FILES = ("none/at/all", "/dev/full", "/dev/zero", "n" * 300)


class Parsed(BaseException):
    """The file that a command was about to read."""


def actions_of(module: str, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    found: list[argparse.Action] = []

    def read(self: CommandParser, *_: object, **__: object) -> None:
        found.extend(self._actions)
        raise Parsed

    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(CommandParser, name, read)
        with pytest.raises(Parsed):
            import_module(module).main(COMMANDS[module].split())
    return [action for action in found if action.option_strings and action.nargs != 0]


def is_number(action: argparse.Action) -> bool:
    made = getattr(action.type, "__qualname__", "").partition(".")[0]
    return action.type in (int, float) or made in ("integer_flag", "float_flag")


def wrong(actions: list[argparse.Action]) -> Iterator[tuple[str, str]]:
    for action in actions:
        flag = action.option_strings[-1]
        if is_number(action):
            yield from ((flag, value) for value in NO_NUMBERS)
        elif action.type is flags.output_path:
            yield from ((flag, value) for value in NO_PLACES)
        elif action.type in (flags.existing_path, flags.existing_file):
            yield from ((flag, value) for value in NO_FILES)


@pytest.mark.parametrize("module", COMMANDS)
def test_what_no_flag_can_be_is_named_in_a_line(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def starts(*_: object, **__: object) -> None:
        raise AssertionError("the mistake was not noticed")

    monkeypatch.setattr("ctrl_megatron.sandbox.__main__.serve_sandbox", starts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    tried = 0
    for flag, value in wrong(actions_of(module, monkeypatch)):
        words = COMMANDS[module].split()
        # The last one counts, and evaluate's further critics follow its flags.
        given = [flag, value, *words] if module.endswith("evaluate") else [*words, flag, value]
        assert import_module(module).main(given) == 2, given
        out, said = capsys.readouterr()
        assert out == "" and len(said.splitlines()) == 1 and flag in said, (given, said)
        tried += 1
    assert tried or module.endswith(("check_env", "check_checkpoint", "init")), "no flag was tried"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    ("type_", "text", "said"),
    [
        (count_flag(), "0", "--n=0 must be at least 1"),
        (count_flag(), "-1", "--n=-1 must be at least 1"),
        (count_flag(0), "3000000000", "--n=3000000000 must be at most 2147483647"),
        (integer_flag(), "1.5", "--n=1.5 is no whole number"),
        (int, "0x10", "--n=0x10 is no whole number"),
        (float, "nan", "--n=nan must be a finite number"),
        (float, "1,5", "--n=1,5 is no number"),
        (float_flag(0, 1), "1.01", "--n=1.01 must be at most 1"),
        (float_flag(0, below=1), "1", "--n=1.0 must be below 1"),
        (float_flag(above=0), "0", "--n=0.0 must be greater than 0"),
        (existing_file, ".", "--n=. is a directory; name a file"),
    ],
)
def test_a_bound_is_said_with_flag_and_value(type_: object, text: str, said: str) -> None:
    parser = CommandParser("?")
    parser.add_argument("--n", type=type_)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        parser.parse_args(["--n", text])
    assert str(caught.value) == said


def test_pipes_and_devices_are_no_files_to_write_and_a_new_name_leaves_no_trace(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for name in ("pipe", "file/below"):
        with pytest.raises(UserError):
            flags.require_writable(tmp_path / name)
    for name in ("file", "new", "new/below/it", "."):
        flags.require_writable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_every_command_is_tried() -> None:
    """Other tools are measurements and checks of the project itself."""
    folder = Path(__file__).parents[2] / "ctrl_megatron/commands"
    helpers = {
        "__init__",
        "check_gpu",  # a measurement
        "chat_flags",
        "hub",
        "model_card",
        "launcher",
        "ray_launcher",
        "start",
        "serve_sandbox",
    }
    names = {path.stem for path in folder.glob("*.py")} - helpers
    assert names <= {name.rpartition(".")[2] for name in COMMANDS}
