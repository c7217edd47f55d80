"""``model.dtype=auto`` is measured once and kept by the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctrl_megatron.commands.start import load_checked_config
from ctrl_megatron.config import Config, load_config, to_yaml
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics import flops, measure_cpu_peak_flops
from ctrl_megatron.models.hf_config import typical_linear_sizes
from ctrl_megatron.record.recorder import write_config_keeping_earlier
from ctrl_megatron.run.measured_dtype import require_one_dtype, resolve_auto_dtype

KEY = "actor_rollout_ref.model.dtype"
SLOW, FAST = (2e9, 9e9, 14e9), (70e9, 80e9, 50e9)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    overrides = [f"{KEY}=auto", "actor_rollout_ref.model.path=model"]
    return load_config(None, overrides, "none")


def let_be_faster(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    def measured(dtype: str, *, sizes: tuple[int, int], **_: float) -> tuple[float, float, float]:
        assert sizes == (64, 96)
        return FAST if dtype == fast else SLOW

    monkeypatch.setattr(flops, "measure_matmul_rates", measured)


@pytest.mark.parametrize("fast", ["float32", "bfloat16"])
def test_the_faster_type_is_chosen_and_a_resume_does_not_measure_again(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fast: str
) -> None:
    let_be_faster(monkeypatch, fast)
    chosen = resolve_auto_dtype(config)
    assert chosen.actor_rollout_ref.model_dtype == fast
    assert f"{KEY}={fast}" in capsys.readouterr().out
    folder = Path(config.trainer.run_dir)
    folder.mkdir(parents=True)
    write_config_keeping_earlier(folder, to_yaml(chosen))
    other = {"float32": "bfloat16", "bfloat16": "float32"}[fast]
    let_be_faster(monkeypatch, other)
    assert resolve_auto_dtype(config).actor_rollout_ref.model_dtype == fast
    assert capsys.readouterr().out == ""


def test_what_cannot_be_measured_is_refused(config: Config) -> None:
    Path("model/config.json").write_text("{}")
    with pytest.raises(UserError, match=f"{KEY}=auto.*hidden_size.*float32"):
        resolve_auto_dtype(config)
    Path("model/config.json").unlink()
    with pytest.raises(UserError, match=r"actor_rollout_ref\.model\.path"):
        resolve_auto_dtype(config)
    with pytest.raises(ValueError, match="has not been measured"):
        _ = config.actor_rollout_ref.model_dtype


@pytest.mark.parametrize("sizes", [(64, 96), flops.SQUARE])
def test_the_peak_is_the_fastest_product_of_the_model_or_of_a_square_layer(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    def measured(dtype: str, *, sizes: tuple[int, int], **_: float) -> tuple[float, float, float]:
        return (3.0, 9.0, 5.0) if sizes == (64, 96) else (7.0, 2.0, 4.0)

    monkeypatch.setattr(flops, "measure_matmul_rates", measured)
    assert measure_cpu_peak_flops("float32", sizes=sizes) == (9.0 if sizes == (64, 96) else 7.0)


def test_experts_and_text_towers_have_sizes(tmp_path: Path) -> None:
    def of(**keys: object) -> tuple[int, int] | None:
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return typical_linear_sizes(tmp_path)

    assert of(hidden_size=8, intermediate_size=16, moe_intermediate_size=4) == (8, 4)
    assert of(text_config={"hidden_size": 8}) == (8, 32)
    assert of(d_model=8) is None


def test_a_command_measures_on_this_machine(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text("actor_rollout_ref: {model: {path: model, dtype: auto}}\n")
    found = load_checked_config("run.yaml", [], "none")
    assert found.actor_rollout_ref.model_dtype in ("float32", "bfloat16")
    assert "GFLOP/s" in capsys.readouterr().out


def test_ranks_with_different_types_are_refused() -> None:
    require_one_dtype(["float32", "float32"])
    with pytest.raises(UserError, match="float32 on rank 0, bfloat16 on rank 1; name one"):
        require_one_dtype(["float32", "bfloat16"])
