"""Ids of models on the Hugging Face Hub in place of directories, asked of a server on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout.rollout_models import save, tiny_llama
from stand_in_hub import Hub, serving, use

from ctrl_megatron.commands import convert_hf_to_megatron, start
from ctrl_megatron.commands.chat_flags import model_source
from ctrl_megatron.commands.hub import hub_directory, is_hub_id, pinned_models, with_hub_models
from ctrl_megatron.config import Config, load_config, parse_yaml, to_yaml
from ctrl_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
KEY, ID = "actor_rollout_ref.model.path", "Qwen/Tiny-0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with files that are of no use here."""
    directory = save(tiny_llama(0), tmp_path_factory.mktemp("model"))
    for name in ("tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        (directory / name).write_text("{}")
    for name in ("pytorch_model.bin", "modeling_tiny.py", "README.md", "onnx/config.json"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("never read")
    return directory


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as hub:
        hub.commits[ID] = [model]
        use(hub, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub


def configured(*overrides: str) -> Config:
    given = ("data.train_files=rows.parquet", f"{KEY}={ID}", "trainer.default_local_dir=runs")
    return load_config(None, [*given, *overrides])


def newer(hub: Hub, tmp_path: Path) -> None:
    """Give the model another commit."""
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/config.json").write_text("{}")
    hub.commits[ID].append(tmp_path / "newer")


def test_an_id_has_an_owner_and_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    ids = ("Qwen/Qwen2.5-0.5B-Instruct", "a/b@main", "01-ai/Yi@refs/pr/1", f"a/b@{'0' * 40}")
    assert all(map(is_hub_id, ids))
    paths = (
        "gpt2",
        "mine/sft",
        "runs/sft",
        "models/Qwen3",
        "./mine",
        "../a/b",
        "/a/b",
        "a/b/c",
        "~/a",
        "a/b@",
        "http://a/b",
    )
    assert not any(map(is_hub_id, paths))
    assert hub_directory("mine/sft", KEY) == "mine/sft"


def test_only_weights_and_texts_of_a_model_are_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    directory = Path(hub_directory(ID, KEY))
    assert directory.name == hub.sha(ID)
    texts = {"config.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"}
    found = {str(file.relative_to(directory)) for file in directory.rglob("*")}
    assert found - {"generation_config.json"} == {*texts, "model.safetensors"}
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Path(hub_directory(ID, KEY)) == directory and len(hub.asked) == asked


def test_a_run_keeps_the_commit_that_it_began_with(hub: Hub, tmp_path: Path) -> None:
    first = configured(
        "trainer.experiment_name=mine",
        "actor_rollout_ref.proxy.model.path=${actor_rollout_ref.model.path}",
    )
    config = with_hub_models(first, "rl")
    pinned = f"{ID}@{hub.sha(ID)}"
    assert Path(config.actor_rollout_ref.model.path, "model.safetensors").is_file()
    assert config.actor_rollout_ref.proxy.model.path == config.actor_rollout_ref.model.path
    keys = (KEY, "actor_rollout_ref.proxy.model.path")
    assert pinned_models(config) == [f"{key}={pinned}" for key in keys]
    text = to_yaml(config)
    family = parse_yaml(text, "")[0]["actor_rollout_ref"]
    assert family["model"]["path"] == family["proxy"]["model"]["path"] == pinned
    assert str(tmp_path / "cache") not in text

    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text(text)
    newer(hub, tmp_path)
    assert to_yaml(with_hub_models(first, "rl")) == text
    recorded = load_config(tmp_path / "runs/mine/config.yaml")
    assert to_yaml(with_hub_models(recorded, "rl")) == text
    for other in ("trainer.resume_mode=disable", "trainer.experiment_name=other"):
        anew = with_hub_models(configured("trainer.experiment_name=mine", other), "rl")
        assert pinned_models(anew) == [f"{KEY}={ID}@{hub.sha(ID)}"] != [f"{KEY}={pinned}"]


@pytest.mark.parametrize("revision", ["", "@v2"])
def test_what_is_not_on_the_hub_names_the_key_and_the_remedy(hub: Hub, revision: str) -> None:
    with pytest.raises(UserError) as caught:
        hub_directory(f"nobody/nothing{revision}", KEY)
    said = str(caught.value)
    assert said.startswith(f"{KEY}: nobody/nothing{revision} is no directory and looks like the id")
    chosen = " --revision v2" if revision else ""
    assert "404" in said and f"`hf download nobody/nothing{chosen} --local-dir DIR`" in said
    assert "HF_HUB_OFFLINE" not in said and "\n" not in said


def test_without_a_network_the_error_says_so(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^--critic: Qwen.*HF_HUB_OFFLINE is set.*; unset HF_HUB"):
        model_source("--critic", ID, "")
    assert model_source("--critic", ID, "http://127.0.0.1:1/v1").model == ID  # the server's name
    assert not hub.asked
    (tmp_path / "rows.parquet").touch()
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{train_files: rows.parquet}}\n{KEY}: {ID}\n")
    with pytest.raises(UserError, match=rf"^{KEY}: Qwen.*HF_HUB_OFFLINE is set"):
        start.load_checked_config(str(file), [], "rl")


def test_nothing_is_downloaded_for_a_run_that_lacks_its_rows(hub: Hub) -> None:
    file = Path("run.yaml")
    file.write_text(f"data: {{train_files: rows.parquet}}\n{KEY}: {ID}\n")
    with pytest.raises(UserError, match=r"^data\.train_files: "):
        start.load_checked_config(str(file), [], "rl")
    assert not hub.asked


def test_ranks_get_the_commit_from_their_launcher(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows.parquet").touch()
    Path("run.yaml").write_text(f"data: {{train_files: rows.parquet}}\n{KEY}: {ID}\n")
    started: list[list[str]] = []

    def start_ranks(name: str, ranks: int, words: list[str], restarts: object) -> int:
        started.append(words)
        return 0

    monkeypatch.setattr(start, "start_ranks", start_ranks)
    arguments = ["--config", "run.yaml", "--nproc-per-node", "1"]
    assert start.load_config_or_launch("train_rl", "rl", arguments, None, lambda config: None) == 0
    pinned = f"{ID}@{hub.sha(ID)}"
    dtype = "actor_rollout_ref.model.dtype=bfloat16"
    assert started == [["--config", "run.yaml", f"{KEY}={pinned}", dtype]]
    # Ranks that another launcher has started have to agree.
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"each of the 2 ranks .* name the commit, {pinned}"):
        with_hub_models(configured(), "rl")
    with_hub_models(configured(f"{KEY}={pinned}"), "rl")


def test_commands_take_ids(hub: Hub, tmp_path: Path) -> None:
    assert convert_hf_to_megatron.main(["--hf", ID, "--out", "megatron"]) == 0
    before = len(hub.asked)
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
    told = subprocess.run(
        [
            *(sys.executable, "-m", "ctrl_megatron.commands.plan"),
            *("--config", ROOT / "examples/ctrl_smollm2_cpu.yaml", f"{KEY}={ID}"),
        ],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    files = [path for path in hub.asked[before:] if "/resolve/" in path]
    assert files and all(path.endswith("/config.json") for path in files)
