"""What a reader of siiRL's guide types: ``examples/guide``, and what is said of the rest."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
)
from ctrl_megatron.config import KEYS, load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import always, node
from ctrl_megatron.pipeline import (
    DAGWorker,
    Node,
    NodeOutput,
    NodeType,
    SampleInfo,
    TaskGraph,
)
from ctrl_megatron.run.checks.nodes import check_node_parameters
from ctrl_megatron.run.checks.rl import check_estimator_and_loss, configured_pipeline
from ctrl_megatron.steps.guide_worker import chain_node_functions

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "examples/guide"
UPDATE = "actor_old_log_prob reference_log_prob actor_train"
ONE_STEP = ("data.train_batch_size=256",)
"""A mini-batch, so that the update computes the log-probs before it."""
GAE, FILTERED = "algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true"


@pytest.fixture(autouse=True)
def names_of_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples are importable, and what they register is forgotten after the test."""
    monkeypatch.syspath_prepend(ROOT)
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
    sys.modules.pop("examples.guide.extensions", None)


def graph_of(function: str, *overrides: str) -> TaskGraph:
    config = load_config(None, [f"dag.custom_pipeline_fn={function}", *overrides], "none")
    graph = configured_pipeline(config)
    check_estimator_and_loss(config)
    return graph


@pytest.mark.parametrize(
    ("function", "settings", "nodes"),
    [
        (
            "pipelines:grpo_pipeline",
            ("actor_rollout_ref.actor.use_kl_loss=true",),
            f"rollout_actor function_reward calculate_advantages {UPDATE}",
        ),
        (
            "pipelines:ppo_pipeline",
            (GAE,),
            f"rollout_actor function_reward compute_value calculate_advantages {UPDATE} "
            "critic_train",
        ),
        (
            "pipelines:dapo_pipeline",
            (FILTERED, "actor_rollout_ref.rollout.n=4"),
            f"rollout_actor function_reward dynamic_sampling calculate_advantages {UPDATE}",
        ),
        (
            "worker:build",
            ("actor_rollout_ref.actor.use_kl_loss=true",),
            f"announce rollout_actor function_reward calculate_advantages {UPDATE}",
        ),
        (
            "extensions:my_custom_pipeline",
            (
                *ONE_STEP,
                "algorithm.adv_estimator=my_custom_adv",
                "actor_rollout_ref.actor.policy_loss=my_custom_loss",
            ),
            "rollout_actor custom_reward calculate_advantages actor_train",
        ),
        ("options:build", ("dag.options.max_retry_count=5",), "my_function"),
        (
            "embodied:embodied_srpo_pipeline",
            ("actor_rollout_ref.actor.use_kl_loss=true",),
            f"rollout_actor dynaminc_sampling compute_reward calculate_advantages {UPDATE}",
        ),
    ],
)
def test_every_pipeline_is_built_and_lacks_nothing(
    function: str, settings: tuple[str, ...], nodes: str
) -> None:
    graph = graph_of(f"examples.guide.{function}", *settings)
    assert list(graph.nodes) == nodes.split() == graph.get_topological_sort()


