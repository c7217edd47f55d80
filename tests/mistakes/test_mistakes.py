"""Whatever the user gives that cannot be used: exit code 2, at most three lines that name it, and
nothing is started or written. Alone and, where a command starts ranks, for two of them.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mistaken_world import (
    PROBLEM,
    change_json,
    change_row,
    change_tensors,
    cut,
    drop_column,
    keep_rows,
    make_world,
    write_model,
    write_tokenizer,
)

from ctrl_megatron.checkpoint.manifest import MARKER
from ctrl_megatron.checkpoint.run_directory import LOCK_FILE, LockHolder
from ctrl_megatron.config import load_config
from ctrl_megatron.eval.transcripts import ChainPlan, begin_evaluation
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.run.evaluation import EvaluationJob, transcript_settings

TRAINING = ("train_rl", "train_sft")
_A = "actor_rollout_ref."
Spoil = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """One mistake."""

    name: str
    tool: str
    arguments: str
    """Arguments of the command, after the configuration file."""
    named: str
    """Text that the message must contain, in upper or lower case."""
    spoil: Spoil = lambda folder: None
    environment: tuple[tuple[str, str], ...] = ()
    only_alone: bool = False
    """Only ranks can know it: the row has to be turned into tokens."""


def _text(file: str, text: str) -> Spoil:
    return lambda folder: (folder / file).write_text(text)


def _bytes(file: str, data: bytes) -> Spoil:
    return lambda folder: (folder / file).write_bytes(data)


def _remove(file: str) -> Spoil:
    return lambda folder: (folder / file).unlink()


def _cell(column: str, value: object, number: int = 3, file: str = "train.parquet") -> Spoil:
    return lambda folder: change_row(folder / file, number, column, value)


def _drop(column: str) -> Spoil:
    return lambda folder: drop_column(folder / "train.parquet", column)


LATENT: dict[str, object] = {
    **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    **{"v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
    "num_key_value_heads": None,
}
V32 = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}


def _model(**changes: object) -> Spoil:
    return lambda folder: change_json(folder / "model/config.json", **changes)


def _context(tokens: int) -> Spoil:
    return _model(max_position_embeddings=tokens)


def _other_model(spoil: Spoil) -> Spoil:
    """A model of the actor's shape, spoilt."""

    def write(folder: Path) -> None:
        write_model(folder / "other")
        spoil(folder / "other")

    return write


def _swapped_words(model: Path) -> None:
    """Two words of the vocabulary have changed their numbers."""
    file = model / "tokenizer.json"
    state = json.loads(file.read_text())
    words = state["model"]["vocab"]
    words["w0"], words["w1"] = words["w1"], words["w0"]
    file.write_text(json.dumps(state))


def _end_token(word: str) -> Spoil:
    return lambda model: change_json(model / "tokenizer_config.json", eos_token=word)


def _template(text: str) -> Spoil:
    return lambda model: (model / "chat_template.jinja").write_text(text)


def _all(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


def _metrics(text: str) -> Spoil:
    """A run that has recorded ``text``."""
    return _all(lambda f: (f / "made").mkdir(), _text("made/metrics.jsonl", text))


def _metrics_bytes(data: bytes) -> Spoil:
    return _all(lambda f: (f / "made").mkdir(), _bytes("made/metrics.jsonl", data))


def _settings(text: str) -> Spoil:
    """A directory whose evaluation.json says ``text``."""
    return _all(lambda f: (f / "made").mkdir(), _text("made/evaluation.json", text))


def _evaluation(**changes: object) -> Spoil:
    """An evaluation of the same rows, models and draws but for ``changes``."""

    def write(folder: Path) -> None:
        overrides = ["data.val_files=train.parquet"]
        job = EvaluationJob(critics={"a": "model"}, plan=ChainPlan(), seeds=(0,))
        settings = transcript_settings(load_config("run.yaml", overrides, "rl"), job) | changes
        begin_evaluation(folder / "made", settings, {}, anew=[], overwrite=False)

    return write


def _index(folder: Path) -> None:
    """All tensors in a file that is not there."""
    names = hf_shapes(read_model_shape(folder / "model"))
    index = {"weight_map": dict.fromkeys(names, "none.safetensors")}
    (folder / "model/model.safetensors").unlink()
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))


def _checkpoint(folder: Path) -> Path:
    """A checkpoint of step 1 where the run looks for one."""
    there = folder / "runs/mine/checkpoints/global_step_1"
    shutil.copytree(folder / "checkpoint", there)
    (folder / "runs/mine/.ctrl_megatron_run").touch()
    state = {"step": 1, "sampler": {}, "kl_controller": {}, "reserve": {}}
    (there / "trainer_state.json").write_text(json.dumps(state))
    (there / MARKER).unlink()  # as of a version without hashes
    return there


def _lock(folder: Path) -> None:
    """Held by this process."""
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine" / LOCK_FILE).write_text(json.dumps(asdict(LockHolder.this_process())))


def rl(name: str, arguments: str, named: str, spoil: Spoil = lambda f: None, **more: Any) -> Case:
    return Case(name, "train_rl", arguments, named, spoil, **more)


def tool(tool: str, name: str, arguments: str, named: str, spoil: Spoil = lambda f: None) -> Case:
    return Case(name, tool, arguments, named, spoil)


sft, evaluation = partial(tool, "train_sft"), partial(tool, "evaluate")
to_megatron, to_hf = (
    partial(tool, "convert_hf_to_megatron"),
    partial(tool, "convert_megatron_to_hf"),
)
plan, data = partial(tool, "plan"), partial(tool, "synthesize")
problems, sandbox = partial(tool, "prepare_data"), partial(tool, "serve_sandbox")
mutants, faults = partial(tool, "make_mutants"), partial(tool, "prepare_mutants")
study, tree_of, service = (
    partial(tool, "study"),
    partial(tool, "generate"),
    partial(tool, "serve_critic"),
)
_MUTATE = "--problems problems.jsonl --out new.jsonl"
_FAULTS = "--problems problems.jsonl --mutants mutants.jsonl --out new"
_MUTANT = {
    **{"id": "seven/mutant0", "problem_id": "seven", "split": "train", "kind": "constant"},
    **{"code": "print(8)", "wrong": "8", "right": "7", "pass_rate": 0.0},
}
_TREE = "--problems problems.jsonl --out new --generator model"
_SERVE = "--critic model"


