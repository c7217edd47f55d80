"""Mistakes in a graph that a run can only find, and refuses, when it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctrl_megatron.algorithms import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from ctrl_megatron.config import Config, load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.pipeline import Pipeline
from ctrl_megatron.run.checks.nodes import check_node_parameters
from ctrl_megatron.run.checks.rl import check_estimator_and_loss, configured_pipeline

LOSS = "actor_rollout_ref.actor.policy_loss"
OWN = """
from ctrl_megatron.algorithms import register_adv_est, register_policy_loss
from ctrl_megatron.pipeline import Pipeline, StepReport, ctrl_pipeline, node

@register_adv_est("names_its_score")
def score(token_level_rewards, response_mask, scale: float = 1.0):
    return token_level_rewards, token_level_rewards

@register_policy_loss("names_its_loss")
def loss(old_log_prob, log_prob, advantages, response_mask, config, *, tau: float, mode="a"):
    raise NotImplementedError

def build(config):
    return ctrl_pipeline(config)

def nothing(worker, batch):
    pass

def foreign():
    return Pipeline("foreign").add_node("only", nothing).build()

def tuned(config, *, threshold: float = 0.5, names: tuple[str, ...] = ()):
    return Pipeline("tuned").add_node("only", nothing, config={"t": (threshold, names)}).build()

def only_options(*, depth: int):
    return Pipeline(f"depth {depth}").add_node("only", nothing).build()

def wrong():
    return 3

def validate(worker):
    return {}

@node(uses=("rewards",))
def rewarding(worker, batch):
    pass

def asking():
    report = StepReport(validate=validate)
    return Pipeline("asking", report=report).add_node("only", rewarding).build()
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Config]]:
    """Configures a run with the module above, whose names are known until the test ends."""
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "names_of_its_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def configure(*overrides: str, function: str = "build") -> Config:
        own = f"dag.custom_pipeline_fn=names_of_its_own:{function}"
        config = load_config(None, [own, *overrides], "none")
        configured_pipeline(config)
        return config

    yield configure
    del sys.modules["names_of_its_own"]


def test_names_that_the_module_registers_are_known(start: Callable[..., Config]) -> None:
    tau = f"{LOSS}_options.tau=1"
    check_estimator_and_loss(
        start("algorithm.adv_estimator=names_its_score", f"{LOSS}=names_its_loss", tau)
    )
    check_estimator_and_loss(start())


