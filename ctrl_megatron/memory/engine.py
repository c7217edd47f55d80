"""Memory of a rollout engine on one GPU, in bytes, awake and asleep. Pure.

Follows vLLM 0.32: a worker creates its CUDA context and communicators before it measures free
memory; then it uses ``gpu_memory_utilization`` of the whole device for weights, its largest
forward pass, CUDA graphs and, with the rest, the key-value cache. A sleeping engine frees weights
and cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ctrl_megatron.config import Config
from ctrl_megatron.config.actor_rollout_ref import EngineConfig
from ctrl_megatron.engine_kinds import BATCHED_TOKENS, ENGINES
from ctrl_megatron.memory.model_state import DTYPE_SIZE, engine_weight_bytes
from ctrl_megatron.memory.pushes import received_bucket_bytes
from ctrl_megatron.models.rules import param_rules
from ctrl_megatron.models.shape import AnyShape, ModelShape

MIB, GIB = 2**20, 2**30
CUDA_CONTEXT = 600 * MIB
"""A process's context with the kernels it loads and its workspaces; an estimate."""
COMMUNICATOR = 256 * MIB
"""An NCCL communicator's channels and buffers; an estimate."""
_ENGINE_BUFFERS = 300 * MIB
"""Block tables, input buffers and the like, which never sleep; an estimate."""
_GRAPHS, _GRAPHS_PER_LAYER = 512 * MIB, 20 * MIB
"""Captured CUDA graphs; an estimate."""
_PLACES = 256
"""Places whose probabilities the sampler of masked-diffusion models computes together
(``rollout.denoising``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemoryUse:
    """Bytes of one worker on its GPU."""

    share: int
    """Bytes of the device that the engine may use in all."""
    weights: int
    workspace: int
    """Activations of its largest forward pass."""
    graphs: int
    outside: int
    """Context, communicators and buffers, which are not part of the share."""
    reload: int
    """Whole tensors that arrive in a weight push before they are cut; 0 without pushes."""
    received: int = 0
    """Buckets in which it receives weights by itself, outside of the share."""
    states: int = 0
    """States of gated delta nets, for all sequences that are computed at the same time."""
    cache_per_token: int
    longest: int
    """Tokens of the longest sequence, for which the cache needs room."""

    @property
    def kv_cache_bytes(self) -> int:
        """Rest of the share for keys and values; 0 or less if nothing is left."""
        return self.share - self.weights - self.workspace - self.graphs - self.states

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that fit into the cache."""
        return max(0, self.kv_cache_bytes) // self.cache_per_token

    @property
    def asleep_bytes(self) -> int:
        """Bytes on the device while the engine sleeps."""
        return self.outside + self.graphs

    @property
    def awake_bytes(self) -> int:
        """Bytes on the device while the engine generates."""
        return self.outside + self.share + self.received


def actor_engine_memory(config: Config, shape: AnyShape, gpu_memory: int) -> EngineMemoryUse:
    """The actor's configured engine on a GPU of ``gpu_memory`` bytes."""
    keys = config.actor_rollout_ref.rollout
    quantised = keys.quantization is not None
    use = _use(config, keys, shape, gpu_memory, config.max_model_len, quantised=quantised)
    return replace(use, received=received_bucket_bytes(config, shape))


def proxy_engine_memory(config: Config, shape: ModelShape, gpu_memory: int) -> EngineMemoryUse:
    """The proxy's own configured engine on a GPU of ``gpu_memory`` bytes.

    Where the length of its sequences follows from the rows, it is taken from the actor's tokens,
    with room for a critique that is twice as long (``pipeline.inputs.proxy_engine_max_length``).
    """
    keys, data = config.actor_rollout_ref.proxy.engine, config.data
    revision = config.actor_rollout_ref.rollout.revision_max_tokens
    expected = data.max_prompt_length + 2 * data.max_response_length + revision
    longest = keys.max_model_len or min(expected, shape.max_position_embeddings)
    return replace(_use(config, keys, shape, gpu_memory, longest), reload=0)


def _use(
    config: Config,
    keys: EngineConfig,
    shape: AnyShape,
    gpu_memory: int,
    longest: int,
    *,
    quantised: bool = False,
) -> EngineMemoryUse:
    dtype = config.actor_rollout_ref.engine_dtype(keys)
    tensor, size = keys.tensor_model_parallel_size, DTYPE_SIZE[dtype]
    given = keys.engine_kwargs.get("max_num_batched_tokens") or BATCHED_TOKENS
    sequences = keys.max_num_seqs or ENGINES[keys.name].default_max_sequences(gpu_memory)
    tokens = max(given, sequences)
    width = 4 * shape.hidden_size + 3 * shape.max_layer_width / tensor
    # The sampler's float32 logits over the whole vocabulary: as they come, scaled, log-softmax.
    logits = min(tokens, sequences) * shape.vocab_size * 3 * 4
    cache_per_token = shape.attention.cached_width(tensor) * size * len(shape.attention_layers)
    # States have a place for each sequence that is computed at the same time.
    states = 0
    if (net := shape.delta_net) is not None:
        convolved = size * sum(net.sections) * (net.kernel - 1)
        of_layer = (4 * net.state_numbers + convolved) // tensor
        states = sequences * len(shape.delta_layers) * of_layer
    weights = engine_weight_bytes(shape, tensor=tensor, dtype=dtype, quantised=quantised)
    if ENGINES[keys.name].denoises:
        # A pass over all canvases: their logits, those of the masked places, and the sampler's
        # float32 probabilities of some places.
        tokens = sequences * longest
        places = sequences * config.data.max_response_length
        logits = shape.vocab_size * (2 * size * places + 4 * 4 * _PLACES)
    workspace = int(tokens * width * size + logits)
    graphs = 0 if keys.enforce_eager else _GRAPHS + shape.num_layers * _GRAPHS_PER_LAYER
    share = int(keys.gpu_memory_utilization * gpu_memory)
    if not ENGINES[keys.name].reserves_cache:
        # transformers takes what it needs, and has no graphs; a pass over canvases has a cache of
        # all rows only if it keeps prefixes.
        keeps = not ENGINES[keys.name].denoises or keys.engine_kwargs.get("keep_prefix")
        cached = sequences if keeps else 1
        cache = cached * longest * cache_per_token + states
        share, graphs = weights + workspace + cache, 0
    outside = CUDA_CONTEXT + _ENGINE_BUFFERS + COMMUNICATOR * (tensor > 1)
    if not ENGINES[keys.name].counts_workspace:
        outside, workspace, graphs = outside + workspace + graphs, 0, 0
    return EngineMemoryUse(
        share=share,
        weights=weights,
        workspace=workspace,
        graphs=graphs,
        outside=outside,
        reload=_largest_module(shape) * size,
        states=states,
        cache_per_token=cache_per_token,
        longest=longest,
    )


def _largest_module(shape: AnyShape) -> int:
    """Elements of the HF tensors that vLLM buffers at most before it cuts them: a fused layer's."""
    arriving = 0
    for rule in param_rules(shape.without_adapters):
        sizes = [math.prod(tensor.shape) for tensor in rule.hf]
        arriving = max(arriving, sum(sizes) if rule.kind == "column" else max(sizes))
    return arriving
