"""The dimensions of a decoder, independent of library, layout and names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ctrl_megatron.models.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Attention whose query heads share the keys and values of their group."""

    heads: int
    groups: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def query_width(self) -> int:
        """Numbers of one token's queries, and of the context that attention returns for it."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of one token's keys, and of its values."""
        return self.groups * self.head_dim

    @property
    def products_per_pair(self) -> int:
        """Multiplications for a token and a token it attends to, in scores and in the context."""
        return 2 * self.query_width

    @property
    def split_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the tensor ranks."""
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated feed-forward layer that every token passes."""

    width: int

    @property
    def split_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the tensor ranks."""
        return {"intermediate_size": self.width}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Gated feed-forward layers of which a router chooses ``top_k`` for each token."""

    count: int
    expert_width: int
    top_k: int
    renormalised: bool
    """The weights of a token's experts sum to 1; otherwise they are their shares among all."""

    @property
    def width(self) -> int:
        """Numbers between the two products for one token, over the experts that it passes."""
        return self.top_k * self.expert_width

    @property
    def split_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the expert tensor ranks."""
        return {"moe_intermediate_size": self.expert_width}


Attention = GroupedQueryAttention
FeedForward = Dense | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder whose layers have equal attention and each their own kind of feed-forward layer."""

    family: str
    """The name in ``models.families.FAMILIES``."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    attention: Attention
    feed_forward: tuple[FeedForward, ...]
    """One for each layer."""
    value_head: bool = False
    """One number per token instead of a vocabulary (transformers' token classification models)."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.feed_forward)

    @property
    def widest(self) -> int:
        """Numbers between the two products of the widest feed-forward layer, for one token."""
        return max(kind.width for kind in self.feed_forward)

    @property
    def layers_by_kind(self) -> dict[FeedForward, tuple[int, ...]]:
        """The layers that have each kind of feed-forward layer, ascending."""
        found: dict[FeedForward, tuple[int, ...]] = {}
        for layer, kind in enumerate(self.feed_forward):
            found[kind] = (*found.get(kind, ()), layer)
        return found


def value_shape(shape: ModelShape) -> ModelShape:
    """The value model with the same decoder."""
    return replace(shape, value_head=True, tied_embeddings=False)
