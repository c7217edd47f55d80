"""HF directories to checkpoints and back, outside of a run: the same bytes, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctrl_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
from ctrl_megatron.checkpoint.sharded import TensorParts, load_tensors
from ctrl_megatron.commands import convert_hf_to_megatron, convert_megatron_to_hf
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.shape import value_model_shape
from ctrl_megatron.resharding.plan import hf_specs, place_in_buckets

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}


def write_hf(
    folder: Path, file_bytes: int = 1 << 30, *, value: bool = False, **changes: int
) -> Path:
    """An HF directory of random weights in files of at most ``file_bytes``."""
    folder.mkdir()
    config: dict[str, object] = {**CONFIG, **changes}
    if value:
        config |= {"architectures": ["Qwen2ForTokenClassification"], "id2label": {"0": "value"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shape = read_model_shape(folder)
    if value:
        shape = value_model_shape(shape)
    places, file_of = place_in_buckets(hf_specs(shape, "bfloat16"), file_bytes), {}
    for number in {place.bucket for place in places}:
        specs = [place.spec for place in places if place.bucket == number]
        tensors = {s.name: torch.rand(s.shape, dtype=torch.bfloat16) for s in specs}
        save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


BESIDE = {
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
    "chat_template.json": "{}",
    "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ 1 }}"}]}',
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "tokenizer.model": "sentences",
    "spiece.model": "pieces",
    "vocab.txt": "a",
    "qwen.tiktoken": "YQ== 0",
    "tekken.json": "{}",
    "tokenization_own.py": "class Own: ...",
    "LICENSE": "Apache-2.0",
}
LEFT = ["pytorch_model.bin", "optimizer.pt", "README.md", ".gitattributes", "consolidated.00.pth"]
LEFT += ["adapter_config.json", "adapter_model.safetensors", "quantize_config.json"]


def test_everything_that_a_tokenizer_may_read_goes_there_and_back(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", value=False)
    (source / "additional_chat_templates").mkdir()
    for name in LEFT:
        (source / name).write_bytes(b"others")
    for name, text in BESIDE.items():
        (source / name).write_text(text)
    hf_to_megatron(source, tmp_path / "checkpoint")
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back")
    back = tmp_path / "back"
    assert {name: (back / name).read_text() for name in BESIDE} == BESIDE
    assert not any((back / name).exists() for name in LEFT)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("value", [False, True])
def test_there_and_back_changes_no_bit(tmp_path: Path, value: bool) -> None:
    source = write_hf(tmp_path / "hf", value=value)
    told: list[tuple[int, int]] = []
    hf_to_megatron(source, tmp_path / "checkpoint", progress=lambda *at: told.append(at))
    size = sum(tensor.nbytes for tensor in weights(source).values())
    assert told[-1] == (size, size) and told == sorted(told) and len(told) > 10
    folder = "value" if value else "policy"
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back", folder=folder, file_bytes=20_000)
    before, after = weights(source), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["dtype"] == "bfloat16" and (tmp_path / "back/tokenizer.json").is_file()


def test_the_commands_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_hf(tmp_path / "hf")
    assert convert_hf_to_megatron.main(["--hf", str(source), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "out/policy/.metadata").unlink()
    wrong = ["--checkpoint", str(tmp_path / "out"), "--out", str(tmp_path / "back")]
    assert convert_megatron_to_hf.main(wrong) == 2
    assert "policy/.metadata: is missing" in capsys.readouterr().err
    assert convert_megatron_to_hf.main([*wrong, "--model", "value"]) == 2
    assert "is not a checkpoint with a value model" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("optimizer.exp_avg.model.norm.weight", (32,), torch.float32, "it lacks optimizer.exp_avg"),
        ("model.norm.weight", (32,), torch.float32, r"\(32,\) torch.bfloat16, the run needs"),
        ("model.norm.weight", (48,), torch.bfloat16, r"the run needs \(48,\)"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, said: str
) -> None:
    hf_to_megatron(write_hf(tmp_path / "hf"), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=said):
        load_tensors({name: TensorParts(shape, dtype)}, tmp_path / "checkpoint/policy", None)


MEASURED = """
import sys
from pathlib import Path
from ctrl_megatron.checkpoint import sharded
from ctrl_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf

FILE, (source, checkpoint, back) = int(sys.argv[1]), map(Path, sys.argv[2:])
sharded._FILE_BYTES = FILE


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def peak(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    print(status("VmHWM") - before)


peak(lambda: hf_to_megatron(source, checkpoint))
peak(lambda: megatron_to_hf(checkpoint, back, file_bytes=FILE))
"""


@pytest.mark.long
def test_a_conversion_holds_at_most_two_files_in_memory(tmp_path: Path) -> None:
    file_bytes = 32 << 20
    sizes = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096}
    source = write_hf(tmp_path / "hf", file_bytes, **sizes, num_hidden_layers=12, value=False)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert size > 10 * file_bytes
    folders = [str(source), str(tmp_path / "checkpoint"), str(tmp_path / "back")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(file_bytes), *folders],
        # Freed tensors return their memory to the system, as large ones always do.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 2 and max(peaks) <= 2 * file_bytes, peaks
