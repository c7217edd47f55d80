"""Files, overrides and types: what is written is what arrives, or a sentence that helps."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctrl_megatron.config import Config, load_config, parse_override, to_dict, to_yaml
from ctrl_megatron.config.actor_rollout_ref import OffloadAndRecompute
from ctrl_megatron.config.coerce import build_config
from ctrl_megatron.config.load import dump_yaml, parse_yaml
from ctrl_megatron.record.recorder import config_changes

ACTOR = "actor_rollout_ref.actor."


def load(*overrides: str, path: Path | None = None) -> Config:
    return load_config(path, overrides, "none")


def error(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        load(*overrides, path=path)
    return str(caught.value)


def test_defaults_file_and_overrides_apply_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 5\n  save_freq: 7\n")
    config = load("trainer.save_freq=8", "trainer.save_freq=9", path=file)
    trainer = config.trainer
    assert (trainer.seed, trainer.save_freq, trainer.test_freq) == (5, 9, -1)


def test_keys_of_compute_may_have_their_former_names(tmp_path: Path) -> None:
    file, old = tmp_path / "run.yaml", ACTOR + "megatron."
    file.write_text(f"{old}param_offload: true\n{old}logprob_chunk_size: 8\n")
    config = load(f"{ACTOR}compute.logprob_chunk_size=9", f"{old}grad_offload=true", path=file)
    compute = config.actor_rollout_ref.actor.compute
    assert compute == OffloadAndRecompute(
        param_offload=True, logprob_chunk_size=9, grad_offload=True
    )
    referred = load(f"reward.max_requests=${{{old}logprob_chunk_size}}", path=file)
    assert referred.reward.max_requests == 8
    whole = load(ACTOR + "megatron={param_offload: false}", path=file)
    assert not whole.actor_rollout_ref.actor.compute.param_offload
    once = to_yaml(config).replace("    megatron:\n", "").replace("    compute:", "    megatron:")
    (tmp_path / "config.yaml").write_text(once)
    assert config_changes(tmp_path, to_yaml(config)) == []
    file.write_text(f"{old}param_offload: true\n{ACTOR}compute.param_offload: true\n")
    assert f"line 2: the key '{ACTOR}compute.param_offload' is set twice" in error(path=file)
    assert f"override '{old}param_offload=3': {ACTOR}compute.p" in error(f"{old}param_offload=3")


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "1E-6", ".000001"])
def test_every_spelling_of_a_float_is_a_float(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"actor_rollout_ref:\n  actor:\n    optim:\n      lr: {text}\n")
    for config in (load(path=file), load(f"{ACTOR}optim.lr={text}")):
        assert config.actor_rollout_ref.actor.optim.lr == 1e-6
        assert isinstance(config.actor_rollout_ref.actor.optim.lr, float)


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("trainer.seed=1e3", lambda c: c.trainer.seed, 1000),
        ("trainer.experiment_name=on", lambda c: c.trainer.experiment_name, "on"),
        ("trainer.experiment_name=123", lambda c: c.trainer.experiment_name, "123"),
        ("trainer.experiment_name=2024-01-01", lambda c: c.trainer.experiment_name, "2024-01-01"),
        ("data.shuffle=off", lambda c: c.data.shuffle, False),
        ("data.shuffle=True", lambda c: c.data.shuffle, True),
        ("data.train_files=a.parquet", lambda c: c.data.train_files, ("a.parquet",)),
        ("data.train_files=[a, b]", lambda c: c.data.train_files, ("a", "b")),
        ("trainer.total_training_steps=null", lambda c: c.trainer.total_training_steps, None),
        ("reward.run_timeout=3", lambda c: c.reward.run_timeout, 3.0),
        (
            "sandbox.endpoint=http://127.0.0.1:8080",
            lambda c: c.sandbox.endpoint,
            "http://127.0.0.1:8080",
        ),
        (
            f"{ACTOR}optim.betas=[0.9, 0.95]",
            lambda c: c.actor_rollout_ref.actor.optim.betas,
            (0.9, 0.95),
        ),
        (
            "actor_rollout_ref.rollout.engine_kwargs={a: 1e-3, b: {c: [on, true, 010]}}",
            lambda c: c.actor_rollout_ref.rollout.engine_kwargs,
            {"a": 1e-3, "b": {"c": ["on", True, "010"]}},
        ),
        ("trainer.nnodes=${trainer.seed}", lambda c: c.trainer.nnodes, 1),
        ("trainer=", lambda c: c.trainer, Config().trainer),
    ],
)
def test_a_value_takes_the_type_of_its_field(override: str, read: Any, expected: Any) -> None:
    value = read(load(override))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("trainer.seed=1.5", ["trainer.seed", "integer", "1.5"]),
        ("trainer.seed=010", ["trainer.seed", "integer", "010"]),
        ("trainer.seed=true", ["trainer.seed", "integer"]),
        ("trainer.seed=", ["trainer.seed", "integer", "None"]),
        ("trainer.seed=99999999999999999999", ["trainer.seed", "64 bits"]),
        (f"trainer.seed={'9' * 400}", ["trainer.seed", "64 bits"]),
        ("actor_rollout_ref.rollout.n=-1e30", ["actor_rollout_ref.rollout.n", "64 bits"]),
        ("data.shuffle=1", ["data.shuffle", "true or false"]),
        ("reward.run_timeout=soon", ["reward.run_timeout", "finite number", "soon"]),
        ("reward.run_timeout=.inf", ["reward.run_timeout", "finite number"]),
        ("trainer.experiment_name=1.50", ["trainer.experiment_name", "text", "quotes"]),
        ("trainer.experiment_name=true", ["trainer.experiment_name", "text", "quotes"]),
        (f"{ACTOR}optim.betas=[0.9]", ["betas", "list of 2"]),
        ("trainer.logger={a: 1}", ["trainer.logger", "list"]),
        ("actor_rollout_ref.rollout.engine_kwargs=3", ["engine_kwargs", "mapping"]),
        ("actor_rollout_ref.rollout.name=vlm", ["vllm, sglang, hf", "did you mean 'vllm'"]),
        (f"{ACTOR}kl_loss_type=low_var", ["low_var_kl", "did you mean 'low_var_kl'"]),
        ("trainer=3", ["trainer", "group of keys", "3"]),
        ("trainer.seed.deep=3", ["trainer.seed"]),
        ("trainer.seed", ["not of the form group.key=value"]),
        ("=3", ["not of the form"]),
        ("trainer..seed=3", ["not of the form"]),
        ("trainer.seed=[1", ["trainer.seed", "not valid YAML"]),
        ("trainer.seed=${data.sed}", ["trainer.seed", "data.sed"]),
    ],
)
def test_a_wrong_value_is_an_error_that_names_key_and_value(
    override: str, fragments: list[str]
) -> None:
    message = error(override)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("algorithm.kl_ctrl.kl_coeff", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.kl_coeff", "algorithm.kl_ctrl.kl_coef"),
        ("trainr.seed", "trainer"),
        (f"{ACTOR}use_klloss", f"{ACTOR}use_kl_loss"),
        ("ppo_epochs", f"{ACTOR}ppo_epochs"),
        (f"{ACTOR}megatron.tensor_parallel_size", f"{ACTOR}megatron.tensor_model_parallel_size"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_one(key: str, suggestion: str) -> None:
    message = error(f"{key}=1")
    assert "unknown key" in message
    assert f"did you mean '{suggestion}'" in message
    assert f"override '{key}=1'" in message


def test_an_error_names_file_and_line_and_all_problems_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: x\n\nalgorithm:\n  gama: 1\n")
    message = error("data.shuffle=maybe", path=file)
    assert f"{file} line 2: trainer.seed" in message
    assert f"{file} line 5: unknown key 'algorithm.gama': did you mean 'algorithm.gamma'" in message
    assert "override 'data.shuffle=maybe'" in message
    assert len(message.splitlines()) == 3


def test_a_key_written_twice_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  seed: 1\n  seed: 2\n")
    message = error(path=file)
    assert "line 3" in message
    assert "'trainer.seed' is set twice" in message
    assert "line 2" in message


@pytest.mark.parametrize(
    ("text", "fragment"),
    [("- 1\n", "must hold groups of keys"), ("a: [\n", "not valid YAML"), ("a", "must hold")],
)
def test_a_file_that_is_no_configuration(text: str, fragment: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert fragment in error(path=file)


def test_a_missing_file_suggests_a_neighbour(tmp_path: Path) -> None:
    (tmp_path / "ctrl_7b.yaml").write_text("")
    message = error(path=tmp_path / "ctrl_7.yaml")
    assert "does not exist" in message
    assert "ctrl_7b.yaml" in message


def test_an_empty_file_and_empty_groups_give_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("")
    assert load(path=file) == Config()
    file.write_text("trainer:\n  # seed: 1\n")
    assert load(path=file) == Config()


def test_every_dataclass_is_frozen_and_keyword_only() -> None:
    groups = [Config]
    for group in groups:
        assert group.__dataclass_params__.frozen  # type: ignore[attr-defined]
        # The whole also remembers what was written, which is no key.
        assert group is Config or "__slots__" in vars(group)
        assert all(f.kw_only for f in dataclasses.fields(group))  # type: ignore[arg-type]
        hints = typing.get_type_hints(group)
        groups += [h for h in hints.values() if dataclasses.is_dataclass(h)]  # type: ignore[misc]


def test_yaml_round_trip_of_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(Config()))
    assert load(path=file) == Config()


def leaf_strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, as a plain tree would hold it."""
    text = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="$\x85\ufeff"))
    plain = {
        bool: st.booleans(),
        int: st.integers(-(2**63) + 1, 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: text | st.sampled_from(["on", "1e-6", "010", "null", "~", "1", "0x1F", "1:30", "="]),
    }
    if hint in plain:
        return plain[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        least, most = (0, None) if arguments[-1] is Ellipsis else (2, 2)
        return st.lists(leaf_strategy(arguments[0]), min_size=least, max_size=most).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text("abc", min_size=1), st.one_of(*plain.values()))
    return st.one_of(*(st.none() if a is type(None) else leaf_strategy(a) for a in arguments))


def group_strategy(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(
        cls,
        **{
            name: group_strategy(h) if dataclasses.is_dataclass(h) else leaf_strategy(h)  # type: ignore[arg-type]
            for name, h in hints.items()
            if typing.get_origin(h) is not typing.ClassVar
        },
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=group_strategy(Config))
def test_yaml_round_trip_of_any_configuration(config: Config) -> None:
    tree, _ = parse_yaml(dump_yaml(to_dict(config)), "test")
    assert tree == to_dict(config)
    assert build_config(Config, tree, {}) == config


@settings(max_examples=300, deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_numbers_as_python_prints_them_are_numbers(value: float) -> None:
    parsed = parse_override(f"a.b={value!r}")[1]
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_configuration_loads_without_heavy_libraries() -> None:
    code = (
        "import sys; import ctrl_megatron.config, ctrl_megatron.config.environment;"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("trainer.total_training_steps=3", "sft.total_training_steps"),
        ("data.train_batch_size=8", "sft.train_batch_size"),
        (ACTOR + "optim.lr=1e-4", "sft.lr"),
    ],
)
def test_an_override_that_only_rl_reads_is_refused_by_sft(typed: str, read: str) -> None:
    needed = ["actor_rollout_ref.model.path=m", "sft.train_files=t"]
    assert load_config(None, [*needed, typed.replace(typed.split("=")[0], read)], "sft")
    with pytest.raises(ValueError, match=f"no effect on SFT, which reads {read}"):
        load_config(None, [*needed, typed], "sft")
