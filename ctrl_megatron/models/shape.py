"""The dimensions of a decoder, independent of library and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.types import Lora, StrategyName


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Attention whose query heads share the keys and values of their group."""

    heads: int
    groups: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    rotated: int | None = None
    """The first numbers of a head that are rotated; None for all."""
    gated: bool = False
    """Whether the context of each head is multiplied with the sigmoid of a gate, which is computed
    with the queries: the rows of a head's gate follow those of its query."""

    @property
    def query_width(self) -> int:
        """Numbers of one token's queries, and of the context that attention returns for it."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of one token's keys, and of its values."""
        return self.groups * self.head_dim

    @property
    def rotary_width(self) -> int:
        """Numbers of a head's query that are rotated by the token's position."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def attended_width(self) -> int:
        """Numbers of one token's keys and values, as attention receives them."""
        return 2 * self.key_width

    @property
    def products_per_pair(self) -> int:
        """Multiplications for a token and a token it attends to, in scores and in the context."""
        return 2 * self.query_width

    @property
    def divisible_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the tensor ranks."""
        return {"num_attention_heads": self.heads, "num_key_value_heads": self.groups}

    def cached_width(self, tensor: int) -> int:
        """Numbers that one of an engine's ``tensor`` ranks keeps of a token in a layer."""
        return 2 * -(-self.groups // tensor) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLatentAttention:
    """Attention whose keys and values are computed from one short vector per token, and whose
    rotated part of a key is the same for all heads (DeepSeek-V2, arXiv 2405.04434). The fields have
    the names of ``config.json``."""

    heads: int
    q_lora_rank: int | None
    """None if queries are computed from the token itself."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int | None = None
    """The keys that an indexer selects for each token (DeepSeek-V3.2); None for all. Only rows that
    are not longer, in which it selects all keys, are computed."""

    @property
    def groups(self) -> int:
        """Every head has keys and values of its own."""
        return self.heads

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_width(self) -> int:
        """Numbers of a head's query that are rotated by the token's position."""
        return self.qk_rope_head_dim

    @property
    def attended_width(self) -> int:
        """Numbers of one token's keys and values, as attention receives them."""
        return self.heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def products_per_pair(self) -> int:
        """Multiplications for a token and a token it attends to, in scores and in the context."""
        return self.heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def divisible_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the tensor ranks."""
        return {"num_attention_heads": self.heads}

    def cached_width(self, tensor: int) -> int:
        """Numbers that one of an engine's ``tensor`` ranks keeps of a token: each has them all."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """A layer that has a matrix for each value head in place of keys and values of all tokens
    (Yang et al., arXiv 2412.06464; ``models.delta_rule``). Neighbouring value heads share queries
    and keys. Before it is a convolution over time, behind it a gated norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    """Numbers of a head's query and key."""
    value_dim: int
    kernel: int
    """Tokens of the convolution, the newest one included."""
    by_head: bool
    """Whether the rows of the two projections are those of one key head after the other
    (Qwen3-Next), or four projections have queries, keys, values and so on (Qwen3.5)."""

    @property
    def key_width(self) -> int:
        """Numbers of one token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Numbers of one token's values."""
        return self.value_heads * self.value_dim

    @property
    def sections(self) -> tuple[int, ...]:
        """Numbers of queries, keys and values, which the convolution receives."""
        return self.key_width, self.key_width, self.value_width

    @property
    def state_numbers(self) -> int:
        """Numbers of a sequence's state, which are float32."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def divisible_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the tensor ranks."""
        return {"linear_num_key_heads": self.key_heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated feed-forward layer that every token passes."""

    width: int

    @property
    def divisible_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the tensor ranks."""
        return {"intermediate_size": self.width}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of the parts of a layer with experts in a family's files."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    stacked: bool = False
    """Whether a file has the weights of all experts as one tensor, gate above up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimitedRouting:
    """A token chooses its experts in the ``chosen`` of ``groups`` groups of experts whose ``best``
    highest scores have the largest sum."""

    groups: int
    chosen: int
    best: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Gated feed-forward layers of which a router chooses ``top_k`` for each token."""

    count: int
    expert_width: int
    top_k: int
    renormalised: bool
    """The weights of a token's experts sum to 1; otherwise they are their shares among all."""
    names: ExpertNames = ExpertNames()
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function from the router's logits to an expert's weight."""
    scaling: float = 1.0
    """The factor of these weights."""
    choice: GroupLimitedRouting | None = None
    """None if a token chooses among all experts."""
    correction_bias: bool = False
    """Whether the router has a number per expert that is added to its score for the choice alone.
    It is no parameter (DeepSeek-V3, arXiv 2412.19437)."""
    wide_router: bool = False
    """Whether the router's logits are computed in float32, whatever the model's type is."""
    shared_width: int = 0
    """Width of the layer that every token passes besides; 0 if there is none."""
    shared_gate: bool = False
    """Whether the output of that layer is multiplied with the sigmoid of a number per token."""

    @property
    def width(self) -> int:
        """Numbers between the two products for one token, over the experts that it passes."""
        return self.top_k * self.expert_width + self.shared_width

    @property
    def divisible_sizes(self) -> Mapping[str, int]:
        """Key of ``config.json`` -> a size that must divide over the expert tensor ranks."""
        return {"moe_intermediate_size": self.expert_width}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDiffusion:
    """How a masked-diffusion model predicts: every token sees all tokens of its sequence, and the
    model predicts the tokens in whose places the mask token stands."""

    mask_token: int
    shifted: bool
    """Whether the state before a masked place predicts its token, as in a model that began as an
    autoregressive one (Dream, arXiv 2508.15487), or the state of the place itself (LLaDA, arXiv
    2502.09992)."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face model."""

    name: str
    shape: tuple[int, ...]
    sections: tuple[int, ...] = ()
    """Rows of the parts that ranks cut one by one, such as queries, keys and values in one tensor;
    empty for a tensor that is cut as a whole."""


VALUE_HEAD = "score"
"""The name of the head in transformers' classification models."""
Attention = GroupedQueryAttention | MultiLatentAttention
FeedForward = Dense | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The two parts of a layer."""

    mixer: Attention | GatedDeltaNet
    """The part in which a token reads earlier ones."""
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. Its layers have equal attention, or equal gated delta nets in place of it, and
    each their own kind of feed-forward layer."""

    strategy: ClassVar[StrategyName] = "megatron"
    """The key ``actor_rollout_ref.actor.strategy`` of the models of this shape."""
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
    delta_net: GatedDeltaNet | None = None
    """None if all layers have attention."""
    delta_layers: tuple[int, ...] = ()
    """The layers with ``delta_net``, ascending."""
    zero_centred_norms: bool = False
    """Whether norms, except that of ``delta_net``, multiply with 1 + w where w is their weight."""
    value_head: bool = False
    """One number per token instead of a vocabulary (transformers' token classification models)."""
    head_bias: bool = True
    """Whether this head has a bias. Those of reward models (transformers' sequence classification
    models), of which one number is read, have none."""
    lora: Lora | None = None
    """Adapters, if they are trained in place of the decoder's weights."""
    diffusion: MaskedDiffusion | None = None
    """None for an autoregressive model, whose tokens see only those before them."""
    file_names: tuple[tuple[str, str], ...] = ()
    """(beginning of a module's name in Llama's files, its name in this family's), where they
    differ; ``{i}`` is the layer."""

    @property
    def without_adapters(self) -> ModelShape:
        """The model without adapters, or with merged ones."""
        return replace(self, lora=None)

    @property
    def num_layers(self) -> int:
        return len(self.feed_forward)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention, ascending."""
        return _others(self.num_layers, self.delta_layers)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """One for each layer."""
        delta = {n: self.delta_net for n in self.delta_layers if self.delta_net is not None}
        return tuple(
            LayerKind(mixer=delta.get(n, self.attention), feed_forward=kind)
            for n, kind in enumerate(self.feed_forward)
        )

    @property
    def with_each_kind_once(self) -> ModelShape:
        """The model with one layer of each kind, in the order in which they come."""
        kinds = dict.fromkeys(self.layer_kinds)
        return replace(
            self,
            feed_forward=tuple(kind.feed_forward for kind in kinds),
            delta_layers=tuple(n for n, kind in enumerate(kinds) if kind.mixer == self.delta_net),
        )

    @property
    def max_layer_width(self) -> int:
        """Numbers of one token between the two products of the widest feed-forward layer."""
        return max(kind.width for kind in self.feed_forward)

    @property
    def layers_by_kind(self) -> dict[FeedForward, tuple[int, ...]]:
        """The layers that have each kind of feed-forward layer, ascending."""
        layers: dict[FeedForward, tuple[int, ...]] = {}
        for layer, kind in enumerate(self.feed_forward):
            layers[kind] = (*layers.get(kind, ()), layer)
        return layers

    @property
    def expert_kinds(self) -> list[Experts]:
        return [kind for kind in self.layers_by_kind if isinstance(kind, Experts)]

    @property
    def expert_choices(self) -> tuple[int, int]:
        """(layers with experts, experts of a token in each), the sizes of ``expert_routes``."""
        layers = [kind for kind in self.feed_forward if isinstance(kind, Experts)]
        return len(layers), max((kind.top_k for kind in layers), default=0)


def _others(count: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in range(count) if n not in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersShape:
    """A language model of any family, as transformers builds it (``models.transformers_model``).

    What its layers compute is not known here. The class constants (``strategy``, ``diffusion``,
    ...) have the values that code for both kinds of shape expects of it.
    """

    family: str
    """Its ``model_type``."""
    config: str = field(compare=False)
    """Its config.json."""
    computed: str
    """The keys of config.json that may change a forward pass, as JSON."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    attention: GroupedQueryAttention
    """The sizes of an attention layer, for counting operations."""
    tied_embeddings: bool
    num_layers: int
    tensors: tuple[tuple[int | None, HfTensor], ...]
    """Every parameter with the layer that has it, in the order of the modules; None outside
    layers."""
    outputs: tuple[str, ...] = ()
    """The names of the output layer's parameters; a tied one is none of ``tensors``."""
    delta_net: GatedDeltaNet | None = None
    """As in ``ModelShape``."""
    delta_layers: tuple[int, ...] = ()
    """As in ``ModelShape``."""
    file_names: tuple[tuple[str, str], ...] = ()
    """As in ``ModelShape``."""
    value_head: bool = False
    """As in ``ModelShape``."""
    head_bias: bool = True
    """As in ``ModelShape``."""
    lora: Lora | None = None
    """As in ``ModelShape``."""
    strategy: ClassVar[StrategyName] = "fsdp"
    diffusion: ClassVar[None] = None
    expert_choices: ClassVar[tuple[int, int]] = (0, 0)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """As in ``ModelShape``."""
        return _others(self.num_layers, self.delta_layers)

    @property
    def max_layer_width(self) -> int:
        """Largest first dimension of a layer's parameters."""
        return max(t.shape[0] for layer, t in self.tensors if layer is not None)

    @property
    def without_adapters(self) -> TransformersShape:
        """The model without adapters, or with merged ones."""
        return replace(self, lora=None)


AnyShape = ModelShape | TransformersShape
"""A model of either strategy."""
SomeShape = TypeVar("SomeShape", bound=AnyShape)


def context_of(shape: AnyShape) -> tuple[int, str]:
    """(tokens of the longest row that a strategy computes, the key of ``config.json`` that ends
    it)."""
    limits = [(shape.max_position_embeddings, "max_position_embeddings")]
    if isinstance(shape.attention, MultiLatentAttention) and shape.attention.index_topk:
        limits.append((shape.attention.index_topk, "index_topk"))
    return min(limits)


def value_model_shape(shape: SomeShape, *, head_bias: bool = True) -> SomeShape:
    """The value model with the same decoder; without ``head_bias`` the reward model."""
    if isinstance(shape, TransformersShape):
        kept = [(layer, own) for layer, own in shape.tensors if own.name not in shape.outputs]
        sizes = {"weight": (1, shape.hidden_size), **({"bias": (1,)} if head_bias else {})}
        head = [HfTensor(f"{VALUE_HEAD}.{leaf}", size) for leaf, size in sizes.items()]
        shape = replace(
            shape,
            tensors=(*kept, *((None, tensor) for tensor in head)),
            outputs=tuple(tensor.name for tensor in head),
        )
    return replace(shape, value_head=True, head_bias=head_bias, tied_embeddings=False)


def is_reward_model(shape: AnyShape) -> bool:
    """Whether the shape is that of a reward model: it has a head for one number, without a bias."""
    return shape.value_head and not shape.head_bias


CLASSIFIERS = {"ForTokenClassification": True, "ForSequenceClassification": False}
"""The end of a class's name in transformers -> whether its head has a bias."""


def value_head_has_bias(config: Mapping[str, Any], where: str) -> bool | None:
    """Whether the head for numbers that a ``config.json`` describes has a bias; None if it
    describes a language model, which has no such head. UserError for a head of several numbers."""
    (architecture, *_) = config.get("architectures") or ("",)
    biases = [bias for end, bias in CLASSIFIERS.items() if architecture.endswith(end)]
    if not biases:
        return None
    # transformers writes no id2label for its default of two labels.
    if (labels := len(config.get("id2label") or (0, 1))) != 1:
        kind = "value" if biases[0] else "reward"
        raise UserError(f"{where}: a {kind} model has 1 label, this model has {labels}")
    return biases[0]
