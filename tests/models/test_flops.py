"""The count against an enumeration of every matrix product of a decoder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.models.flops import model_flops
from ctrl_megatron.models.lora import shape_with_adapters
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.shape import (
    Attention,
    Dense,
    Experts,
    GroupedQueryAttention,
    ModelShape,
    MultiLatentAttention,
)
from ctrl_megatron.types import Lora


def matmul(m: int, k: int, n: int) -> int:
    """(m, k) @ (k, n): one multiply and one add per term."""
    return 2 * m * k * n


def projections(attention: Attention, h: int) -> list[tuple[int, int]]:
    """(rows, columns) of every product of a token in attention."""
    q = attention.heads
    if isinstance(attention, GroupedQueryAttention):
        d, kv = attention.head_dim, attention.groups
        return [(h, q * d), (h, kv * d), (h, kv * d), (q * d, h)]
    plain, turned = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    short, value, rank = attention.kv_lora_rank, attention.v_head_dim, attention.q_lora_rank
    queries = [(h, q * (plain + turned))]
    if rank is not None:
        queries = [(h, rank), (rank, q * (plain + turned))]
    keys = [(h, short + turned), (short, q * (plain + value))]
    return [*queries, *keys, (q * value, h)]


def head_widths(attention: Attention) -> tuple[int, int]:
    """Numbers of a head's key and of its value."""
    if isinstance(attention, GroupedQueryAttention):
        return attention.head_dim, attention.head_dim
    return attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim


def enumerated(shape: ModelShape, lens: list[int]) -> int:
    """Forward pass, product by product, attention row by row (row i sees i + 1 keys)."""
    h, total = shape.hidden_size, 0
    key, value = head_widths(shape.attention)
    for length in lens:
        for layer in shape.feed_forward:
            for inner, columns in projections(shape.attention, h):
                total += matmul(length, inner, columns)
            for _head in range(shape.attention.heads):
                for row in range(length):
                    total += matmul(1, key, row + 1) + matmul(1, row + 1, value)
            widths = [layer.width]
            if isinstance(layer, Experts):
                total += matmul(length, h, layer.count)
                widths = [layer.expert_width] * layer.top_k + [layer.shared_width]
            for width in widths:
                total += 2 * matmul(length, h, width) + matmul(length, width, h)
        total += matmul(length, h, shape.vocab_size)
    return total


def decoder(
    hidden: int, vocab: int, attention: Attention, *widths: int, experts: Experts | None = None
) -> ModelShape:
    return ModelShape(
        family="any",
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=8,
        norm_epsilon=1e-5,
        rope=Rope(theta=1e4),
        tied_embeddings=True,
        attention=attention,
        feed_forward=(*(Dense(width=width) for width in widths), *([experts] if experts else [])),
    )


small = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(
    hidden=small,
    vocab=small,
    attention=st.builds(
        GroupedQueryAttention,
        heads=small,
        groups=small,
        head_dim=small,
        qkv_bias=st.booleans(),
        qk_norm=st.booleans(),
    )
    | st.builds(
        MultiLatentAttention,
        heads=small,
        q_lora_rank=st.none() | small,
        kv_lora_rank=small,
        qk_nope_head_dim=small,
        qk_rope_head_dim=small,
        v_head_dim=small,
    ),
    experts=st.none()
    | st.builds(
        Experts,
        count=st.just(6),
        expert_width=small,
        top_k=small,
        renormalised=st.booleans(),
        correction_bias=st.booleans(),
        shared_width=st.integers(0, 6),
    ),
    widths=st.lists(small, max_size=3),
    lens=st.lists(st.integers(0, 9), max_size=4),
)
def test_the_count_equals_an_enumeration(
    hidden: int,
    vocab: int,
    attention: Attention,
    experts: Experts | None,
    widths: list[int],
    lens: list[int],
) -> None:
    shape = decoder(hidden, vocab, attention, *widths, experts=experts)
    counts = {"tokens": sum(lens), "projected_tokens": sum(lens)}
    counts |= {"pairs": sum(row + 1 for length in lens for row in range(length))}
    forward = model_flops(shape, **counts, backward=False)
    assert forward == enumerated(shape, lens)
    assert model_flops(shape, **counts, backward=True) == 3 * forward
    counts["projected_tokens"] = 0
    bodies = model_flops(shape, **counts, backward=False)
    assert forward - bodies == sum(matmul(length, hidden, vocab) for length in lens)


def test_a_known_model_is_close_to_six_flops_per_parameter_and_token() -> None:
    """SmolLM2-135M has 134.5 M parameters; short sequences make attention scores negligible."""
    attention = GroupedQueryAttention(heads=9, groups=3, head_dim=64)
    flops = model_flops(
        decoder(576, 49152, attention, *[1536] * 30),
        tokens=320,
        pairs=10 * 32 * 33 // 2,
        projected_tokens=320,
        backward=True,
    )
    assert flops / (6 * 134_515_008 * 320) == pytest.approx(1.0, abs=0.02)


def test_adapters_add_their_products_and_save_the_gradients_of_other_weights() -> None:
    attention = GroupedQueryAttention(heads=2, groups=1, head_dim=3)
    plain = decoder(5, 11, attention, 7)
    shape = shape_with_adapters(plain, Lora(rank=2, alpha=1.0, targets=("q_proj", "down_proj")))
    tokens = {"tokens": 4, "pairs": 10, "projected_tokens": 3}
    products = matmul(4, 5, 2) + matmul(4, 2, 6) + matmul(4, 7, 2) + matmul(4, 2, 5)
    forward = model_flops(plain, backward=False, **tokens)
    assert model_flops(shape, backward=False, **tokens) == forward + products
    # Scores and contexts have two inputs, and gradients of both.
    scores = 2 * matmul(10, 6, 1)
    assert model_flops(shape, backward=True, **tokens) == 2 * forward + scores + 3 * products
