"""The count against an enumeration of every matrix product of a decoder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.models.flops import model_flops
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.shape import (
    Dense,
    Experts,
    FeedForward,
    GroupedQueryAttention,
    ModelShape,
)


def matmul(m: int, k: int, n: int) -> int:
    """(m, k) @ (k, n): one multiply and one add per term."""
    return 2 * m * k * n


def enumerated(shape: ModelShape, lens: list[int]) -> int:
    """Forward pass, product by product, attention row by row (row i sees i + 1 keys)."""
    h, q, kv = shape.hidden_size, shape.attention.heads, shape.attention.groups
    d, total = shape.attention.head_dim, 0
    for length in lens:
        for layer in shape.feed_forward:
            for columns in (q * d, kv * d, kv * d):
                total += matmul(length, h, columns)
            for _head in range(q):
                for row in range(length):
                    total += matmul(1, d, row + 1) + matmul(1, row + 1, d)
            total += matmul(length, q * d, h)
            passed, width = 1, layer.width
            if isinstance(layer, Experts):
                total += matmul(length, h, layer.count)
                passed, width = layer.top_k, layer.expert_width
            total += passed * (2 * matmul(length, h, width) + matmul(length, width, h))
        total += matmul(length, h, shape.vocab_size)
    return total


def decoder(
    hidden: int, vocab: int, attention: GroupedQueryAttention, *layers: FeedForward
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
        feed_forward=layers,
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
    ),
    layers=st.lists(
        st.builds(Dense, width=small)
        | st.builds(
            Experts, count=st.just(6), expert_width=small, top_k=small, renormalised=st.booleans()
        ),
        max_size=3,
    ),
    lens=st.lists(st.integers(0, 9), max_size=4),
)
def test_the_count_equals_an_enumeration(
    hidden: int,
    vocab: int,
    attention: GroupedQueryAttention,
    layers: list[FeedForward],
    lens: list[int],
) -> None:
    shape = decoder(hidden, vocab, attention, *layers)
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
        decoder(576, 49152, attention, *[Dense(width=1536)] * 30),
        tokens=320,
        pairs=10 * 32 * 33 // 2,
        projected_tokens=320,
        backward=True,
    )
    assert flops / (6 * 134_515_008 * 320) == pytest.approx(1.0, abs=0.02)
