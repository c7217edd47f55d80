"""The rooms of the package: who may import whom, and what stays out of where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
from package_imports import (
    FILES,
    NAME,
    PACKAGE,
    ROOT,
    Import,
    imports_of,
    library,
    module_graph,
    module_name,
    tree_of,
)

from ctrl_megatron.engine_kinds import EngineName

ORDER = (
    *(
        "errors",
        "types",
        "engine_kinds",
        "torch_features",
        "background",
        "keeping",
        "exposition",
        "config",
        "metrics",
        "prompts",
        "problems",
        "sandbox",
        "data",
        "rewards",
        "algorithms",
    ),
    *("parallel", "models", "rollout", "resharding", "memory", "checkpoint", "generation"),
    *("eval", "graph", "steps", "record", "run", "guide", "pipeline"),
    *("sft", "preparation", "commands", "__main__"),
)
"""A room imports itself and the rooms before it."""

TORCH_FREE = (*ORDER[: ORDER.index("algorithms")], "preparation", "commands")
HEAVY = ("torch", "tensordict", "transformers", "vllm", "sglang", "megatron", "ray")

OWNERS = {
    "torch": (
        *("algorithms/", "parallel/", "models/", "rollout/", "resharding/", "checkpoint/"),
        *("graph/", "steps/", "record/", "run/", "guide/", "sft/"),
        *("metrics/flops.py", "commands/launcher.py", "torch_features.py"),
        *("commands/check_env.py", "commands/check_gpu.py", "commands/prepare_smollm2.py"),
    ),
    "tensordict": ("graph/", "steps/", "record/", "run/", "guide/", "sft/"),
    "megatron": ("parallel/", "models/"),
    "triton": ("parallel/softmax_kernels.py",),
    "transformers": (
        *("data/tokens.py", "models/transformers_model.py"),
        *("rollout/hf_", "rollout/sglang_stand_ins.py"),
        *("commands/check_gpu.py", "commands/prepare_smollm2.py"),
    ),
    "vllm": ("rollout/vllm_",),
    "sglang": ("rollout/sglang_",),
    "ray": ("commands/ray_launcher.py",),
    "huggingface_hub": ("commands/hub.py",),
    "aiohttp": ("sandbox/", "rollout/", "generation/", "rewards/providers/e2b_router.py"),
    "matplotlib": ("metrics/report/figures.py",),
    "jinja2": ("data/tokens.py", "metrics/report/document.py"),
    "tensorboard": ("metrics/sinks.py",),
    "wandb": ("metrics/sinks.py",),
    "mlflow": ("metrics/sinks.py",),
    "trackio": ("metrics/sinks.py",),
    "swanlab": ("metrics/sinks.py",),
    "omegaconf": ("config/",),
    "pyarrow": (
        *("data/", "sft/examples.py", "preparation/records.py", "generation/search_nodes.py"),
    ),
}
"""Beginnings of paths inside the package below which a library may be imported."""


def room_of(module: str) -> str | None:
    """The room of a module of ours; None for foreign modules and the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == NAME and len(parts) > 1 else None


