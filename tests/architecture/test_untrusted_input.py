"""Where the code reads what could bring code along: pickles, tensors, YAML, model directories."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from package_imports import ROOT, tree_of

SOURCES = sorted(
    path
    for folder in ("ctrl_megatron", "tools", "examples")
    for path in (ROOT / folder).rglob("*.py")
)

UNPICKLING = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler"),
    *("_pickle.load", "_pickle.loads", "cloudpickle.load", "cloudpickle.loads"),
    *("marshal.load", "marshal.loads", "shelve.open", "dill.load", "dill.loads", "joblib.load"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
    *("numpy.load", "numpy.fromfile", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"),
}
CHECKPOINTS = ("torch.distributed.checkpoint", "megatron.core.dist_checkpointing")
LOADERS = ("load", "FileSystemReader", "async_load", "load_state_dict", "dcp_to_torch_save")

ALLOWED = {
    # Each with the reason why what it reads runs no code.
    "ctrl_megatron/sandbox/datasets/payload.py pickle._Unpickler": "knows plain data alone",
    "ctrl_megatron/checkpoint/tensor_metadata.py pickle._Unpickler": "knows torch's records alone",
    "ctrl_megatron/checkpoint/tensor_metadata.py "
    "torch.distributed.checkpoint.filesystem.FileSystemReader": "gets a table that is read already",
    "ctrl_megatron/checkpoint/sharded.py "
    "torch.distributed.checkpoint.state_dict_loader.load": "with that reader; tensors alone",
    "ctrl_megatron/parallel/signed_objects.py pickle.loads": "signed by another rank of the run",
    "ctrl_megatron/config/load.py yaml.load": "with a SafeLoader",
}


def names_in(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Every dotted name that is used, by the module where it comes from, and its place."""
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                origin[one.asname or top] = one.name if one.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            origin |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node)
            first, dot, rest = name.partition(".")
            yield origin.get(first, first) + dot + rest, node


def ways_in(tree: ast.Module) -> set[str]:
    """The names that read what could be a pickle."""
    found = {name for name, _ in names_in(tree)}
    readers = {
        name
        for name in found
        if name.startswith(CHECKPOINTS) and name.rpartition(".")[2] in LOADERS
    }
    return found & UNPICKLING | readers


def trusting(tree: ast.Module) -> list[int]:
    """The lines of calls that would run the code of a model's directory if somebody agrees."""
    return [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(call.func.value).rpartition(".")[2].startswith("Auto")
        and not any(
            k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in call.keywords
        )
    ]


def test_every_place_that_reads_a_pickle_is_known() -> None:
    found = {
        f"{path.relative_to(ROOT)} {name}" for path in SOURCES for name in ways_in(tree_of(path))
    }
    assert found == set(ALLOWED)


def test_no_model_directory_brings_code() -> None:
    found = {
        str(path.relative_to(ROOT)): lines for path in SOURCES if (lines := trusting(tree_of(path)))
    }
    assert found == {}
    told = [path for path in SOURCES if "trust_remote_code=True" in path.read_text()]
    assert told == []


def test_the_search_sees_every_spelling() -> None:
    text = """
import numpy as np, torch.distributed.checkpoint as dcp
from pickle import loads as read
from torch import load
from megatron.core import dist_checkpointing
from transformers import AutoProcessor
read(b""); load("x"); np.load("x"); dcp.load({}); dist_checkpointing.load({}, "x")
AutoProcessor.from_pretrained("x"); AutoProcessor.from_pretrained("x", trust_remote_code=False)
"""
    tree = ast.parse(text)
    assert ways_in(tree) == {
        *("pickle.loads", "torch.load", "numpy.load", "torch.distributed.checkpoint.load"),
        "megatron.core.dist_checkpointing.load",
    }
    assert trusting(tree) == [8]
