"""Draw first solutions of a problem set with a model and judge them.

``python tools/generate_solutions.py --model DIR --out examples/solutions/smollm2.jsonl``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import track

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.commands.start import CommandParser, command
from ctrl_megatron.data.problems import read_json_lines, read_problems
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import UserError, users_input
from ctrl_megatron.generation.solutions import first_solutions, judge_attempts
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.rollout.engine import EngineSpec, default_engine
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.types import Problem, SamplingParams

_PART = 64
_KEYS = ("id", "problem_id", "solution", "pass_rate")
"""Of a line of the file."""


async def generate(
    arguments: argparse.Namespace,
    problems: Sequence[Problem],
    codec: TextCodec,
    params: SamplingParams,
) -> None:
    """Start engine and sandbox, draw, judge, write."""
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
            dict(zip(_KEYS, (a.id, a.problem.id, a.solution, a.pass_rate), strict=True)),
            ensure_ascii=False,
        )
        for a, _ in judged
    ]
    write_whole(arguments.out, "\n".join(lines) + "\n")
    solved = sum(v.accepted for _, v in judged)
    print(f"{arguments.out}: {len(judged)} solutions, {solved} pass every test")


@command("generate_solutions")
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check and run. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    parser.add_argument("--model", required=True, help="HF directory")
    parser.add_argument("--problems", default="examples/problems", help="file or folder of .jsonl")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--overwrite", action="store_true", help="replace an --out of this tool")
    parser.add_argument("--engine", choices=["vllm", "hf"])
    parser.add_argument("--n", type=int, default=2, help="solutions per problem")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    require_own_file(options.out, overwrite=options.overwrite)
    with users_input("--problems"):
        problems = read_problems(options.problems)
    for name, least in (("n", 1), ("max_tokens", 1), ("temperature", 0)):
        if getattr(options, name) < least:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag}={getattr(options, name)} must be at least {least}")
    with users_input("--model"):
        codec = TextCodec(options.model)
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            n=options.n,
            seed=options.seed,
            stop_token_ids=codec.eos_token_ids,
        )
        SafetensorsDirectory(options.model).check(read_model_shape(options.model))
    asyncio.run(generate(options, problems, codec, params))
    return 0


def require_own_file(out: Path, *, overwrite: bool) -> None:
    """UserError unless ``out`` is new or, with ``overwrite``, solutions that this tool wrote."""
    if not os.path.lexists(out):
        return
    try:
        own = all(entry.keys() == set(_KEYS) for _, entry in read_json_lines(out))
    except UserError:
        own = False
    if not own:
        raise UserError(f"--out: {out} was not written by this tool", remedy="name another file")
    if not overwrite:
        raise UserError(f"--out: {out} is there; --overwrite replaces it")


if __name__ == "__main__":
    raise SystemExit(main())
