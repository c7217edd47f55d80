"""Arithmetic of a model, counted from its rules."""

from __future__ import annotations

import math

from ctrl_megatron.models.rules import rules
from ctrl_megatron.models.shape import ModelShape


def model_flops(
    shape: ModelShape, *, tokens: int, pairs: int, projected_tokens: int, backward: bool
) -> int:
    """Floating-point operations of the matrix products over packed tokens.

    A multiply-add counts 2. Attention counts ``pairs`` of a token and a token it attends to
    (s(s+1)/2 in a causal sequence of s tokens), the vocabulary projection counts
    ``projected_tokens``, the backward pass twice the forward pass. Neither norms and biases nor a
    value model's head count, nor recomputed activations, which are work of the implementation.
    """
    per_token = sum(
        len(rule.layers) * rule.passed * math.prod(tensor.shape)
        for rule in rules(shape)
        for tensor in rule.hf
        if rule.part == "layer" and len(tensor.shape) == 2
    )
    products = tokens * per_token
    products += shape.num_layers * pairs * shape.attention.products_per_pair
    products += projected_tokens * shape.hidden_size * shape.vocab_size
    return 2 * products * (3 if backward else 1)
