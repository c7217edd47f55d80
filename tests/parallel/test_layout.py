from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ctrl_megatron.config.actor_rollout_ref import Actor, Megatron
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.layout import Layout, MeshName, layout_for

SMALL = [
    Layout(tensor=t, pipeline=p, virtual_pipeline=v, data=d)
    for t, p, v, d in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 2, 3))
]


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_ranks_count_through_tensor_then_data_then_pipeline(layout: Layout) -> None:
    rank = 0
    for pp in range(layout.pipeline):
        for dp in range(layout.data):
            for tp in range(layout.tensor):
                place = layout.coordinates(rank)
                assert (place.tp, place.pp, place.dp, place.cp) == (tp, pp, dp, 0)
                # Without experts of their own, both meshes are the same.
                assert (place.etp, place.ep, place.edp) == (tp, 0, dp)
                assert layout.rank(tp=tp, pp=pp, dp=dp) == rank
                rank += 1
    assert layout.world_size == rank
    assert layout.model_parallel_size * layout.data == rank
    for outside in (-1, rank):
        with pytest.raises(ValueError, match=f"rank {outside} is outside a layout of {rank} ranks"):
            layout.coordinates(outside)


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_stages_hold_every_layer_once_and_in_order(layout: Layout) -> None:
    chunks = layout.pipeline * layout.virtual_pipeline
    stages = list(layout.virtual_stages())
    assert sorted(stages) == sorted(
        itertools.product(range(layout.pipeline), range(layout.virtual_pipeline))
    )
    for num_layers in range(chunks, chunks + 25):
        own = [layout.layers(num_layers, pp=pp, chunk=chunk) for pp, chunk in stages]
        assert [layer for layers in own for layer in layers] == list(range(num_layers))
        # At most one layer apart, and those with less lie at the ends.
        sizes = [len(layers) for layers in own]
        most = max(sizes)
        assert set(sizes) <= {most, most - 1}
        short = sizes.count(most - 1)
        start, end = short // 2, short - short // 2
        assert sizes == [most - 1] * start + [most] * (chunks - short) + [most - 1] * end


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_one_stage_is_first_and_one_is_last(layout: Layout) -> None:
    stages = list(layout.virtual_stages())
    assert [s for s in stages if layout.has_embedding(pp=s[0], chunk=s[1])] == stages[:1]
    assert [s for s in stages if layout.has_output_layer(pp=s[0], chunk=s[1])] == stages[-1:]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensor, context, data, pipeline = (draw(st.integers(1, 4)) for _ in range(4))
    stage = tensor * context * data
    expert_tensor = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    left = stage // expert_tensor
    stage = tensor * context * data
    return Layout(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        sharded=draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0])),
        expert_tensor=expert_tensor,
        expert=draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])),
    )


