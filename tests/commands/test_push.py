"""``ctrl-convert-megatron-to-hf --push``: the model card, and what the Hub is asked to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from rollout.rollout_models import save, tiny_llama
from stand_in_hub import serving, use

from ctrl_megatron.checkpoint.convert import hf_to_megatron
from ctrl_megatron.commands.convert_megatron_to_hf import main
from ctrl_megatron.commands.model_card import model_card
from ctrl_megatron.config import load_config, parse_yaml, to_yaml
from ctrl_megatron.errors import UserError

COMMIT, TOKEN = "0123456789" * 4, "hf_correcthorse"
BASE = f"Qwen/Tiny@{COMMIT}"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(0), tmp_path_factory.mktemp("model"))


def run_of(tmp_path: Path, weights: Path, *overrides: str, **metrics: Any) -> Path:
    """The checkpoint of step 2 of a run ``mine``."""
    run_dir = tmp_path / "runs/mine"
    run_dir.mkdir(parents=True)
    given = ("data.train_files=/home/me/data/rows.parquet", f"actor_rollout_ref.model.path={BASE}")
    config = load_config(None, [*given, "data.val_files=held.parquet", *overrides], "none")
    (run_dir / "config.yaml").write_text(to_yaml(config))
    logged = [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5, "time/step": 3.0, **metrics})]
    logged += [(2, {"val/revision_pass_rate": 0.375}), (3, {"reward/mean": 0.75})]
    lines = (json.dumps({"step": step, "metrics": values}) + "\n" for step, values in logged)
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    checkpoint = run_dir / "checkpoints/global_step_2"
    hf_to_megatron(weights, checkpoint)
    return checkpoint


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Hub's client, which takes the arguments of the real one."""
    api = create_autospec(HfApi, instance=True)
    made = type("RepoUrl", (str,), {"repo_id": "me/critic"})("https://huggingface.co/me/critic")
    api.create_repo.return_value = made
    api.repo_info.return_value = SimpleNamespace(private=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return api


def words(checkpoint: Path, out: Path, *more: str) -> list[str]:
    return ["--checkpoint", str(checkpoint), "--out", str(out), "--push", "me/critic", *more]


def test_a_card_says_what_the_run_says(tmp_path: Path, weights: Path) -> None:
    checkpoint = run_of(
        tmp_path,
        weights,
        *("reward.reward_funcs=[critic,mine:short]", "reward.reward_weights=[1,0.5]"),
        *("reward.provider=e2b", f"reward.provider_options={{api_key: {TOKEN}}}"),
    )
    card = model_card(checkpoint, model="policy", adapters=False)
    _, facts, text = card.split("---\n", 2)
    assert parse_yaml(facts, "card")[0] == {
        "library_name": "transformers",
        "tags": ["ctrl_megatron", "code-critique", "reinforcement-learning"],
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Tiny",
    }
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    told = {row[0]: row[1:] for row in rows}
    assert told["trained from"] == [f"`{BASE}`"]
    assert told["training rows"] == ["`rows.parquet`"]
    assert told["validation rows"] == ["`held.parquet`"]
    assert told["rewards"] == ["`critic, mine:short`"]
    assert told["their weights"] == ["`1.0, 0.5`"]
    assert told["`reward/mean`"][:2] == ["0.5", "2"]
    assert told["`val/revision_pass_rate`"][:2] == ["0.375", "2"]
    assert "`time/step`" not in told and "torch 2" in text and "step 2 of the run `mine`" in text
    assert TOKEN not in card and "/home/me" not in card and str(tmp_path) not in card


def test_a_card_of_fine_tuning_names_its_own_rows(tmp_path: Path, weights: Path) -> None:
    checkpoint = run_of(tmp_path, weights, "sft.train_files=sft.parquet", **{"sft/loss": 1.25})
    card = model_card(checkpoint, model="policy", adapters=True)
    assert "| training rows | `sft.parquet` |" in card and "| rewards |" not in card
    assert "library_name: peft" in card and "| `sft/loss` | 1.25 | 2 |" in card
    assert "- supervised-fine-tuning" in card


@pytest.mark.parametrize(
    ("more", "private"), [((), None), (("--private",), True)], ids=["public", "private"]
)
def test_an_export_is_uploaded_with_its_card(
    tmp_path: Path,
    weights: Path,
    hub: Any,
    capsys: pytest.CaptureFixture[str],
    more: Sequence[str],
    private: bool | None,
) -> None:
    checkpoint, out = run_of(tmp_path, weights), tmp_path / "out"
    assert main(words(checkpoint, out, *more)) == 0
    hub.create_repo.assert_called_once_with("me/critic", private=private, exist_ok=True)
    folder = hub.upload_folder.call_args.kwargs
    assert folder["repo_id"] == "me/critic" and folder["folder_path"] == out
    assert (out / "model.safetensors").is_file() and not (out / "README.md").exists()
    # Parts of an earlier upload would be read in place of these.
    assert "*.safetensors.index.json" in folder["delete_patterns"]
    file = hub.upload_file.call_args.kwargs
    assert file["path_in_repo"] == "README.md" and file["repo_id"] == "me/critic"
    card = model_card(checkpoint, model="policy", adapters=False)
    assert file["path_or_fileobj"] == card.encode()
    said = capsys.readouterr()
    assert said.out.endswith("https://huggingface.co/me/critic\n")
    written = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert TOKEN not in f"{said}{hub.mock_calls}" and TOKEN.encode() not in written


def test_the_hub_gets_the_files_and_keeps_none_of_an_earlier_model(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = run_of(tmp_path, weights), tmp_path / "out"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        hub.uploaded["me/critic"] = {"model-00001-of-00002.safetensors": b"", "LICENSE": b"mine"}
        hub.private["me/critic"] = True
        assert main(words(checkpoint, out, "--private")) == 0, hub.asked[-1]
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    card = model_card(checkpoint, model="policy", adapters=False).encode()
    assert hub.uploaded["me/critic"] == {**files, "README.md": card, "LICENSE": b"mine"}
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_a_private_model_is_not_uploaded_to_a_public_repository(
    tmp_path: Path, weights: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repo_info.return_value = SimpleNamespace(private=False)
    assert main(words(run_of(tmp_path, weights), tmp_path / "out", "--private")) == 2
    assert "--private: https://huggingface.co/me/critic is there and" in capsys.readouterr().err
    assert not hub.upload_folder.called and not hub.upload_file.called


def test_what_the_hub_refuses_leaves_the_export(
    tmp_path: Path, weights: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.create_repo.side_effect = OSError("403 Forbidden\nmore")
    assert main(words(run_of(tmp_path, weights), tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert "--push: " in said and "403 Forbidden; try `hf upload me/critic" in said
    assert (tmp_path / "out/model.safetensors").is_file()


def test_what_cannot_be_pushed_is_refused_before_the_export(
    tmp_path: Path,
    weights: Path,
    hub: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint, out = run_of(tmp_path, weights), tmp_path / "out"
    elsewhere = tmp_path / "elsewhere/global_step_2"
    hf_to_megatron(weights, elsewhere)
    with pytest.raises(UserError, match="no global_step_N of a run with config"):
        model_card(elsewhere.parent, model="policy", adapters=False)
    plain = ["--checkpoint", str(checkpoint), "--out", str(out)]
    wrong = {
        "--private is for --push": [*plain, "--private"],
        "write OWNER/NAME": [*plain, "--push", "critic"],
        "none of metrics.jsonl": words(elsewhere, out),
    }
    for said, arguments in wrong.items():
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(words(checkpoint, out)) == 2
    assert "hf auth login" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(words(checkpoint, out)) == 2
    assert "unset it" in capsys.readouterr().err
    assert not out.exists() and not hub.mock_calls
