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
from ctrl_megatron.config.foreign import ABSENT, RENAMED
from ctrl_megatron.config.keys import Key

TARGET = ROOT / "docs/configuration.md"
_INTRODUCTION = """# Configuration

Written by `python tools/write_config_docs.py` from `ctrl_megatron/config/`; do not edit by hand.

A run is told everything by a YAML file and by `key=value` arguments after it, which win:

```bash
torchrun --nproc-per-node 2 tools/train_rl.py --config examples/ctrl_smollm2_cpu.yaml \\
  trainer.total_training_steps=2
```

- Keys that are not given keep the default of the tables below. Every key that a run reads stands
  with its value in `runs/NAME/config.yaml`, from which the run can be started again.
- An unknown key, a value of the wrong type or keys that do not fit together stop the run before a
  model is loaded, with one line per problem: the key, where it was written, and the remedy.
- So does a key that somebody wrote and that nothing reads, also where it has its default: an option
  of another estimator or loss, the coefficient of a KL that is off, a key of `critic` without a
  value model. The tables say with which setting of another key a key is read. Three things are no
  mistake: a key of the file that an argument has switched off, a file with the keys of both
  trainings, and `null`.
- What estimators, losses and pipelines of your own read is not known, so what only they could read
  is accepted: options of any loss with a loss of your own, revisions with a pipeline of your own.
  A key with a switch needs its switch turned on there, too.
- YAML is read by the rules of YAML 1.2: `1e-6` is a number, `no` is a text. A key for a boolean
  takes `true` and `false`, and `yes`, `no`, `on` and `off` for them; one for a number its text.
  The value of an argument is YAML too: `trainer.logger='[console, jsonl]'`.
- A value may refer to another one as `${group.key}`.
- `tools/train_rl.py` needs `actor_rollout_ref.model.path` and `data.train_files`;
  `tools/train_sft.py` needs `actor_rollout_ref.model.path` and `sft.train_files`.
- None, True and False in the tables are written `null`, `true` and `false`.
- `trainer.nnodes` times `trainer.n_gpus_per_node` must be the number of started processes.

Two environment variables belong to the package; another name that begins with `CTRL_` is an error.
`CTRL_LOG_LEVEL` (`DEBUG`, `INFO`, `WARNING` or `ERROR`; `WARNING` by default) says which messages
of Python's logging the trainer processes print, Megatron-Core's among them. `CTRL_MASTER_PORT` (or
`MASTER_PORT`) sets the port of the rendezvous where `srun` starts the ranks without torchrun;
otherwise it follows from the job's number. A code provider (`reward.provider`) takes its key or
address from the variable that its users know: `E2B_API_KEY`, `MORPH_API_KEY`, `PISTON_ENDPOINT`,
`PISTON_API_KEY`, `SANDBOX_FUSION_ENDPOINT`.
"""
_FOREIGN = """## Keys of other trainers

Keys that users of CTRL, siiRL, verl or DiffuCoder know. Each is refused with the name it has here,
or with what holds instead.

| key | here |
|---|---|
"""


def field_texts(cls: type) -> dict[str, str]:
    """The string that follows each field in the source of a dataclass, on one line."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)):
            continue
        if isinstance(field.target, ast.Name) and isinstance(after.value, ast.Constant):
            texts[field.target.id] = " ".join(str(after.value.value).split()).replace("``", "`")
    return texts


def type_words(hint: Any) -> str:
    """A type as somebody who writes YAML would call it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        return f"{type_words(inner)} or null"
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
    """A default as YAML would have it."""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def reading_words(key: Key) -> str:
    """Under which settings of other keys, and in which trainings, the key is read."""
    words = "".join(f" Read with `{c.text}`." for c in key.read)
    return words + (" SFT reads it too." if key.stage == "both" else "")


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """(dotted name, dataclass) of every group that has keys of its own, in the schema's order."""
    hints = typing.get_type_hints(cls)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    if len(groups) < len(dataclasses.fields(cls)):
        yield prefix, cls
    for name, hint in groups.items():
        yield from sections(typing.cast(type, hint), f"{prefix}.{name}" if prefix else name)


def section_table(prefix: str, cls: type) -> str:
    """One group's heading and table; ValueError for a key without a text."""
    texts, rows = field_texts(cls), []
    for name in texts | typing.get_type_hints(cls):
        key = KEYS.get(f"{prefix}.{name}")
        if key is None:
            continue
        if name not in texts:
            raise ValueError(f"{key.name} has no text below it in ctrl_megatron/config")
        allowed = "" if key.allowed is None else key.allowed.text
        meaning = texts[name] + reading_words(key)
        cells = (
            f"`{key.name}`",
            type_words(key.type),
            default_words(key.default),
            allowed,
            meaning,
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    purpose = " ".join((cls.__doc__ or "").split()).replace("``", "`")
    head = "| key | type | default | range | meaning |\n|---|---|---|---|---|"
    return "\n".join((f"## `{prefix}`\n\n{purpose}\n\n{head}", *rows)) + "\n"


def foreign_table() -> str:
    """Keys that users of other trainers know."""
    rows = [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    rows += [f"| `{old}` | none: {instead} |" for old, instead in ABSENT.items()]
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
