"""Tiny models, reference log-probs by transformers, and a producer of weight chunks."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.rollout.weight_chunks import WeightChunk, weight_chunk
from ctrl_megatron.types import Completion, TensorSpec

VOCAB = 512
MASK = VOCAB - 1
"""The mask token of masked-diffusion models."""


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


def tiny_mixtral(seed: int) -> torch.nn.Module:
    """A random fp32 Mixtral; SGLang reads no head size of this family."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        intermediate_size=40,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return MixtralForCausalLM(config).eval()


def tiny_glm(seed: int) -> torch.nn.Module:
    """A random fp32 GLM-4.5: a dense layer, and one with experts; half of a head is rotated."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        **{"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64},
        **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "n_shared_experts": 1, "num_nextn_predict_layers": 0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"attention_bias": True, "vocab_size": VOCAB, "max_position_embeddings": 2048},
        **{"initializer_range": 0.2, "tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    )
    return Glm4MoeForCausalLM(config).eval()


def tiny_latent(seed: int, family: str = "DeepseekV3", **changes: Any) -> Any:
    """A random fp32 DeepSeek-V3: a dense layer, and one with experts."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        **{"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24},
        **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{"vocab_size": VOCAB, "max_position_embeddings": 2048, "initializer_range": 0.2},
        **{"tie_word_embeddings": False, **changes},
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tiny_indexed(seed: int) -> torch.nn.Module:
    """A random fp32 DeepSeek-V3.2: the same layers, whose indexers select all keys of a short row.
    They are those of every seed."""
    own = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8}
    model = tiny_latent(seed, "DeepseekV32", **own)
    for name, weight in model.named_parameters():
        if ".indexer." in name:
            weight.data = torch.linspace(-1, 1, weight.numel()).view_as(weight)
    return model


