"""Write docs/configuration.md from the configuration's dataclasses: ``python
tools/write_config_docs.py``; with ``--check`` only say whether the file is up to date.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.config import KEYS, Config
from ctrl_megatron.config.foreign import FOREIGN
from ctrl_megatron.config.keys import Key

TARGET = ROOT / "docs/configuration.md"
_INTRODUCTION = """# Configuration

Written by `python tools/write_config_docs.py` from `ctrl_megatron/config/`; do not edit by hand.

A run reads a YAML file, and `key=value` arguments after it, which take precedence:

```bash
torchrun --nproc-per-node 2 tools/train_rl.py --config examples/ctrl_smollm2_cpu.yaml \\
  trainer.total_training_steps=2
```

- The full name of a key is the heading of its table, a dot, and the name in the table:
  `trainer.total_training_steps`. Keys that are not set have the default of the table.
- `runs/NAME/config.yaml` contains every key that the run reads, with its value. The run can be
  started again from this file.
- An unknown key, a value of the wrong type, or keys that do not fit together stop the run before a
  model is loaded. The message has one line per problem, with the key, the place where it was
  written, and the remedy.
- A key that is set and that nothing reads is refused too, even if it is set to its default: an
  option of another estimator or loss, the coefficient of a KL term that is off, a key of `critic`
  without a value model. The column *read* refers to the settings, listed below the table, with
  which a key is read. Three cases are accepted: a key of the file that an argument has switched
  off, a file with keys of both trainings, and `null`.
- The trainer does not know which keys your own estimators, losses and pipelines read. It accepts
  the keys of any loss together with your own loss, and the keys of revisions together with your
  own pipeline. A key with a switch needs its switch turned on.
- YAML follows version 1.2: `1e-6` is a number, and `no` is text. A boolean accepts `true` and
  `false`, and also `yes`, `no`, `on` and `off`; a number accepts its text. The value of an
  argument is YAML too: `trainer.logger='[console, jsonl]'`.
- A value may refer to another one as `${group.key}`, and to a variable of the environment as
  `${oc.env:NAME}`; files of a run have that text, not the variable's value.
- A key that names a Hugging Face directory also takes the id of a model on the Hugging Face Hub,
  `owner/name` or `owner/name@revision`, unless there is a folder `owner` here (`models` and
  `runs` are always folders). The model is
  downloaded before the run starts, into huggingface_hub's cache; with `HF_HUB_OFFLINE=1` it has to
  be there. `runs/NAME/config.yaml` has the id with its commit, from which the run goes on.
  `--nproc-per-node` passes the commit to the ranks; with `torchrun` and `srun` you name it. Flags
  of commands that name a model take ids as well.
- No file, page or log of a run has a secret of its configuration, and neither have trackers such as
  Weights & Biases: `***` stands for every text in `reward.provider_options` and
  `actor_rollout_ref.proxy.api.extra_body`, for entries of any options whose name says so
  (`api_key`, `headers`), for what follows `Bearer` or `--api-key` in a text, and for name, password
  and query of any address. A file with `***` is
  refused until the value is given again; comments in it name the variable to set. A resume does not
  compare such values.
- `tools/train_rl.py` requires `actor_rollout_ref.model.path` and `data.train_files`;
  `tools/train_sft.py` requires `actor_rollout_ref.model.path` and `sft.train_files`.
- In YAML, None, True and False are written `null`, `true` and `false`.
- `trainer.nnodes` times `trainer.n_gpus_per_node` must equal the number of started processes.
- RL training reads every table but `sft`. Fine-tuning (SFT) reads `sft` and the keys with the mark
  *SFT*.

The package reads two environment variables of its own; another name that begins with `CTRL_` is an
error. `CTRL_LOG_LEVEL` (`DEBUG`, `INFO`, `WARNING` or `ERROR`; `WARNING` by default) is the level
of Python's logging in the trainer processes, including Megatron-Core's. `CTRL_MASTER_PORT` (or
`MASTER_PORT`) is the port of the rendezvous where `srun` starts the ranks without torchrun; by
default it is computed from the job's number. A code provider (`reward.provider`) reads its key or
address from its usual variable: `E2B_API_KEY`, `MORPH_API_KEY`, `PISTON_ENDPOINT`,
`PISTON_API_KEY`, `SANDBOX_FUSION_ENDPOINT`.
"""
_SFT, _BY_SFT = "SFT", "by fine-tuning too"
_FOREIGN = """## Keys of other trainers

