"""Random small HF models of every family, batches, and transformers' answers to them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from ctrl_megatron.models.safetensors_dir import PARTS_OF_STACKS

VOCAB = 101
_DIMS = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_DELTA = {
    **{"linear_num_key_heads": 12, "linear_num_value_heads": 24, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 6, "full_attention_interval": 2, "head_dim": 24},
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama3_rope": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE},
    ),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2_tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 20}),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, _DELTA),
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 20,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 0.7},
    **{"mscale_all_dim": 0.9, "original_max_position_embeddings": 16},
}
_SHARED = {**_DELTA, "shared_expert_intermediate_size": 32}
EXPERTS = {
    "qwen3_next": (transformers.Qwen3NextConfig, {**_EXPERTS, **_SHARED}),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, {**_EXPERTS, **_SHARED}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        transformers.Qwen3MoeConfig,
        {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            **{"head_dim": 20, "partial_rotary_factor": 0.5, "attention_bias": True},
            **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 24, "use_qk_norm": False, "routed_scaling_factor": 1.3},
            **{"first_k_dense_replace": 1, "num_nextn_predict_layers": None},
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        {**_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {**_LATENT, "q_lora_rank": 24, "rope_parameters": _YARN},
    ),
    # The longest row of ``random_batch`` has as many tokens as the indexer selects.
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        {
            **{**_LATENT, "q_lora_rank": 24, "rope_parameters": _YARN},
            **{"index_topk": 21, "index_n_heads": 3, "index_head_dim": 8},
        },
    ),
}
DELTA_FAMILIES = {
    family
    for family, (_, extra) in {**FAMILIES, **EXPERTS}.items()
    if "linear_num_key_heads" in extra
}
INDEXER = ".self_attn.indexer."
"""In the names of tensors with which only transformers computes (``deepseek_v32``)."""


def gradient_bound(family: str, layers: int) -> float:
    """Largest relative error of a gradient in float32.

    The norm behind a gated delta net divides by what a row's first tokens read, which may be next
    to nothing: in four layers transformers in float32 is as far from itself in float64.
    """
    return 5e-5 if family in DELTA_FAMILIES and layers > 2 else 1e-5


def layers_for(layout: dict) -> int:
    """The number of layers that a layout needs: two on each of two stages, or one on each of their
    chunks. Layouts without stages get two, which take half of the time.
    """
    return 4 if "pipeline" in layout else 2


def save_tiny(
    family: str, directory: Path, dtype: torch.dtype = torch.float32, **dims: Any
) -> Path:
    """A random model of ``family``; biases and norms are random too, so that none is forgotten."""
    config_class, extra = {**FAMILIES, **EXPERTS}[family]
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(
        config_class(**{**_DIMS, **extra, **dims})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # A tenth of a state is forgotten with each token.
                parameter.copy_(-2.5 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.to(dtype).save_pretrained(directory)
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model with which the trainer computes; those of all experts of a layer as
    transformers writes them."""
    tensors, files = {}, (load_file(path) for path in directory.glob("*.safetensors"))
    for name, tensor in itertools.chain.from_iterable(file.items() for file in files):
        module, _, leaf = name.rpartition(".")
        for expert, own in enumerate(tensor if leaf in PARTS_OF_STACKS else ()):
            parts = PARTS_OF_STACKS[leaf]
            halves = own.chunk(len(parts))
            tensors |= {f"{module}.{expert}.{p}": h for p, h in zip(parts, halves, strict=True)}
        if leaf not in PARTS_OF_STACKS and INDEXER not in name:
            tensors[name] = tensor
    return tensors


