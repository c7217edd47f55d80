"""Worlds: what the ranks of each do in a step, and messages between them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack

from ctrl_megatron.config import Config, check_world_size, load_config
from ctrl_megatron.config.placement import separate_role_ranks
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.errors import UserError
from ctrl_megatron.graph.declarations import always
from ctrl_megatron.graph.declarations import node as declare
from ctrl_megatron.graph.world_link import (
    Action,
    ReceiveMessage,
    RunNode,
    SendMessage,
    WorldMessage,
)
from ctrl_megatron.parallel.layout import Layout, World, worlds_of
from ctrl_megatron.pipeline import Node, NodeRole, NodeType, TaskGraph, ctrl_pipeline
from ctrl_megatron.run import worlds
from ctrl_megatron.run.checks.nodes import check_worlds
from ctrl_megatron.run.worlds import _Head, plan_step, world_of_roles
from ctrl_megatron.steps.sample import SampleSize
from ctrl_megatron.steps.sampling import deal_rows

PPO = ("algorithm.adv_estimator=gae", "placement.critic=[2,3]", "trainer.n_gpus_per_node=4")
WORLDS = (
    World(ranks=(0, 1), layout=Layout(data=2)),
    World(roles=("critic",), ranks=(2, 3), layout=Layout(tensor=2)),
    World(roles=("reference",), ranks=(4,), layout=Layout()),
)
"""Three worlds, of which the configuration is not asked."""
KL = "algorithm.use_kl_in_reward=true"


def configured(*overrides: str) -> Config:
    given = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=/model")
    return load_config(None, [*given, *overrides], "rl")


def node(
    name: str,
    after: Sequence[str] = (),
    *,
    role: NodeRole = NodeRole.DEFAULT,
    wants: Sequence[str] = (),
    gives: Sequence[str] = (),
    kind: NodeType = NodeType.COMPUTE,
) -> Node:
    @declare(needs=always(*wants), writes=tuple(gives))
    def function(worker: Any, batch: Any) -> None: ...

    return Node(name, kind, role, dependencies=after, func=function)


def programs(*nodes: Node) -> dict[str, list[Action]]:
    graph = TaskGraph("g")
    for one in nodes:
        graph.add_node(one)
    return planned(graph, WORLDS, Config())


def planned(graph: TaskGraph, worlds: Sequence[World], config: Config) -> dict[str, list[Action]]:
    order = [graph.nodes[name] for name in graph.get_topological_sort()]
    return plan_step(graph, order, world_of_roles(worlds), config)


def shown(actions: Sequence[Action]) -> list[str]:
    """``run NODE``, ``send NODE: FIELDS`` and ``receive NODE: FIELDS``."""
    lines = []
    for action in actions:
        if isinstance(action, RunNode):
            lines.append(f"run {action.node.node_id}")
        else:
            message, verb = action.message, type(action).__name__.removesuffix("Message").lower()
            lines.append(f"{verb} {message.node.node_id}: {', '.join(message.fields)}".rstrip())
    return lines


def test_a_ppo_step_computes_values_beside_log_probs_and_updates_both_models_at_once() -> None:
    config = configured(*PPO, "actor_rollout_ref.actor.ppo_epochs=2")
    found = planned(ctrl_pipeline(config), worlds_of(4, config), config)
    assert shown(found["critic"]) == [
        "receive values: input_ids, response_mask, mini_batch",
        "run values",
        "send advantages: values",
        "receive critic_update: returns, response_mask, mini_batch",
        "run critic_update",
    ]
    home = shown(found["actor"])
    places = [home.index(line) for line in home if not line.startswith("run")]
    assert [home[place - 1] for place in places] == [
        *("run balance", "run token_rewards", "run advantages")
    ]
    assert home.index("run actor_update") > places[-1]


def test_a_diamond_over_two_worlds_runs_both_branches_at_once_and_joins() -> None:
    found = programs(
        node("draw", gives=["x"]),
        node("left", ["draw"], wants=["x"], gives=["l"]),
        node("right", ["draw"], role=NodeRole.CRITIC, wants=["x"], gives=["r"]),
        node("join", ["left", "right"]),
    )
    assert shown(found["actor"]) == [
        *("run draw", "send right: x", "run left", "receive join: r", "run join"),
    ]
    assert shown(found["critic"]) == ["receive right: x", "run right", "send join: r"]


def test_three_worlds_exchange_fields_without_the_first_one() -> None:
    found = programs(
        node("draw", gives=["x"]),
        node("compare", ["draw"], role=NodeRole.REFERENCE, wants=["x"], gives=["r"]),
        node("learn", ["compare"], role=NodeRole.CRITIC, wants=["x", "r"]),
        node("join", ["learn"]),
    )
    assert shown(found["critic"]) == [
        *("receive learn: x", "receive learn: r", "run learn", "send join:")
    ]
    assert shown(found["reference"]) == [
        *("receive compare: x", "run compare", "send learn: r", "send join: r")
    ]
    assert shown(found["actor"])[-3:] == ["receive join: r", "receive join:", "run join"]


def test_a_reference_of_its_own_runs_beside_the_log_probs() -> None:
    config = configured("placement.reference=[2,3]", "trainer.n_gpus_per_node=4", KL)
    found = planned(ctrl_pipeline(config), worlds_of(4, config), config)
    assert shown(found["reference"]) == [
        "receive ref_log_prob: input_ids, response_mask",
        "run ref_log_prob",
        "send token_rewards: ref_log_prob",
    ]
    home = shown(found["actor"])
    sent = home.index("send ref_log_prob: input_ids, response_mask")
    received = home.index("receive token_rewards: ref_log_prob")
    assert sent < home.index("run old_log_prob") < home.index("run scores") < received


def test_a_dependency_without_fields_is_waited_for_too() -> None:
    found = programs(
        node("draw", gives=["x"]),
        node("learn", ["draw"], role=NodeRole.CRITIC, wants=["x"]),
        node("after", ["learn"]),
    )
    assert shown(found["actor"])[-2:] == ["receive after:", "run after"]


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    for number in range(draw(st.integers(2, 9))):
        earlier = [one.node_id for one in nodes]
        after = draw(st.lists(st.sampled_from(earlier), unique=True)) if earlier else []
        other = draw(st.sampled_from([NodeRole.DEFAULT, NodeRole.CRITIC, NodeRole.REFERENCE]))
        wants = draw(st.lists(st.sampled_from("abc"), unique=True))
        gives = draw(st.lists(st.sampled_from("abc"), unique=True))
        role = other if number else NodeRole.DEFAULT
        nodes.append(node(f"n{number}", after, role=role, wants=wants, gives=gives))
    return nodes


@settings(max_examples=50)
@given(graphs())
def test_every_message_is_sent_once_and_received_once_and_nobody_waits_in_a_circle(
    nodes: list[Node],
) -> None:
    found = programs(*nodes)
    sent = [a.message for of in found.values() for a in of if isinstance(a, SendMessage)]
    received = [a.message for of in found.values() for a in of if isinstance(a, ReceiveMessage)]
    key: Callable[[WorldMessage], int] = lambda message: message.number  # noqa: E731
    assert sorted(sent, key=key) == sorted(received, key=key)
    assert [message.number for message in sorted(sent, key=key)] == list(range(len(sent)))
    # Each world goes on as far as it can: all of them reach their end.
    there, done, at = set[int](), set[str](), dict.fromkeys(found, 0)
    by_name = {one.node_id: one for one in nodes}
    moved = True
    while moved:
        moved = False
        for world, actions in found.items():
            while at[world] < len(actions):
                action = actions[at[world]]
                if isinstance(action, ReceiveMessage) and action.message.number not in there:
                    break
                if isinstance(action, SendMessage):
                    there.add(action.message.number)
                if isinstance(action, RunNode):
                    name = action.node.node_id
                    assert done.issuperset(by_name[name].dependencies)
                    done.add(name)
                at[world] += 1
                moved = True
    assert done == by_name.keys()


@pytest.mark.parametrize("piece_bytes", [1, 60, 4 << 20])
def test_a_message_arrives_as_it_was_sent(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "_PIECE_BYTES", piece_bytes)
    fields: Mapping[str, Any] = {
        "mask": torch.tensor([[True, False], [True, True], [False, False]]),
        "empty": torch.zeros(3, 0),
        "values": torch.randn(3, 7),
        "numbers": torch.arange(3),
        "uid": NonTensorStack("a", "ü", ""),
    }
    for rows in ([0, 1, 2], [2, 0], []):
        head: _Head = pickle.loads(pickle.dumps(_Head.of({"rows": rows}, fields, rows)))
        assert head.facts == {"rows": rows}
        assert head.texts == {"uid": [["a", "ü", ""][row] for row in rows]}
        assert {*head.forms} == {*fields} - {"uid"}
        found, pieces = head.empty(), list(head.pieces())
        for name, part in pieces:
            found[name][part] = fields[name][torch.tensor(rows, dtype=torch.int64)[part]]
        for name, value in found.items():
            assert torch.equal(value, fields[name][torch.tensor(rows, dtype=torch.int64)]), name
        assert len(pieces) == len({(name, part.start) for name, part in pieces})


@given(st.lists(st.integers(1, 40), min_size=8, max_size=8), st.sampled_from([1, 2, 4]))
def test_rows_are_dealt_once_and_groups_stay_whole(lengths: list[int], ranks: int) -> None:
    sizes = [
        SampleSize(uid=f"{i // 2}", mini_batch=i // 8, prompt=5, response=length)
        for i, length in enumerate(lengths * 2)
    ]
    dealt = deal_rows(sizes, ranks, shared_prefix=True)
    assert sorted(row for part in dealt for row in part) == list(range(16))
    for part in dealt:
        uids = [sizes[row].uid for row in part]
        assert all(uids.count(uid) == 2 for uid in uids)
        assert {sizes[row].mini_batch for row in part} == {0, 1}


def test_worlds_follow_the_configuration() -> None:
    actor, critic = worlds_of(4, configured(*PPO, "critic.megatron.tensor_model_parallel_size=2"))
    assert (actor.ranks, actor.layout.data) == ((0, 1), 2)
    assert (critic.ranks, critic.layout.tensor, critic.layout.data) == ((2, 3), 2, 1)
    (only,) = worlds_of(4, configured("trainer.n_gpus_per_node=4"))
    assert only.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        (("placement.critic=[4]",), 4, "placement.critic: .* ranks from 1 to 3"),
        (("placement.critic=[0]",), 4, "placement.critic: .* rank 0 has the actor"),
        (("placement.critic=[1]",), 4, "rank 2 of the actor comes behind rank 1"),
        (("critic.megatron.tensor_model_parallel_size=3",), 4, "name a multiple of 3 ranks"),
        (("placement.critic=[1,2,3]",), 4, "3 data-parallel ranks"),
        (("trainer.min_nnodes=1",), 4, "leave out trainer.min_nnodes"),
        (("placement.critic={hosts: [1]}",), 4, "placement.critic.hosts: .* or take more hosts"),
        (("placement.critic={hosts: 1}",), 4, "must be a list"),
        (("placement.critic={share: 0.3}",), 4, "0.3 of 4 ranks is 1.2, .* multiple of 1/4"),
        (("placement.critic={share: 1}",), 4, "placement.critic.share"),
        (("placement.critic={share: half}",), 4, "share must be a finite number"),
        (("placement.critic={host: [1]}",), 4, "placement.critic: cannot be .* {share: SHARE}"),
        ((KL, "placement.reference=[3]"), 4, "placement.reference: rank 3 has another role"),
        (
            (KL, "placement.reference=[2,3]", "critic.megatron.tensor_model_parallel_size=2"),
            4,
            "roles critic and reference have the same ranks and different layouts",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused(keys: tuple[str, ...], ranks: int, said: str) -> None:
    config = configured(*PPO, *keys)
    with pytest.raises(UserError, match=said):
        check_world_size(config, ranks)


def test_a_key_of_a_world_needs_its_model() -> None:
    for name in ("critic", "reference"):
        with pytest.raises(UserError, match=rf"placement.{name}=.* is not read with"):
            configured(f"placement.{name}=[1]", "actor_rollout_ref.actor.use_kl_loss=false")
    with pytest.raises(UserError, match=r"set placement.reference=RANKS"):
        configured(KL, "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    ("critic", "reference", "found"),
    [
        ("[]", "[]", {}),
        ("[7,6]", "[5]", {"critic": (6, 7), "reference": (5,)}),
        ("{hosts: [1]}", "[3]", {"critic": (4, 5, 6, 7), "reference": (3,)}),
        ("{share: 0.25}", "{share: 0.125}", {"critic": (6, 7), "reference": (5,)}),
        ("{share: 0.25}", "[6,7]", {"reference": (6, 7), "critic": (4, 5)}),
        ("[4,5,6,7]", "{hosts: [1]}", {"critic reference": (4, 5, 6, 7)}),
    ],
)
def test_ranks_are_named_by_number_by_host_and_by_share(
    critic: str, reference: str, found: dict[str, tuple[int, ...]]
) -> None:
    config = configured(
        *("algorithm.adv_estimator=gae", KL, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"),
        *(f"placement.critic={critic}", f"placement.reference={reference}"),
    )
    assert {" ".join(one.roles): one.ranks for one in separate_role_ranks(config, 8)} == found
    worlds = worlds_of(8, config)
    assert sorted(rank for world in worlds for rank in world.ranks) == list(range(8))
    assert worlds[0].ranks[0] == 0 and all(len(w.ranks) == w.layout.world_size for w in worlds)


@settings(max_examples=50)
@given(
    st.integers(5, 40),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])), min_size=1, max_size=30),
)
def test_no_world_sees_a_row_twice_in_an_epoch_however_placements_change(
    num_rows: int, steps: list[tuple[int, int]]
) -> None:
    """Each entry of ``steps`` is a run of so many steps with so many data ranks of another world;
    the next run continues from its state."""
    seen: dict[int, list[str]] = {}
    state: dict[str, Any] = ResumableSampler(num_rows, seed=3).state_dict()
    for count, ranks in steps:
        sampler = ResumableSampler(num_rows, seed=3)
        sampler.load_state_dict(state)
        for _ in range(count):
            rows = sampler.next_batch(4)
            sizes = [
                SampleSize(uid=str(row), mini_batch=0, prompt=3, response=5 + row % 7)
                for row in rows
                for _ in range(2)
            ]
            dealt = deal_rows(sizes, ranks, shared_prefix=True)
            epoch = sampler.state_dict()["epoch"]
            seen.setdefault(epoch, []).extend(sizes[i].uid for part in dealt for i in part)
        state = sampler.state_dict()
    for uids in seen.values():
        assert all(uids.count(uid) == 2 for uid in {*uids}), uids


def test_a_node_apart_declares_what_travels(tmp_path: Path) -> None:
    def learn(worker: Any, batch: Any) -> None: ...

    graph = TaskGraph("mine")
    graph.add_node(Node("learn", NodeType.MODEL_TRAIN, NodeRole.CRITIC, func=learn))
    check_worlds(graph, WORLDS[:1])
    with pytest.raises(UserError, match=r"'learn' of the pipeline mine .* does not declare"):
        check_worlds(graph, WORLDS)