def test_a_graph_may_be_a_file() -> None:
    from examples.guide.pipelines import grpo_pipeline

    file = "examples/guide/grpo_graph.yaml"
    graph = graph_of("ctrl_megatron.pipeline:pipeline_from_file", f"dag.options.file={ROOT / file}")
    typed = grpo_pipeline()
    assert graph.graph_id == typed.graph_id and graph.rev_adj == typed.rev_adj
    for found, wanted in zip(graph.nodes.values(), typed.nodes.values(), strict=True):
        assert found.executable is wanted.executable
        assert (found.node_type, found.node_role) == (wanted.node_type, wanted.node_role)
        assert found.only_forward_compute == wanted.only_forward_compute
        assert found.config["_node_id_"] == wanted.node_id
    assert graph.nodes["rollout_actor"].config["model_params"] == "7B"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("planner", r"begins with draw; [\s\S]*two_rewards_split_1"),
        ("coordinator", r"rank 0: \[10, 80, 90, 20\] tokens\nrank 1: \[30, 60, 70, 40\]"),
    ],
)
def test_the_examples_of_plain_objects_run(name: str, said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", f"examples.guide.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(said, ran.stdout), ran.stdout


@pytest.mark.parametrize("name", ["siirl", "ctrl", "diffucoder", "options"])
def test_every_configuration_loads(name: str) -> None:
    assert load_config(GUIDE / f"{name}.yaml").data.train_files


SIIRL = """
    algorithm: adv_estimator workflow_type gamma lam use_kl_in_reward norm_adv_by_std_in_grpo
        kl_ctrl.type kl_ctrl.kl_coef
    data: train_files train_batch_size max_prompt_length max_response_length num_loader_workers
    actor_rollout_ref.model: path dtype trust_remote_code
    actor_rollout_ref.actor: strategy clip_ratio entropy_coef ppo_epochs ppo_mini_batch_size
        max_grad_norm
    actor_rollout_ref.actor.optim: lr weight_decay scheduler warmup_ratio
    actor_rollout_ref.rollout: name tensor_model_parallel_size n temperature top_p mode
    trainer: n_gpus_per_node nnodes total_epochs save_freq test_freq val_before_train critic_warmup
        project_name experiment_name logger
    dag: custom_pipeline_fn enable_perf backend_threshold
"""
"""The keys of section 10.1 by group."""
CTRL = """
    data: train_files val_files prompt_key max_prompt_length max_response_length train_batch_size
    actor_rollout_ref: hybrid_engine model.path actor.ppo_mini_batch_size actor.ppo_epochs
        actor.clip_ratio actor.entropy_coeff actor.use_kl_loss rollout.name rollout.temperature
        rollout.n
    algorithm: adv_estimator gamma lam kl_ctrl.kl_coef
"""
"""The keys of CTRL's trainer.yaml by group, as its description has them."""


def names_of(blocks: str) -> list[str]:
    names, group = [], ""
    for word in blocks.split():
        if word.endswith(":"):
            group = word[:-1]
        else:
            names.append(f"{group}.{word}")
    return names


@pytest.mark.parametrize("name", [*names_of(SIIRL), *names_of(CTRL)])
def test_every_key_of_both_blocks_is_a_key_or_answered(name: str) -> None:
    if name in KEYS:
        return
    with pytest.raises(ValueError, match="unknown key") as raised:
        load_config(None, [f"{name}=1"], "none")
    told = str(raised.value)
    assert "here that is " in told or told.endswith("; leave it out"), told


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("algorithm.beta", "actor.kl_loss_coef"),
        ("actor_rollout_ref.actor.epsilon", "actor.clip_ratio"),
        ("actor_rollout_ref.rollout.num_generations", "rollout.n"),
        ("actor_rollout_ref.actor.num_iterations", "actor.ppo_epochs"),
        ("actor_rollout_ref.actor.context_parallel_size", "megatron.context_parallel_size"),
    ],
)
def test_names_of_others_are_answered_in_any_group(key: str, here: str) -> None:
    with pytest.raises(ValueError, match=here):
        load_config(None, [f"{key}=1"], "none")


def test_a_policy_loss_is_no_estimator() -> None:
    said = r"gspo is a policy loss: set actor_rollout_ref.actor.policy_loss=gspo"
    with pytest.raises(ValueError, match=said):
        load_config(None, ["algorithm.adv_estimator=gspo"], "none")
    with pytest.raises(ValueError, match=said):
        graph_of("examples.guide.pipelines:grpo_pipeline", "algorithm.adv_estimator=gspo")