def with_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors``, in which each expert has its own, with one of all experts of a layer."""
    found = dict[str, torch.Tensor]()
    parts_of = dict[str, list[tuple[str, int, torch.Tensor]]]()
    for name, tensor in tensors.items():
        module, _, own = name.partition(".experts.")
        number, _, part = own.partition(".")
        if not number.isdigit():
            found[name] = tensor
            continue
        (leaf,) = [leaf for leaf, parts in PARTS_OF_STACKS.items() if part in parts]
        stack = f"{module}.experts.{leaf}"
        parts_of.setdefault(stack, []).append((part, int(number), tensor))
    for name, owned in parts_of.items():
        halves = [
            torch.stack([t for p, _, t in sorted(owned, key=lambda own: own[1]) if p == part])
            for part in PARTS_OF_STACKS[name.rpartition(".")[2]]
        ]
        found[name] = torch.cat(halves, dim=1)
    return found


def with_pictures(text: Path, directory: Path, family: str) -> Path:
    """The model ``text`` as its authors publish it: within another, experts in one tensor for each
    layer, beside tensors for pictures and of a layer that predicts further tokens."""
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in with_stacks(load_file(text / "model.safetensors")).items()
    }
    draw = torch.Generator().manual_seed(1)
    for name, size in {
        "model.visual.patch_embed.proj.weight": (4, 3, 2, 2, 2),
        "mtp.norm.weight": (5,),
    }.items():
        tensors[name] = torch.randn(size, generator=draw).bfloat16()
    inner = json.loads((text / "config.json").read_text())
    kind = inner.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    outer = {"model_type": family, "architectures": [kind], "text_config": inner}
    outer |= {"vision_config": {"depth": 1}, "image_token_id": 7, "dtype": "float32"}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(outer))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


MASK = VOCAB - 1
_LLADA_KEYS = {
    **{"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    **{"num_key_value_heads": "n_kv_heads", "intermediate_size": "mlp_hidden_size"},
    **{"max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying"},
    **{"vocab_size": "vocab_size", "rms_norm_eps": "rms_norm_eps"},
}
_LLADA_MODULES = {
    **{"input_layernorm": "attn_norm", "self_attn.o_proj": "attn_out", "mlp.down_proj": "ff_out"},
    **{"post_attention_layernorm": "ff_norm", "mlp.gate_proj": "ff_proj"},
    **{"self_attn.": "", "mlp.": "", "model.layers.": "model.transformer.blocks."},
    **{"model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f"},
    "lm_head": "model.transformer.ff_out",
}


def llada_name(name: str) -> str:
    """LLaDA's name of a tensor of Llama's."""
    for part, renamed in _LLADA_MODULES.items():
        name = name.replace(part, renamed)
    return name


def save_masked(family: str, directory: Path, **dims: Any) -> tuple[Path, Path]:
    """(a random masked-diffusion model as its authors publish it, the same weights as a model of
    transformers): ``dream``, ``dream_tied`` or ``llada``."""
    base = {"dream": "qwen2", "dream_tied": "qwen2_tied", "llada": "llama3_rope"}[family]
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    theirs = save_tiny(base, directory / "theirs", **{**plain, **dims})
    own = directory / "own"
    own.mkdir()
    config = json.loads((theirs / "config.json").read_text())
    tensors = load_file(theirs / "model.safetensors")
    remote = {"auto_map": {"AutoModel": f"modeling_{family}.Model"}, "mask_token_id": MASK}
    if family.startswith("dream"):
        config |= {"model_type": "Dream", "architectures": ["DreamModel"], **remote}
    else:
        config = {
            **{theirs: config[ours] for ours, theirs in _LLADA_KEYS.items()},
            **{"model_type": "llada", "architectures": ["LLaDAModelLM"], **remote},
            **{"embedding_size": config["vocab_size"], "rope_theta": 5e5, "block_type": "llama"},
            **{"layer_norm_type": "rms", "activation_type": "silu", "torch_dtype": "float32"},
        }
        tensors = {llada_name(name): tensor for name, tensor in tensors.items()}
    (own / "config.json").write_text(json.dumps(config))
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    return own, theirs


def with_masks(batch: dict, seed: int) -> dict:
    """``batch`` with random masks of all its tokens, also of prompts."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = batch["attention_mask"].shape
    share = 0.2 + 0.6 * torch.rand(rows, generator=generator)
    masked = torch.rand((rows, columns), generator=generator) < share[:, None]
    return {**batch, "masked": masked & batch["attention_mask"].bool(), "mask_share": share}


