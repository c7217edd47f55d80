"""What of a configuration can be a secret is written and said nowhere, and asked for again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from refusals import PATHS

from ctrl_megatron.commands.evaluate import proxy_overrides
from ctrl_megatron.config import KEYS, dict_without_secrets, load_config, to_yaml
from ctrl_megatron.config.secrets import (
    hidden_key_names,
    hide_credentials_in_text,
    hide_secrets,
    secret_storage_advice,
)
from ctrl_megatron.errors import without_concealed
from ctrl_megatron.record.recorder import config_changes, write_config_keeping_earlier

P, R = "actor_rollout_ref.proxy.api.", "actor_rollout_ref.rollout."
SECRET = "correct-horse"
SECRETIVE = (
    "reward.provider=sandbox_fusion",
    f"reward.provider_options={{endpoint: 'http://{SECRET}@h', api_key: {SECRET}, memory_mb: 64}}",
    "actor_rollout_ref.proxy.kind=api",
    f"{P}model=stranger",
    f"{P}base_url=['http://me:{SECRET}@one:1/v1', 'http://two/v1?key={SECRET}', 'http://three/v1']",
    f"{P}extra_body={{user: [{SECRET}], top_k: 4, think: false}}",
    f"{R}engine_kwargs={{hf_token: {SECRET}, a: {{headers: {{X-Auth: {SECRET}}}}}, threads: 2}}",
    "dag.custom_pipeline_fn=mine:pipeline",
    f"dag.options={{url: 'https://u:{SECRET}@h/x', apiKey: {SECRET}, note: plain, pin_code: 3}}",
)


def test_no_text_of_a_configuration_has_its_secrets() -> None:
    config = load_config(None, (*PATHS, *SECRETIVE))
    assert config.reward.provider_options["api_key"] == SECRET
    text, tree = to_yaml(config), dict_without_secrets(config)
    assert SECRET not in text and SECRET not in str(tree)
    options = tree["actor_rollout_ref"]
    assert options["proxy"]["api"]["base_url"] == [
        "http://***@one:1/v1",
        "http://two/v1?***",
        "http://three/v1",
    ]
    assert options["proxy"]["api"]["extra_body"] == {"user": ["***"], "top_k": 4, "think": False}
    assert options["rollout"]["engine_kwargs"]["threads"] == 2
    assert tree["dag"]["options"]["note"] == "plain"
    assert "# reward.provider_options.api_key: *** is not written; set the provider" in text


def test_a_written_configuration_asks_for_its_secrets(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(load_config(None, (*PATHS, *SECRETIVE))))
    with pytest.raises(ValueError, match="give the value again") as caught:
        load_config(file)
    for name in ("reward.provider_options.api_key", f"{P}base_url", "dag.options.apiKey"):
        assert f"{name} has ***" in str(caught.value)
    again = load_config(file, SECRETIVE)
    assert again.reward.provider_options["api_key"] == SECRET


@pytest.mark.parametrize(
    "override",
    [
        f"reward.provider_options={{api_key: {SECRET}",
        f"reward.provider_options={SECRET}",
        f"sandbox.endpoint=ftp://me:{SECRET}@host",
        f"{P}base_url={{a: 'http://me:{SECRET}@host'}}",
        f"{P}extra_body.user={SECRET}",
        # Misspelt keys and forms, and addresses without a scheme.
        f"reward.provider_option.api_key={SECRET}",
        f"trainer.nope={{headers: [{SECRET}]}}",
        f"+reward.provider_options.api_key={SECRET}",
        f"reward.provider_options.api_key: {SECRET}",
        f"reward.provider_options.api_key=!{SECRET} x",
        f"reward.provider_options.api_key=*{SECRET}",
        f"sandbox.endpoint=me:{SECRET}@host:80",
    ],
)
def test_no_message_names_a_secret(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What an earlier test has given is concealed too.
    monkeypatch.setattr("ctrl_megatron.errors._secrets", [])
    with pytest.raises(ValueError) as caught:
        load_config(None, (*PATHS, override))
    assert SECRET not in str(caught.value)
    assert re.split("[=:]", override.lstrip("+"))[0] in str(caught.value)


def test_variables_are_written_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_MINE", SECRET)
    monkeypatch.setenv("NUMBER", "7")
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer:\n  seed: ${oc.decode:${oc.env:NUMBER}}\n  max_bad_steps: ${trainer.seed}\n"
        "  default_local_dir: /x/${oc.env:OF_MINE}\n"
    )
    overrides = (*PATHS, "trainer.experiment_name=${oc.env:OF_MINE}", *SECRETIVE[:2])
    overrides = (*overrides, "reward.provider_options={api_key: '${oc.env:OF_MINE}', version: '3'}")
    config = load_config(file, overrides)
    assert config.reward.provider_options["api_key"] == config.trainer.experiment_name == SECRET
    assert config.trainer.seed == config.trainer.max_bad_steps == 7
    for one in (config, config.replace_groups(sft=config.sft)):
        text = to_yaml(one)
        assert SECRET not in text and "seed: ${oc.decode:${oc.env:NUMBER}}" in text
        assert "api_key: ${oc.env:OF_MINE}" in text
    written = tmp_path / "written.yaml"
    written.write_text(text)
    again = load_config(written, ("reward.provider_options.version='3'",))
    assert again == config and to_yaml(again) == text


def test_a_resume_does_not_compare_secrets(tmp_path: Path) -> None:
    def text(secret: str, seed: int = 1) -> str:
        overrides = (s.replace(SECRET, secret) for s in SECRETIVE)
        return to_yaml(load_config(None, (*PATHS, *overrides, f"trainer.seed={seed}")))

    assert write_config_keeping_earlier(tmp_path, text(SECRET)) == []
    assert write_config_keeping_earlier(tmp_path, text("another-one")) == []
    assert write_config_keeping_earlier(tmp_path, text(SECRET, 2)) == ["trainer.seed: 1 -> 2"]
    # As an older version wrote it.
    (tmp_path / "config.yaml").write_text(text(SECRET).replace("'***'", SECRET))
    assert config_changes(tmp_path, text("another-one", 2)) == ["trainer.seed: 1 -> 2"]
    gone = "gone: {api_key: abc12345678, size: 3}\ntrainer: {seed: 1}\n"
    (tmp_path / "config.yaml").write_text(gone)
    changed = config_changes(tmp_path, "trainer: {seed: 1}\n")
    assert changed == ["gone.size: 3 -> unset"]


def test_a_proxys_address_may_have_a_password() -> None:
    (found,) = proxy_overrides([f"there=a@b@https://me:{SECRET}@host/v1"], []).values()
    assert found[1:] == [f'{P}model="a@b"', f'{P}base_url=["https://me:{SECRET}@host/v1"]']
    with pytest.raises(ValueError, match="no directory") as caught:
        proxy_overrides([f"there=ftp://me:{SECRET}@host"], [])
    assert SECRET not in str(caught.value)


def test_what_says_secret_and_what_does_not() -> None:
    key = KEYS["dag.options"]
    shown = hide_secrets(
        key,
        {
            **dict.fromkeys(("token", "HF_TOKEN", "api-key", "secretKey", "env", "pwd"), "x"),
            **dict.fromkeys(("stop_token", "prompt_key", "tokenizer", "monkey", "author"), "x"),
            "password": 1234,
            "max_tokens": 5,
        },
    )
    assert [name for name, value in shown.items() if value == "***"] == [
        *("token", "HF_TOKEN", "api-key", "secretKey", "env", "pwd", "password"),
    ]
    names = (
        *(
            "api_keys",
            "HFToken",
            "hftoken",
            "secretkey",
            "accessKeyId",
            "AWSSecretKey",
            "passwords",
        ),
        *("authtoken", "client_secrets", "accessTokens", "dsn", "proxyPassword"),
    )
    assert hide_secrets(key, dict.fromkeys(names, "x")) == dict.fromkeys(names, "***")
    plain = {"maxTokens": 5, "stop_tokens": ["x"], "keys": ["x"], "at": "a:b", "mail": "a@b"}
    assert hide_secrets(key, plain) == plain
    assert hide_secrets(key, {"http_proxy": "me:pw@proxy:3128"}) == {"http_proxy": "***@proxy:3128"}
    written = ["Bearer sk-123456", "run --hf-token abcdefg1 -x", "--api-key=***", "a Bearer bond"]
    assert hide_secrets(key, {"a": {"value": written}})["a"]["value"] == [
        *("Bearer ***", "run --hf-token *** -x", "--api-key=***", "a Bearer bond"),
    ]
    assert [*hidden_key_names(key, hide_secrets(key, {"a": written[:1]}))] == ["dag.options.a"]
    assert hide_credentials_in_text("http://a:b@h,http://c@i/x?q#z ftp://d:e/f@j no@mail") == (
        "http://***@h,http://***@i/x?***#z ftp://***@j no@mail"
    )
    assert secret_storage_advice(KEYS[f"{P}base_url"]).startswith("set OPENAI_API_KEY")


def test_messages_name_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctrl_megatron.errors._secrets", [])
    options = "reward.provider_options={endpoint: http://judge:2000, api_key: s3cret-of-judge}"
    load_config(None, ["reward.provider=sandbox_fusion", options], "none")
    said = "http://judge:2000 refuses s3cret-of-judge"
    assert without_concealed(said) == "http://judge:2000 refuses ***"
