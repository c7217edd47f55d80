"""Whether the engines say what transformers says: ``python tools/check_engines.py``.

Every engine answers the same prompts greedily. transformers then reads prompt and answer in one
pass (fp32): the texts agree as far as each token is the likeliest there. Where they part, the gap
between the likeliest token's logit and the chosen one's is shown: a tie, up to rounding. The
difference of probabilities is that of the answers' tokens, between the engine and transformers in
the engine's own type. The agreement with the trainer is a metric of every step
(``rollout/probs_diff_mean``).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM

from ctrl_megatron.data.problems import read_problems
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.rollout.engine import EngineSpec, available_engines
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An engine's answers beside transformers'."""

    equal: int
    """Answers of which every token is the likeliest."""
    parted: list[float]
    """Of the others: what the chosen token's logit lacks where the texts part."""
    gaps: torch.Tensor
    """|p engine - p transformers| of every token."""


def answers(spec: EngineSpec, prompts: list[list[int]], tokens: int) -> list[Completion]:
    """The engine's greedy answers."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    with launch_engine(spec) as process:

        async def ask() -> list[Completion]:
            engine = process.connect()
            groups = await engine.generate(prompts, params)
            await engine.close()
            return [completion for (completion,) in groups]

        return asyncio.run(ask())


@torch.no_grad()
def compare(
    models: Mapping[str, torch.nn.Module],
    prompts: list[list[int]],
    said: list[Completion],
    dtype: str,
) -> Comparison:
    """``models`` by type; float32 decides which token is the likeliest."""
    equal, parted, gaps = 0, [], []
    for prompt, completion in zip(prompts, said, strict=True):
        text, chosen = [*prompt, *completion.token_ids], torch.tensor(completion.token_ids)[:, None]
        logits = {
            name: model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1].float()
            for name, model in models.items()
            if name in (dtype, "float32")
        }
        exact = logits["float32"]
        lacking = exact.max(-1).values - exact.gather(-1, chosen).squeeze(-1)
        wrong = lacking.nonzero().flatten()
        equal += not len(wrong)
        parted += lacking[wrong[:1]].tolist()
        own = logits[dtype].softmax(-1).gather(-1, chosen).squeeze(-1)
        gaps.append((torch.tensor(completion.log_probs).exp() - own).abs())
    return Comparison(equal=equal, parted=sorted(parted), gaps=torch.cat(gaps))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=available_engines())
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--problems", default="examples/problems", help="problem file or directory")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    codec = TextCodec(options.model)
    prompts = [
        codec.encode_chat([{"role": "user", "content": problem.statement}])
        for problem in read_problems(options.problems)[: options.prompts]
    ]
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, dtype)
        ).eval()
        for dtype in {*options.dtypes, "float32"}
    }
    for name in options.engines or available_engines():
        for dtype in options.dtypes:
            spec = EngineSpec(
                name=name,
                model_path=options.model,
                dtype=dtype,
                max_model_len=max(map(len, prompts)) + options.tokens,
                kv_cache_gib=1.0,
            )
            found = compare(models, prompts, answers(spec, prompts, options.tokens), dtype)
            lacking = [round(gap, 5) for gap in found.parted[:12]]
            print(
                f"{name} {dtype}: {found.equal} of {len(prompts)} texts are transformers' in fp32; "
                f"the others part where the logit lacks {lacking}; "
                f"|p - p of transformers in {dtype}| of {len(found.gaps)} tokens: mean "
                f"{found.gaps.mean():.2e}, max {found.gaps.max():.2e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