_LLADA = {
    **{"model.layers.": "model.transformer.blocks.", "model.norm": "model.transformer.ln_f"},
    **{"model.embed_tokens": "model.transformer.wte", "lm_head": "model.transformer.ff_out"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"},
    **{"self_attn.o_proj": "attn_out", "mlp.down_proj": "ff_out", "mlp.gate_proj": "ff_proj"},
    **{"self_attn.": "", "mlp.": ""},
}


def masked_dream(
    seed: int, directory: Path, family: str = "Dream"
) -> tuple[torch.nn.Module, Callable[[str], str]]:
    """(a random fp32 Qwen2 or Llama, from its names to those of the files): its weights are in
    ``directory`` as a ``Dream`` or ``llada`` model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCAB},
        **{"max_position_embeddings": 2048, "tie_word_embeddings": False},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    }
    dream = family == "Dream"
    kind = (Qwen2ForCausalLM, Qwen2Config) if dream else (LlamaForCausalLM, LlamaConfig)
    model = kind[0](kind[1](**sizes, initializer_range=0.2)).eval()
    config: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "mask_token_id": MASK}
    if dream:
        del sizes["rope_parameters"]
        config |= sizes | {"model_type": "Dream", "architectures": ["DreamModel"]}
    else:
        config |= {"model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 64}
        config |= {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96}
        config |= {"max_sequence_length": 2048, "vocab_size": VOCAB, "block_type": "llama"}
        config |= {"layer_norm_type": "rms"}

    def name(usual: str) -> str:
        for part, own in () if dream else _LLADA.items():
            usual = usual.replace(part, own)
        return usual

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name(n): t.detach().clone() for n, t in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model, name


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


def full_logits(model: torch.nn.Module) -> Callable[[list[int], int], torch.Tensor]:
    """(text, place) -> (V,) the logits that predict the place, where every token sees all."""

    @torch.no_grad()
    def logits(text: list[int], place: int) -> torch.Tensor:
        everything = torch.zeros(1, 1, len(text), len(text))
        return model(torch.tensor([text]), attention_mask=everything).logits[0, place - 1]

    return logits


def denoised(
    logits: Callable[[list[int], int], torch.Tensor],
    prompt: list[int],
    length: int,
    *,
    alg: str,
    seed: int,
    t: float,
    steps: int,
    alg_temp: float = 0.0,
    block: int | None = None,
    begin: Callable[[list[int], int], None] = lambda text, place: None,
) -> tuple[list[int], list[int], list[float]]:
    """(tokens, the step of each, log-probs) of a row: blocks one after the other, and in each of
    them time falls from 1 to 0.001 in equal steps; from t to s a share of 1 - s/t of the masked
    places is committed; the last step commits the rest. ``begin`` hears of the first pass of a
    block, and where in the text it begins."""
    stream, text = torch.Generator().manual_seed(seed), prompt + [MASK] * length
    starts, size = range(0, length, block or length), block or length
    own = max(1, steps // len(starts))
    times = torch.linspace(1, 1e-3, own + 1, dtype=torch.float64)
    order, log_probs = [-1] * length, [0.0] * length
    for start, step in ((start, step) for start in starts for step in range(own)):
        numbers = torch.rand(2, length, generator=stream, dtype=torch.float64)
        masked = [p for p in range(start, min(start + size, length)) if order[p] < 0]
        share = 1 - float(times[step + 1] / times[step])
        count = len(masked) if step == own - 1 else int(len(masked) * share)
        found = []
        if count and len(masked) == min(size, length - start):
            begin(text, len(prompt) + start)
        for place in masked if count else ():
            log_p = (logits(text, len(prompt) + place) / (t or 1)).log_softmax(-1)
            p = (log_p.exp() * (torch.arange(len(log_p)) != MASK)).double()
            at = numbers[0, place] * p.sum()
            token = int((p.cumsum(-1) > at).nonzero()[0]) if t else int(p.argmax())
            q = (p / p.sum()).sort(descending=True).values
            entropy, chance = (q * (q + 1e-10).log()).sum(), numbers[1, place]
            sure = float({"entropy": entropy, "margin": q[0] - q[1], "random": chance}[alg])
            if alg_temp and alg != "random":
                sure = sure / alg_temp - float((-numbers[1, place].log()).log())
            found.append((-sure, place, token, float(log_p[token])))
        now = start // size * own + step
        for _, place, token, log_prob in sorted(found)[:count]:
            text[len(prompt) + place], order[place], log_probs[place] = token, now, log_prob
    return text[len(prompt) :], order, log_probs


class FrozenPrefix:
    """The logits of a model whose every token sees all others, where the keys and values before a
    place stay those of an earlier text."""

    def __init__(self, model: torch.nn.Module, *, shifted: bool) -> None:
        self._model, self._shifted = model, shifted
        self._kept: dict[torch.nn.Module, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(("k_proj", "v_proj")):
                module.register_forward_hook(self._freeze)

    def begin(self, text: list[int], place: int) -> None:
        """Keep what lies before ``place``, as far as it does not predict it."""
        self._kept, self._end = {}, place - self._shifted
        self(text, place)

    def __call__(self, text: list[int], place: int) -> torch.Tensor:
        """(V,) logits for ``place``."""
        everything = torch.zeros(1, 1, len(text), len(text))
        with torch.no_grad():
            logits = self._model(torch.tensor([text]), attention_mask=everything).logits
        return logits[0, place - self._shifted]

    def _freeze(self, module: torch.nn.Module, _: Any, states: torch.Tensor) -> torch.Tensor:
        kept = self._kept.setdefault(module, states[:, : self._end])
        return torch.cat([kept, states[:, self._end :]], dim=1)


def denoised_log_probs(
    model: torch.nn.Module, prompt: list[int], completion: Completion, temperature: float
) -> torch.Tensor:
    """(R,) log-probs of a completion without a stop token: each token's at its own step."""
    length, logits = len(completion.token_ids), torch.zeros(len(completion.token_ids))
    for step in sorted(set(completion.order)):
        shown = [
            token if order < step else MASK
            for token, order in zip(completion.token_ids, completion.order, strict=True)
        ]
        everything = torch.zeros(1, 1, len(prompt) + length, len(prompt) + length)
        with torch.no_grad():
            given = model(torch.tensor([prompt + shown]), attention_mask=everything).logits[0]
        scores = (given[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        for place, token in enumerate(completion.token_ids):
            if completion.order[place] == step:
                logits[place] = scores[place, token]
    return logits


def asked(
    name: str, path: Path, ask: Callable[[RemoteEngine], Coroutine[Any, Any, Any]], **changes: Any
) -> Any:
    """What ``ask`` returns of an engine for short rows of the tiny model in ``path``, which is
    launched for it and stopped."""
    size = {"dtype": "float32", "max_model_len": 96, "kv_cache_gib": 0.25, "threads": 1}
    process = launch_engine(EngineSpec(name=name, model_path=str(path), **{**size, **changes}))

    async def asking() -> Any:
        engine = RemoteEngine(process.address)
        try:
            return await ask(engine)
        finally:
            await engine.close()

    try:
        return asyncio.run(asking())
    finally:
        process.stop()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """HF name -> tensor, without the tied head and what is never sent."""
    from transformers.core_model_loading import revert_weight_conversion

    held = {n: p.detach() for n, p in model.named_parameters() if ".indexer." not in n}
    # The bias by which a router chooses is no parameter.
    held |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
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
        {
            "segments": [segment],
            "offsets": [offset for _, offset in places],
            "locked": 0,
            "workers": None,
        },
    )


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))
