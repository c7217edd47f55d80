"""The reward of a model: its place in the graph, in the sum and in the plans; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tiny_reward_models import save_reward_model
from transformers import AutoModelForSequenceClassification

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.world_link import RunNode
from ctrl_megatron.memory.budget import memory_budget
from ctrl_megatron.memory.model_state import frozen_model_memory
from ctrl_megatron.memory.proposal import placement_candidates
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.shape import value_model_shape
from ctrl_megatron.parallel.layout import worlds_of
from ctrl_megatron.pipeline import Pipeline
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.run.checks.models import check_reward_model
from ctrl_megatron.run.checks.nodes import check_fields
from ctrl_megatron.run.checks.rl import configured_pipeline
from ctrl_megatron.run.worlds import plan_step, world_of_roles
from ctrl_megatron.steps.ctrl import place_scores
from ctrl_megatron.steps.model_reward import model_reward, total_rewards

EXAMPLES = Path(__file__).parents[2] / "examples"
ON = ("reward_model.enable=true", "reward_model.model.path=/rewards")
PIPELINES = "dag.custom_pipeline_fn=ctrl_megatron.pipeline:"
NAN = float("nan")
GIB = 2**30


def configured(*overrides: str, pipeline: str = "grpo_pipeline") -> Config:
    given = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=/model")
    given += (PIPELINES + pipeline, "reward.reward_funcs=[code]")
    return load_config(None, [*given, *ON, *overrides], "rl")


class Reader:
    """Rewards a text by its length, and nothing that is longer than 6 letters."""

    def conversation_tokens(self, prompt: Any, answer: str) -> tuple[list[int], list[int]]:
        return [1] * len(prompt[-1]["content"]), [2] * len(answer)

    def score_conversations(self, conversations: Any) -> list[float | None]:
        return [len(rest) / 4 if len(rest) <= 6 else None for _, rest in conversations]


def worker_of(config: Config) -> Any:
    rows = [
        Row(id=f"r{i}", prompt=({"role": "user", "content": "ask"},), task=task)
        for i, task in enumerate(("critique", "solving"))
    ]
    worker = SimpleNamespace(
        config=config,
        train=PromptTable(rows=tuple(rows), prompts=((), ()), dropped=0),
        codec=SimpleNamespace(decode=lambda ids: "x" * len(ids)),
        reward_weights=plan_rewards(config).weights,
        step_weights=plan_rewards(config).weights,
        reward_model=Reader(),
        global_means=lambda values: {name: float(value.mean()) for name, value in values.items()},
        judged_rate_metrics=dict,
        groups=SimpleNamespace(sum_over_data=lambda totals: totals),
    )
    return worker


def batch_of(sizes: list[int], scores: list[float]) -> TensorDict:
    width = max(sizes)
    answered = torch.arange(width) < torch.tensor(sizes)[:, None]
    asked = torch.ones(len(sizes), 2, dtype=torch.int64)
    batch = TensorDict(
        {
            "prompts": asked,
            "input_ids": torch.cat([asked, answered.long()], dim=1),
            "attention_mask": torch.cat([asked, answered.long()], dim=1),
            # The mask of a row that was not judged is empty; its text is rewarded all the same.
            "response_mask": answered & torch.tensor([[True]] * (len(sizes) - 1) + [[False]]),
            "score": torch.tensor(scores),
        },
        batch_size=[len(sizes)],
    )
    batch["problem_id"] = NonTensorStack(*(f"r{i % 2}" for i in range(len(sizes))))
    return batch


def test_the_models_reward_is_a_part_of_the_sum() -> None:
    config = configured("reward_model.weight=0.5")
    worker, batch = worker_of(config), batch_of([4, 2, 7, 6], [1.0, NAN, 1.0, 0.0])
    output = model_reward(worker, batch)
    batch["reward/reward_model"] = output.fields["reward/reward_model"]
    found = batch["reward/reward_model"]
    torch.testing.assert_close(found, torch.tensor([1.0, 0.5, NAN, 1.5]), equal_nan=True)
    assert output.metrics["reward_model/length"] == pytest.approx(3 + 19 / 4)
    assert not model_reward(worker, batch).fields, "once is enough"
    total = total_rewards(worker, batch)
    torch.testing.assert_close(total, torch.tensor([1.5, NAN, NAN, 0.75]), equal_nan=True)
    batch["response_mask"] = batch["response_mask"] | True
    batch["uid"] = NonTensorStack(*"aabb")
    placed = place_scores(worker, batch)
    assert placed.fields["rewarded"].tolist() == [True, False, False, True]
    assert placed.fields["token_level_scores"].sum(dim=1).tolist() == [1.5, 0.0, 0.0, 0.75]


def test_with_weight_0_it_is_a_metric_and_other_tasks_are_not_touched() -> None:
    batch = batch_of([4, 7], [1.0, 2.0])
    batch["reward/reward_model"] = torch.tensor([1.0, NAN])
    worker = worker_of(configured("reward_model.weight=0"))
    assert total_rewards(worker, batch).tolist() == [1.0, 2.0]
    tasks = "reward.reward_tasks={reward_model: [critique], code: [critique, solving]}"
    worker = worker_of(configured(tasks))
    del batch["reward/reward_model"]
    batch["reward/reward_model"] = model_reward(worker, batch).fields["reward/reward_model"]
    assert total_rewards(worker, batch).tolist() == [2.0, 2.0]
    assert batch["reward/reward_model"][1].isnan()


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("grpo_pipeline", ()),
        ("ppo_pipeline", ("algorithm.adv_estimator=gae",)),
        ("ctrl_pipeline", ("reward.reward_funcs=[critic]",)),
        ("grpo_pipeline", ("reward.reward_funcs=[]",)),
    ],
)
def test_pipelines_have_the_node_and_wait_for_it(name: str, extra: tuple[str, ...]) -> None:
    graph = configured_pipeline(configured(*extra, pipeline=name))
    assert "reward_model" in graph.nodes["scores"].dependencies
    assert "balance" in graph.nodes["reward_model"].dependencies


def test_dynamic_sampling_rewards_while_it_draws() -> None:
    own = ("algorithm.filter_groups.enable=true",)
    graph = configured_pipeline(configured(*own, pipeline="dapo_pipeline"))
    assert "reward_model" not in graph.nodes
    with pytest.raises(UserError, match=r"placement\.reward_model puts the reward model on others"):
        configured(*own, "placement.reward_model=[1]", "trainer.n_gpus_per_node=2")


def test_ranks_of_its_own_reward_beside_the_log_probs() -> None:
    keys = ("placement.reward_model=[2,3]", "trainer.n_gpus_per_node=4")
    config = configured(*keys, "actor_rollout_ref.actor.ppo_epochs=2")
    graph: TaskGraph = configured_pipeline(config)
    order = [graph.nodes[name] for name in graph.get_topological_sort()]
    found = plan_step(graph, order, world_of_roles(worlds_of(4, config)), config)

    def shown(world: str) -> list[str]:
        return [
            f"run {a.node.node_id}"
            if isinstance(a, RunNode)
            else f"{type(a).__name__.removesuffix('Message').lower()} {', '.join(a.message.fields)}"
            for a in found[world]
        ]

    assert shown("reward_model") == [
        *("receive input_ids, response_mask", "run reward_model", "send reward/reward_model")
    ]
    home = shown("actor")
    places = [
        home.index(line)
        for line in (
            *("send input_ids, response_mask", "run old_log_prob"),
            *("receive reward/reward_model", "run scores"),
        )
    ]
    assert places == sorted(places)


def test_a_pipeline_that_asks_no_reward_model_is_refused() -> None:
    config = configured(pipeline="grpo_pipeline")
    pipeline = Pipeline("mine")
    pipeline.add_node("draw", lambda worker, batch: None)
    with pytest.raises(UserError, match="no node of the pipeline mine uses the reward model"):
        check_fields(config, pipeline.build())
    pipeline.add_node("scores", place_scores, ["draw"])
    with pytest.raises(UserError, match=r"'scores' .* needs the field reward/reward_model"):
        check_fields(config, pipeline.build())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("reward_model.model.path=null",), "needs reward_model.model.path"),
        (("reward.reward_funcs=[]", "reward_model.weight=0"), "nothing would be rewarded"),
        (("placement.auto=true", "placement.reward_model=[1]"), "leave placement.reward_model out"),
        (("reward_model.enable=false",), "reward_model.model.path=.* is not read with"),
        (
            (PIPELINES + "repair_pipeline",),
            "episodes of several turns, .* leave reward_model.enable out",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        configured(*overrides)


def test_its_name_belongs_to_no_list() -> None:
    named = "reward.reward_funcs=[reward_model]"
    with pytest.raises(
        UserError, match=r"reward_funcs: 'reward_model' is on with reward_model\.en"
    ):
        load_config(None, [named], "none")
    with pytest.raises(UserError, match="'reward_model', which keys of its own turn on"):
        configured(named)


def test_directories_that_reward_nothing_are_refused(tmp_path: Path) -> None:
    good = save_reward_model(tmp_path / "good")

    def refused(*overrides: str, path: Path = good) -> str:
        config = configured(f"reward_model.model.path={path}", *overrides)
        with pytest.raises(UserError) as raised:
            check_reward_model(config)
        return str(raised.value)

    assert check_reward_model(configured(f"reward_model.model.path={good}")) is not None
    keys = json.loads((good / "config.json").read_text())
    for name, changed, said in (
        ("language", {"architectures": ["Qwen2ForCausalLM"]}, "is a language model"),
        (
            "value",
            {"architectures": ["Qwen2ForTokenClassification"], "id2label": {"0": "a"}},
            "is a value model",
        ),
        ("strange", {"model_type": "strange"}, "model_type 'strange' is not supported"),
        ("vocabulary", {"vocab_size": 300}, r"score|embed_tokens"),
    ):
        path = tmp_path / name
        path.mkdir()
        for file in good.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        (path / "config.json").write_text(json.dumps(keys | changed))
        text = refused(path=path)
        assert text.startswith("reward_model.model.path: ") and any(
            part in text for part in said.split("|")
        ), text
    two = AutoModelForSequenceClassification.from_pretrained(
        good, num_labels=2, ignore_mismatched_sizes=True
    )
    two.save_pretrained(tmp_path / "two")
    assert "a reward model has 1 label, this model has 2" in refused(path=tmp_path / "two")
    long = refused("reward_model.max_length=9999")
    assert long.startswith("reward_model.max_length: 9999 tokens are more than")
    layers = "reward_model.megatron.pipeline_model_parallel_size=4"
    where = ("placement.reward_model=[1,2,3,4]", "trainer.n_gpus_per_node=5")
    assert "layers" in refused(layers, *where)


def test_the_memory_plan_counts_it_where_it_is() -> None:
    shape = parse_model_shape(json.loads((EXAMPLES / "shapes/qwen2.5-7b.json").read_text()))
    rewarding = value_model_shape(shape, head_bias=False)
    shapes = ModelShapes(actor=shape, reference=None, value=None, reward_model=rewarding)
    keys = ("trainer.nnodes=2", "actor_rollout_ref.actor.use_kl_loss=false", *ON)
    config = load_config(EXAMPLES / "ctrl_7b.yaml", [*keys])
    plain = memory_budget(config, replace(shapes, reward_model=None), gpu_memory=80 * GIB)
    beside = memory_budget(config, shapes, gpu_memory=80 * GIB)
    own = "reward model's parameters"
    sizes = {use.phase: use.items.get(own, 0) for use in beside.phases}
    layout = worlds_of(16, config)[0].layout
    expected = frozen_model_memory(rewarding, layout, pp=0, dtype="bfloat16").parameters
    assert sizes["log-probs"] == expected > 0
    for use, without in zip(beside.phases, plain.phases, strict=True):
        assert use.total >= without.total, use.phase
    where = (
        "placement.reward_model={hosts: [1]}",
        "reward_model.megatron.tensor_model_parallel_size=4",
    )
    apart = load_config(EXAMPLES / "ctrl_7b.yaml", [*keys, *where])
    several = memory_budget(apart, shapes, gpu_memory=80 * GIB)
    uses = {use.phase: use for use in several.phases}
    assert uses["reward_model: log-probs"].items[own] > 0
    assert own not in uses["log-probs"].items and "reward_model: update" not in uses
    found = placement_candidates(config, shapes, gpu_memory=80 * GIB, generation=0.5)
    assert any("placement.reward_model" in one.keys for one in found)
