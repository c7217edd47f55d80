"""Memory of a model's passes beside its parameters, in bytes, on one rank. Pure.

T tokens of a packed micro-batch on this rank, H hidden, F ffn, A query heads, G query groups of D
numbers each, V vocabulary, t tensor ranks, s = t under sequence parallelism and else 1, e bytes per
number.

``te``: Transformer Engine 2.9-2.11's fused norms and rotary embedding and flash attention, as read
in its sources: ``LayerNormLinear`` saves its input, the normalised input and one float32 per token;
flash attention saves queries, keys, values (a view that keeps the fused projection alive), its
output and one float32 per token and head; fused SwiGLU saves its input.
``torch``: the project's own layer spec (``models.layer_spec``), as autograd saves its operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.models.delta_rule import CHUNK
from ctrl_megatron.models.shape import (
    AnyShape,
    Dense,
    Experts,
    FeedForward,
    GatedDeltaNet,
    GroupedQueryAttention,
    ModelShape,
    MultiLatentAttention,
)
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.vocab import vocab_range

Kernels = Literal["te", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The quantities that determine the size of a pass."""

    shape: AnyShape
    layout: Layout
    kernels: Kernels
    dtype_size: int
    tokens: int
    """Tokens of one micro-batch on one of the context ranks that share it."""
    micro_batches: int
    """Micro-batches of one optimizer step on one data-parallel rank."""
    logprob_chunk: int
    recompute_granularity: str | None = None
    recompute_num_layers: int = 1
    recompute_modules: Sequence[str] = ("core_attn",)
    gathered_keys: int = 0
    """Keys that a variable-length kernel receives for one micro-batch, divided by the context
    ranks, if responses share prompts; 0 if it receives those of the tokens alone."""
    grouped_experts: bool = False
    """Whether a layer's experts are computed together (``models.grouped_experts``)."""
    fused_softmax: bool = False
    """Whether Triton's kernels compute the softmax over the vocabulary."""
    divergence_matrices: int = 0
    """Float32 matrices of a chunk's logits that a divergence over the whole vocabulary needs
    (``OutputLayer.divergence_from``); 0 where an update computes none."""

    @property
    def decoder_shape(self) -> ModelShape:
        """The shape of a model whose layers this file counts."""
        assert isinstance(self.shape, ModelShape)
        return self.shape

    @property
    def key_value_replication_factor(self) -> float:
        """How often keys and values are attended to on the context ranks, each of which has all
        tokens of a part of the heads or, where they do not divide, all keys of its own tokens
        (``models.context_parallel``)."""
        attention, ranks = self.shape.attention, self.layout.context
        heads, groups = (n // self.layout.tensor for n in (attention.heads, attention.groups))
        return ranks if heads % ranks else math.lcm(groups, ranks) / groups

    @property
    def exchanged_bytes_per_token(self) -> float:
        """Bytes per token of queries, keys, values and contexts as context ranks exchange them; 0
        for one rank."""
        if self.layout.context == 1:
            return 0
        attention = self.shape.attention
        numbers = (
            attention.products_per_pair
            + self.key_value_replication_factor * attention.attended_width
        )
        return self.dtype_size * numbers / self.layout.tensor

    @property
    def gathered_key_value_bytes(self) -> float:
        """Bytes of these keys and their values in one layer; only ``te`` copies them."""
        numbers = (
            self.shape.attention.attended_width
            * self.key_value_replication_factor
            / self.layout.tensor
        )
        size = self.dtype_size * numbers * self.gathered_keys
        return size if self.kernels == "te" else 0

    @property
    def stacked_expert_bytes(self) -> float:
        """Bytes of the copy of one layer's experts' first or second weights, of which a grouped
        product reads the larger; 0 if each expert is computed by itself."""
        experts = max(
            (kind.count * kind.expert_width for kind in self.decoder_shape.expert_kinds), default=0
        )
        ranks = self.layout.ranks_per_expert_layer
        return self.grouped_experts * self.dtype_size * 2 * self.shape.hidden_size * experts / ranks

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks over which norms and residuals are split."""
        return self.layout.tensor if self.layout.sequence_parallel else 1

    @property
    def residual_bytes_per_token(self) -> float:
        """Bytes per token of the stream between layers."""
        return self.dtype_size * self.shape.hidden_size / self.sequence_ranks

    @property
    def output_columns(self) -> int:
        """Columns of the output layer on this rank."""
        return vocab_range(self.shape.vocab_size, 0, self.layout.tensor)[2]


def saved_bytes_per_token(p: PassShape) -> float:
    """Bytes per token that one layer keeps for its backward pass, without full recomputation; the
    layer of the model that keeps most counts."""
    mlp = max(_saved_by_feed_forward(p, kind) for kind in p.decoder_shape.layers_by_kind)
    norms = 2 * (2 * p.residual_bytes_per_token + 4 / p.sequence_ranks)
    softmax = 4 * p.shape.attention.heads / p.layout.tensor
    match p.shape.attention:
        case GroupedQueryAttention() as attention:
            attended = _saved_by_grouped_query(p, attention)
        case MultiLatentAttention() as attention:
            attended = _saved_by_latent(p, attention)
    attention = attended + softmax
    if p.kernels == "te":
        attention += p.gathered_key_value_bytes / p.tokens
    if p.recompute_granularity == "selective":
        if "core_attn" in p.recompute_modules:
            attention -= softmax + p.gathered_key_value_bytes / p.tokens
        if "mlp" in p.recompute_modules:
            mlp = 0
            if p.kernels == "te":
                norms /= 2
                norms += p.residual_bytes_per_token
    if (net := p.decoder_shape.delta_net) is not None:
        attention = max(attention, _saved_by_delta_net(p, net))
    return norms + attention + mlp


def _saved_by_delta_net(p: PassShape, net: GatedDeltaNet) -> float:
    """Bytes per token of the projections, of the convolution's input and output, of what is read
    before and after the norm and times the gate, and of decays and rates; the same with both
    kernels. The convolution and the rule keep no more (``models.delta_rule``)."""
    keys, values = net.key_width, net.value_width
    own = p.dtype_size * (6 * keys + 7 * values) + 8 * values + 24 * net.value_heads
    return own / p.layout.tensor


def _delta_workspace_bytes_per_token(p: PassShape) -> float:
    """Bytes per token while the gated delta rule computes forward, all in float32: queries, keys
    and values in chunks, three matrices of each chunk and head, and what is added to a state and
    read from it. Context ranks share the heads."""
    if (net := p.decoder_shape.delta_net) is None:
        return 0
    of_head = 3 * CHUNK + 5 * net.key_dim + 5 * net.value_dim
    return 4 * net.value_heads * of_head / p.layout.tensor


def _saved_by_grouped_query(p: PassShape, attention: GroupedQueryAttention) -> float:
    """Bytes per token of projections, rotated queries and keys, values, and the context."""
    e, t = p.dtype_size, p.layout.tensor
    heads, groups, head = attention.heads, attention.groups, attention.head_dim
    fused_qkv = e * (heads + 2 * groups) * head / t
    rotated = e * (heads + groups) * head / t
    context = e * heads * head / t
    # Context ranks keep the exchanged tensors in the place of their own.
    if p.kernels == "te":
        return (
            (p.exchanged_bytes_per_token or fused_qkv + rotated)
            + context
            + rotated * attention.qk_norm
        )
    # Values beside what is rotated.
    attended = p.exchanged_bytes_per_token or rotated + e * groups * head / t
    return attended + context + (fused_qkv + 4 * (heads + groups) / t) * attention.qk_norm


def _saved_by_latent(p: PassShape, attention: MultiLatentAttention) -> float:
    """Bytes per token of the short vectors before and after their norms, of queries, keys and
    values, and of the context; the same with both kernels."""
    e, heads, s = p.dtype_size, attention.heads / p.layout.tensor, p.sequence_ranks
    short = 2 * attention.kv_lora_rank + attention.qk_rope_head_dim
    if attention.q_lora_rank is not None:
        short += 2 * attention.q_lora_rank
    context = e * heads * attention.v_head_dim
    attended = p.exchanged_bytes_per_token or e * heads * (
        2 * attention.qk_head_dim + attention.v_head_dim
    )
    return e * short / s + attended + context + 8 / s


def _saved_by_feed_forward(p: PassShape, kind: FeedForward) -> float:
    """Bytes per token of the two halves of the activation and their product; with experts also the
    token's copy and the scaled product of each expert that it passes, and the router's scores. A
    rank computes as many tokens as it sends if the load is even, and with expert tensor ranks those
    that it sends and those that they send.
    """
    e, products = p.dtype_size, 3 * p.dtype_size * kind.width / p.layout.tensor
    match kind:
        case Dense():
            return products
        case Experts():
            copies = p.layout.expert_tensor_ranks * p.shape.hidden_size
            # Grouped, the scaled product is made from the halves in one operation.
            scaled = 0 if p.grouped_experts else kind.width
            routed = e * (kind.top_k * copies + scaled) + 12 * kind.count
            return products + routed / p.sequence_ranks


def _exchanged(p: PassShape) -> float:
    """Bytes per token of the copies that exist while a layer's experts compute: what is sent and
    what arrives, in the order of the experts, their output, and this in the order of arrival. Where
    tensor ranks add their outputs, the sum comes on top; gloo makes one more copy for it."""
    spread, tensor = p.layout.expert, p.layout.expert_tensor_ranks
    most = (
        max((kind.top_k for kind in p.decoder_shape.expert_kinds), default=0)
        * p.residual_bytes_per_token
    )
    added = (2 if p.kernels == "torch" else 1) * (tensor > 1)
    return most * (1 + (spread > 1) + 3 * tensor + added)


def _computed_together(p: PassShape) -> float:
    """Bytes per token between the two grouped products: what is sent, what arrives, and the two
    halves of the activation, beside which an adapter's are before and after they are joined."""
    if not p.grouped_experts:
        return 0
    copies = p.residual_bytes_per_token * (1 + p.layout.expert_tensor_ranks * (p.layout.expert > 1))
    halves = 2 * p.dtype_size / p.layout.tensor * (1 if p.shape.lora is None else 3)
    sizes = (k.top_k * (copies + halves * k.expert_width) for k in p.decoder_shape.expert_kinds)
    return max(sizes, default=0)


def largest_virtual_stage_layers(p: PassShape, *, pp: int) -> int:
    """Layers of the largest virtual stage of stage ``pp``."""
    chunks = range(p.layout.virtual_pipeline)
    return max(len(p.layout.layers(p.shape.num_layers, pp=pp, chunk=chunk)) for chunk in chunks)


def micro_batches_in_flight(p: PassShape, *, pp: int) -> int:
    """Virtual stages' micro-batches whose activations exist at one time on stage ``pp``.

    Megatron's 1F1B schedule runs this many forward passes before its first backward pass.
    """
    layout = p.layout
    if layout.pipeline == 1:
        return 1
    ahead = layout.pipeline - pp - 1
    if layout.virtual_pipeline > 1:
        ahead = 2 * ahead + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(ahead + 1, p.micro_batches * layout.virtual_pipeline)


def update_activations_and_workspace(p: PassShape, *, pp: int, largest: int) -> tuple[int, int]:
    """(activations kept, workspace) in bytes at the peak of an update on a rank of stage ``pp``;
    ``largest`` is the number of elements of the largest parameter of its layers.

    The peak is in the backward pass of the output layer, or of a layer whose block is recomputed.
    """
    kept, layer_bytes = _kept(p, pp=pp), saved_bytes_per_token(p)
    block = 0.0
    if p.recompute_granularity == "full":
        block = (
            p.tokens
            * layer_bytes
            * min(p.recompute_num_layers, largest_virtual_stage_layers(p, pp=pp))
        )
    moments = [(kept + block, _layer_workspace(p, largest))]
    if pp == p.layout.pipeline - 1:
        moments.append((kept, logits_workspace(p, backward=True)))
    activations, workspace = max(moments, key=sum)
    return int(activations), int(workspace)


def _kept(p: PassShape, *, pp: int) -> float:
    """Bytes that a rank keeps when its first backward pass begins."""
    layers, count = largest_virtual_stage_layers(p, pp=pp), micro_batches_in_flight(p, pp=pp)
    if p.recompute_granularity == "full":
        stage = math.ceil(layers / min(p.recompute_num_layers, layers)) * p.residual_bytes_per_token
    else:
        stage = layers * saved_bytes_per_token(p)
    if p.layout.pipeline > 1:
        stage += (
            p.residual_bytes_per_token
        )  # inputs and outputs of the stage are kept until its backward pass
    if pp == 0:
        stage += 8  # the embedding's rows
    ends = _saved_by_end(p) if pp == p.layout.pipeline - 1 else 0
    return p.tokens * (count * stage + ends)


def _saved_by_end(p: PassShape) -> float:
    """Bytes per token of final norm, output and loss; at most all tokens are responses."""
    norm = 2 * p.residual_bytes_per_token + 4 / p.sequence_ranks
    selected = p.dtype_size * p.shape.hidden_size
    if p.shape.value_head:
        selected = 4 * p.shape.hidden_size / p.sequence_ranks  # float32 for the head
    return norm + selected + 100  # vectors of the loss


def _layer_workspace(p: PassShape, largest: int) -> float:
    """Gradients inside a layer, under sequence parallelism the whole input and its gradient, what
    context ranks send and receive, and a weight's gradient before it is added to Megatron's buffer.

    The package's own layer spec saves more than these kernels, and frees it meanwhile.
    """
    e, hidden = p.dtype_size, p.shape.hidden_size
    ffn = e * p.shape.max_layer_width / p.layout.tensor
    gathered = 2 * e * hidden if p.layout.sequence_parallel else 0
    gathered += 2 * p.exchanged_bytes_per_token
    # Values and their gradients.
    gathered += 2 * _delta_workspace_bytes_per_token(p)
    # The copy of the experts' weights, and their gradients, which are as large.
    weights = 2 * p.stacked_expert_bytes
    if p.kernels == "te":
        return p.tokens * (2 * ffn + 3 * p.residual_bytes_per_token + gathered) + max(
            weights, e * largest
        )
    return p.tokens * (ffn + p.residual_bytes_per_token + gathered) + max(weights, e * largest / 2)


def logits_workspace(p: PassShape, *, backward: bool) -> float:
    """Bytes of ``parallel.vocab`` on the last stage of a GPU at its peak: a chunk of logits, and
    without the kernels the same and its exponentials in float32; backwards the output weight's
    gradient in float32, and a chunk's share of it, which adapters do without. A divergence over the
    vocabulary has the teacher's hidden states and output weight beside these."""
    if p.shape.value_head:
        return 0
    e, hidden = p.dtype_size, p.shape.hidden_size
    logits = min(p.logprob_chunk, p.tokens) * p.output_columns
    tile, powers = (e, 0) if p.fused_softmax else (4 if e == 4 else 4 + e, 4)
    gathered = e * hidden * p.tokens
    if not backward:
        return (tile + powers) * logits + 2 * gathered
    weight = p.output_columns * hidden if p.shape.lora is None else 0
    moments = [(tile + powers) * logits + 4 * weight, tile * logits + (4 + e) * weight]
    if p.divergence_matrices:
        compared = 4 * p.divergence_matrices * logits + (4 + e) * weight
        moments.append(compared + gathered + e * hidden * p.output_columns)
    return gathered + max(moments)


def inference_workspace(p: PassShape, *, pp: int) -> int:
    """Bytes of a pass without gradients at its peak on a rank of stage ``pp``."""
    e, hidden = p.dtype_size, p.shape.hidden_size
    ffn = e * p.shape.max_layer_width / p.layout.tensor
    gathered = e * hidden if p.layout.sequence_parallel else 0
    stream = 3 if p.kernels == "te" else 5
    # An adapter's output, before and after its parts are joined, is beside the layer's own.
    widths = 3 if p.shape.lora is None else 6
    moments = [p.tokens * (stream * p.residual_bytes_per_token + gathered + widths * ffn)]
    moments.append(
        p.tokens * (3 * p.residual_bytes_per_token + gathered) + p.gathered_key_value_bytes
    )
    moments.append(p.tokens * (stream * p.residual_bytes_per_token + _exchanged(p)))
    moments.append(
        p.tokens * (stream * p.residual_bytes_per_token + _computed_together(p))
        + p.stacked_expert_bytes
    )
    moments.append(
        p.tokens * (stream * p.residual_bytes_per_token + _delta_workspace_bytes_per_token(p))
    )
    if pp == p.layout.pipeline - 1:
        head = logits_workspace(p, backward=False)
        moments.append(p.tokens * (p.residual_bytes_per_token + gathered) + head)
    return int(max(moments))
