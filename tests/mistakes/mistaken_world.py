"""Everything that the commands read, in small and right, for tests that spoil one thing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from safetensors.torch import save_file

from ctrl_megatron.checkpoint.convert import hf_to_megatron
from ctrl_megatron.data.rows import row_of_attempt, write_rows
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.sft.examples import SftExample, write_examples
from ctrl_megatron.types import Attempt, Problem

ROWS = 8
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"
PROBLEM = {
    "id": "seven",
    "statement": "Print seven.",
    "prompter_type": "code_contests",
    "tests": [json.dumps([{"input": {"stdin": ""}, "output": {"stdout": "7\n"}}])],
    "reference": "print(7)",
}


def make_world(folder: Path) -> Path:
    """``model``, ``train.parquet``, ``sft.parquet``, ``problems.jsonl``, ``solutions.jsonl``,
    ``checkpoint`` and ``run.yaml`` in ``folder``.
    """
    write_model(folder / "model")
    problem = Problem(
        id="seven",
        statement="Print seven.",
        prompter_type="code_contests",
        selected_uts=PROBLEM["tests"][0],
    )
    attempts = [
        Attempt(id=f"seven/{n}", problem=problem, solution="print(7)", pass_rate=1.0)
        for n in range(ROWS)
    ]
    write_rows(folder / "train.parquet", [row_of_attempt(attempt) for attempt in attempts])
    asked = ({"role": "user", "content": "?"},)
    examples = [SftExample(id=str(n), prompt=asked, response="yes") for n in range(ROWS)]
    write_examples(folder / "sft.parquet", examples)
    (folder / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    solution = {"id": "seven/0", "problem_id": "seven", "solution": "print(8)"}
    (folder / "solutions.jsonl").write_text(json.dumps(solution) + "\n")
    hf_to_megatron(folder / "model", folder / "checkpoint")
    (folder / "run.yaml").write_text(RUN)
    return folder


RUN = """
actor_rollout_ref:
  model: {path: model, dtype: float32}
  rollout: {name: hf, n: 2}
  actor: {ppo_mini_batch_size: 4}
data: {train_files: [train.parquet], train_batch_size: 4, max_prompt_length: 4000}
sft: {train_files: [sft.parquet], train_batch_size: 4}
trainer: {default_local_dir: runs, experiment_name: mine, total_training_steps: 1}
"""


def write_model(directory: Path, **changes: object) -> None:
    """A Hugging Face directory of zeros."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL | changes))
    shape = read_model_shape(directory)
    tensors = {name: torch.zeros(size) for name, size in hf_shapes(shape).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    write_tokenizer(directory)


def write_tokenizer(directory: Path, words: int = 60) -> None:
    """A tokenizer of whole words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "</s>", *(f"w{n}" for n in range(words - 2))]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def change_row(file: Path, number: int, column: str, value: object) -> None:
    """Give row ``number`` (from 1) another value; the column's type follows."""
    records = parquet.read_table(file).to_pylist()
    records[number - 1][column] = value
    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {}
    for name in names:
        values = [record.get(name) for record in records]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            columns[name] = pa.array([None if v is None else str(v) for v in values])
    parquet.write_table(pa.table(columns), file)


def keep_rows(file: Path, count: int) -> None:
    """Only the first rows."""
    parquet.write_table(parquet.read_table(file).slice(0, count), file)


def drop_column(file: Path, column: str) -> None:
    """All but one column."""
    parquet.write_table(parquet.read_table(file).drop_columns([column]), file)


def change_json(file: Path, **changes: object) -> None:
    """Other values in a JSON object; None takes a key away."""
    record = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


def cut(file: Path, keep: int = -16) -> None:
    """The file without its end."""
    file.write_bytes(file.read_bytes()[:keep])


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors in a model's file, by their last but one name; None takes them away."""
    from safetensors.torch import load_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    for part, value in changes.items():
        for name in [name for name in tensors if f".{part}." in name]:
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value.clone()
    save_file(tensors, file, metadata={"format": "pt"})