def full_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(T, V) logits of ``tokens`` (T,), each of which sees all."""
    everything = torch.zeros(1, 1, len(tokens), len(tokens), dtype=model.dtype)
    return model(tokens[None], attention_mask=everything).logits[0]


def reference_scores(
    directory: Path,
    batch: dict,
    *,
    shifted: bool,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(model, coupled scores with gradients, mean entropies) by transformers, of a model in
    ``dtype``; of a batch with ``mask_level`` those of its single version."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    rows, width = batch["response_mask"].shape
    scores, entropies = (torch.zeros(rows, width, dtype=torch.float64) for _ in range(2))
    for row in range(rows):
        seen = batch["attention_mask"][row].bool()
        tokens, hidden = batch["input_ids"][row][seen], batch["masked"][row][seen]
        first, single = int(seen[:-width].sum()), "mask_level" in batch
        share = batch["mask_level" if single else "mask_share"][row].double()
        answers = int(batch["response_mask"][row].sum())
        in_response = torch.arange(len(tokens)) >= first
        versions = [
            (hidden | in_response, None),
            (hidden, 1 / share),
            (hidden ^ in_response, 1 / (1 - share)),
        ]
        # Every log-prob of a single version counts whole, every one of the three half.
        part = 1.0 if single else 0.5
        versions = versions[1:2] if single else versions
        for which, weight in versions:
            logits = full_logits(model, torch.where(which, MASK, tokens)) / temperature
            counted = which[first : first + answers] | (weight is None)
            columns = counted.nonzero().flatten()
            places = first + columns
            log_p = logits.log_softmax(-1)[places - int(shifted)]
            chosen = log_p.gather(-1, tokens[places, None]).squeeze(-1).double()
            factor = part * (1.0 if weight is None else weight)
            own = (torch.full_like(columns, row), columns)
            scores = scores.index_put(own, factor * chosen, accumulate=True)
            entropies[own] -= part * (log_p.exp() * log_p).sum(-1).detach()
    return model, scores, entropies


def random_batch(
    seed: int,
    rows: int = 6,
    prompt: int = 12,
    response: int = 9,
    group: int = 1,
    holes: bool = False,
    vocab: int = VOCAB,
) -> dict:
    """Ragged rows: prompts padded on the left, responses on the right; ``group`` of them begin with
    the same prompt, in turn. With ``holes`` a third of the response tokens is in no mask, like an
    environment's observations.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, prompt + response), generator=generator)
    prompts = torch.randint(1, prompt + 1, (rows,), generator=generator)
    answers = torch.randint(1, response + 1, (rows,), generator=generator)
    same = torch.arange(rows) % (rows // group)
    ids[:, :prompt], prompts = ids[same, :prompt], prompts[same]
    column = torch.arange(prompt + response)
    attention = (column >= prompt - prompts[:, None]) & (column < prompt + answers[:, None])
    mask = attention[:, prompt:]
    noise = torch.randn((3, rows, response), generator=generator)
    if holes:
        mask = mask & (torch.rand(mask.shape, generator=generator) > 1 / 3)
    return {
        "input_ids": ids,
        "attention_mask": attention.long(),
        "response_mask": mask,
        "old_log_probs": (-4.6 + 0.3 * noise[0]) * mask,
        "ref_log_prob": (-4.6 + 0.3 * noise[1]) * mask,
        "advantages": noise[2] * mask,
    }


def predicted(seen: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(n,) places of a row's masked tokens among its attended ones (P+R,), of which the response's
    last R columns are attended from their first one on.
    """
    return int(seen[: -len(mask)].sum()) + mask.nonzero().flatten()


def recurrent_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule as transformers calls it, token by token and in the tensors' own type:
    its own function computes in float32."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state, out = value.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1]), []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        seen = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = beta[:, t, :, None] * (value[:, t] - seen)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(out, dim=1) * key.shape[-1] ** -0.5, state


@contextmanager
def exact_models() -> Iterator[Any]:
    """A function from a directory to transformers' model in float64."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
            patch.setattr(module, "torch_chunk_gated_delta_rule", recurrent_delta_rule)
        yield partial(
            transformers.AutoModelForCausalLM.from_pretrained,
            dtype=torch.float64,
            experts_implementation="eager",
        )


def reference_gradients(directory: Path, batch: dict, out: Path) -> Path:
    """transformers' gradients of ``workers.weighted_loss``, saved as a model in ``out``."""
    names = ("input_ids", "attention_mask", "response_mask", "advantages")
    with exact_models() as load:
        model = load(directory)
        for ids, seen, mask, weights in zip(*(batch[name] for name in names), strict=True):
            tokens, places = ids[seen.bool()], predicted(seen, mask)
            log_p = model(tokens[None]).logits[0].log_softmax(-1)[places - 1]
            chosen = log_p.gather(-1, tokens[places, None]).squeeze(-1)
            (-(chosen * weights[mask]).sum() / batch["response_mask"].sum()).backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (INDEXER in name)
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.float().save_pretrained(out)
    return out


def reference_router_losses(
    directory: Path, batches: list[dict], losses: dict[str, float], out: Path
) -> tuple[Path, dict[str, float]]:
    """The routers' losses over ``batches``, each one micro-batch, on transformers' hidden states in
    float64: (gradients saved as a model in ``out``, metrics of a step)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    gates = {i: m.mlp.gate for i, m in enumerate(model.model.layers) if hasattr(m.mlp, "gate")}
    seen: dict[int, list[torch.Tensor]] = {}
    for layer, gate in gates.items():
        gate.register_forward_pre_hook(
            lambda gate, given, layer=layer: seen.setdefault(layer, []).append(
                given[0].flatten(0, -2) @ gate.weight.T
            )
        )
    count = sum(int(batch["attention_mask"].sum()) for batch in batches)
    top_k, sums = model.config.num_experts_per_tok, {"balance": 0.0, "z": 0.0}
    loads = {layer: torch.zeros(model.config.num_experts) for layer in gates}
    for batch in batches:
        seen.clear()
        for ids, attended in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            model.model(ids[attended.bool()][None])
        total = torch.zeros((), dtype=torch.float64)
        for layer, rows in seen.items():
            logits = torch.cat(rows)
            shares = logits.softmax(-1)
            chosen = torch.zeros_like(shares).scatter(1, shares.topk(top_k).indices, 1.0)
            loads[layer] += chosen.sum(0).float()
            fractions = chosen.mean(0) / top_k
            parts = {
                "balance": len(fractions) * (fractions * shares.mean(0)).sum(),
                "z": logits.logsumexp(-1).square().mean(),
            }
            for name, part in parts.items():
                total = total + losses[name] * part * len(logits) / count
                sums[name] += float(part) * len(logits) / count / len(gates)
        total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(out)
    busiest = {f"moe/max_load/{i}": float(load.max() / load.mean()) for i, load in loads.items()}
    return out, {
        **busiest,
        "moe/max_load": max(busiest.values()),
        "moe/balance_loss": sums["balance"],
        "moe/z_loss": sums["z"],
    }


@torch.no_grad()
def reference_biases(directory: Path, batch: dict, rate: float) -> dict[str, torch.Tensor]:
    """The biases of DeepSeek-V3's routers after a step on ``batch``, by their names in files: an
    expert that transformers chooses for fewer tokens than the mean gains ``rate``, one that it
    chooses for more loses it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    counts: dict[str, torch.Tensor] = {}

    def count(name: str, found: tuple[torch.Tensor, ...]) -> None:
        chosen = torch.bincount(found[2].flatten(), minlength=model.config.n_routed_experts)
        counts[name] = counts.get(name, 0) + chosen.float()

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, given, found, name=name: count(name, found))
    for ids, attended in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        model.model(ids[attended.bool()][None])
    biases = {}
    for name, tokens in counts.items():
        bias, even = model.get_submodule(name).e_score_correction_bias, tokens.mean()
        steps = [rate * ((own < even).item() - (own > even).item()) for own in tokens]
        biases[f"{name}.e_score_correction_bias"] = bias + torch.tensor(steps)
    return biases


@torch.no_grad()
def reference_log_probs(
    directory: Path, batch: dict, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' log-probs and entropies, computed row by row without padding."""
    log_probs = torch.zeros(batch["response_mask"].shape)
    entropy = torch.zeros_like(log_probs)
    rows = (batch[name] for name in ("input_ids", "attention_mask", "response_mask"))
    with exact_models() as load:
        model = load(directory)
        for row, (ids, seen, mask) in enumerate(zip(*rows, strict=True)):
            tokens, places = ids[seen.bool()], predicted(seen, mask)
            logits = model(tokens[None]).logits[0] / temperature
            log_p = logits.log_softmax(-1)[places - 1]
            log_probs[row, mask] = log_p.gather(-1, tokens[places, None]).squeeze(-1).float()
            entropy[row, mask] = -(log_p.exp() * log_p).sum(-1).float()
    return log_probs, entropy


def widest_gap(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest relative error of a gradient, and whose it is.

    Queries and keys of qwen2 have a hundredth of the other gradients, and rounding errors like
    theirs, so a norm counts as a fiftieth of the largest at least.
    """
    assert found.keys() == expected.keys()
    floor = 0.02 * max(float(want.norm()) for want in expected.values())
    return max(
        (float((found[name] - want).norm()) / max(float(want.norm()), floor), name)
        for name, want in expected.items()
    )
