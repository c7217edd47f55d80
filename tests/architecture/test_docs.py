"""README and docs name only what exists, and leave out no tool and no key."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from patience import PATIENCE
from preloaded import ForkedProgram
from test_rooms import ORDER

from ctrl_megatron.config import KEYS, Config, parse_override
from ctrl_megatron.config.foreign import FOREIGN, foreign_key_hint
from ctrl_megatron.sandbox import SandboxLimits

ROOT = Path(__file__).parents[2]
FIRST = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in FIRST), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
LEAVES = set(KEYS)
CONSOLE_SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
GROUPS = {key.rsplit(".", n)[0] for key in LEAVES for n in range(1, key.count(".") + 1)}
NAMES_OF_GROUPS = {f.name for f in fields(Config)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITTEN_BY_RUNS = ("runs/", "/", "http")
INSIDE_A_CHECKPOINT = {
    "agent1/",
    "policy/",
    "value/",
    "hf/",
    "hf_agent1/",
    "trainer_state.json",
    "config.json",
    *("optimizer.json", "policy/adapters.json", "adapter_config.json"),
}
INSIDE_A_DUMP = {
    *("dump.json", "config.yaml", "metrics.json", "texts_0000.jsonl", "replay/replay.json"),
}
INSIDE_A_PROFILE = {"step_2.json", "step_N.json", "step_2.rank_0.torch.json"}
ELSEWHERE = {"mine.py", ".jsonl", "checked_tests.jsonl"}
PATH = re.compile(r"[\w.\-/]+(\.(py|sh|md|toml|yaml|json|jsonl|txt)|/)")

LINKING = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")})

each_page = pytest.mark.parametrize("page", TEXTS)


def prose(page: str) -> str:
    return FENCE.sub("", TEXTS[page])


def quoted(page: str) -> list[str]:
    return [text.strip() for text in re.findall(r"`([^`\n]+)`", prose(page))]


def blocks(page: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(TEXTS[page]) if kind == language]


def commands(page: str) -> Iterator[list[str]]:
    """Shell commands of the page, in blocks and between backticks, as words."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line)
    for text in quoted(page):
        if re.match(r"(make|(\.venv/bin/)?python|pytest|torchrun|sbatch|ctrl-[a-z-]+) \S", text):
            yield shlex.split(text)


