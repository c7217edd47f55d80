"""Arithmetic of a model, counted from its rules."""

from __future__ import annotations

import math

from ctrl_megatron.models.delta_rule import products_per_token
from ctrl_megatron.models.rules import param_rules
from ctrl_megatron.models.shape import AnyShape


def model_flops(
    shape: AnyShape, *, tokens: int, pairs: int, projected_tokens: int, backward: bool
) -> int:
    """Floating-point operations of the matrix products over packed tokens.

    A multiply-add counts 2. Attention counts ``pairs`` of a token and a token it attends to
    (s(s+1)/2 in a causal sequence of s tokens), the vocabulary projection counts
    ``projected_tokens``, the backward pass twice the forward pass, or once where the weight is not
    trained and only the input's gradient is computed. The products of a gated delta net's chunks
    count as those of ``models.delta_rule``. Neither norms, convolutions and biases nor a value
    model's head count, nor recomputed activations, which are work of the implementation.
    """
    whole, frozen = (3, 2) if backward else (1, 1)
    products = tokens * sum(
        len(rule.layers)
        * rule.passed
        * math.prod(tensor.shape)
        // (rule.experts if rule.stacked else 1)
        * (whole if rule.trained else frozen)
        for rule in param_rules(shape)
        for tensor in rule.hf
        if rule.part == "layer" and len(tensor.shape) == (3 if rule.stacked else 2)
    )
    products += whole * len(shape.attention_layers) * pairs * shape.attention.products_per_pair
    if shape.delta_net is not None:
        products += whole * len(shape.delta_layers) * tokens * products_per_token(shape.delta_net)
    head = whole if shape.lora is None else frozen
    products += head * projected_tokens * shape.hidden_size * shape.vocab_size
    return 2 * products
