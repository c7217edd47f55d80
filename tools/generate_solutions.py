"""Draw first solutions of a problem set with a model and judge them.

``python tools/generate_solutions.py --model DIR --out examples/solutions/smollm2.jsonl``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import track

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.data.problems import read_problems
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.generation.solutions import first_solutions, judge_attempts
from ctrl_megatron.rollout.engine import EngineSpec, default_engine
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import SamplingParams

_PART = 64


async def generate(arguments: argparse.Namespace) -> None:
    """Start engine and sandbox, draw, judge, write."""
    problems = read_problems(arguments.problems)
    codec = TextCodec(arguments.model)
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        n=arguments.n,
        seed=arguments.seed,
        stop_token_ids=codec.eos_token_ids,
    )
    spec = EngineSpec(
        name=arguments.engine or default_engine(),
        model_path=arguments.model,
        max_model_len=2048,
        kv_cache_gib=1.0,
        threads=arguments.threads,
    )
    process, sandbox = launch_engine(spec), EmbeddedSandbox.start()
    try:
        engine, judged = process.connect(), []
        async with SandboxClient(sandbox.endpoint) as client:
            for start in track(range(0, len(problems), _PART), description="solving"):
                part = problems[start : start + _PART]
                attempts = await first_solutions(engine, codec, part, params)
                judged += await judge_attempts(client, attempts)
        await engine.close()
    finally:
        process.stop()
        sandbox.stop()
    lines = [
        json.dumps(
            {
                "id": a.id,
                "problem_id": a.problem.id,
                "solution": a.solution,
                "pass_rate": a.pass_rate,
            },
            ensure_ascii=False,
        )
        for a, _ in judged
    ]
    write_whole(arguments.out, "\n".join(lines) + "\n")
    solved = sum(v.accepted for _, v in judged)
    print(f"{arguments.out}: {len(judged)} solutions, {solved} pass every test")


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="HF directory")
    parser.add_argument("--problems", default="examples/problems", help="file or folder of .jsonl")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--engine", choices=["vllm", "hf"])
    parser.add_argument("--n", type=int, default=2, help="solutions per problem")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    try:
        asyncio.run(generate(arguments))
    except ValueError as error:
        print(f"generate_solutions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
