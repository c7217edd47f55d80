"""Our code in vLLM's worker processes: reads chunks, reads weights back, draws tokens.

vLLM imports this module in each worker because ``worker_extension_cls`` names it; the import
registers the weight transfer, before the workers meet in a store. It uses only interfaces of vLLM
0.32, apart from ``SeededSampler``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from ctrl_megatron.models.families import FAMILIES
from ctrl_megatron.models.fp8 import SCALES
from ctrl_megatron.models.rules import adapter_name
from ctrl_megatron.parallel.store import install_single_address_store
from ctrl_megatron.rollout import vllm_cpu
from ctrl_megatron.rollout.held_tensors import RankExpertWeights, engine_hf_checksums
from ctrl_megatron.rollout.sampling import DRAWN_ROWS, inverse_sample, next_random_numbers
from ctrl_megatron.rollout.transports import read_chunk, wait_until_copied
from ctrl_megatron.rollout.vllm_delta import skip_tensors_for_pictures
from ctrl_megatron.rollout.weight_chunks import VLLM_BACKEND, ChunkTensor, WeightChunk
from ctrl_megatron.rollout.weight_update import checksums, read_model_config

_PROBE_ROWS = 2048
_READABLE = {
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
    UnquantizedMoeBackend.CPU,
}
"""Kernels for experts that keep the weights' order, or one that ``vllm_cpu`` inverts."""

install_single_address_store()
skip_tensors_for_pictures()


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Our media need no rendezvous through vLLM."""


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    """The fields of a ``WeightChunk``."""

    receiver: str
    tensors: list[ChunkTensor]
    place: dict[str, Any]
    reader: int = 0


class ChunkTransfer(WeightTransferEngine[NoInitInfo, ChunkInfo]):
    """Every worker reads whole chunks; the model's own weight loaders cut the worker's share."""

    init_info_cls = NoInitInfo
    update_info_cls = ChunkInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Convert the model to the form in which checkpoints are loaded."""
        initialize_layerwise_reload(self.model)
        vllm_cpu.mark_experts_unpacked(self.model)

    def receive_weights(self, update_info: ChunkInfo) -> None:
        """Load a chunk; no tensor refers to its memory afterwards."""
        dtype, model = self.model_config.dtype, self.model
        lent: set[int] = set()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            chunk: WeightChunk = {
                "receiver": update_info.receiver,
                "tensors": update_info.tensors,
                "place": update_info.place,
                "reader": update_info.reader,
            }
            for name, view in read_chunk(chunk):
                lent.add(_memory_of(view))
                own = name.endswith(SCALES) or view.dtype is torch.float8_e4m3fn
                yield name, view.to(self.device, view.dtype if own else dtype)

        model.load_weights(tensors())  # type: ignore[operator]
        for layer in model.modules():
            # An incomplete layer keeps its tensors until another chunk completes it.
            for _, call in get_layerwise_info(layer).loaded_weights:
                for name, value in call.arguments.items():
                    if isinstance(value, torch.Tensor) and _memory_of(value) in lent:
                        call.arguments[name] = value.clone()
        wait_until_copied(self.device)

    def finish_weight_update(self) -> None:
        """Convert the model to the form in which it computes."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # A tied head shares the embedding's weight but packs its own copy on a CPU, which the
            # reload does not renew.
            if isinstance(module, VocabParallelEmbedding) and _is_packed(module):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage; 0 for a meta tensor."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


if VLLM_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(VLLM_BACKEND, ChunkTransfer)


class SeededSampler(torch.nn.Module):
    """Draws as vLLM does, with two differences.

    Log-probs are those before top-k and top-p; vLLM's "processed" ones are those after. And rows
    with a seed are drawn together, with one random number each: on a GPU vLLM launches a kernel per
    row and token, and on a CPU its kernel makes a number for every token of the vocabulary.

    It replaces ``Sampler.topk_topp_sampler`` of vLLM's first model runner, which ``ENGINES``
    selects.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B,) int64 tokens and (B, V) float32 log-probs before top-k and top-p, of ``logits`` (B,
        V). ``generators`` are those of the rows that have a seed, ``k`` and ``p`` (B,) or None for
        all tokens. Without seeds and bounds the inner sampler decides whether it returns log-probs
        or None."""
        if generators:
            return self.draw_together(logits, generators, k, p)
        if k is None and p is None:
            return self.inner(logits, generators, k, p)
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens, _ = self.inner(logits, generators, k, p)
        return tokens, log_probs

    @staticmethod
    def draw_together(
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B,) int64 tokens and (B, V) float32 log-probs before top-k and top-p, of ``logits`` (B,
        V); one random number per row, from the row's generator if it has one."""
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        if k is None and p is None:
            kept, weights = log_probs, torch.exp
        else:
            kept = apply_top_k_top_p(logits, k, p)
            weights = partial(torch.softmax, dim=-1, dtype=torch.float32)
        numbers = next_random_numbers(generators, len(logits), logits.device)
        pairs = zip(kept.split(DRAWN_ROWS), numbers.split(DRAWN_ROWS), strict=True)
        return torch.cat([inverse_sample(weights(part), own) for part, own in pairs]), log_probs