ESTIMATOR = "algorithm.adv_estimator"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (f"{LOSS}=names_its_loss", f"{LOSS}_options.tua=1"),
            (
                rf"override '{LOSS}_options.tua=1': {LOSS}_options.tua: loss \(.*\) has no option "
                r"'tua'; did you mean 'tau'\? \(its options: tau, mode\)\n"
                rf"{LOSS}_options.tau is not set; loss \(.*\) requires it$"
            ),
        ),
        (
            (f"{LOSS}=names_its_loss", f"{LOSS}_options.tau=warm"),
            rf"^override .*: {LOSS}_options.tau must be a finite number, not 'warm'$",
        ),
        (
            (f"{LOSS}_options.clip_ratio=0.1",),
            rf"{LOSS}_options.clip_ratio: vanilla_terms .* has no option .* \(it has none\)$",
        ),
        (
            (f"{ESTIMATOR}=names_its_score", f"{ESTIMATOR}_options={{gamma: 1, scale: true}}"),
            (
                rf"{ESTIMATOR}_options.gamma: .* no option 'gamma'; \(its options: scale\)\n.*"
                rf"{ESTIMATOR}_options.scale must be a finite number, not True$"
            ),
        ),
        (
            (f"{ESTIMATOR}=gpg", f"{ESTIMATOR}_options.f_nrm=2"),
            r"no option 'f_nrm'; did you mean 'f_norm'\?",
        ),
    ],
)
def test_options_that_a_function_does_not_declare_are_refused(
    start: Callable[..., Config], overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        check_estimator_and_loss(start(*overrides))


def test_a_wrong_option_of_a_file_is_named_with_its_line(
    start: Callable[..., Config], tmp_path: Path
) -> None:
    start()
    file = tmp_path / "run.yaml"
    actor = (
        "actor_rollout_ref: {actor: {policy_loss: names_its_loss, policy_loss_options: {tau: x}}}"
    )
    file.write_text(f"trainer: {{seed: 2}}\n{actor}\n")
    config = load_config(file, ["dag.custom_pipeline_fn=names_of_its_own:build"], "none")
    with pytest.raises(UserError, match=r"run.yaml line 2: .*_options.tau must be a finite number"):
        check_estimator_and_loss(config)


def test_a_pipeline_gets_the_options_that_it_declares(start: Callable[..., Config]) -> None:
    config = start("dag.options={threshold: 1, names: [a, b]}", function="tuned")
    assert configured_pipeline(config).nodes["only"].config == {"t": (1.0, ("a", "b"))}
    assert configured_pipeline(start(function="tuned")).nodes["only"].config == {"t": (0.5, ())}
    assert (
        configured_pipeline(start("dag.options.depth=3", function="only_options")).graph_id
        == "depth 3"
    )


@pytest.mark.parametrize(
    ("function", "override", "said"),
    [
        (
            "tuned",
            "dag.options.treshold=1",
            r"'dag.options.treshold=1': .*did you mean 'threshold'",
        ),
        ("tuned", "dag.options.threshold=hot", "dag.options.threshold must be a finite number"),
        ("tuned", "dag.options.config=1", r"no option 'config'; \(its options: threshold, names\)"),
        ("build", "dag.options.depth=3", r"build \(.*\) has no option 'depth'; \(it has none\)"),
        (
            "only_options",
            "dag.options={}",
            "dag.options.depth is not set; only_options .* requires",
        ),
    ],
)
def test_options_that_a_pipeline_does_not_declare_are_refused(
    start: Callable[..., Config], function: str, override: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        start(override, function=function)


def test_the_built_in_pipeline_has_no_options() -> None:
    with pytest.raises(UserError, match=r"ctrl_pipeline .* has no option 'turns'"):
        configured_pipeline(load_config(None, ["dag.options.turns=2"], "none"))


@pytest.mark.parametrize("key", ["algorithm.adv_estimator", LOSS])
def test_a_name_that_nothing_registers_ends_the_run_at_its_start(
    start: Callable[..., Config], key: str
) -> None:
    with pytest.raises(ValueError) as caught:
        check_estimator_and_loss(start(f"{key}=grop"))
    said = str(caught.value)
    assert said.startswith(f"{key}=grop: unknown ")
    assert "known: " in said and "names_its_" in said
    assert said.endswith("register it in the module of dag.custom_pipeline_fn")


class Tool:
    """A worker's class in the style of siiRL's guide."""

    def draw(self, batch: object) -> None: ...

    @staticmethod
    def judge(worker: object, batch: object) -> None: ...


def test_a_node_that_cannot_be_called_ends_the_run_at_its_start() -> None:
    def by_other_names(w: object, b: object) -> None: ...

    graph = Pipeline("own").add_node("draw", by_other_names).build()
    with pytest.raises(UserError, match="the node 'draw' cannot be called with worker and"):
        check_node_parameters(graph)
    for method in ("draw", "judge"):
        check_node_parameters(Pipeline("own").add_node("n", f"{__name__}:Tool.{method}").build())


DAPO = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4")


def test_a_graph_of_ones_own_may_take_the_configuration_or_nothing(
    start: Callable[..., Config],
) -> None:
    assert "dynamic_sampling" in configured_pipeline(start(*DAPO)).nodes
    assert "generate_critiques" in configured_pipeline(start()).nodes
    assert list(configured_pipeline(start(function="foreign")).nodes) == ["only"]


def test_dynamic_sampling_without_a_node_for_it_is_refused(start: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"filter_groups.enable=true has no effect .* foreign"):
        start(*DAPO, function="foreign")


def test_a_function_that_returns_no_graph_is_named(start: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match="names_of_its_own:wrong returned int, not the TaskGraph"):
        start(function="wrong")


@pytest.mark.parametrize(
    "override",
    [
        *("reward.run_timeout=3", "sandbox.workers=1", "algorithm.adv_estimator=rloo"),
        *("actor_rollout_ref.actor.policy_loss=gspo", "actor_rollout_ref.proxy.model.path=x"),
        *("data.val_files=[x]", "algorithm.rollout_correction.rollout_is=token"),
    ],
)
def test_a_key_that_no_node_reads_is_refused(start: Callable[..., Config], override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ValueError, match=f"{key} is not read by any node of the pipeline foreign"):
        start(override, function="foreign")
    start(override)


def test_what_a_node_says_to_read_may_be_given(start: Callable[..., Config]) -> None:
    graph = configured_pipeline(
        start("reward.run_timeout=3", "data.val_files=[x]", function="asking")
    )
    assert graph.required_rewards == ()
    assert configured_pipeline(start(function="foreign")).required_rewards is None


def test_a_file_of_another_pipeline_may_be_used(
    start: Callable[..., Config], tmp_path: Path
) -> None:
    """Settings of the file are refused only if the file names the pipeline too."""
    start(function="foreign")
    file = tmp_path / "run.yaml"
    file.write_text("reward: {run_timeout: 3}\n")
    own = "names_of_its_own:foreign"
    configured_pipeline(load_config(file, [f"dag.custom_pipeline_fn={own}"], "none"))
    file.write_text(f"reward: {{run_timeout: 3}}\ndag: {{custom_pipeline_fn: '{own}'}}\n")
    with pytest.raises(ValueError, match=r"run.yaml line 1: reward.run_timeout is not read"):
        configured_pipeline(load_config(file, [], "none"))


def test_keys_of_nodes_exist_and_every_built_in_pipeline_reads_its_own() -> None:
    from ctrl_megatron.config import KEYS
    from ctrl_megatron.graph.declarations import CORRECTION, KEYS_OF_NODES, VALIDATION
    from ctrl_megatron.pipeline import ctrl_pipeline

    for name in KEYS_OF_NODES:
        assert name in KEYS or any(key.startswith(f"{name}.") for key in KEYS), name
    gae = load_config(None, ["algorithm.adv_estimator=gae", "data.val_files=[x]"], "none")
    remax = load_config(None, ["algorithm.adv_estimator=remax"], "none")
    renewed = load_config(
        *(None, ["actor_rollout_ref.ref.sync_steps=2", "actor_rollout_ref.actor.use_kl_loss=true"]),
        "none",
    )
    judged = load_config(
        None, ["reward_model.enable=true", "reward_model.model.path=reward"], "none"
    )
    graphs = map(ctrl_pipeline, (gae, remax, renewed, judged))
    read = {*VALIDATION, *(key for graph in graphs for key in graph.config_keys)}
    assert read >= set(KEYS_OF_NODES) - set(CORRECTION)


@pytest.mark.parametrize(
    ("functions", "runs"),
    [("[critic]", True), ("[code_format]", False), ("[json:dumps]", False)],
)
def test_a_sandbox_is_for_functions_that_run_programs(functions: str, runs: bool) -> None:
    from ctrl_megatron.rewards.plan import plan_rewards

    config = load_config(None, [f"reward.reward_funcs={functions}"], "none")
    assert plan_rewards(config).runs_programs is runs
    assert plan_rewards(config, ("critic",)).runs_programs
    assert plan_rewards(config, None).functions == {}


COMPLETIONS = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=/model")
COMPLETIONS += ("reward.reward_funcs=[code]",)
GAE, FILTERED = "algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true"


@pytest.mark.parametrize(
    ("name", "setting", "node", "said"),
    [
        ("ppo", GAE, "critic_update", "adv_estimator=grpo: .*set algorithm.adv_estimator=gae"),
        ("dapo", FILTERED, "dynamic_sampling", "filter_groups.enable=false: .*set it to true"),
    ],
)
def test_pipelines_of_the_guide_are_those_of_completions_with_what_they_need(
    name: str, setting: str, node: str, said: str
) -> None:
    chosen = (*COMPLETIONS, f"dag.custom_pipeline_fn=ctrl_megatron.pipeline:{name}_pipeline")
    config = load_config(None, [*chosen, setting], "rl")
    assert not config.writes_revisions
    graph = configured_pipeline(config)
    assert graph.graph_id == f"{name}_training_pipeline" and node in graph.nodes
    grpo = load_config(None, [*chosen[:-1], chosen[-1].replace(name, "grpo"), setting], "rl")
    assert list(graph.nodes) == list(configured_pipeline(grpo).nodes)
    with pytest.raises(UserError, match=said):
        configured_pipeline(load_config(None, list(chosen), "rl"))
