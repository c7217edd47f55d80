"""Compare the sampler of masked-diffusion models with and without kept prefixes on equal prompts:
``python tools/bench/denoising.py --model runs/diffusion_start``.

Both take the same weights, and the processor's time is counted, so that other work on the machine
does not. The ratio is the median over rounds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.hf_diffusion import DiffusionEngine
from ctrl_megatron.types import SamplingParams
from tools.bench.engine_setup import random_prompts


async def compare(spec: dict[str, Any], options: Any) -> list[float]:
    """The time without over the time with kept prefixes, of every round."""
    extra = {"steps": options.steps, "block_length": options.block}
    engines = [
        await DiffusionEngine.build(EngineSpec(**spec, extra={**extra, "keep_prefix": keep}))
        for keep in (False, True)
    ]
    draw, params = random.Random(0), SamplingParams(max_tokens=options.canvas, temperature=0.0)
    ratios = []
    for number in range(options.rounds + 1):
        prompts = random_prompts(draw, options.rows, options.prompt)
        took = [0.0, 0.0]
        for way in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            await engines[way].generate(prompts, params)
            took[way] = time.process_time() - began
        if number:  # the first round warms up
            ratios.append(took[0] / took[1])
            print(f"{took[0]:.2f} s, with kept prefixes {took[1]:.2f} s", flush=True)
    for engine in engines:
        await engine.close()
    return ratios


def main() -> None:
    """Entry point."""
    parser = ToolParser(__doc__)
    parser.add_argument("--model", default="runs/diffusion_start", help="masked-diffusion model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--canvas", type=int, default=64, help="tokens of a canvas")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    parser.add_argument("--steps", type=int, default=32, help="passes over a canvas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    spec = {
        "name": "diffusion",
        "model_path": options.model,
        "dtype": options.dtype,
        "max_model_len": options.prompt + options.canvas,
        "max_num_seqs": options.rows,
        "threads": options.threads,
    }
    ratios = asyncio.run(compare(spec, options))
    print(
        f"{options.rows} rows of {options.prompt} + {options.canvas} tokens, blocks of "
        f"{options.block}, {options.steps} steps: kept prefixes are "
        f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