MESHES: dict[MeshName, dict[str, str]] = {
    "dense": {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"},
    "expert": {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"},
}
"""Our name of each of Megatron's axes."""


@given(layouts())
def test_megatron_has_the_same_groups(layout: Layout) -> None:
    from megatron.core.parallel_state import RankGenerator

    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for axes in MESHES.values():
        sizes = {theirs: 1 + max(getattr(p, ours) for p in places) for theirs, ours in axes.items()}
        generator = RankGenerator(**{"cp": 1, "ep": 1} | sizes, order="tp-cp-ep-dp-pp")  # type: ignore[arg-type]
        for theirs, ours in axes.items():
            groups = generator.get_ranks(theirs)
            assert {layout.ranks_along(rank, ours) for rank in range(layout.world_size)} == {  # type: ignore[arg-type]
                tuple(group) for group in groups
            }
            for group in groups:
                indices = [getattr(places[rank], ours) for rank in group]
                assert indices == list(range(len(group)))


@given(layouts(), st.data())
def test_holders_are_the_ranks_with_these_indices(layout: Layout, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted([*MESHES, "module"])))
    axes = data.draw(st.sets(st.sampled_from(sorted(layout.mesh(name).axes))))
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    found = {layout.ranks_at(name, place.indices_on(*axes)) for place in places}
    # They part the world, and every part is what a look at each rank finds.
    assert sorted(itertools.chain(*found)) == list(range(layout.world_size))
    for holders in found:
        first = places[holders[0]].indices_on(*axes)
        assert holders == tuple(
            r for r, place in enumerate(places) if place.indices_on(*axes) == first
        )


def test_an_axis_of_the_other_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no axes \['ep'\]"):
        Layout(data=2).ranks_at("dense", (("ep", 0),))


@given(*(st.integers(1, 4) for _ in range(5)))
def test_experts_that_do_not_divide_a_stage_name_both_keys(
    tensor: int, context: int, data: int, expert: int, expert_tensor: int
) -> None:
    assume(tensor * context * data % (expert * expert_tensor))
    with pytest.raises(UserError) as caught:
        Layout(
            tensor=tensor, context=context, data=data, expert=expert, expert_tensor=expert_tensor
        )
    assert f"expert_model_parallel_size={expert}" in str(caught.value)
    assert f"expert_tensor_parallel_size={expert_tensor}" in str(caught.value)


@pytest.mark.parametrize("missing", range(3))
@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_megatron_has_the_same_layers(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, missing: int
) -> None:
    from types import SimpleNamespace

    from megatron.core import parallel_state
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from ctrl_megatron.models.build import uneven_pipeline_layout

    if layout.pipeline == 1 and layout.virtual_pipeline > 1:
        return  # Megatron has no interleaving without a pipeline.
    chunks = layout.pipeline * layout.virtual_pipeline
    num_layers = 2 * chunks - missing % chunks
    uneven = uneven_pipeline_layout(num_layers, layout)
    assert (uneven is None) == (num_layers % chunks == 0)
    stages = uneven and PipelineParallelLayerLayout(uneven, layout.pipeline)
    if stages:
        stages.validate_layer_layout(num_layers, 0)
    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline
        if layout.virtual_pipeline > 1
        else None,
        pipeline_model_parallel_layout=stages,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for pp, chunk in layout.virtual_stages():
        stage = chunk if layout.virtual_pipeline > 1 else None
        state = {
            "rank": lambda pp=pp: pp,
            "virtual": lambda: layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        }
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", state["rank"])
        name = "get_virtual_pipeline_model_parallel_world_size"
        monkeypatch.setattr(parallel_state, name, state["virtual"])
        offset = get_transformer_layer_offset(config, stage, pp)  # type: ignore[arg-type]
        assert layout.layers(num_layers, pp=pp, chunk=chunk).start == offset


def test_too_few_layers_name_both_keys() -> None:
    layout = Layout(pipeline=2, virtual_pipeline=3)
    for call in (layout.check_layers, lambda n: layout.layers(n, pp=0, chunk=0)):
        with pytest.raises(ValueError) as caught:
            call(5)
        text = str(caught.value)
        assert "5 layers" in text
        assert "pipeline_model_parallel_size=2" in text
        assert "virtual_pipeline_model_parallel_size=3" in text


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline"),
    list(itertools.product(range(1, 13), (1, 2, 3, 4), (1, 2, 3))),
)
def test_what_is_left_over_is_data_parallel(world: int, tensor: int, pipeline: int) -> None:
    def make() -> Layout:
        megatron = Megatron(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            sequence_parallel=tensor > 1,
        )
        return layout_for(world, Actor(megatron=megatron))

    if world % (tensor * pipeline):
        with pytest.raises(ValueError) as caught:
            make()
        text = str(caught.value)
        assert f"tensor_model_parallel_size={tensor}" in text
        assert f"pipeline_model_parallel_size={pipeline}" in text
        assert f"multiple of {tensor * pipeline} ranks" in text
        return
    layout = make()
    assert layout.world_size == world
    assert (layout.tensor, layout.pipeline, layout.virtual_pipeline) == (tensor, pipeline, 1)
    assert layout.sequence_parallel == (tensor > 1)