def inside(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def places(file: Path, found: Iterator[Import]) -> list[str]:
    return [f"{inside(file)}:{entry.line} imports {entry.module}" for entry in found]


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 50
    assert any(room_of(i.module) for file in FILES for i in imports_of(file))


def test_the_import_finder_sees_every_kind(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import a\n"
        "else:\n    import b\n"
        "try:\n    import c.d\nexcept ImportError:\n    pass\n"
        "class K:\n    import e\n    def f(self):\n        from g.h import i\n"
        f"from {NAME} import types\n"
        "from .x import y\n"
        "import importlib\n"
        "j = importlib.import_module('j.k')\n"
        "def l(): return __import__('l')\n"
    )
    found = {(i.module, i.at_load) for i in imports_of(file)}
    assert found >= {
        *(("a", False), ("b", True), ("c.d", True), ("e", True), ("g.h", False)),
        *((f"{NAME}.types", True), (".x", True), ("j.k", True), ("l", False)),
    }


def test_every_folder_and_module_is_a_room() -> None:
    rooms = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert rooms - {"__init__"} <= set(ORDER)


def test_imports_are_absolute() -> None:
    wrong = [
        place
        for file in FILES
        for place in places(file, (i for i in imports_of(file) if i.module.startswith(".")))
    ]
    assert not wrong


def test_a_room_imports_only_rooms_before_it() -> None:
    wrong = []
    for file in FILES:
        own = room_of(module_name(file))
        if own is None:
            continue
        later = set(ORDER[ORDER.index(own) + 1 :])
        wrong += places(file, (i for i in imports_of(file) if room_of(i.module) in later))
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count: what depends on each other is one
    module, or a third one is missing.
    """
    graph = module_graph()
    assert f"{NAME}.errors" in graph[f"{NAME}.rewards.items"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_what_a_run_reads_needs_no_sandbox() -> None:
    """Rows are read where no program can be run."""
    wrong = []
    for file in FILES:
        if room_of(module_name(file)) == "data":
            wrong += places(file, (i for i in imports_of(file) if room_of(i.module) == "sandbox"))
    assert not wrong


def test_the_package_itself_imports_nothing_heavy() -> None:
    assert not [i for i in imports_of(PACKAGE / "__init__.py") if room_of(i.module)]


def test_torch_free_rooms_import_nothing_heavy_when_loaded() -> None:
    wrong = []
    for file in FILES:
        if room_of(module_name(file)) in TORCH_FREE:
            heavy = (i for i in imports_of(file) if i.at_load and library(i.module) in HEAVY)
            wrong += places(file, heavy)
    assert not wrong


@pytest.mark.parametrize("room", TORCH_FREE)
def test_a_fresh_interpreter_loads_the_room_without_torch(room: str) -> None:
    """What really happens, through whatever the room's libraries import in turn."""
    modules = [name for name in map(module_name, FILES) if room_of(name) == room]
    assert modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []


def test_heavy_libraries_are_imported_only_by_their_owners() -> None:
    wrong = []
    for file in FILES:
        foreign = (
            i
            for i in imports_of(file)
            if (owners := OWNERS.get(library(i.module))) and not inside(file).startswith(owners)
        )
        wrong += places(file, foreign)
    assert not wrong


def test_every_owner_imports_its_library() -> None:
    imported = {(library(i.module), inside(file)) for file in FILES for i in imports_of(file)}
    unused = [
        (name, place)
        for name, owners in OWNERS.items()
        for place in owners
        if not any(found == name and file.startswith(place) for found, file in imported)
    ]
    assert unused == []


def test_only_the_record_of_an_engine_says_what_it_does() -> None:
    """No file decides by an engine's name but those that bear one, ``rollout/NAME_*.py``."""
    names = set(get_args(EngineName))
    own = tuple(f"rollout/{name}_" for name in names)
    decisions = (ast.Compare, ast.match_case)
    wrong = [
        f"{inside(file)}:{part.lineno}"
        for file in FILES
        if not inside(file).startswith(own)
        for node in ast.walk(tree_of(file))
        if isinstance(node, decisions)
        for part in ast.walk(node.pattern if isinstance(node, ast.match_case) else node)
        if isinstance(part, ast.Constant) and part.value in names
    ]
    assert not wrong


def test_only_checks_refuse_a_configuration() -> None:
    """docs/architecture.md, the rule of checks."""
    refusing = ("config/", "run/", "sft/run.py", "commands/")
    wrong = [
        f"{inside(file)}:{raised.lineno} {function.name}"
        for file in FILES
        if not inside(file).startswith(refusing)
        for function in ast.walk(tree_of(file))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        and ": Config" in ast.unparse(function.args)
        and not (function.returns and ast.unparse(function.returns) == "TaskGraph")
        for raised in ast.walk(function)
        if isinstance(raised, ast.Raise) and raised.exc and "UserError" in ast.unparse(raised.exc)
    ]
    assert not wrong


def test_engines_are_loaded_only_when_they_are_used() -> None:
    """Only an engine's own files import it, and they are imported when that engine is used."""
    engines = {"vllm", "sglang", "ray"}
    adapters = {
        module_name(file)
        for file in FILES
        if any(i.at_load and library(i.module) in engines for i in imports_of(file))
    }
    assert all(room_of(adapter) == "rollout" for adapter in adapters)
    wrong = []
    for file in FILES:
        if module_name(file) not in adapters:
            loaded = (i for i in imports_of(file) if i.at_load and i.module in adapters)
            wrong += places(file, loaded)
    assert not wrong
