"""Keys that do not fit together are refused with the key and the remedy."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest
from refusals import ACTOR, PATHS, messages

from ctrl_megatron.config import (
    COUPLED_GRPO_PIPELINE,
    GRPO_PIPELINE,
    KEYS,
    Config,
    Purpose,
    check_world_size,
    load_config,
    require_files_exist,
)
from ctrl_megatron.config.actor_rollout_ref import POLICY_LOSSES
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.config.algorithm import ADV_ESTIMATORS
from ctrl_megatron.config.checks import model_directories
from ctrl_megatron.config.foreign import FOREIGN
from ctrl_megatron.errors import UserError

ROLLOUT = "actor_rollout_ref.rollout."
MEGATRON = ACTOR + "megatron."
CORRECTED = "algorithm.rollout_correction.rollout_is=token"


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (
            (ACTOR + "use_kl_loss=true", "algorithm.use_kl_in_reward=true"),
            ["use_kl_loss", "use_kl_in_reward", "turn one of them off"],
        ),
        (
            ("data.train_batch_size=100", ACTOR + "ppo_mini_batch_size=30"),
            ["ppo_mini_batch_size=30", "divide", "train_batch_size=100"],
        ),
        (
            (ROLLOUT + "engine_kwargs.trust_remote_code=true",),
            ["rollout.engine_kwargs.trust_remote_code", "leave it out"],
        ),
        ((MEGATRON + "sequence_parallel=true",), ["tensor_model_parallel_size", "2 or more"]),
        (("reward.reward_funcs=[]",), ["reward_funcs=[]", "at least one"]),
        (("reward.reward_funcs=[code,code]",), ["reward_funcs=['code', 'code']", "each once"]),
        (
            ("reward.reward_funcs=[critic,code]", "reward.reward_weights=[1.0]"),
            ["reward_weights has 1 entries for 2", "one each"],
        ),
        (("reward.reward_weights=[0.0]",), ["reward_weights are all 0"]),
        (
            ("reward.reward_options.code_format={final_newline: false}",),
            ["reward_options.code_format", "reward_funcs"],
        ),
        (
            ("reward.reward_funcs=[code]", "algorithm.filter_groups.enable=true"),
            ["filter_groups", "critic's reward", "turn filter_groups off"],
        ),
        (
            (MEGATRON + "virtual_pipeline_model_parallel_size=2",),
            ["pipeline_model_parallel_size", "2 or more"],
        ),
        ((ROLLOUT + "quantization=fp8",), ["quantization=fp8", "rollout_correction.rollout_is"]),
        *(
            (
                (ROLLOUT + "quantization=fp8", CORRECTED, *own),
                ["rollout.quantization=fp8", *fragments],
            )
            for own, fragments in (
                ((ROLLOUT + "name=sglang",), ["name=sglang", "vllm or hf"]),
                ((ROLLOUT + "weight_transport=shards",), ["weight_transport=shared_memory"]),
                (
                    (ROLLOUT + "adapter_push=true", "actor_rollout_ref.model.lora_rank=4"),
                    ["leave", "adapter_push out"],
                ),
            )
        ),
        ((ROLLOUT + "n=1",), ["rollout.n=1", "grpo", "2 or more"]),
        ((ROLLOUT + "temperature=0",), ["temperature=0", "greater than 0", "greedy"]),
        ((ROLLOUT + "temperature=-1",), ["temperature=-1.0", "greater than 0"]),
        ((ROLLOUT + "top_p=0",), ["top_p=0.0", "(0, 1]"]),
        ((ROLLOUT + "top_p=1.5",), ["top_p=1.5", "(0, 1]"]),
        ((ROLLOUT + "top_k=0",), ["top_k=0", "-1"]),
        ((ROLLOUT + "tensor_model_parallel_size=2",), ["name=hf", "vllm or sglang"]),
        (("algorithm.adv_estimator=gae", "critic.enable=false"), ["gae", "value model"]),
        (("critic.enable=true",), ["critic.enable=true", "never reads"]),
        (("trainer.critic_warmup=2",), ["critic_warmup=2", "no value model"]),
        ((ROLLOUT + "n=1", "algorithm.filter_groups.enable=true"), ["filter_groups", "n to 2"]),
        (
            (
                "algorithm.rollout_correction.rollout_rs=token",
                "algorithm.rollout_correction.rollout_rs_threshold_lower=3",
            ),
            ["rollout_rs_threshold_lower=3.0", "nothing would stay"],
        ),
        (
            (
                "reward.overlong_buffer.enable=true",
                "reward.overlong_buffer.len=900",
            ),
            ["overlong_buffer.len=900", "max_response_length=768"],
        ),
        (("algorithm.adv_estimator=grop",), ["adv_estimator", "did you mean 'grpo'"]),
        ((ACTOR + "policy_loss=vanila",), ["policy_loss", "did you mean 'vanilla'"]),
        (
            ("trainer.logger=[console, tensorbord]",),
            ["logger", "jsonl, tensorboard, wandb", "module:Class"],
        ),
        (("sandbox.isolation=nome",), ["sandbox.isolation", "strict, standard, none"]),
        (
            (
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.max_num_gen_batches=3",
                "data.gen_batch_size=300",
            ),
            ["max_num_gen_batches=3", "900 groups at most", "data.train_batch_size=1024"],
        ),
        (
            ("algorithm.filter_groups.enable=true", ROLLOUT + "top_k=1"),
            [ROLLOUT + "top_k=1", "filter_groups.enable=true finds no difference"],
        ),
        ((ROLLOUT + "top_k=1",), [ROLLOUT + "top_k=1", "adv_estimator=grpo finds no difference"]),
        ((ROLLOUT + "max_model_len=3000",), ["max_model_len=3000", "3328", "leave it unset"]),
        ((ACTOR + "ppo_max_token_len_per_gpu=2000",), ["2304", "raise it"]),
        ((ROLLOUT + "log_prob_max_token_len_per_gpu=9",), ["2304", "raise it"]),
        (("algorithm.kl_ctrl.type=adaptive",), ["adaptive", "use_kl_in_reward=true"]),
        ((ACTOR + "optim.betas=[0.9, 1]",), ["betas", "[0, 1)"]),
        (("sandbox.endpoint=localhost:80",), ["sandbox.endpoint", "http://"]),
        (("trainer.experiment_name=../x",), ["experiment_name", "plain directory name"]),
        (('trainer.experiment_name="a\\0b"',), ["experiment_name", "control characters"]),
        (('trainer.experiment_name="a\\nb"',), ["experiment_name", "control characters"]),
        (('trainer.experiment_name="\\e[31mred"',), ["experiment_name", "control characters"]),
        (('trainer.experiment_name="a\\u202eb"',), ["experiment_name", "control characters"]),
        ((f"trainer.experiment_name={'n' * 300}",), ["experiment_name", "200 bytes"]),
        ((f"trainer.experiment_name={'é' * 150}",), ["experiment_name", "200 bytes"]),
        (
            ("trainer.logger=[wandb]", f"trainer.project_name={'n' * 300}"),
            ["project_name", "200 bytes"],
        ),
        (("trainer.val_before_train=true",), ["data.val_files"]),
        (("trainer.test_freq=5",), ["data.val_files"]),
        (("data.val_files=[a/t.pq, a/t.pq]",), ["would be reported as a_t, a_t", "rename"]),
        (("data.val_files=[a/t.pq, b/reward.pq]",), ["reported as t, reward", "rename"]),
        (("trainer.save_freq=0",), ["save_freq=0", "-1 or at least 1"]),
        (("data.max_prompt_length=0",), ["data.max_prompt_length=0", "at least 1"]),
        (("dag.custom_pipeline_fn=my.module.fn",), ["package.module:function"]),
        (
            ("actor_rollout_ref.model.dtype=float16",),
            ["model.dtype", "bfloat16, float32, auto, not 'float16'"],
        ),
        ((ROLLOUT + "dtype=float16",), ["rollout.dtype", "bfloat16, float32, not 'float16'"]),
    ],
)
def test_each_conflict_is_one_line_with_key_and_remedy(
    overrides: tuple[str, ...], fragments: list[str]
) -> None:
    found = messages(*overrides)
    hits = [line for line in found if all(fragment in line for fragment in fragments)]
    assert len(hits) == 1, found


def test_a_key_of_another_trainer_is_refused_with_what_holds_here() -> None:
    for key, foreign in FOREIGN.items():
        assert key not in KEYS and (foreign.here in KEYS or foreign.reason), key
        there = f"here that is {foreign.here}"
        told = there if foreign.here else f"{foreign.reason}; leave it out"
        assert messages(f"{key}=1") == [f"override '{key}=1': unknown key '{key}': {told}"]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ("[]", ()),
        ("test.parquet", ()),
        ("[math.parquet, gsm8k.parquet]", ("math", "gsm8k")),
        ("[gsm8k/test.parquet, math/test.parquet]", ("gsm8k_test", "math_test")),
        ("[a/test.parquet, b/test.parquet, b/hard.parquet]", ("a_test", "b_test", "hard")),
        ("['my set (2).parquet', b.parquet]", ("my_set__2_", "b")),
    ],
)
def test_validation_files_need_different_names(files: str, names: tuple[str, ...]) -> None:
    assert load_config(None, [f"data.val_files={files}"], "none").data.val_set_names == names


def test_the_pipeline_without_revisions_needs_nothing_of_them() -> None:
    grpo = (f"dag.custom_pipeline_fn={GRPO_PIPELINE}", "reward.reward_funcs=[code]")
    config = load_config(None, [*PATHS, *grpo, "algorithm.filter_groups.enable=true"])
    assert not config.writes_revisions and config.max_model_len == 1536 + 768
    (line,) = messages(*grpo, ROLLOUT + "revision_max_tokens=9")
    assert "is not read with dag.custom_pipeline_fn=" in line
    (line,) = messages(grpo[0])
    assert "names critic" in line and line.endswith("name code or functions of your own")
    assert len(messages(*grpo, "algorithm.adv_estimator=mine")) == 1


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        (ROLLOUT + "name=vllm", ["name=vllm samples token by token", "name=diffusion"]),
        ("actor_rollout_ref.model.shared_prefix=true", ["shared_prefix=true is not read", "leave"]),
        ("algorithm.adv_estimator=gae", ["a value model reads them", "other than gae"]),
        ("algorithm.adv_estimator=remax", ["without a greedy baseline"]),
        ("algorithm.use_kl_in_reward=true", ["use_kl_loss=true in the place of"]),
        (CORRECTED, ["rollout_correction.rollout_is", "leave it out"]),
        (ACTOR + "ppo_max_token_len_per_gpu=6911", ["three masked versions", "raise it to 6912"]),
    ],
)
def test_coupled_scores_exclude_what_reads_log_probs(override: str, fragments: list[str]) -> None:
    coupled = (f"dag.custom_pipeline_fn={COUPLED_GRPO_PIPELINE}", "reward.reward_funcs=[code]")
    given = (*coupled, ROLLOUT + "name=diffusion", "algorithm.adv_estimator=rloo")
    assert messages(*given) == []
    (line,) = messages(*given, override)
    assert all(fragment in line for fragment in fragments), line


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("placement=auto", ["placement.auto knows", "one policy"]),
        ("agent1.rollout.n=1", ["policies.agent1: ", "rollout.n=1", "to 2 or more"]),
        ("dag.custom_pipeline_fn=null", ["agent_group 1", "a pipeline of your own"]),
        ("policies={}", ["kind=agent1", "set policies"]),
        (
            "policies={solver: {actor_rollout_ref: {model: {path: solver}}}}",
            ["names solver", "name agent1"],
        ),
        ("policies={agent1: 3}", ["policies.agent1 is a group"]),
        ("policies.agent1.actor_rollout_ref.model.path=null", ["agent1 lacks", "model.path"]),
        ("policies.agent1.data.max_response_length=3", ["belongs to engines", "rollout.name)"]),
        ("policies.agent1.data.train_batch_size=3", ["train_batch_size", "for all policies"]),
        (
            "policies.agent1.actor_rollout_ref.model.tokenizer_path=solver",
            ["policies.agent1.actor_rollout_ref.model.tokenizer_path", "belongs to engines"],
        ),
        ("policies.agent1.actor_rollout_ref.rollout.staleness=1", ["staleness", "for all"]),
        (
            "policies={agent1: {actor_rollout_ref: {model: {path: solver, dtype: auto}, "
            "rollout: {name: hf}}}}",
            ["policies.agent1.actor_rollout_ref.model.dtype=auto is measured"],
        ),
        ("policies.agent1.critic.nothing=1", ["policies.agent1.", "critic.nothing"]),
        ("policies.agent1.actor_rollout_ref.ref.sync_steps=-1", ["policies.agent1", "sync_steps"]),
    ],
)
def test_what_a_second_policy_cannot_do_is_refused(override: str, fragments: list[str]) -> None:
    second = (
        *("agent1.model.path=solver", "dag.custom_pipeline_fn=mine:build"),
        *("actor_rollout_ref.proxy.kind=agent1", ACTOR + "use_kl_loss=true"),
    )
    assert messages(*second) == []
    (line,) = messages(*second, override)
    assert all(fragment in line for fragment in fragments), line


def test_a_second_policy_has_the_settings_of_the_first_but_for_its_own() -> None:
    second = ("agent1.model.path=solver", "agent1.optim.lr=1e-3", "agent1.rollout.n=2")
    own = (ACTOR + "clip_ratio=0.1", "actor_rollout_ref.ref.model.path=before")
    given = (*PATHS, *second, *own, ACTOR + "use_kl_loss=true", "dag.custom_pipeline_fn=mine:build")
    actor, solver = (config.actor_rollout_ref for config in load_config(None, given).agents)
    assert (actor.model.path, solver.model.path) == ("model", "solver")
    assert actor.model.tokenizer == solver.model.tokenizer == "model"
    assert (actor.actor.optim.lr, solver.actor.optim.lr) == (1e-6, 1e-3)
    assert (actor.rollout.n, solver.rollout.n) == (8, 2)
    assert actor.actor.clip_ratio == solver.actor.clip_ratio == 0.1
    # Its reference is its own start.
    assert (actor.ref.model.path, solver.ref.model.path) == ("before", None)
    assert len(load_config(None, PATHS).agents) == 1


@pytest.mark.parametrize(
    ("ranks", "apart", "own", "fragment"),
    [
        (3, "[2]", "tensor_model_parallel_size=2", ""),
        (4, "[]", "tensor_model_parallel_size=2", ""),
        (3, "[]", "tensor_model_parallel_size=2", "start a multiple of 2 ranks"),
        (4, "[3]", "tensor_model_parallel_size=1", ""),
        (5, "[4]", "tensor_model_parallel_size=1", "does not divide over 4 data-parallel ranks"),
    ],
)
def test_the_layout_of_every_policy_fits_the_actors_ranks(
    ranks: int, apart: str, own: str, fragment: str
) -> None:
    given = (
        *(*PATHS, "dag.custom_pipeline_fn=mine:build", "agent1.model.path=solver"),
        *(f"trainer.n_gpus_per_node={ranks}", f"placement.reference={apart}"),
        *("data.train_batch_size=6", ACTOR + "ppo_mini_batch_size=6", ACTOR + "use_kl_loss=true"),
        ACTOR + f"megatron.tensor_model_parallel_size={ranks - (apart != '[]')}",
        f"policies.agent1.actor_rollout_ref.actor.megatron.{own}",
    )
    config = load_config(None, given)
    if not fragment:
        return check_world_size(config, ranks)
    with pytest.raises(UserError, match=fragment) as caught:
        check_world_size(config, ranks)
    assert str(caught.value).startswith("policies.agent1: ")


def test_a_policy_that_names_an_engine_has_its_own_with_its_tokenizer() -> None:
    own = "policies.agent{}.actor_rollout_ref."
    given = (
        *PATHS,
        *("dag.custom_pipeline_fn=mine:build", "actor_rollout_ref.rollout.kv_cache_gib=2"),
        "actor_rollout_ref.rollout.name=vllm",
        *(own.format(1) + "model.path=first", own.format(2) + "model.path=second"),
        *(own.format(2) + "rollout.name=hf", "trainer.turn_steps=2", "trainer.critic_warmup=1"),
    )
    config = load_config(None, (*given, "algorithm.adv_estimator=gae"))
    assert config.engine_owners == (0, 0, 2)
    assert [one.actor_rollout_ref.rollout.name for one in config.agents] == ["vllm", "vllm", "hf"]
    assert all(one.actor_rollout_ref.rollout.kv_cache_gib == 2 for one in config.agents)
    tokenizers = [one.actor_rollout_ref.model.tokenizer for one in config.agents]
    assert tokenizers == ["model", "model", "second"]
    turns = [[one.learns_in(step) for one in config.agents].index(True) for step in range(1, 9)]
    assert turns == [0, 0, 1, 1, 2, 2, 0, 0]
    assert not any(one.learns_in(0) for one in config.agents)


def test_every_policy_may_learn_in_its_own_way() -> None:
    own = "policies.agent1."
    given = (
        *(*PATHS, ACTOR + "use_kl_loss=true", "dag.custom_pipeline_fn=mine:build"),
        *("actor_rollout_ref.model.lora_rank=4", f"{own}actor_rollout_ref.model.path=solver"),
        *(f"{own}actor_rollout_ref.model.lora_rank=0", f"{own}algorithm.adv_estimator=gae"),
        *(f"{own}critic.optim.lr=3e-4", f"{own}actor_rollout_ref.ref.sync_steps=5"),
        "policies.agent2.actor_rollout_ref.model.path=third",
    )
    actor, solver, third = load_config(None, given).agents
    ranks = [own.actor_rollout_ref.model.lora_rank for own in (actor, solver, third)]
    assert ranks == [4, 0, 4]
    assert [own.needs_value_model for own in (actor, solver, third)] == [False, True, False]
    assert solver.critic.optim.lr == 3e-4 and solver.refreshes_reference
    assert not third.refreshes_reference and third.policies == {}


def test_a_reference_that_follows_the_actor_is_a_copy_of_its_weights() -> None:
    sync = (ACTOR + "use_kl_loss=true", "actor_rollout_ref.ref.sync_steps=8")
    assert messages(*sync, "actor_rollout_ref.ref.sync_mix=0.6") == []
    (line,) = messages(*sync, "actor_rollout_ref.model.lora_rank=4")
    assert "ref.sync_steps=8" in line and "lora_rank=4" in line
    (line,) = messages(ACTOR + "use_kl_loss=true", "actor_rollout_ref.ref.sync_mix=0.6")
    assert "sync_mix=0.6 is not read" in line


def test_offloading_fits_a_run_that_has_what_is_moved() -> None:
    switches = [MEGATRON + f"{name}_offload=true" for name in ("param", "grad", "optimizer")]
    assert messages(*switches, ACTOR + "use_kl_loss=true") == []


def test_names_of_own_algorithms_are_left_to_the_registry() -> None:
    own = ("algorithm.adv_estimator=mine", ACTOR + "policy_loss=mine")
    assert len(messages(*own)) == 2
    assert messages(*own, "dag.custom_pipeline_fn=my.module:build") == []


@pytest.mark.parametrize(
    ("purpose", "missing"),
    [
        ("rl", ["actor_rollout_ref.model.path", "data.train_files"]),
        ("sft", ["actor_rollout_ref.model.path", "sft.train_files"]),
        ("none", []),
    ],
)
def test_required_keys_depend_on_the_purpose(purpose: str, missing: list[str]) -> None:
    if not missing:
        assert load_config(None, [], purpose) == Config()  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError) as caught:
        load_config(None, [], purpose)  # type: ignore[arg-type]
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == missing
    assert all("not set" in line for line in lines)


def test_fine_tuning_shares_the_token_budget_but_not_the_longest_sequence() -> None:
    paths = ["actor_rollout_ref.model.path=m", "sft.train_files=f"]
    budget = ACTOR + "ppo_max_token_len_per_gpu="
    load_config(None, [*paths, budget + "1024"], "sft")
    with pytest.raises(ValueError, match=r"=1023 cannot hold .* sft\.max_length=1024; raise"):
        load_config(None, [*paths, budget + "1023"], "sft")


UNBOUNDED = {
    "actor_rollout_ref.actor.clip_cov_lb",
    "actor_rollout_ref.actor.clip_cov_ub",
    "reward.reward_weights",
    "reward_model.weight",
}
"""Covariances have both signs, like rewards."""


def test_tables_of_options_are_what_the_algorithms_read() -> None:
    from ctrl_megatron.algorithms import POLICY_LOSS_REGISTRY, get_adv_estimator

    def declared(switch: str, name: str) -> set[str]:
        return {
            key.name.rpartition(".")[2]
            for key in KEYS.values()
            for condition in key.read
            if condition.switches == (switch,) and condition.holds(name)
        }

    options = {key.rpartition(".")[2] for key in KEYS if key.startswith("algorithm.")}
    for name in ADV_ESTIMATORS:
        read = declared("algorithm.adv_estimator", name)
        assert read == inspect.signature(get_adv_estimator(name)).parameters.keys() & options, name
    assert set(POLICY_LOSSES) == set(POLICY_LOSS_REGISTRY)


def test_every_number_has_a_range() -> None:
    """Every number except seeds has bounds; without them nonsense would be accepted."""
    for key in KEYS.values():
        is_number = {int, float} & {key.type, *typing.get_args(key.type)}
        if not is_number or key.name.endswith("seed"):
            continue
        if key.name in UNBOUNDED or key.name.startswith(("reward.transition.", "reward.judge.")):
            continue
        value = "[-7, -7]" if isinstance(key.default, tuple) else "-7"
        found = [line for line in messages(f"{key.name}={value}") if " must be " in line]
        assert any(line.startswith(f"override '{key.name}={value}': ") for line in found), key.name


def test_missing_files_are_named_with_their_keys(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = load_config(
        None, [f"data.train_files={tmp_path}/a.parquet", f"actor_rollout_ref.model.path={model}"]
    )
    with pytest.raises(ValueError) as caught:
        require_files_exist(config, "rl")
    text = str(caught.value)
    # The other roles' models and the tokenizer are the actor's, which is checked once.
    assert "data.train_files" in text and text.count("is not a Hugging Face model directory") == 1
    (tmp_path / "a.parquet").touch()
    (model / "config.json").touch()
    (model / "tokenizer_config.json").touch()
    require_files_exist(config, "rl")


@pytest.mark.parametrize(
    ("nodes", "each", "started", "remedy"),
    [
        (1, 2, 1, "trainer.n_gpus_per_node=1"),
        (2, 4, 6, "trainer.n_gpus_per_node=3"),
        (2, 4, 5, "trainer.nnodes=1 trainer.n_gpus_per_node=5"),
    ],
)
def test_as_many_ranks_must_start_as_were_announced(
    nodes: int, each: int, started: int, remedy: str
) -> None:
    keys = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={each}"]
    config = load_config(None, [*PATHS, *keys])
    check_world_size(config, nodes * each)
    with pytest.raises(ValueError) as caught:
        check_world_size(config, started)
    for part in (*keys, f"{started} were started", f"--nproc-per-node {each}", remedy):
        assert part in str(caught.value)
    mended = load_config(
        None,
        [
            *PATHS,
            *keys,
            *remedy.split(),
            "data.train_batch_size=30",
            ACTOR + "ppo_mini_batch_size=30",
        ],
    )
    check_world_size(mended, started)


def test_world_size_must_fit_layout_and_batches() -> None:
    sizes = (MEGATRON + "tensor_model_parallel_size=2", MEGATRON + "pipeline_model_parallel_size=2")
    batches = ("data.train_batch_size=6", ACTOR + "ppo_mini_batch_size=6")

    def check(ranks: int, purpose: Purpose = "rl") -> None:
        announced = f"trainer.n_gpus_per_node={ranks}"
        check_world_size(load_config(None, [*PATHS, *sizes, *batches, announced]), ranks, purpose)

    check(4)
    check(12)
    with pytest.raises(ValueError, match=r"multiple of 4 ranks"):
        check(6)
    with pytest.raises(ValueError, match=r"train_batch_size=6 .* 4 data-parallel ranks"):
        check(16)
    with pytest.raises(ValueError, match=r"sft\.train_batch_size=16 .* 3 data-parallel"):
        check(12, "sft")


@pytest.mark.parametrize(
    ("argument", "taken"),
    [
        ("enable_expert_parallel=true", True),
        ("ep_size=1", True),
        ("ep_size=2", False),
        ("enable_eplb=true", False),
        ("pipeline_parallel_size=2", False),
    ],
)
def test_shards_are_refused_for_engines_that_cut_in_other_ways(argument: str, taken: bool) -> None:
    rollout = "actor_rollout_ref.rollout."
    cut = rollout + f"engine_kwargs.{argument}"
    assert messages(cut) == []
    found = messages(cut, rollout + "weight_transport=shards")
    if taken:
        assert found == []
    else:
        (line,) = found
        name = argument.split("=")[0]
        assert "weight_transport=shards" in line and f"engine_kwargs.{name}" in line


def test_mapped_memory_is_refused_for_engines_on_other_devices() -> None:
    rollout = "actor_rollout_ref.rollout."
    keys = [rollout + "weight_transport=cuda_ipc", rollout + "placement=dedicated"]
    (line,) = messages(*keys, rollout + "n_gpus_per_node=1")
    assert "cuda_ipc" in line and "placement=dedicated" in line


def test_messages_are_refused_for_engines_on_the_same_devices() -> None:
    rollout = "actor_rollout_ref.rollout."
    (line,) = messages(rollout + "weight_transport=nccl")
    assert "nccl" in line and "placement=colocated" in line
    apart = [rollout + "placement=dedicated", rollout + "n_gpus_per_node=1"]
    assert messages(rollout + "weight_transport=nccl", *apart) == []


CORRECTED = "algorithm.rollout_correction.rollout_is=token"
IN_FLIGHT = [
    *("rollout.update_in_flight=true", "rollout.staleness=1", "rollout.placement=dedicated"),
    *(
        "rollout.n_gpus_per_node=1",
        "proxy.kind=engine",
        "proxy.engine.n_gpus_per_node=1",
        CORRECTED,
    ),
]


@pytest.mark.parametrize(
    ("further", "alone"),
    [
        ([], True),
        (["rollout.adapter_push=false"], False),
        (["rollout.name=vllm"], True),
        (["rollout.name=sglang"], True),
        (["model.lora_rank=0"], False),
        (["rollout.weight_transport=shards"], False),
        (["rollout.quantization=fp8", "rollout.name=vllm", CORRECTED], False),
        (["proxy.model.path=other"], False),
        (["proxy.model.path=other", "proxy.kind=engine"], True),
        (["rollout.name=vllm", *IN_FLIGHT], False),
        (IN_FLIGHT, True),
    ],
)
def test_adapters_go_alone_wherever_engines_can_take_them(further: list[str], alone: bool) -> None:
    family = "actor_rollout_ref."
    keys = ["model.lora_rank=4", "model.path=own", "proxy.model.path=own", "rollout.name=hf"]
    keys = [key if key == CORRECTED else family + key for key in (*keys, *further)]
    config = load_config(None, keys, "none")
    assert pushes_adapters(config) == alone


@pytest.mark.parametrize("transport", ["shards", "cuda_ipc"])
def test_adapters_go_as_wholes(transport: str) -> None:
    keys = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.adapter_push=true"]
    assert messages(*keys) == []
    (line,) = messages(*keys, f"actor_rollout_ref.rollout.weight_transport={transport}")
    assert "adapter_push" in line and "weight_transport=shared_memory" in line


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("placement=auto", ["no proposal", "placement.auto"]),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2", ["cuts no model"]),
        (MEGATRON + "recompute_granularity=selective", ["whole layers", "set it to full"]),
        (MEGATRON + "tensor_model_parallel_size=2", ["is not read with", "strategy=megatron"]),
        (MEGATRON + "moe_z_loss_coeff=0.1", ["is not read with", "strategy=megatron"]),
        (ROLLOUT + "name=diffusion", ["no masked-diffusion models"]),
        (ROLLOUT + "weight_transport=shards", ["use shared_memory"]),
        (ROLLOUT + "quantization=fp8", ["leave", "quantization out"]),
    ],
)
def test_what_models_of_transformers_cannot_do_is_refused(
    override: str, fragments: list[str]
) -> None:
    keys = [ACTOR + "strategy=fsdp", ROLLOUT + "name=hf"]
    assert messages(*keys) == []
    assert messages(*keys, MEGATRON + "param_offload=true") == []
    hits = [m for m in messages(*keys, override) if all(part in m for part in fragments)]
    assert len(hits) == 1, hits


def test_engines_take_whole_hosts() -> None:
    rollout = "actor_rollout_ref.rollout."
    vllm = (rollout + "name=vllm", rollout + "tensor_model_parallel_size=2")
    dedicated = (*vllm, rollout + "placement=dedicated")
    assert messages(*dedicated, rollout + "n_gpus_per_node=4") == []
    (line,) = messages(*dedicated)
    assert "placement=dedicated needs actor_rollout_ref.rollout.n_gpus_per_node" in line
    (line,) = messages(*dedicated, rollout + "n_gpus_per_node=3")
    assert "n_gpus_per_node=3 is no multiple of" in line and "size=2" in line
    (line,) = messages(
        *dedicated, rollout + "n_gpus_per_node=4", rollout + "free_cache_engine=true"
    )
    assert "free_cache_engine=true is not read with" in line
    batches = ("data.train_batch_size=30", ACTOR + "ppo_mini_batch_size=30")
    three = load_config(None, [*PATHS, *batches, *vllm, "trainer.n_gpus_per_node=3"])
    with pytest.raises(ValueError, match=r"size=2 does not divide trainer\.n_gpus_per_node=3"):
        check_world_size(three, 3)
    # Dedicated engines do not care.
    own = [*PATHS, *batches, *dedicated, rollout + "n_gpus_per_node=4"]
    check_world_size(load_config(None, [*own, "trainer.n_gpus_per_node=3"]), 3)


def test_an_engine_may_have_all_devices_of_several_hosts() -> None:
    rollout = "actor_rollout_ref.rollout."
    keys = ("name=vllm", "tensor_model_parallel_size=4", "placement=dedicated", "n_gpus_per_node=2")
    spanning, two = tuple(rollout + key for key in keys), "trainer.nnodes=2"
    assert messages(two, *spanning) == []
    (line,) = messages("trainer.nnodes=3", *spanning)
    assert "n_gpus_per_node=2 is no multiple of" in line and "whole hosts" in line
    assert messages(two, *spanning, rollout + "name=sglang") == []
    line, _ = messages(two, *spanning, rollout + "name=hf")
    assert "size=4 is not possible with actor_rollout_ref.rollout.name=hf" in line
    (line,) = messages(two, *spanning, "trainer.min_nnodes=1")
    assert "needs all hosts" in line and "trainer.min_nnodes=1" in line
    adapters = ("actor_rollout_ref.model.lora_rank=4", rollout + "adapter_push=true")
    (line,) = messages(two, *spanning, *adapters)
    assert "adapter_push=true writes adapters on the host that serves" in line
    sizes = (two, "trainer.n_gpus_per_node=2", *spanning[:2])
    check_world_size(load_config(None, [*PATHS, *sizes]), 4)
    with pytest.raises(ValueError, match=r"size=4 does not divide trainer\.n_gpus_per_node=2"):
        alone = ("trainer.nnodes=1", *sizes[1:])
        check_world_size(load_config(None, [*PATHS, *alone]), 2)


def test_experts_are_spread_over_the_ranks_of_a_stage() -> None:
    sizes = ("tensor_model_parallel_size=2", "sequence_parallel=true")
    keys = [*PATHS, *(MEGATRON + size for size in sizes), "trainer.n_gpus_per_node=4"]
    spread = MEGATRON + "expert_model_parallel_size="
    check_world_size(load_config(None, [*keys, spread + "2"]), 4)
    alone = MEGATRON + "expert_tensor_parallel_size=1"
    check_world_size(load_config(None, [*keys, spread + "4", alone]), 4)
    with pytest.raises(ValueError, match=r"size=4 x .*size=2 does not divide the 4 ranks"):
        check_world_size(load_config(None, [*keys, spread + "4"]), 4)


def test_derived_values_follow_their_sources() -> None:
    config = load_config(None, PATHS)
    model = config.actor_rollout_ref
    assert model.model.tokenizer == "model"
    assert model.rollout_dtype == "bfloat16"
    assert config.max_model_len == 1536 + 768 + 1024
    assert str(config.trainer.run_dir) == "runs/run"
    assert not config.needs_reference and not config.needs_value_model
    assert model.log_prob_token_budget == model.actor.ppo_max_token_len_per_gpu


def test_a_proxy_has_the_keys_of_its_kind_only() -> None:
    proxy = "actor_rollout_ref.proxy."
    assert not messages(f"{proxy}model.path=other")
    for kind, given in {
        "shared": ("engine.max_num_seqs=4", "api.model=m"),
        "engine": ("api.model=m",),
        "api": ("engine.max_num_seqs=4", "model.path=other"),
    }.items():
        server = (f"{proxy}api.base_url=http://a/v1", f"{proxy}api.model=m")
        needed = server if kind == "api" else ()
        assert not messages(f"{proxy}kind={kind}", *needed)
        for key in given:
            (line,) = messages(f"{proxy}kind={kind}", *needed, proxy + key)
            name = (proxy + key).partition("=")[0]
            assert name in line and f"is not read with {proxy}kind" in line
    found = messages(f"{proxy}kind=api")
    assert [line.partition(";")[0] for line in found] == [
        f"{proxy}kind=api needs {proxy}api.base_url",
        f"{proxy}kind=api needs {proxy}api.model",
    ]
    sizes = ("engine.name=vllm", "engine.n_gpus_per_node=3", "engine.tensor_model_parallel_size=2")
    (line,) = messages(f"{proxy}kind=engine", *(proxy + size for size in sizes))
    assert f"{proxy}engine.n_gpus_per_node=3 is no multiple of" in line


def test_every_directory_of_a_policy_is_looked_for() -> None:
    own = "policies.agent1."
    given = (
        *(*PATHS, "dag.custom_pipeline_fn=mine:build"),
        *(f"{own}actor_rollout_ref.model.path=solver", f"{own}algorithm.adv_estimator=gae"),
        f"{own}critic.model.path=judge",
    )
    found = model_directories(load_config(None, given), "rl")
    assert {key: path for key, path in found.items() if key.startswith(own)} == {
        f"{own}actor_rollout_ref.model.path": "solver",
        f"{own}critic.model.path": "judge",
    }