def _mutant(**changes: object) -> Spoil:
    """A file of one mutant."""
    return _text("mutants.jsonl", json.dumps(_MUTANT | changes) + "\n")


FUNCTION = PROBLEM | {"prompter_type": "mbppplus", "entry_point": "f", "tests": ["assert f() == 7"]}
_DATA = (
    "--problems problems.jsonl --solutions solutions.jsonl --out data --val-share 0 --sft-share 0"
)
_SOLVE = "--problems problems.jsonl --solver model --out data --val-share 0 --sft-share 0"
_READ = "--format ctrl --input problems.jsonl --out read.jsonl"
_FUNCS = "reward.reward_funcs="
_PAIR = '{"pair_id": "1", "question": "?", "response_A": "a", "response_B": "b"}\n'
_SAID = '{"id": "x", "critique": "Overall judgment: Correct"}\n'
_LONG_PAIR = json.dumps({**json.loads(_PAIR), "response_A": "w " * 5000, "label": "A>B"}) + "\n"
_PIPELINE = "dag.custom_pipeline_fn="

CASES = [
    # The configuration.
    Case("no config", "train_rl", "-", "--config"),
    rl("no such file", "--config none.yaml", "none.yaml"),
    rl("near file", "--config rum.yaml", "did you mean run.yaml"),
    rl("a folder", "--config model", "model"),
    rl("no YAML", "", "run.yaml is not valid YAML", _text("run.yaml", "data: {seed: [1\n")),
    rl("no UTF-8", "", "run.yaml", _bytes("run.yaml", b"data: {prompt_key: \xff}")),
    rl("a list", "", "groups of keys", _text("run.yaml", "- 1\n")),
    rl("twice", "", "is set twice", _text("run.yaml", "data: {seed: 1}\ndata: {seed: 2}\n")),
    rl("no key", "written=3", "unknown key 'written'"),
    rl("rows in a folder", "data.train_files=model", "model is a directory"),
    rl("no such reward", "reward.reward_funcs=[nope]", "reward.reward_funcs: unknown reward"),
    rl("misspelt", "data.train_bach_size=4", "data.train_batch_size"),
    rl("another trainer's", _A + "rollout.log_prob_micro_batch_size_per_gpu=1", "log_prob"),
    rl("wrong type", "data.train_batch_size=many", "data.train_batch_size"),
    rl("out of range", "data.train_batch_size=0", "at least 1"),
    rl("no equals sign", "trainer.seed", "group.key=value"),
    rl("below a value", "trainer.seed.x=1", "trainer.seed"),
    rl("no such reference", "trainer.seed=${nothing.here}", "trainer.seed"),
    rl("not read", "critic.optim.lr=1e-5", "critic.optim.lr"),
    rl("no divisor", _A + "actor.ppo_mini_batch_size=3", "ppo_mini_batch_size"),
    rl("no ranks", "--nproc-per-node 0", "at least 1"),
    rl("ranks as a word", "--nproc-per-node two", "--nproc-per-node"),
    rl("other ranks", "trainer.nnodes=3", "trainer.nnodes=3"),
    rl("two KLs", f"{_A}actor.use_kl_loss=true algorithm.use_kl_in_reward=true", "use_kl_in_rew"),
    rl("unknown variable", "", "CTRL_LOG_LEVEL", environment=(("CTRL_LOG_LEVLE", "INFO"),)),
    rl("wrong level", "", "CTRL_LOG_LEVEL", environment=(("CTRL_LOG_LEVEL", "LOUD"),)),
    rl("rank without world", "", "WORLD_SIZE", environment=(("RANK", "0"),)),
    rl("rank as a word", "", "RANK", environment=(("RANK", "first"), ("WORLD_SIZE", "2"))),
    rl("name with a slash", "trainer.experiment_name=a/b", "trainer.experiment_name"),
    # The layout and the model.
    rl(
        "tensor ranks and heads",
        f"--nproc-per-node 3 trainer.n_gpus_per_node=3 {_A}actor.megatron."
        f"tensor_model_parallel_size=3 {_A}rollout.name=vllm",
        "num_attention_heads=4",
    ),
    rl(
        "stages and layers",
        "--nproc-per-node 4 trainer.n_gpus_per_node=4 "
        f"{_A}actor.megatron.pipeline_model_parallel_size=4",
        "2 layers",
    ),
    rl("no model", _A + "model.path=none", "model.path"),
    rl("config.json is garbage", "", "model/config.json", _text("model/config.json", "{")),
    rl("config.json is a list", "", "model/config.json", _text("model/config.json", "[]")),
    rl("config.json is binary", "", "model/config.json", _bytes("model/config.json", b"\xff\xfe")),
    rl("another family", "", "model_type 'gpt2'", _model(model_type="gpt2")),
    rl(
        "code of its authors",
        _A + "actor.strategy=fsdp",
        "its code is in the directory",
        _model(model_type="theirs", auto_map={"AutoModelForCausalLM": "modeling.Theirs"}),
    ),
    rl("no layers", "", "num_hidden_layers", _model(num_hidden_layers=None)),
    rl("layers as text", "", "num_hidden_layers", _model(num_hidden_layers="two")),
    rl("another activation", "", "hidden_act", _model(hidden_act="gelu")),
    rl("heads and groups", "", "num_key_value_heads=3", _model(num_key_value_heads=3)),
    rl("an unknown feature", "", "clever_attention", _model(clever_attention=True)),
    rl("no weights", "", "model.safetensors", _remove("model/model.safetensors")),
    rl(
        "weights are garbage", "", "model.safetensors", _bytes("model/model.safetensors", b"x" * 99)
    ),
    rl(
        "weights are cut off", "", "model.safetensors", lambda f: cut(f / "model/model.safetensors")
    ),
    rl("weights are empty", "", "model.safetensors", _bytes("model/model.safetensors", b"")),
    rl("a tensor lacks", "", "q_proj", lambda f: change_tensors(f / "model", q_proj=None)),
    rl("another shape", "", "q_proj", lambda f: change_tensors(f / "model", q_proj=torch.ones(3))),
    rl("index is garbage", "", "index.json", _text("model/model.safetensors.index.json", "{}")),
    rl(
        "index names no file",
        "",
        "none.safetensors",
        _index,
    ),
    rl(
        "another proxy",
        _A + "proxy.model.path=other",
        "proxy.model.path",
        lambda f: write_model(f / "other", hidden_size=32),
    ),
    rl(
        "no tokenizer",
        _A + "model.tokenizer_path=data",
        "tokenizer_path",
        lambda f: (f / "data").mkdir(),
    ),
    *(
        rl(
            f"another {part} of the proxy",
            _A + "proxy.model.path=other",
            f"{_A}proxy.model.path: the tokenizer of other differs in its {part}",
            _other_model(spoil),
        )
        for part, spoil in (
            ("vocabulary (token 59", lambda folder: write_tokenizer(folder, 59)),
            ("vocabulary (token 2 is", _swapped_words),
            ("special tokens", _end_token("w3")),
            ("chat template", _template("{{ messages }}")),
            ("end tokens", _text("generation_config.json", '{"eos_token_id": [1, 2]}')),
        )
    ),
    rl(
        "another vocabulary of the reference",
        f"{_A}ref.model.path=other {_A}actor.use_kl_loss=true",
        f"{_A}ref.model.path: the tokenizer of other differs in its vocabulary",
        _other_model(_swapped_words),
    ),
    rl(
        "another vocabulary of the value model",
        "critic.model.path=other algorithm.adv_estimator=gae",
        "critic.model.path: the tokenizer of other differs in its vocabulary",
        _other_model(_swapped_words),
    ),
    *(
        case(
            "a tokenizer that is not the model's",
            _A + "model.tokenizer_path=other",
            f"{_A}model.path: the tokenizer of model differs in its vocabulary",
            _other_model(_swapped_words),
        )
        for case in (rl, sft)
    ),
    *(
        case(
            f"a short context for {keys}",
            given,
            f"embeddings=64 tokens, and {keys}",
            spoil,
        )
        for case, given, keys, spoil in (
            (rl, "", "data.max_prompt_length=4000 + data.max_response_length=768", _context(64)),
            (rl, f"{_A}rollout.max_model_len=9000", _A + "rollout.max_model_len", _context(64)),
            (sft, "", "sft.max_length=1024", _context(64)),
        )
    ),
    rl(
        "a short context for revisions",
        "",
        "max_position_embeddings=4800 tokens, and data.max_prompt_length=4000 + data."
        f"max_response_length=768 + {_A}rollout.revision_max_tokens=1024 makes 5792",
        _context(4800),
    ),
    rl(
        "a context that an indexer ends",
        f"{_A}model.path=other {_A}rollout.name=hf",
        f"{_A}model.path: the model of other has a context of index_topk=2048 tokens, and data.",
        lambda f: write_model(f / "other", **LATENT | {"model_type": "deepseek_v32", **V32}),
    ),
    rl(
        "a short context of the reference",
        f"{_A}ref.model.path=other {_A}actor.use_kl_loss=true",
        f"{_A}ref.model.path: the model of other has a context of max_position_embeddings=70",
        lambda f: write_model(f / "other", max_position_embeddings=70),
    ),
    rl(
        "weights in 8 bits",
        "",
        "the weights of model have 8 bits",
        _model(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ),
    rl(
        "blocks of 8 bits that an engine cuts",
        f"{_A}rollout.name=vllm {_A}rollout.quantization=fp8 "
        "algorithm.rollout_correction.rollout_is=token",
        "which is no multiple of 128",
    ),
    rl(
        "routers without a bias to change",
        f"{_A}actor.megatron.moe_router_bias_update_rate=0.001",
        f"{_A}actor.megatron.moe_router_bias_update_rate=0.001: the routers of model",
    ),
    rl(
        "an engine that cannot receive latent attention",
        f"{_A}model.path=other {_A}rollout.name=vllm",
        f"pushed to engine 'vllm'; set {_A}rollout.name",
        lambda f: write_model(f / "other", **LATENT),
    ),
    rl(
        "a masked-diffusion model",
        "",
        "is a masked-diffusion model, which RL trains on coupled scores alone",
        _model(model_type="Dream", architectures=["DreamModel"], mask_token_id=63),
    ),
    rl("tokenizer is garbage", "", "model", _text("model/tokenizer.json", "{")),
    rl("no chat template", "", "chat template", _remove("model/chat_template.jinja")),
    rl("template is broken", "", "template", _text("model/chat_template.jinja", "{% for %}")),
    rl(
        "template refuses",
        "",
        "refuses the roles",
        _text("model/chat_template.jinja", "{{ raise_exception('no') }}"),
    ),
    rl("more tokens than rows", "", "token number", lambda f: write_tokenizer(f / "model", 99)),
    # The rows.
    rl("no rows file", "data.train_files=none.parquet", "none.parquet"),
    rl("rows are no parquet", "", "train.parquet", _text("train.parquet", "id,prompt\n")),
    rl("rows are cut off", "", "train.parquet", lambda f: cut(f / "train.parquet")),
    rl("no prompt column", "", "prompt", _drop("prompt")),
    rl("no id column", "", "id", _drop("id")),
    rl("another prompt column", "data.prompt_key=question", "question"),
    rl("no rows", "", "train.parquet", lambda f: keep_rows(f / "train.parquet", 0)),
    rl("too few rows", "", "3 usable rows", lambda f: keep_rows(f / "train.parquet", 3)),
    rl("no id", "", "row 3: column 'id'", _cell("id", None)),
    rl("id as a number", "", "row 1: column 'id'", lambda f: [change_ids(f / "train.parquet")]),
    rl(
        "id twice",
        "",
        "row 3: column 'id' repeats",
        _all(_cell("id", "seven/0"), _cell("solution", "x")),
    ),
    rl("no tests column", "", "row 1: column 'selected_uts'", _drop("selected_uts")),
    rl("no solution", "", "row 3: column 'solution'", _cell("solution", None)),
    rl(
        "a column of a reward",
        f"{_PIPELINE}ctrl_megatron.pipeline:grpo_pipeline {_FUNCS}[reader:f]",
        "column 'answer' is missing or null, which the reward reader:f reads",
        _text("reader.py", "def f(items): ...\nf.reads = ('answer',)\n"),
    ),
    rl(
        "a reward that leaves when it is imported",
        f"{_PIPELINE}ctrl_megatron.pipeline:grpo_pipeline {_FUNCS}[leaves:f]",
        "reward.reward_funcs: cannot import the reward 'leaves:f': it calls sys.exit(0)",
        _text("leaves.py", "def f(items): ...\nimport sys\nsys.exit(0)\n"),
    ),
    rl(
        "a reward of other arguments",
        f"{_PIPELINE}ctrl_megatron.pipeline:grpo_pipeline {_FUNCS}[pairs:f]",
        "pairs.py line 1) cannot be called as (items)",
        _text("pairs.py", "def f(prompts, completions): ...\n"),
    ),
    rl(
        "a pipeline that leaves",
        f"{_PIPELINE}leaving:build",
        "leaving.py line 3",
        _text("leaving.py", "import sys\ndef build(config):\n    sys.exit('no')\n"),
    ),
    rl(
        "columns as a text",
        f"{_PIPELINE}ctrl_megatron.pipeline:grpo_pipeline {_FUNCS}[texts:f]",
        "tuple of column names",
        _text("texts.py", "def f(items): ...\nf.reads = 'answer'\n"),
    ),
    rl(
        "a right first solution",
        "reward.judge.weight=1",
        "'pass_rate'",
        _cell("pass_rate", None),
    ),
    rl("prompt is empty", "", "row 3: column 'prompt'", _cell("prompt", [])),
    rl("unknown role", "", "row 3", _cell("prompt", [{"role": "bot", "content": "?"}])),
    rl("no content", "", "row 3", _cell("prompt", [{"role": "user", "content": ""}])),
    rl("unknown prompter", "", "row 3: column 'prompter_type'", _cell("prompter_type", "mine")),
    rl("tests are no JSON", "", "row 3: column 'selected_uts'", _cell("selected_uts", ["7"])),
    rl("no tests", "", "row 3: column 'selected_uts'", _cell("selected_uts", [])),
    rl("pass rate of two", "", "row 3: column 'pass_rate'", _cell("pass_rate", 2.0)),
    rl("no time", "", "row 3: column 'time_limit'", _cell("time_limit", -1.0)),
    rl("difficulty of nine", "", "row 3: column 'difficulty'", _cell("difficulty", 9)),
    rl(
        "other rows to validate",
        "data.val_files=val.parquet",
        "val.parquet: row 1",
        _all(
            lambda f: shutil.copyfile(f / "train.parquet", f / "val.parquet"),
            _cell("solution", "x", 1),
        ),
    ),
    rl(
        "a long prompt",
        "data.filter_overlong_prompts=false data.max_prompt_length=4",
        "data.max_prompt_length",
        only_alone=True,
    ),
    rl("only long prompts", "data.max_prompt_length=4", "data.max_prompt_length", only_alone=True),
    # Rewards and pipelines.
    rl("unknown reward", _FUNCS + "[critc]", "did you mean 'critic'"),
    rl(
        "reward's option",
        f"{_FUNCS}[code_format] reward.reward_options.code_format.x=1",
        "code_format",
    ),
    rl("no reward module", _FUNCS + "[nowhere:f]", "nowhere"),
    rl(
        "reward does not parse",
        _FUNCS + "[unparsed:f]",
        "unparsed.py line 2",
        _text("unparsed.py", "\ndef f(:\n"),
    ),
    rl("reward fails", _FUNCS + "[fails:f]", "fails.py line 1", _text("fails.py", "1 / 0\n")),
    rl("no such function", _FUNCS + "[empty:f]", "empty", _text("empty.py", "")),
    rl("no function", _FUNCS + "[number:f]", "not callable", _text("number.py", "f = 1\n")),
    rl("weights of rewards", "reward.reward_weights=[1,2]", "reward.reward_weights"),
    rl("no key of a provider", "reward.provider=e2b", "E2B_API_KEY"),
    rl(
        "no token file",
        "sandbox.endpoint=http://127.0.0.1:1 sandbox.token_file=none",
        "sandbox.token_file",
    ),
    rl(
        "unread by the own pipeline",
        _PIPELINE + "examples.own_pipeline:build reward.run_timeout=3",
        "reward.run_timeout is not read by any node of the pipeline own_pipeline",
    ),
    rl(
        "the own pipeline has no sandbox",
        _PIPELINE + "examples.own_pipeline:build sandbox.workers=2",
        "sandbox.workers",
    ),
    rl("no pipeline module", _PIPELINE + "nowhere:build", "dag.custom_pipeline_fn"),
    rl(
        "pipeline fails",
        _PIPELINE + "built:build",
        "built.py line 2",
        _text("built.py", "def build():\n    return {}['graph']\n"),
    ),
    rl(
        "no graph",
        _PIPELINE + "nothing:build",
        "TaskGraph",
        _text("nothing.py", "def build(): 0\n"),
    ),
    rl("unknown estimator", "algorithm.adv_estimator=grpp", "algorithm.adv_estimator"),
    rl("unknown loss", _A + "actor.policy_loss=none", "policy_loss"),
    rl("no such logger", "trainer.logger=[console,mlflow]", "mlflow"),
    rl("unknown logger", "trainer.logger=[paper]", "trainer.logger"),
    # The folder in which the command writes and continues.
    rl("a file is there", "trainer.default_local_dir=run.yaml", "run.yaml"),
    rl(
        "files of others",
        "",
        "runs/mine/config.yaml",
        _all(
            lambda f: (f / "runs/mine").mkdir(parents=True),
            _text("runs/mine/config.yaml", "my: notes\n"),
        ),
    ),
    rl("in use", "", f"pid {os.getpid()}", _lock),
    rl("no checkpoint", "trainer.resume_mode=none", "trainer.resume_mode"),
    rl(
        "of weights",
        "",
        "weights only",
        lambda f: change_json(_checkpoint(f) / "trainer_state.json", weights_only=True),
    ),
    rl(
        "no state",
        "",
        "trainer_state.json",
        lambda f: (_checkpoint(f) / "trainer_state.json").write_text("{"),
    ),
    rl("no policy", "", "policy", lambda f: shutil.rmtree(_checkpoint(f) / "policy")),
    rl("cut off", "", ".distcp", lambda f: cut(next((_checkpoint(f) / "policy").glob("*.distcp")))),
    rl(
        "no metadata",
        "",
        "was not copied whole",
        lambda f: (_checkpoint(f) / "policy/.metadata").unlink(),
    ),
    rl(
        "metadata of another kind",
        "",
        "no table of a checkpoint's tensors",
        lambda f: (_checkpoint(f) / "policy/.metadata").write_bytes(pickle.dumps({})),
    ),
    rl(
        "metadata that is text",
        "",
        "no table of a checkpoint's tensors",
        lambda f: (_checkpoint(f) / "policy/.metadata").write_text("none"),
    ),
    rl(
        "no counted steps",
        "",
        "optimizer.json: cannot be read",
        lambda f: (_checkpoint(f) / "policy/optimizer.json").write_text("[1"),
    ),
    rl(
        "of fine-tuning",
        "",
        "kl_controller",
        lambda f: change_json(_checkpoint(f) / "trainer_state.json", kl_controller=None),
    ),
    # Fine-tuning.
    sft("of reinforcement", "", "holds kl_controller, reserve", _checkpoint),
    sft("no examples file", "sft.train_files=none.parquet", "none.parquet"),
    sft("no files", "sft.train_files=[]", "sft.train_files"),
    sft("no response column", "", "response", lambda f: drop_column(f / "sft.parquet", "response")),
    sft(
        "response is empty",
        "",
        "row 3: column 'response'",
        _cell("response", "", file="sft.parquet"),
    ),
    sft("prompt is none", "", "row 3: column 'prompt'", _cell("prompt", None, file="sft.parquet")),
    sft("too few examples", "", "2 usable rows", lambda f: keep_rows(f / "sft.parquet", 2)),
    sft("a key of the other", "data.train_batch_size=4", "sft.train_batch_size"),
    Case(
        "long examples",
        "train_sft",
        "sft.max_length=1 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8",
        "sft.max_length",
        only_alone=True,
    ),
    # Evaluation.
    evaluation("no stage", "model", "STAGE=DIR"),
    evaluation("stage twice", "a=model a=model", "each stage once"),
    evaluation("nothing to evaluate", "a=model", "data.val_files"),
    evaluation("no critic", "a=none --set data.val_files=train.parquet", "a=none"),
    evaluation(
        "another critic",
        "a=other --set data.val_files=train.parquet",
        "a=other",
        lambda f: write_model(f / "other", hidden_size=32),
    ),
    # Conversions.
    to_megatron("no out", "--hf model", "--out"),
    to_megatron("no model", "--hf none --out new", "none"),
    to_megatron(
        "garbage",
        "--hf model --out new",
        "model.safetensors",
        _bytes("model/model.safetensors", b"x" * 99),
    ),
    to_megatron(
        "cut off",
        "--hf model --out new",
        "model.safetensors",
        lambda f: cut(f / "model/model.safetensors"),
    ),
    to_megatron("of float8", "--hf model --out new", "float8", _model(torch_dtype="float8")),
    to_megatron("onto others' files", "--hf model --out model", "model is not empty"),
    to_megatron("over others' files", "--hf model --out model --overwrite", "did not write"),
    to_megatron("onto its own", "--hf model --out checkpoint", "--overwrite replaces it"),
    to_megatron(
        "over a changed one",
        "--hf model --out checkpoint --overwrite",
        "notes.txt",
        _text("checkpoint/notes.txt", "!"),
    ),
    to_megatron("onto a file", "--hf model --out run.yaml", "run.yaml"),
    to_hf("no checkpoint", "--checkpoint none --out new", "none"),
    to_hf("no value model", "--checkpoint checkpoint --model value --out new", "value"),
    to_hf("no such model", "--checkpoint checkpoint --model both --out new", "both"),
    to_hf(
        "cut off",
        "--checkpoint checkpoint --out new",
        ".distcp",
        lambda f: cut(next((f / "checkpoint/policy").glob("*.distcp"))),
    ),
    to_hf(
        "no metadata",
        "--checkpoint checkpoint --out new",
        "checkpoint/policy/.metadata: is missing",
        _remove("checkpoint/policy/.metadata"),
    ),
    tool("check_checkpoint", "no checkpoint", "runs", "runs does not exist"),
    tool("check_checkpoint", "nothing of ours", "model", "model holds no checkpoint"),
    to_hf("onto others' files", "--checkpoint checkpoint --out model", "model is not empty"),
    to_hf("over others' files", "--checkpoint checkpoint --out model --overwrite", "did not write"),
    # The plan and the check of the environment.
    plan("no config", "--config none.yaml", "none.yaml"),
    plan("no memory", "--gpu-memory 0", "--gpu-memory"),
    plan("memory as a word", "--gpu-memory much", "--gpu-memory"),
    plan("no shape", "--model-config none.json", "none.json"),
    plan("shape is garbage", "--model-config run.yaml", "run.yaml"),
    tool("check_env", "key without a file", "trainer.seed=1", "--config"),
    tool("check_env", "misspelt", "--config run.yaml trainer.sead=1", "trainer.seed"),
    tool("report", "no run", "model", "model has none of"),
    tool("report", "lines are no JSON", "made", "line 1", _metrics("{\n")),
    tool("report", "a line lacks its step", "made", "'step'", _metrics("{}\n")),
    tool("report", "twice", "made made", "one name", _metrics("")),
    tool("report", "onto others' files", "made model --out run.yaml", "run.yaml is there"),
    # Data.
    data("no problems", _DATA.replace("problems.jsonl", "none.jsonl"), "none.jsonl"),
    data("no solutions", _DATA.replace("solutions.jsonl", "none.jsonl"), "none.jsonl"),
    data(
        "problem is no JSON",
        _DATA,
        "problems.jsonl: line 2",
        _text("problems.jsonl", json.dumps(PROBLEM) + "\n{\n"),
    ),
    data(
        "unknown field",
        _DATA,
        "line 1: unknown key(s) colour",
        _text("problems.jsonl", json.dumps(PROBLEM | {"colour": 1})),
    ),
    data(
        "field of another type",
        _DATA,
        "line 1: key 'statement'",
        _text("problems.jsonl", json.dumps(PROBLEM | {"statement": 1})),
    ),
    data(
        "problem twice",
        _DATA,
        "line 2: key 'id'",
        _text("problems.jsonl", 2 * (json.dumps(PROBLEM) + "\n")),
    ),
    data(
        "no field",
        _DATA,
        "solution",
        _text("solutions.jsonl", '{"id": "a", "problem_id": "seven"}\n'),
    ),
    data(
        "of another problem",
        _DATA,
        "line 1: problem 'six'",
        _text("solutions.jsonl", '{"id": "a", "problem_id": "six", "solution": ""}\n'),
    ),
    data("nothing is left", _DATA + " --max-difficulty -1", "reinforcement learning"),
    data("onto others' files", _DATA.replace("--out data", "--out ."), "train.parquet was not"),
    data("onto a file", _DATA.replace("--out data", "--out run.yaml"), "run.yaml is there"),
    data("no such flag", _DATA + " --fast", "--fast"),
    data("no model", _SOLVE.replace("--solver model", "--solver none"), "none"),
    data("no problems to solve", _SOLVE.replace("problems.jsonl", "none.jsonl"), "none.jsonl"),
    data("none of them", _SOLVE + " --n 0", "--n=0"),
    data("no source", _DATA.replace("--solutions solutions.jsonl", ""), "--solver or --solutions"),
    data("two sources", _DATA + " --solver model", "--solver or --solutions"),
    data("a server without a model", _DATA + " --critic-url http://x/v1", "--critic-url"),
    data("no critic", _DATA + " --critic none", "--critic"),
    data("a share of two", _DATA + " --sft-share 2", "--sft-share"),
    data("none to fine-tune on", _DATA.replace("--sft-share 0", "--sft-share .01"), "fine-tuning"),
    data(
        "only prose",
        _DATA,
        "no readable solution",
        _text("solutions.jsonl", '{"id": "a", "problem_id": "seven", "solution": "Print it."}\n'),
    ),
    problems("unknown format", _READ.replace("ctrl", "mine"), "--format"),
    problems("no input", _READ.replace("problems.jsonl", "none.jsonl"), "none.jsonl"),
    problems("other format", _READ.replace("ctrl", "mbpp"), "problems.jsonl: line 1"),
    problems("split of another set", _READ + " --split train", "--split"),
    problems("no problem is left", _READ + " --max-statement 3", "statement longer"),
    problems("no tests at all", _READ + " --max-tests 0", "--max-tests"),
    problems("no test set", _READ + " --against problems.jsonl", "--against"),
    problems("onto others' file", _READ.replace("read.jsonl", "run.yaml"), "not written"),
    problems(
        "over others' file", _READ.replace("read.jsonl", "run.yaml --overwrite"), "not written"
    ),
    data("cold", _SOLVE + " --temperature -1", "temperature"),
    data(
        "weights are cut off",
        _SOLVE,
        "model.safetensors",
        lambda f: cut(f / "model/model.safetensors"),
    ),
    data(
        "an assert that is no Python",
        _DATA,
        "line 1: test 2 of problem 'seven' is no Python",
        _text(
            "problems.jsonl", json.dumps(FUNCTION | {"tests": ["assert f() == 7", "assert (f()"]})
        ),
    ),
    data(
        "an assert that nothing defines",
        _DATA,
        "line 1: the tests of problem 'seven' cannot be judged",
        _text("problems.jsonl", json.dumps(FUNCTION | {"tests": ["assert g(f()) == 7"]})),
    ),
    data(
        "cases of another form",
        _DATA,
        "line 1: key 'tests' case 1 must be an object",
        _text("problems.jsonl", json.dumps(PROBLEM | {"tests": ['[{"in": "", "out": "7"}]']})),
    ),
    *(
        data(f"{name} as {file}", _DATA, said, _bytes(f"{file}.jsonl", content))
        for file in ("problems", "solutions")
        for name, content, said in (
            ("no UTF-8", b'{"id": "\xe9"}\n', f"{file}.jsonl line 1 is no UTF-8 text: byte 0xe9"),
            ("two bytes a letter", "{}\n".encode("utf-16"), "line 1 is no UTF-8"),
            ("an archive", b"\x1f\x8b\x08" + bytes(range(200)), "line 1 is no UTF-8"),
            ("a cut line", b'{"id": "a", "sta', f"{file}.jsonl: line 1 is not JSON"),
            ("nothing", b"", f"{file}.jsonl"),
        )
    ),
    data(
        "no place", _DATA.replace("--out data", "--out /proc/x"), "--out: /proc cannot be written"
    ),
    data("a device", _DATA.replace("--out data", "--out /dev/full"), "--out: /dev/full"),
    rl("no place", "trainer.default_local_dir=/proc/x", "trainer.default_local_dir: /proc"),
    rl("a device", "trainer.default_local_dir=/dev/full", "/dev/full is no"),
    rl("seed of 70 bits", "trainer.seed=999999999999999999999", "64 bits"),
    rl("no number", _A + "rollout.temperature=nan", "finite number"),
    rl("no base of rotations", "", "rope_theta", _model(rope_theta=-1.0)),
    rl(
        "another form of cases",
        "",
        "row 3: column 'selected_uts' case 1",
        _cell("selected_uts", ['[{"stdin": "", "stdout": "7"}]']),
    ),
    tool(
        "report", "no UTF-8", "made", "metrics.jsonl line 1 is no UTF-8", _metrics_bytes(b"\xff\n")
    ),
    tool("report", "several onto a device", "made runs --out /dev/full", "--out: /dev/full"),
    evaluation("no heat", "a=model --temperature nan --set data.val_files=train.parquet", "finite"),
    evaluation(
        "settings are cut",
        "a=model --out made --set data.val_files=train.parquet",
        "is no file of ctrl-evaluate",
        _settings('{"tool": "ctrl-ev'),
    ),
    # Mutants.
    mutants("no problems", _MUTATE.replace("problems.jsonl", "none.jsonl"), "none.jsonl"),
    mutants("no out", "--problems problems.jsonl", "--out"),
    mutants(
        "problem is no JSON", _MUTATE, "problems.jsonl: line 1", _text("problems.jsonl", "{\n")
    ),
    mutants("nothing to change", _MUTATE + " --max-difficulty -1", "no reference"),
    mutants(
        "reference is no Python",
        _MUTATE,
        "the reference of seven is no Python",
        _text("problems.jsonl", json.dumps(PROBLEM | {"reference": "print(7"})),
    ),
    mutants("level as a word", _MUTATE + " --max-difficulty hard", "--max-difficulty"),
    mutants("onto a file", _MUTATE.replace("new.jsonl", "run.yaml"), "run.yaml is there"),
    mutants("part of others", _MUTATE, "new.jsonl.part", _text("new.jsonl.part", '{"x": 1}\n')),
    mutants("part is no JSON", _MUTATE, "line 1", _text("new.jsonl.part", "hello\n")),
    faults("no mutants", _FAULTS, "mutants.jsonl"),
    faults("no problems", _FAULTS.replace("problems.jsonl", "none.jsonl"), "none.jsonl"),
    faults("a key lacks", _FAULTS, "line 1", _text("mutants.jsonl", '{"id": "a"}\n')),
    faults("unknown kind", _FAULTS, "'kind' must be one of", _mutant(kind="typo")),
    faults("of another problem", _FAULTS, "problem 'six'", _mutant(problem_id="six")),
    faults("of another reference", _FAULTS, "is not the problem's reference", _mutant(right="6")),
    faults("passes every test", _FAULTS, "'pass_rate'", _mutant(pass_rate=1.0)),
    faults("one split only", _FAULTS, "none of split", _mutant()),
    faults("no attempts", _FAULTS + " --test-size 0", "--test-size=0"),
    faults("seed as a word", _FAULTS + " --seed first", "--seed"),
    faults("onto a file", _FAULTS.replace("--out new", "--out run.yaml"), "run.yaml is there"),
    faults(
        "onto others' files",
        _FAULTS.replace("--out new", "--out ."),
        "rl.parquet was not",
        _text("rl.parquet", "mine"),
    ),
    study("no such piece", "--piece grpo.seed9", "grpo.seed9"),
    study("no such flag", "--fast", "--fast"),
    study("nothing to show", "--tables", "no transcript yet"),
    # Trees and the service.
    tree_of("no problems", _TREE.replace("problems.jsonl", "none.jsonl"), "none.jsonl"),
    tree_of(
        "unknown field",
        _TREE,
        "line 1: unknown key(s) colour",
        _text("problems.jsonl", json.dumps(PROBLEM | {"colour": 1})),
    ),
    tree_of("rows without tests", _TREE.replace("problems.jsonl", "sft.parquet"), "sft.parquet"),
    tree_of("no generator", "--problems problems.jsonl --out new", "--generator"),
    tree_of("no model", _TREE.replace("generator model", "generator none"), "none"),
    tree_of("no critic", _TREE + " --critic none", "--critic"),
    tree_of("a server without a model", _TREE + " --critic-url http://x/v1", "--critic-url"),
    tree_of("no width", _TREE + " --widths 1 0", "widths"),
    tree_of("no problem", _TREE + " --limit 0", "--limit=0"),
    tree_of("no room", _TREE + " --max-tokens 4096", "--max-model-len"),
    tree_of("cold", _TREE + " --critique-temperature -1", "--critique-temperature=-1.0"),
    tree_of("top p of two", _TREE + " --top-p 2", "--top-p"),
    tree_of("onto others' files", _TREE.replace("--out new", "--out model"), "model is not empty"),
    tree_of("onto a file", _TREE.replace("--out new", "--out run.yaml"), "run.yaml is there"),
    service("no critic", "--port 0", "--critic"),
    service("no model", "--critic none", "none"),
    service("a short context", _SERVE, "fewer than --max-model-len=2048", _context(64)),
    service("no generator", _SERVE + " --generator none", "--generator"),
    service(
        "weights are cut off",
        _SERVE,
        "model.safetensors",
        lambda f: cut(f / "model/model.safetensors"),
    ),
    service("no chat template", _SERVE, "chat template", _remove("model/chat_template.jinja")),
    service("no port", _SERVE + " --port 99999", "--port=99999"),
    service("no tokens", _SERVE + " --max-tokens 0", "--max-tokens=0"),
    service("no token file", _SERVE + " --token-file none", "none"),
    service("open to all", _SERVE + " --host 0.0.0.0", "0.0.0.0"),
    service("no threads", _SERVE + " --threads 0", "--threads=0"),
    # The rest.
    sandbox("no port", "--port 99999", "--port"),
    sandbox("no workers", "--workers 0", "--workers"),
    sandbox("no token", "--token-file none", "none"),
    *(
        evaluation(name, f"a=model {flags} --set data.val_files=train.parquet", named, spoil)
        for name, flags, named, spoil in (
            ("no critiques", "--samples 0", "--samples=0", lambda f: None),
            ("no turn", "--turns 0", "--turns=0", lambda f: None),
            ("cold", "--temperature -1", "--temperature=-1.0", lambda f: None),
            ("greedy draws", "--samples 4", "--temperature", lambda f: None),
            ("a seed twice", "--temperature 1 --seeds 3 3", "names a seed twice", lambda f: None),
            (
                "onto others' files",
                "--out model",
                "model exists and is no evaluation",
                lambda f: None,
            ),
            ("onto a run", "--out made", "made exists and is no evaluation", _metrics("")),
            ("other settings", "--out made", "turns: 2 -> 1", _evaluation(turns=2)),
            *(
                (f"other {name}", "--out made", f"{name}: 0.5 -> {now}", _evaluation(**{name: 0.5}))
                for name, now in (
                    ("prompt_key", "prompt"),
                    ("run_timeout", "10.0"),
                    ("tokenizer", "{'path': 'model', 'digest': "),
                )
            ),
            ("no settings", "--out made", "is no file of ctrl-evaluate", _settings("{}")),
            ("no pairs", "--pairs none.jsonl", "none.jsonl", lambda f: None),
            ("pair without label", "--pairs p.jsonl", "'label'", _text("p.jsonl", _PAIR)),
            ("long pair", "--pairs p.jsonl", "the pair 1 has", _text("p.jsonl", _LONG_PAIR)),
            ("own words", "--turns 2", "--turns: ", _cell("prompt", "Is it right?")),
        )
    ),
    evaluation(
        "names alike",
        "a.b=model a.b.=model --set data.val_files=train.parquet",
        "differ in punctuation only",
    ),
    *(
        evaluation(name, f"a=said.jsonl {flags} --set data.val_files=train.parquet", named, spoil)
        for name, flags, named, spoil in (
            ("no critiques there", "", "said.jsonl", lambda f: None),
            ("no critique of a row", "", "has no critique of", _text("said.jsonl", _SAID)),
            ("critique without text", "", "'critique'", _text("said.jsonl", '{"id": "x"}\n')),
            ("said twice", "", "x has a critique already", _text("said.jsonl", 2 * _SAID)),
            ("said once, two turns", "--turns 2", "--turns", _text("said.jsonl", _SAID)),
        )
    ),
    tool("report", "evaluation and run", "made runs", "is none", _settings("{}")),
    tool("report", "no transcript", "made", "no transcript yet", _evaluation()),
    tool("report", "pass at nothing", "made --pass-at 0", "--pass-at"),
    sandbox("weak token", "--token-file run.yaml", "run.yaml", _text("run.yaml", "1234\n")),
    sandbox("limits are no JSON", "--limits {", "--limits"),
    sandbox("unknown limit", '--limits {"memory":1}', "memory_mb"),
    sandbox("limit as a word", '--limits {"memory_mb":"much"}', "memory_mb"),
    sandbox("no Python", "--python none", "none"),
    sandbox("unknown isolation", "--isolation total", "total"),
    tool("prepare_smollm2", "onto others' files", "--out model", "model"),
    tool(
        "make_env", "onto others' files", "--venv model --lock {ROOT}/requirements/cpu.txt", "model"
    ),
    tool("make_env", "no lock", "--venv new --lock none.txt", "none.txt"),
]
MODULES = {
    **{name: f"ctrl_megatron.commands.{name}" for name in ("train_rl", "train_sft", "evaluate")},
    **{
        name: f"ctrl_megatron.commands.{name}"
        for name in ("plan", "check_env", "serve_sandbox", "report", "generate", "serve_critic")
    },
    **{name: f"ctrl_megatron.commands.{name}" for name in ("prepare_data", "synthesize")},
    "check_checkpoint": "ctrl_megatron.commands.check_checkpoint",
    "convert_hf_to_megatron": "ctrl_megatron.commands.convert_hf_to_megatron",
    "convert_megatron_to_hf": "ctrl_megatron.commands.convert_megatron_to_hf",
    **{name: f"tools.{name}" for name in ("prepare_smollm2", "make_env")},
    **{name: f"tools.{name}" for name in ("make_mutants", "prepare_mutants")},
    "study": "examples.study_smollm2.study",
}
ROOT = Path(__file__).parents[2]


def change_ids(file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = parquet.read_table(file)
    numbers = pa.array(range(len(table)))
    parquet.write_table(table.set_column(table.column_names.index("id"), "id", numbers), file)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file with its content, every directory."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("right"))


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would begin to work after the checks."""

    def starts(*_: object, **__: object) -> None:
        raise AssertionError("the mistake was not noticed")

    for place in (
        *("ctrl_megatron.run.train.session", "ctrl_megatron.sft.run.session"),
        "ctrl_megatron.run.evaluation.session",
        *(
            "torch.distributed.run.main",
            "ctrl_megatron.commands.synthesize.make_training_files",
        ),
        *(
            "ctrl_megatron.commands.prepare_data.write_text_atomically",
            "ctrl_megatron.commands.prepare_smollm2.convert_gguf_to_hf",
            "tools.make_env.run",
        ),
        "ctrl_megatron.sandbox.__main__.serve_sandbox",
        *(
            "tools.make_mutants.judge",
            "ctrl_megatron.commands.prepare_mutants.tool_output_files",
            "examples.study_smollm2.study._run",
        ),
        *("ctrl_megatron.commands.generate._grow", "ctrl_megatron.generation.sources.open_chats"),
    ):
        monkeypatch.setattr(place, starts)


def starts_ranks(case: Case) -> bool:
    """Whether the command also reports the mistake before it starts ranks."""
    own = case.only_alone or case.environment or "--nproc-per-node" in case.arguments
    return case.tool in TRAINING and not own


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(case, ranks) for case in CASES for ranks in ((1, 2) if starts_ranks(case) else (1,))],
    ids=lambda v: f"{v.tool}-{v.name}" if isinstance(v, Case) else ("alone", "two ranks")[v - 1],
)
def test_a_mistake_is_named_in_a_line_and_nothing_is_written(
    case: Case,
    ranks: int,
    right: Path,
    tmp_path: Path,
    nothing_starts: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "given"
    shutil.copytree(right, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, value in case.environment:
        monkeypatch.setenv(name, value)
    case.spoil(folder)
    before, imported = tree(folder), set(sys.modules)
    code = import_module(MODULES[case.tool]).main(arguments(case, ranks))
    for name in set(sys.modules) - imported:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    out, errors = capfd.readouterr()
    assert code == 2, errors
    lines = errors.strip().splitlines()
    assert case.named.lower() in errors.lower() and out == ""
    assert 1 <= len(lines) <= 3, errors
    assert tree(folder) == before


def arguments(case: Case, ranks: int) -> list[str]:
    given = case.arguments.replace("{ROOT}", str(ROOT)).split()
    if case.tool == "evaluate" and "--set" not in given:
        given.append("--set")
    configured = case.tool in (*TRAINING, "evaluate", "plan") and "--config" not in given
    given = [] if given == ["-"] else [*(("--config", "run.yaml") if configured else ()), *given]
    if case.tool == "evaluate":
        return given
    return [*given, *(("--nproc-per-node", "2", "trainer.n_gpus_per_node=2") if ranks == 2 else ())]


def test_weights_that_have_changed_do_not_go_on_with_what_others_wrote(
    right: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from safetensors.torch import load_file, save_file

    async def drawn(*_: object) -> SimpleNamespace:
        return SimpleNamespace(write=lambda _: None, counts={})

    monkeypatch.setattr("ctrl_megatron.commands.generate._grow", lambda *_: None)
    monkeypatch.setattr("ctrl_megatron.commands.synthesize.make_training_files", drawn)
    folder = tmp_path / "given"
    shutil.copytree(right, folder)
    monkeypatch.chdir(folder)
    grow = partial(import_module(MODULES["generate"]).main, [*_TREE.split(), "--engine", "hf"])
    synthesise = partial(import_module(MODULES["synthesize"]).main, _SOLVE.split())
    for _ in range(2):
        assert grow() == synthesise() == 0
    typed = [*_TREE.split(), "--engine", "hf", "--dtype", "float32"]
    assert import_module(MODULES["generate"]).main(typed) == 2
    assert "dtype: bfloat16, now float32" in capsys.readouterr().err
    file = folder / "model/model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    assert grow() == synthesise() == 2
    told = capsys.readouterr().err
    assert "generator_weights: " in told and "critic_weights: " in told
    assert "begun with other weights of --solver" in told


def test_there_are_enough_mistakes() -> None:
    assert len(CASES) >= 80 and len({(case.tool, case.name) for case in CASES}) == len(CASES)
    assert {case.tool for case in CASES} == set(MODULES)
