"""Packed rows that share a prompt: the layout by its definition, attention by dense float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import te_stand_ins
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType

from ctrl_megatron.models import attention, attention_kernel
from ctrl_megatron.models.packed_layout import (
    PackedLayout,
    build_packed_layout,
    layout_params,
    reorder_by_rank,
    reorder_by_token,
)

Groups = list[tuple[int, list[int]]]
CPU = torch.device("cpu")
A, G, D = 6, 2, 8
RAGGED: Groups = [(5, [3, 0, 1, 4]), (2, [6]), (7, []), (1, [1, 1]), (3, [0, 2])]
groups_of_rows = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than what is computed here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_definition(groups: Groups, filler: int) -> tuple[torch.Tensor, list[int], list[list[int]]]:
    """(which token sees which, positions, the tokens of every row), row by row."""
    total = filler + sum(prompt + sum(responses) for prompt, responses in groups)
    sees, positions = torch.zeros(total, total, dtype=torch.bool), [0] * total
    rows, start = [], 0
    for prompt, responses in groups:
        end = start + prompt
        for response in responses or [0]:
            tokens = [*range(start, start + prompt), *range(end, end + response)]
            for place, token in enumerate(tokens):
                sees[token, tokens[: place + 1]] = True
                positions[token] = place
            end += response
            rows.append(tokens)
        rows = rows if responses else rows[:-1]
        start = end
    for token in range(filler):
        sees[start + token, start : start + token + 1] = True
        positions[start + token] = token
    return sees, positions, rows


@settings(deadline=None, max_examples=30)
@given(groups_of_rows, st.integers(0, 3))
@example(RAGGED, 2)
def test_the_layout_is_what_it_says(groups: Groups, filler: int) -> None:
    sees, positions, rows = by_definition(groups, filler)
    layout = build_packed_layout(groups, filler=filler)
    params = layout_params(layout, CPU)
    assert layout.num_tokens == len(positions)
    assert layout.attended_pairs == int(sees.sum())
    assert params.positions.tolist() == positions
    # The kernel's view: bottom-right causal masks over queries and gathered keys.
    found = torch.zeros_like(sees)
    bounds = params.attention
    queries, keys = bounds.cu_seqlens_q.tolist(), bounds.cu_seqlens_kv.tolist()
    index = layout.key_index()
    assert (queries[-1], keys[-1]) == (layout.num_tokens, len(index))
    assert bounds.cu_seqlens_q.dtype == bounds.cu_seqlens_kv.dtype == torch.int32
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        assert b - a <= bounds.max_seqlen_q and d - c <= bounds.max_seqlen_kv
        for query in range(a, b):
            found[query, index[c : d - (b - query) + 1]] = True
    assert torch.equal(found, sees)
    assert layout.shares_prefix == (params.key_index is not None)
    if not layout.shares_prefix:
        assert index.tolist() == list(range(layout.num_tokens))
    # Megatron's rotary embedding takes everything for one sequence with a row per token.
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, layout.num_tokens]
    for place, tokens in zip(layout.rows, rows, strict=True):
        count = place.end - place.start
        assert tokens[len(tokens) - count :] == list(range(place.start, place.end))
        before = tokens[len(tokens) - count - 1 : -1]
        assert place.predecessors(torch.arange(count)).tolist() == before
        assert place.predecessors(torch.arange(count)[1::2]).tolist() == before[1::2]


def random_inputs(
    layout: PackedLayout, dtype: torch.dtype, value_width: int = D
) -> list[torch.Tensor]:
    """Query, key and value as views of one projection, as Megatron's are, and a gradient."""
    generator = torch.Generator().manual_seed(layout.num_tokens)
    widest = max(D, value_width)
    fused = torch.randn(
        layout.num_tokens, A + 2 * G, widest, generator=generator, dtype=torch.float64
    )
    given = torch.randn(
        layout.num_tokens, A * value_width, generator=generator, dtype=torch.float64
    )
    query, key, value = fused.to(dtype).split([A, G, G], dim=1)
    parts = query[..., :D], key[..., :D], value[..., :value_width]
    return [*(part.detach().requires_grad_() for part in parts), given.to(dtype)]


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor
) -> torch.Tensor:
    """Attention by its formula."""
    key, value = (x.repeat_interleave(A // G, dim=1) for x in (key, value))
    scores = torch.einsum("qad,kad->aqk", query, key) / D**0.5
    scores = scores.masked_fill(~sees, -torch.inf)
    return torch.einsum("aqk,kad->qad", scores.softmax(-1), value).flatten(1)


def by_segments(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
    module = attention.PackedAttention(SimpleNamespace(context_parallel_size=1))  # type: ignore[arg-type]
    return module(q, k, v, None, packed_seq_params=layout_params(layout, CPU))


def by_masks(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
    return attention.masked_attention(q, k, v, layout_params(layout, CPU), None).flatten(1)


def by_flash(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.varlen, "varlen_attn", te_stand_ins.varlen_attn)
        params = layout_params(layout, CPU)
        return attention.variable_length_attention(q, k, v, params, None).flatten(1)


def built_with_transformer_engine(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
    """Through Megatron's slot for Transformer Engine's attention."""
    kernel = attention.shared_prefix_attention_class(te_stand_ins.DotProductAttention)
    config = SimpleNamespace(
        num_attention_heads=q.shape[1],
        num_query_groups=k.shape[1],
        kv_channels=q.shape[2],
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        window_size=None,
    )
    widths = {"k_channels": q.shape[2], "v_channels": v.shape[2]}
    module = kernel(config, layer_number=1, attn_mask_type=None, attention_type="self", **widths)
    params = layout_params(layout, CPU)
    return module(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)


def by_transformer_engine(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernel, "attention_kernel_on", lambda *_: "transformer_engine")
        return built_with_transformer_engine(q, k, v, layout)


def beside_transformer_engine(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
    """In layers of other libraries, as those of ``strategy=fsdp``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernel, "attention_kernel_on", lambda *_: "transformer_engine")
        patch.setattr(attention.varlen, "varlen_attn", te_stand_ins.varlen_attn)
        return by_segments(q, k, v, layout)


def never(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("Transformer Engine was asked for what it has no kernel for")


def in_its_place(kernel: str) -> Callable[..., torch.Tensor]:
    """Transformer Engine is installed and has no kernel for this GPU or type."""

    def compute(q: Any, k: Any, v: Any, layout: PackedLayout) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_kernel, "attention_kernel_on", lambda *_: kernel)
            patch.setattr(te_stand_ins.DotProductAttention, "forward", never)
            patch.setattr(attention.varlen, "varlen_attn", te_stand_ins.varlen_attn)
            return built_with_transformer_engine(q, k, v, layout)

    return compute


WAYS = {
    "segments": by_segments,
    "masks": by_masks,
    "flash": by_flash,
    "transformer_engine": by_transformer_engine,
    "beside transformer_engine": beside_transformer_engine,
    "flash in its place": in_its_place("varlen"),
    "masks in its place": in_its_place("masked"),
}


@pytest.mark.parametrize("compute", WAYS.values(), ids=WAYS)
@settings(deadline=None, max_examples=8)
@given(groups_of_rows, st.integers(2, 4), st.booleans(), st.sampled_from([1, 3, 100]))
@example(RAGGED, 2, True, 3)
@example(RAGGED, 3, True, 100)
@example([(0, [9])], 2, False, 100)
def test_queries_of_two_pieces_see_what_they_see_in_the_whole(
    compute: Callable[..., torch.Tensor], groups: Groups, ranks: int, causal: bool, apart: int
) -> None:
    """Each context rank has the queries of a piece in each half of the tokens; together they are
    all tokens."""
    if not causal:
        groups = [(prompt, [n]) for prompt, responses in groups for n in responses]
    tokens = build_packed_layout(groups).num_tokens
    whole = build_packed_layout(groups, filler=-tokens % (2 * ranks), causal=causal)
    *parts, given_back = random_inputs(whole, torch.float64)
    sees = by_definition(groups, -tokens % (2 * ranks))[0]
    if not causal:
        sees = sees | sees.T
    wanted = dense(*parts, sees)
    gradients = torch.autograd.grad(wanted, parts, given_back)
    order = reorder_by_rank(torch.arange(whole.num_tokens), ranks)
    assert torch.equal(reorder_by_token(order, ranks), torch.arange(whole.num_tokens))
    summed = [torch.zeros_like(x) for x in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_TOGETHER", 3)
        patch.setattr(attention, "_APART", apart)
        for own in order.chunk(ranks):
            pieces = [range(int(piece[0]), int(piece[-1]) + 1) for piece in own.chunk(2)]
            assert [token for piece in pieces for token in piece] == own.tolist()
            layout, seen = whole.restricted_to_queries(pieces)
            query, key, value = parts
            found = compute(query[own], key[seen], value[seen], layout)
            torch.testing.assert_close(found, wanted[own], rtol=0, atol=1e-12)
            for total, grad in zip(
                summed, torch.autograd.grad(found, parts, given_back[own]), strict=True
            ):
                total += grad
    for total, wanted_grad in zip(summed, gradients, strict=True):
        torch.testing.assert_close(total, wanted_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compute", WAYS.values(), ids=WAYS)
@settings(deadline=None, max_examples=12)
@given(groups_of_rows, st.integers(0, 3), st.sampled_from([1, 3, 100]), st.sampled_from([D, 5, 11]))
@example(RAGGED, 2, 3, D)
@example(RAGGED, 2, 3, 5)
@example(RAGGED, 2, 100, 11)
@example([(4, [3])], 0, 100, D)
def test_every_way_of_attention_is_the_formula(
    compute: Callable[..., torch.Tensor], groups: Groups, filler: int, apart: int, value_width: int
) -> None:
    layout = build_packed_layout(groups, filler=filler)
    sees = by_definition(groups, filler)[0]
    *parts, given_back = random_inputs(layout, torch.float64, value_width)
    wanted = dense(*parts, sees)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_TOGETHER", 3)
        patch.setattr(attention, "_APART", apart)
        found = compute(*parts, layout)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        grads = torch.autograd.grad(found, parts, given_back)
    for a, b in zip(grads, torch.autograd.grad(wanted, parts, given_back), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compute", WAYS.values(), ids=WAYS)
@settings(deadline=None, max_examples=8)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3))
@example([9, 1, 4], 2)
def test_in_a_layout_that_is_not_causal_every_token_sees_its_whole_sequence(
    compute: Callable[..., torch.Tensor], lengths: list[int], filler: int
) -> None:
    layout = build_packed_layout(
        [(1, [length - 1]) for length in lengths], filler=filler, causal=False
    )
    sizes = [*lengths, *([filler] if filler else [])]
    sees = torch.block_diag(*(torch.ones(size, size) for size in sizes)).bool()
    assert layout.attended_pairs == int(sees.sum())
    *parts, given_back = random_inputs(layout, torch.float64, 5)
    wanted = dense(*parts, sees)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_TOGETHER", 3)
        found = compute(*parts, layout)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        grads = torch.autograd.grad(found, parts, given_back)
    for a, b in zip(grads, torch.autograd.grad(wanted, parts, given_back), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_only_causal_layouts_share_prompts() -> None:
    with pytest.raises(ValueError, match="only in causal layouts"):
        build_packed_layout([(3, [2, 2])], causal=False)


def test_gradcheck() -> None:
    layout = build_packed_layout([(2, [2, 1]), (1, [1])])
    whole = random_inputs(layout, torch.float64)
    parts = [
        part.detach()[:, :heads, :width].requires_grad_()
        for part, heads, width in zip(whole, (2, 1, 1), (3, 3, 2), strict=False)
    ]
    for compute in (by_segments, by_transformer_engine):
        assert torch.autograd.gradcheck(lambda *x: compute(*x, layout), parts)  # noqa: B023


@pytest.mark.parametrize("value_width", [D, 5])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_rounding_is_that_of_the_type(dtype: torch.dtype, bound: float, value_width: int) -> None:
    groups: Groups = [(150, [70, 64, 1, 0, 33]), (40, [120]), (5, [6, 7])]
    layout, sees = build_packed_layout(groups), by_definition(groups, 0)[0]
    *parts, given_back = random_inputs(layout, dtype, value_width)
    exact = [part.detach().double().requires_grad_() for part in parts]
    found = by_segments(*parts, layout)
    wanted = dense(*exact, sees)
    assert found.dtype == dtype
    pairs = [(found, wanted)]
    pairs += zip(
        torch.autograd.grad(found, parts, given_back),
        torch.autograd.grad(wanted, exact, given_back.double()),
        strict=True,
    )
    for a, b in pairs:
        assert float((a.double() - b).norm() / b.norm()) < bound


def test_rows_of_their_own_are_computed_as_without_sharing() -> None:
    """By torch's causal kernel, sequence by sequence, to the last bit; gradients to rounding."""
    lengths = [(4, [13]), (1, [1]), (90, [40])]
    layout = build_packed_layout(lengths)
    assert [(s.start, s.end) for s in layout.segments] == [(0, 17), (17, 19), (19, 149)]
    *parts, given_back = random_inputs(layout, torch.float32)
    found, alone = by_segments(*parts, layout), by_masks(*parts, layout)
    assert torch.equal(found, alone)
    for a, b in zip(
        torch.autograd.grad(found, parts, given_back),
        torch.autograd.grad(alone, parts, given_back),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "te", "flash", "kernel"),
    [
        (None, BF16, None, False, "segments"),
        (None, FP32, None, False, "segments"),
        # Hopper and Blackwell: cuDNN has kernels for halves.
        ((9, 0), BF16, "2.11.0", False, "transformer_engine"),
        ((9, 0), FP16, "2.9.0", True, "transformer_engine"),
        ((10, 0), BF16, "2.11.0", False, "transformer_engine"),
        ((9, 0), FP32, "2.11.0", True, "masked"),
        ((10, 3), FP32, "2.11.0", False, "masked"),
        # Ampere and Ada: only flash-attn has, else torch.
        ((8, 0), BF16, "2.11.0", True, "transformer_engine"),
        ((8, 0), BF16, "2.11.0", False, "varlen"),
        ((8, 6), FP16, "2.11.0", False, "varlen"),
        ((8, 9), BF16, "2.11.0", False, "varlen"),
        ((8, 9), FP32, "2.11.0", True, "masked"),
        # Cards of which cuDNN's kernels are not known.
        ((12, 0), BF16, "2.11.0", False, "varlen"),
        ((12, 0), BF16, "2.11.0", True, "transformer_engine"),
        # Volta and Turing have no flash attention.
        ((7, 0), FP16, "2.11.0", True, "masked"),
        ((7, 5), BF16, "2.11.0", False, "masked"),
        ((7, 5), FP16, None, False, "masked"),
        # Without Transformer Engine, or with one that does not know the mask.
        ((9, 0), BF16, None, True, "varlen"),
        ((9, 0), FP32, None, True, "masked"),
        ((9, 0), BF16, "1.5.0", True, "varlen"),
    ],
)
def test_which_kernel_a_gpu_takes(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    te: str | None,
    flash: bool,
    kernel: str,
) -> None:
    found = attention_kernel.attention_kernel(
        capability=capability, dtype=dtype, transformer_engine=te, flash_attn=flash
    )
    assert found == kernel
