"""Models and data of this folder's runs: models that write two words, and problems they solve.

A random model never writes a judgment, so it would never be judged either. The critic here has been
taught one chain of tokens per judgment and draws a whole one about every second time; the proxy
answers everything with ``print(7)``. So groups differ in reward and the sandbox has work.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ctrl_megatron.data.rows import row_of_attempt, write_rows
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.types import Attempt, Problem

REPOSITORY = Path(__file__).parents[2]
JUDGMENTS = ("Overall judgment: Correct", "Overall judgment: Incorrect")
PROGRAM = "print(7)"
_SEVENS = ("days of a week", "colours of a rainbow", "dwarfs of Snow White", "hills of Rome")


def smollm2(scratch: Path) -> Path:
    """The directory that ``tools/prepare_smollm2.py`` writes; the checkout's where it is there.

    It is made once in ``scratch``, also where several processes ask for it.
    """
    from ctrl_megatron.commands import prepare_smollm2

    kept = REPOSITORY / "runs/models/smollm2"
    _, stamp = prepare_smollm2.find_source()
    if prepare_smollm2.is_complete(kept, stamp):
        return kept
    made = scratch / "smollm2"
    with (scratch / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare_smollm2.prepare_directory(made)
    return made


def chain_model(
    directory: Path,
    tokenizer_from: Path,
    texts: Sequence[str],
    probability: float,
    *,
    experts: int = 0,
    family: str = "",
    **keys: Any,
) -> Path:
    """A tiny fp32 Llama that says one of ``texts`` and ends, each token with ``probability``; with
    ``experts`` a Qwen3-MoE with so many of them; of another ``family`` with these ``keys``.

    Attention starts out switched off, so the next token depends on the last one only, whatever the
    prompt is.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tokenizer_from)
    if experts:
        family, keys = (
            "qwen3_moe",
            {
                # SGLang reads no tied head of this family.
                **{"tie_word_embeddings": False, "num_experts": experts, "num_experts_per_tok": 2},
                **{"moe_intermediate_size": 48, "norm_topk_prob": True},
            },
        )
    if family:
        kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        kept += ("max_position_embeddings",)
        keys = {"num_hidden_layers": 2, **keys}
        config = CONFIG_MAPPING[family](**{key: getattr(config, key) for key in kept}, **keys)
    config.update(
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            # vLLM's CPU attention requires heads of at least 32.
            "head_dim": 32,
            "initializer_range": 0.05,
        }
    )
    torch.manual_seed(len(texts))
    # The configuration names bfloat16, which would round the weights.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight")):
                parameter.zero_()
    _teach(model, _chains(tokenizer_from, texts), probability)
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer_from / name, directory / name)
    model.save_pretrained(directory)
    return directory


def _chains(tokenizer_from: Path, texts: Sequence[str]) -> torch.Tensor:
    codec = TextCodec(tokenizer_from)
    first = codec.encode_chat([{"role": "user", "content": "?"}])[-1]
    eos = codec.eos_token_ids[0]
    chains = [[first, *codec.tokenizer.encode(text), eos] for text in texts]
    width = max(map(len, chains))
    return torch.tensor([chain + [eos] * (width - len(chain)) for chain in chains])


def _teach(model: torch.nn.Module, chains: torch.Tensor, probability: float) -> None:
    taught = [p for n, p in model.named_parameters() if "_attn" not in n]
    optimizer = torch.optim.Adam(taught, lr=1e-2)
    for _ in range(200):
        log_p = model(chains[:, :-1]).logits.log_softmax(-1)
        target = log_p.gather(-1, chains[:, 1:, None]).squeeze(-1)
        if target.exp().mean() > probability:
            return
        (-target.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError("the tiny model does not learn its chain")


def problem(number: int, statement: str, answer: str) -> Problem:
    """A problem that is solved by printing ``answer``."""
    case = {"input": {"stdin": ""}, "output": {"stdout": f"{answer}\n"}}
    return Problem(
        id=f"tiny/{number}",
        statement=statement,
        prompter_type="code_contests",
        selected_uts=json.dumps([case]),
        time_limit=20.0,
    )


def write_problems(path: Path, first: int = 0) -> Path:
    """Eight rows, numbered from ``first``: seven things that are seven, and one that is not."""
    statements = [f"Print the number of {s}." for s in _SEVENS]
    statements += [f"Print the result of {a} + {7 - a}." for a in (1, 2, 3)]
    problems = [problem(first + i, s, "7") for i, s in enumerate(statements)]
    problems.append(problem(first + 7, "Print the number of legs of a spider.", "8"))
    attempts = [
        Attempt(
            id=f"{p.id}/0",
            problem=p,
            solution=f"```python\nprint({i})\n```",
            pass_rate=float(i == 7),
        )
        for i, p in enumerate(problems)
    ]
    write_rows(path, [row_of_attempt(attempt) for attempt in attempts])
    return path


def byte_chat_model(
    directory: Path, texts: Sequence[str], *, experts: int = 0, family: str = ""
) -> Path:
    """A ``chain_model`` with another vocabulary, tokenizer and chat template than SmolLM2's: its
    tokens are bytes, and a conversation ends with ``[bot]``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig

    source = directory.with_name(f"{directory.name}_tokenizer")
    source.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["[end]", "[user]", "[bot]"]
    vocabulary = {name: number for number, name in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[end]"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]"
    (source / "chat_template.jinja").write_text(template)
    size = len(vocabulary)
    LlamaConfig(
        vocab_size=size, eos_token_id=0, bos_token_id=None, max_position_embeddings=8192
    ).save_pretrained(source)
    return chain_model(directory, source, texts, 0.9, experts=experts, family=family)