def is_key(text: str) -> bool:
    return text in LEAVES or text in GROUPS


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_page
def test_every_path_exists(page: str) -> None:
    named = [t for t in quoted(page) if PATH.fullmatch(t) and not t.startswith(WRITTEN_BY_RUNS)]
    written = INSIDE_A_CHECKPOINT | INSIDE_A_DUMP | INSIDE_A_PROFILE | ELSEWHERE
    missing = [t for t in named if t not in written and not (ROOT / t).exists()]
    assert missing == []


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub names the headings of ``page``: small letters, digits, hyphens and underscores of
    the text, a hyphen for each blank, and a number where an earlier heading has the same name.
    """
    counted: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{counted[name]}" if counted[name] else name)
        counted[name] += 1
    return names


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        led = page.parent / path if path else page
        if not target.startswith("http"):
            there = not path.startswith("/") and led.exists()
            if not there or (anchor and anchor not in anchors(led)):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# 1: a `b_c`, [d](e) -f\n## Same\n```\n# No\n```\n## Same\n"
    )
    right = ["#top", "other.md", "other.md#1-a-b_c-d--f", "other.md#same-1", "https://x.org/#no"]
    wrong = ["#no", "other.md#no", "other.md#same-2", "absent.md", f"{tmp_path}/other.md"]
    page = tmp_path / "page.md"
    page.write_text("# Top\n" + "".join(f"[text]({target})\n" for target in right + wrong))
    assert broken_links(page) == wrong


@each_page
def test_lists_are_lists_in_the_site_too(page: str) -> None:
    """Python-Markdown wants four blanks before what is in an item, where GitHub takes two, and an
    empty line between a paragraph and the next item.
    """
    nested = r"(?:^|\n) {1,3}(?:[-*] |\d+\. )|\n\n {1,3}\S"
    joined = r"\n\n {4}[^\s-].*(?:\n {4}.*)*\n(?:- |\d+\. )"
    assert re.findall(f"{nested}|{joined}", prose(page)) == []


def test_every_page_that_the_code_names_exists() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("ctrl_megatron", "tools", "slurm", "container", "examples")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh", ".yaml", ".def") or path.name == "Dockerfile"
    ]
    named = {
        page for text in sources for page in re.findall(r"docs/(?:experiments/)?[a-z_]+\.md", text)
    }
    assert len(named) > 5
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


@each_page
def test_every_configuration_key_exists(page: str) -> None:
    wrong = []
    for text in quoted(page):
        key, _, value = text.partition("=")
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.split(".")[0] in NAMES_OF_GROUPS:
            known = key in LEAVES if value else is_key(key)
            if page in ("docs/configuration.md", "docs/coming_from.md"):
                known = known or bool(foreign_key_hint(key))
            wrong += [] if known else [text]
    assert wrong == []


@each_page
def test_every_dotted_python_name_exists(page: str) -> None:
    for text in re.findall(r"ctrl_megatron(?:\.\w+)+(?::\w+)?", TEXTS[page]):
        module, _, name = text.partition(":")
        assert importlib.util.find_spec(module) is not None, text
        assert not name or hasattr(importlib.import_module(module), name), text


def said(*args: str) -> str:
    """The output of ``python ARGS``, run as a fork of a process that has imported torch already."""
    with tempfile.NamedTemporaryFile("r") as log:
        code = ForkedProgram([*args], Path(log.name), below=()).wait(timeout=PATIENCE)
        text = log.read()
    assert code == 0, text
    return text


@cache
def help_of(script: str) -> str:
    """The output of ``--help`` of a Python file; empty for a shell script."""
    if not script.endswith(".py"):
        return ""
    if script.startswith("ctrl_megatron/"):
        return said("-m", script.removesuffix(".py").replace("/", "."), "--help")
    return said(script, "--help")


@each_page
def test_every_command_can_be_given(page: str) -> None:
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = " ".join(rules).split()
    for words in commands(page):
        if words[0] == "make":
            assert next(w for w in words[1:] if "=" not in w) in targets, words
        for place, word in enumerate(words):
            if re.fullmatch(r"ctrl-[a-z-]+", word):
                script = CONSOLE_SCRIPTS[word].partition(":")[0].replace(".", "/") + ".py"
            elif re.fullmatch(r"(tools|slurm|tests)/\S+\.(py|sh)", word):
                script = word
            else:
                continue
            assert (ROOT / script).is_file(), words
            given = words[place + 1 :]
            flags = [w for w in given if w.startswith("--")]
            assert not flags or set(flags) <= set(re.findall(r"--[\w-]+", help_of(script))), words
            for argument in given:
                if re.fullmatch(r"[a-z_]+\.[a-z_.]+=\S+", argument):
                    assert parse_override(argument)[0] in LEAVES, words
                if argument.endswith(".yaml"):
                    assert (ROOT / argument).is_file(), words


@each_page
def test_no_two_trainings_of_a_block_share_a_run_directory(page: str) -> None:
    for block in blocks(page, "bash"):
        given = re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE)
        for name, value in given:
            block = block.replace(f"${name}", value)
        lines = block.replace("\\\n", " ").splitlines()
        trainings = [
            line for line in lines if re.match(r"(ctrl-train|torchrun .*tools/train)", line)
        ]
        named = [
            re.findall(r"--config \S+|trainer\.(?:default_local_dir|experiment_name)=\S+", line)
            for line in trainings
        ]
        assert len({" ".join(names) for names in named}) == len(trainings), trainings


def test_every_page_is_linked_from_its_index() -> None:
    for folder, index in (("docs", "index.md"), ("docs/experiments", "README.md")):
        linked = set(re.findall(r"\]\(([\w/]+\.md)\)", TEXTS[f"{folder}/{index}"]))
        pages = {page.name for page in (ROOT / folder).glob("*.md")} - {index}
        assert pages - linked == set()


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_examples_import_what_a_room_lists() -> None:
    """Everything else may move (docs/api.md)."""
    examples = [example for page in TEXTS for example in blocks(page, "python")]
    files = sorted((ROOT / "examples").rglob("*.py"))
    # The study is a tool of this repository.
    examples += [path.read_text() for path in files if path.parent.name != "study_smollm2"]
    hidden = [
        f"{node.module}: {alias.name}"
        for node in (node for text in examples for node in ast.walk(ast.parse(text)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ctrl_megatron")
        for alias in node.names
        if alias.name not in getattr(importlib.import_module(node.module or ""), "__all__", ())
    ]
    assert hidden == []


@each_page
def test_every_python_example_runs(page: str, tmp_path: Path) -> None:
    examples = blocks(page, "python")
    if examples:
        # A process of its own: the examples register names.
        file = tmp_path / "examples.py"
        file.write_text("\n".join(examples))
        said(str(file))


def test_every_tool_is_described() -> None:
    everything = "\n".join([*TEXTS.values(), (ROOT / "Makefile").read_text()])
    names = [path.stem for path in sorted((ROOT / "tools").glob("*.py"))]
    commands = [(f"tools/{name}.py", f"ctrl-{name.replace('_', '-')}") for name in names]
    assert [pair for pair in commands if not any(word in everything for word in pair)] == []


def test_the_table_of_rooms_has_the_order_of_imports() -> None:
    table = TEXTS["docs/architecture.md"]
    rooms = re.findall(r"^\| `ctrl_megatron/(\w+)(?:/|\.py)` \|", table, re.MULTILINE)
    assert tuple(rooms) == ORDER
    package = ROOT / "ctrl_megatron"
    folders = {p.parent.name for p in package.glob("*/__init__.py")}
    assert folders | {p.stem for p in package.glob("*.py")} - {"__init__"} == set(rooms)


def test_the_configuration_page_is_what_the_tool_writes() -> None:
    written = load_tool("write_config_docs").render()
    assert TEXTS["docs/configuration.md"] == written, "run python tools/write_config_docs.py"
    described = set()
    for section in written.split("\n## ")[1:]:
        heading, _, table = section.partition("\n")
        group = f"{heading.strip('`')}." if heading.startswith("`") else ""
        described |= {
            group + name for name in re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
        }
    assert described == LEAVES | set(FOREIGN)


def test_the_page_of_metrics_is_what_the_tool_writes() -> None:
    written = load_tool("write_metric_docs").render()
    assert TEXTS["docs/metrics.md"] == written, "run python tools/write_metric_docs.py"


def test_the_page_of_public_names_is_what_the_tool_writes() -> None:
    tool = load_tool("write_api_docs")
    written = tool.render()
    assert TEXTS["docs/api.md"] == written, "run python tools/write_api_docs.py"
    assert [line for line in written.splitlines() if line.endswith("|  |")] == []
    assert written.count("\n## ") == len(tool.rooms()) > 8


def test_the_page_of_own_pipelines_names_every_member_of_the_worker() -> None:
    from ctrl_megatron.steps.worker import DAGWorker

    members = {name for name in dir(DAGWorker) if not name.startswith("_")}
    shown = set(re.findall(r"\w+", " ".join(quoted("docs/own_pipeline.md"))))
    assert members - shown == set()


def test_the_sandbox_page_gives_every_limit_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", TEXTS["docs/sandbox.md"], re.MULTILINE)
    limits = SandboxLimits()
    assert rows == [(f.name, str(getattr(limits, f.name))) for f in fields(limits)]


def test_the_built_in_graph_is_the_one_described() -> None:
    from ctrl_megatron.config import load_config
    from ctrl_megatron.graph.picture import graph_tree_lines
    from ctrl_megatron.pipeline import ctrl_pipeline

    graph = ctrl_pipeline(load_config(None, [], "none"))
    rows = re.findall(
        r"^\| `(\w+)` \| (rollout|train|host) \| ([^|]*) \|",
        TEXTS["docs/architecture.md"].replace("| |", "|  |"),
        re.MULTILINE,
    )
    described = [(name, place, re.findall(r"\w+", after)) for name, place, after in rows]
    nodes = [graph.get_node(name) for name in graph.get_topological_sort()]
    found = [(name, place == "host", after) for name, place, after in described]
    assert found == [(n.node_id, n.is_async, n.dependencies) for n in nodes]
    assert "\n".join(graph_tree_lines(graph)) in TEXTS["docs/architecture.md"]