def _is_packed(module: torch.nn.Module) -> bool:
    return hasattr(module, "cpu_linear")


def _computed_weight(module: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    """(out, in) weight that the layer multiplies with.

    On a CPU vLLM keeps only packed weights. The layer is then applied to the rows of the identity
    matrix, which returns the columns of its weight exactly (one product per output, the rest
    zeros). Of the packed weight of a convolution it keeps the original.
    """
    if (convolution := getattr(module, "_cpu_unpacked_conv_weight", None)) is not None:
        return convolution.unsqueeze(1)
    if not _is_packed(module):
        return module.weight
    columns = []
    for first in range(0, width, _PROBE_ROWS):
        rows = torch.zeros(min(_PROBE_ROWS, width - first), width, dtype=dtype)
        rows.diagonal(first).fill_(1)
        columns.append(module.quant_method.apply(module, rows))
    # Transposing the parts of a fused layer one by one takes twice as long.
    return (columns[0] if len(columns) == 1 else torch.cat(columns)).t().contiguous()


def _computed_experts(module: Any) -> RankExpertWeights:
    """The weights that a layer's experts multiply with.

    RuntimeError for a kernel whose layout cannot be read back.
    """
    backend = module.quant_method.unquantized_backend
    if backend not in _READABLE:
        raise RuntimeError(
            f"vLLM computes experts with its backend {backend.value}, whose weights cannot be read "
            "back; set actor_rollout_ref.rollout.engine_kwargs.moe_backend=triton, or "
            "trainer.verify_weight_sync=false"
        )
    gate_up, down = module.w13_weight, module.w2_weight
    if backend is UnquantizedMoeBackend.CPU:
        gate_up, down = vllm_cpu.unpacked_experts(module)
    placed = module._expert_map  # global number -> local number, -1 for those of other ranks
    numbers = None
    if placed is not None:
        (mine,) = torch.where(placed >= 0)
        numbers = mine[placed[mine].argsort()]
    names = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    return RankExpertWeights(gate_up, down, numbers, names=names)


def _gathered(local: torch.Tensor, dim: int) -> torch.Tensor:
    """The parts of all tensor ranks, concatenated along ``dim``."""
    if get_tensor_model_parallel_world_size() == 1:
        return local
    return tensor_model_parallel_all_gather(local.contiguous(), dim)


class VllmWorkerExtension:
    """Methods added to vLLM's worker, reached through ``AsyncLLM.collective_rpc``."""

    def ctrl_prepare(self: Any) -> None:
        """Install our sampler and, on a CPU, ``vllm_cpu``; called once, after the start."""
        sampler = self.model_runner.sampler
        sampler.topk_topp_sampler = SeededSampler(sampler.topk_topp_sampler)
        if self.device.type == "cpu":
            vllm_cpu.install_cpu_kernels(self.model_runner.get_model(), sampler)

    def ctrl_adapter_checksums(self: Any) -> dict[str, str]:
        """Checksums, by PEFT's names, of the adapters from which this worker computes; RuntimeError
        unless it has one set of them in use."""
        manager = self.model_runner.lora_manager._adapter_manager
        (number,) = manager.list_adapters()
        if list(manager._active_adapters) != [number]:
            raise RuntimeError(f"vLLM has loaded adapters {number} but does not use them")
        fused = manager.packed_modules_mapping
        found = {}
        for module, held in manager.get_adapter(number).loras.items():
            parent, _, leaf = module.rpartition(".")
            packed = leaf in fused
            names = fused[leaf] if packed else [leaf]
            downs, ups = (part if packed else [part] for part in (held.lora_a, held.lora_b))
            for name, down, up in zip(names, downs, ups, strict=True):
                if down is not None:
                    weight = f"{parent}.{name}.weight"
                    found |= {adapter_name(weight, "A"): down, adapter_name(weight, "B"): up}
        return checksums(found.items())

    def ctrl_checksums(self: Any) -> dict[str, str]:
        """Checksums of this pipeline stage's tensors, on the first tensor rank only."""
        model, dtype = self.model_runner.get_model(), self.model_config.dtype
        config = read_model_config(self.model_config.model)
        return engine_hf_checksums(
            model,
            dtype,
            is_first=get_tensor_model_parallel_rank() == 0,
            # If a directory has a head that equals the embedding, vLLM reports them as untied.
            tied=config.get("tie_word_embeddings", False),
            family=FAMILIES.get(config["model_type"]),
            gather=_gathered,
            fused=getattr(model, "packed_modules_mapping", {}),
            computed_weight=lambda module, width: _computed_weight(module, width, dtype),
            computed_experts=_computed_experts,
        )