Keys of CTRL, siiRL, verl and DiffuCoder that do not exist here. Each is refused with its name
here, or with an explanation, unless [`config_format`](coming_from.md#their-files-as-they-are) names
the trainer whose keys they are; the last column says what becomes of a key then.

| key | here | with `config_format` |
|---|---|---|
"""


def field_texts(cls: type) -> dict[str, str]:
    """The string that follows each field in the source of a dataclass or its base, on one line."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    texts = field_texts(base) if dataclasses.is_dataclass(base := cls.__bases__[0]) else {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)):
            continue
        if isinstance(field.target, ast.Name) and isinstance(after.value, ast.Constant):
            texts[field.target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return texts


def type_words(hint: Any) -> str:
    """The name of a type for a reader who writes YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else type_words(a) for a in arguments)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {type_words(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {type_words(arguments[0])}s"
    if origin is dict:
        return "mapping"
    return {bool: "boolean", int: "integer", float: "number", str: "text"}[hint]


def default_words(value: Any) -> str:
    """A default in YAML."""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """(dotted name, dataclass) of every group that has keys of its own, in the schema's order."""
    hints = typing.get_type_hints(cls)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    if len(groups) < len(dataclasses.fields(cls)):
        yield prefix, cls
    for name, hint in groups.items():
        yield from sections(typing.cast(type, hint), f"{prefix}.{name}" if prefix else name)


def section_table(prefix: str, cls: type) -> str:
    """One group's heading, table and notes; ValueError for a key without a text."""
    texts, inside = field_texts(cls), f"{prefix}." if prefix else ""
    names = [n for n in typing.get_type_hints(cls) if inside + n in KEYS]
    if missing := [name for name in names if name not in texts]:
        raise ValueError(f"{inside}{missing[0]} has no text below it in ctrl_megatron/config")
    keys = [KEYS[inside + name] for name in names]
    shared, marks = _reading(keys)
    rows = []
    for name, key in zip(names, keys, strict=True):
        own = [mark for text, mark in marks.items() if text in _settings(key)]
        cells = (
            f"`{name}`",
            type_words(key.type),
            default_words(key.default),
            "" if key.allowed is None else key.allowed.text,
            ", ".join(own),
            texts[name],
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    purpose = " ".join((cls.__doc__ or "").split()).replace("``", "`") if prefix else ""
    title = f"`{prefix}`" if prefix else "Keys without a group"
    above = [purpose, *(f"Every key of this table is read {text}." for text in shared)]
    legend = [f"{mark} {text}" for text, mark in marks.items() if mark != _SFT]
    head = "| key | type | default | range | read | meaning |\n|---|---|---|---|---|---|"
    said = " ".join(filter(None, above))
    table = "\n".join(
        (f"## {title}\n\n{said}\n\n{head}" if said else f"## {title}\n\n{head}", *rows)
    )
    return table + (f"\n\nRead: {'; '.join(legend)}.\n" if legend else "\n")


def _settings(key: Key) -> list[str]:
    """The settings of other keys, and the training, with which the key is read."""
    with_settings = [f"with `{condition.text}`" for condition in key.read]
    return [*with_settings, *([_BY_SFT] if key.stage == "both" else [])]


def _reading(keys: list[Key]) -> tuple[list[str], dict[str, str]]:
    """The settings that all keys of a table have in common, and a mark for each of the others."""
    every = list(dict.fromkeys(text for key in keys for text in _settings(key)))
    shared = [text for text in every if all(text in _settings(key) for key in keys)]
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    others = (text for text in every if text not in shared)
    return shared, {text: _SFT if text == _BY_SFT else next(letters) for text in others}


def foreign_table() -> str:
    """The table of keys of other trainers."""
    rows = [
        f"| `{name}` | {f'`{key.here}`' if key.here else f'none: {key.reason}'} | {key.fate} |"
        for name, key in FOREIGN.items()
    ]
    return _FOREIGN + "\n".join(rows) + "\n"


def render() -> str:
    """The whole page."""
    tables = [section_table(prefix, cls) for prefix, cls in sections(Config)]
    return "\n".join((_INTRODUCTION, *tables, foreign_table()))


def main() -> int:
    """Write the page, or compare; 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        TARGET.write_text(render(), encoding="utf-8")
        return 0
    if TARGET.read_text(encoding="utf-8") == render():
        return 0
    print(f"{TARGET.name} is out of date; run python tools/write_config_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