def test_dotted_keys_inside_groups_are_groups(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "algorithm: {kl_ctrl.kl_coef: 0.5, use_kl_in_reward: true, kl_ctrl: {type: adaptive}}\n"
        "trainer.seed: 3\n"
        "dag: {options: {a.b: 1}}\n"
    )
    config = load_config(file, [], "none")
    control = config.algorithm.kl_ctrl
    assert (control.kl_coef, control.type, config.trainer.seed) == (0.5, "adaptive", 3)
    assert config.dag.options == {"a.b": 1}
    assert "line 1" in str(config.written["algorithm.kl_ctrl.kl_coef"])
    for text, said in (
        ("algorithm: {kl_ctrl.kl_coef: 1, kl_ctrl: {kl_coef: 2}}", "is set twice"),
        ("algorithm: {kl_ctrl.kl_coef: 1, kl_ctrl: 2}", "is a value and a group of keys"),
        ("algorithm: {kl_ctrl.kl_cof: 1}", "did you mean 'algorithm.kl_ctrl.kl_coef'"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            load_config(file, [], "none")


def test_a_graph_without_what_its_keys_need_is_refused() -> None:
    """The guide computes rewards before the log-probs that a KL in the reward needs."""
    with pytest.raises(UserError, match=r"'function_reward' .* needs the field old_log_probs"):
        graph_of("examples.guide.pipelines:grpo_pipeline", "algorithm.use_kl_in_reward=true")
    with pytest.raises(UserError, match="needs the field values"):
        graph_of("examples.guide.pipelines:grpo_pipeline", GAE)
    with pytest.raises(UserError, match=r"'actor_train' .* needs the field old_log_probs"):
        graph_of("examples.guide.extensions:my_custom_pipeline")
    with pytest.raises(UserError, match="uses a value model, and the run has none"):
        graph_of("examples.guide.pipelines:ppo_pipeline")


def test_old_import_paths_get_one_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "typed_unchanged.py").write_text("from siirl.execution.dag import Pipeline\n")
    monkeypatch.syspath_prepend(tmp_path)
    for wrong in (
        lambda: Node(
            "n", NodeType.COMPUTE, executable_ref="siirl.dag_worker.dagworker:DAGWorker.generate"
        ),
        lambda: graph_of("typed_unchanged:build"),
    ):
        with pytest.raises(UserError, match=r"siiRL's names are here in ctrl_megatron.pipeline"):
            wrong()


class Mine:
    def method(self, config: Any, batch: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self, config, batch, kwargs

    @staticmethod
    def free(batch: Any, config: Any, **kwargs: Any) -> tuple[Any, ...]:
        return batch, config, kwargs

    @staticmethod
    def ours(worker: Any, batch: Any, threshold: int) -> tuple[Any, ...]:
        return worker, batch, threshold


def test_functions_get_what_their_signature_names() -> None:
    worker, batch = SimpleNamespace(config="configuration"), object()

    def called(name: str) -> Any:
        path = f"{__name__}:Mine.{name}"
        node = Node("n", NodeType.COMPUTE, executable_ref=path, config={"threshold": 3})
        graph = TaskGraph("g")
        graph.add_node(node)
        check_node_parameters(graph)
        return node.call_in_step(worker, batch)

    own = {"threshold": 3}
    assert called("method") == (worker, "configuration", batch, {**own, "worker": worker})
    assert called("free") == (batch, "configuration", {**own, "worker": worker})
    assert called("ours") == (worker, batch, 3)


def test_names_are_typed_as_the_guide_prints_them() -> None:
    known = AdvantageEstimator.GAE, AdvantageEstimator.GRPO, AdvantageEstimator.CPGD
    for name in known:
        assert ADV_ESTIMATOR_REGISTRY[name] is ADV_ESTIMATOR_REGISTRY[name.value]
    assert POLICY_LOSS_REGISTRY["vanilla"] is POLICY_LOSS_REGISTRY.get("vanilla")
    with pytest.raises(KeyError, match="unknown advantage estimator 'grp'"):
        ADV_ESTIMATOR_REGISTRY["grp"]
    named = SampleInfo(sum_tokens=12, prompt_length=4, response_length=8, uid="group")
    assert SampleInfo(12, 4, 8, "group") == named
    path = "ctrl_megatron.pipeline:DAGWorker.generate"
    assert Node("n", NodeType.COMPUTE, executable_ref=path).executable_ref == path


def test_a_worker_has_the_guides_methods() -> None:
    names = "generate compute_reward compute_value compute_advantage compute_old_log_prob "
    names += "compute_ref_log_prob train_actor train_critic dynamic_sampling"
    for name in names.split():
        assert callable(getattr(DAGWorker, name))
    assert "advantages" in DAGWorker.compute_advantage.writes


def test_one_node_does_the_work_of_several() -> None:
    @node(needs=always("a"), writes=("b",))
    def first(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"b": batch["a"] + 1}, metrics={"first": 1.0})

    @node(needs=lambda config: {"b": "", "c": "setting"}, writes=("d",))
    def second(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"d": batch["b"] * batch["c"]}, metrics={"second": 2.0})

    both: Any = chain_node_functions(first, second)
    assert both.writes == ("b", "d")
    assert both.needs(load_config(None, [], "none")) == {"a": "", "c": "setting"}
    batch = TensorDict({"a": torch.tensor([1.0]), "c": torch.tensor([5.0])}, batch_size=[1])
    output = both(None, batch)
    assert float(output.fields["d"]) == 10.0 and output.metrics == {"first": 1.0, "second": 2.0}
    assert "b" not in batch
