"""Tiny models, reference log-probs by transformers, and a producer of weight chunks."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ctrl_megatron.rollout.weight_chunks import WeightChunk, weight_chunk
from ctrl_megatron.types import TensorSpec

VOCAB = 512


def tiny_llama(seed: int) -> torch.nn.Module:
    """A random fp32 Llama with a tied head; large weights, so that its choices are clear-cut."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # vLLM's CPU attention requires heads of at least 32.
        head_dim=32,
        intermediate_size=128,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def tiny_experts(seed: int) -> torch.nn.Module:
    """A random fp32 Qwen3-MoE whose width no engine's kernel computes without padding."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=40,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        # SGLang reads no tied head of this family.
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).eval()


def save(model: torch.nn.Module, directory: Path) -> Path:
    """Write an HF directory that holds a tied head too, as some exports do."""
    model.save_pretrained(directory)  # type: ignore[operator]
    if not model.config.tie_word_embeddings:  # type: ignore[union-attr]
        return directory
    file = directory / "model.safetensors"
    tensors = load_file(file)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, file, metadata={"format": "pt"})
    return directory


def log_probs(
    model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """(R,) log-probabilities of ``tokens`` after ``prompt``, computed in one full pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    scores = torch.log_softmax(logits.float() / temperature, -1)
    return scores.gather(-1, torch.tensor(list(tokens))[:, None]).squeeze(-1)


def greedy(model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest continuation, by full passes without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """HF name -> tensor, without the tied head."""
    from transformers.core_model_loading import revert_weight_conversion

    held = {name: p.detach() for name, p in model.named_parameters()}
    return revert_weight_conversion(model, held)  # type: ignore[arg-type]


class Sender:
    """Offers weights chunk by chunk through ONE segment, which it spoils before it fills it again.

    Whoever reads a chunk after asking for the next one gets NaNs.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], per_chunk: int = 4) -> None:
        self._tensors, self._per_chunk = tensors, per_chunk
        self.segment = f"ctrl-{os.getpid()}-{uuid.uuid4().hex[:12]}-0"
        self._path = Path("/dev/shm") / self.segment
        self.pulled = 0

    def specs(self) -> list[TensorSpec]:
        """The tensors that a push sends."""
        return [_spec(name, tensor) for name, tensor in self._tensors.items()]

    async def chunks(self, fail_after: int | None = None) -> AsyncIterator[WeightChunk]:
        """The chunks; RuntimeError instead of the one after ``fail_after``."""
        names = list(self._tensors)
        size = sum(t.numel() * t.element_size() for t in self._tensors.values())
        self._path.write_bytes(b"\xff" * size)
        try:
            for first in range(0, len(names), self._per_chunk):
                if self.pulled == fail_after:
                    raise RuntimeError("the trainer fell over")
                self.pulled += 1
                self._spoil(size)
                yield self._fill(names[first : first + self._per_chunk])
            self._spoil(size)
        finally:
            with suppress(FileNotFoundError):
                self._path.unlink()

    def _spoil(self, size: int) -> None:
        with self._path.open("r+b") as file:
            file.write(b"\xff" * size)

    def _fill(self, names: Iterable[str]) -> WeightChunk:
        places, offset = [], 0
        with self._path.open("r+b") as file:
            for name in names:
                raw = self._tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
                file.seek(offset)
                file.write(raw.tobytes())
                places.append((_spec(name, self._tensors[name]), offset))
                offset += len(raw)
        return shared_chunk(self.segment, places)


def shared_chunk(segment: str, places: Sequence[tuple[TensorSpec, int]]) -> WeightChunk:
    """The chunk of tensors at these byte offsets of a file in /dev/shm."""
    return weight_chunk(
        "ctrl_megatron.rollout.transports.shared_memory:SharedMemoryReceiver",
        [spec for spec, _ in places],
        {"segment": segment, "offsets": [offset for _, offset in places]},
    )


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))
