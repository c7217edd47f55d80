"""Whether the engines say what transformers says, and go on doing so when their weights change:
``python tools/check/engines.py``.

Every engine answers the same prompts greedily. transformers then reads prompt and answer in one
pass (fp32): the texts agree as far as each token is the likeliest there. Where they part, the gap
between the likeliest token's logit and the chosen one's is shown: a tie, up to rounding. Then every
engine draws at temperature 1, and the probabilities of its answers are compared with those that
transformers computes in float32 and in the engine's own type. In float32 that shows errors. In
bfloat16 it shows rounding, which has no truth to it: how far transformers itself is from float32
there is shown beside it.

``--updates N`` loads N times other weights, the model's own in every second update. Texts must
follow, checksums must be equal on both sides, and the engine's memory is shown.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.parallel.groups import ProcessGroups, initialize_groups, shutdown_groups
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.parent_watch import process_group_members
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.preparation.problem_files import read_problems
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.push import push
from ctrl_megatron.resharding.sources import DirectorySource
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import EngineSpec, available_engines
from ctrl_megatron.rollout.launch import launch_engine
from ctrl_megatron.types import Completion, SamplingParams

FEW = 32
"""Prompts whose probabilities are compared, and that are answered again after an update."""


class Asked:
    """A live engine."""

    def __init__(self, engine: RemoteEngine, loop: BackgroundLoop) -> None:
        self.engine, self.loop = engine, loop

    def answers(
        self, prompts: list[list[int]], tokens: int, *, temperature: float = 0.0
    ) -> list[Completion]:
        """To every prompt one, of at most so many tokens."""
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
        return [answer for (answer,) in self.loop.run(self.engine.generate(prompts, params))]

    def megabytes(self) -> float:
        """Private memory of all processes of the engine in MiB, without shared memory."""
        held = 0
        for pid in process_group_members(self.engine.address.pid):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            held += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
        return held / 1024


@contextmanager
def asked(spec: EngineSpec) -> Iterator[Asked]:
    """Start the engine; it ends with the block."""
    loop = BackgroundLoop()
    with launch_engine(spec) as process:
        engine = process.connect()
        yield Asked(engine, loop)
        loop.run(engine.close())
    loop.close()


@torch.inference_mode()
def logits(model: Any, prompt: list[int], answer: Completion) -> torch.Tensor:
    """(tokens of the answer, V) float32, by one pass over prompt and answer."""
    text = torch.tensor([[*prompt, *answer.token_ids]])
    return model(text, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1].float()


def compare_texts(model: Any, prompts: list[list[int]], said: list[Completion]) -> str:
    """How many greedy answers consist of likeliest tokens only, and where the others diverge."""
    equal, parted = 0, list[float]()
    for prompt, answer in zip(prompts, said, strict=True):
        exact = logits(model, prompt, answer)
        chosen = torch.tensor(answer.token_ids)[:, None]
        lacking = exact.amax(-1) - exact.gather(-1, chosen).squeeze(-1)
        wrong = lacking[lacking > 0]
        equal += not len(wrong)
        parted += wrong[:1].tolist()
    text = f"{equal} of {len(said)} greedy texts are those of transformers in float32"
    gaps = [round(gap, 4) for gap in sorted(parted)]
    return text + (f"; the others part where a logit lacks {gaps}" if gaps else "")


def compare_probabilities(
    models: Mapping[str, Any], dtype: str, prompts: list[list[int]], said: list[Completion]
) -> str:
    """|p - p| of all tokens between the engine and transformers, in ``dtype`` and float32."""
    found: dict[str, list[torch.Tensor]] = {"engine": []}
    for prompt, answer in zip(prompts, said, strict=True):
        chosen = torch.tensor(answer.token_ids)[:, None]
        found["engine"].append(torch.tensor(answer.log_probs).exp())
        for name in {dtype, "float32"}:
            shares = logits(models[name], prompt, answer).softmax(-1)
            found.setdefault(name, []).append(shares.gather(-1, chosen).squeeze(-1))
    shares = {name: torch.cat(parts) for name, parts in found.items()}

    def gap(one: str, other: str) -> str:
        return f"{(shares[one] - shares[other]).abs().mean():.2e}"

    text = f"mean |p - p| of {len(shares['engine'])} drawn tokens: engine and "
    text += f"transformers in {dtype} {gap('engine', dtype)}"
    if dtype != "float32":
        text += f", engine and float32 {gap('engine', 'float32')}"
        text += f", transformers in {dtype} and float32 {gap(dtype, 'float32')}"
    return text


def follow_updates(
    engine: Asked,
    groups: ProcessGroups,
    directories: tuple[str, str],
    *,
    prompts: list[list[int]],
    dtype: str,
    updates: int,
    tokens: int,
) -> tuple[str, list[Completion]]:
    """Load both directories' weights in turn; what was seen, and the other model's answers.

    RuntimeError where checksums differ, or where the model's own texts do not come back: all of
    them in float32, most of them in bfloat16, whose rounding depends on what is computed together.
    """
    layout = EngineLayout(dtype=dtype, bucket_bytes=128 << 20)
    sources = [DirectorySource(path, layout, groups) for path in directories]
    sender = SharedMemorySender(groups)
    waiting = WaitRules(groups=groups, stop=StopFlag(), limit=600.0)
    own, other = engine.answers(prompts, tokens), list[Completion]()
    held, back = [engine.megabytes()], list[int]()
    enough = len(prompts) if dtype == "float32" else len(prompts) // 2 + 1
    for number in range(1, updates + 1):
        source, version = sources[number % 2], f"update-{number}"
        push(source, engine.engine, engine.loop, sender, waiting, version=version, verify=True)
        if number <= 2 or number > updates - 2:
            said = engine.answers(prompts, tokens)
            same = sum(a.token_ids == b.token_ids for a, b in zip(said, own, strict=True))
            if (same >= enough) != (number % 2 == 0):
                raise RuntimeError(
                    f"update {number}: {same} of {len(own)} texts are those from before"
                )
            if number % 2:
                other = said
            else:
                back.append(same)
        held.append(engine.megabytes())
    shown = {0: "before", 1: "after 1", 2: "2", 10: "10", updates: str(updates)}
    sizes = ", ".join(f"{name} {held[n]:.0f}" for n, name in shown.items() if n <= updates)
    came = f"own texts that come back: {', '.join(map(str, back))} of {len(own)}"
    return f"{updates} updates, checksums equal on both sides; {came}; MB: {sizes}", other


def write_changed(model: Any, source: str, folder: str) -> None:
    """A directory like ``source`` with other weights."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(0.2 * parameter.data.abs().mean() * noise)
    model.save_pretrained(folder)


def main() -> None:
    """Entry point."""
    parser = ToolParser(__doc__)
    parser.add_argument("--engines", nargs="+", choices=available_engines(denoising=False))
    parser.add_argument("--model", default="runs/models/smollm2", help="Hugging Face directory")
    parser.add_argument("--problems", default="examples/problems", help="problem file or directory")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--updates", type=int, default=4, help="0 leaves them out")
    parser.add_argument("--threads", type=int, default=0, help="of an engine; 0 takes all cores")
    options = parser.parse_args()
    codec = TextCodec(options.model)
    prompts = [
        codec.encode_chat([{"role": "user", "content": problem.statement}])
        for problem in read_problems(options.problems)[: options.prompts]
    ]
    few = prompts[:FEW]
    models = {dtype: load(options.model, dtype) for dtype in {*options.dtypes, "float32"}}
    groups = initialize_groups(Layout(), seed=1, timeout_seconds=600)
    with tempfile.TemporaryDirectory() as folder:
        changed = load(options.model, "float32")
        write_changed(changed, options.model, folder)
        for name in options.engines or available_engines(denoising=False):
            for dtype in options.dtypes:
                spec = EngineSpec(
                    name=name,
                    model_path=options.model,
                    dtype=dtype,
                    max_model_len=max(map(len, prompts)) + options.tokens,
                    kv_cache_gib=1.0,
                    threads=options.threads,
                )
                print(f"{name} {dtype}", flush=True)
                with asked(spec) as engine:
                    said = engine.answers(prompts, options.tokens)
                    drawn = engine.answers(few, options.tokens, temperature=1.0)
                    show(compare_texts(models["float32"], prompts, said))
                    show(compare_probabilities(models, dtype, few, drawn))
                    if options.updates:
                        seen, said = follow_updates(
                            engine,
                            groups,
                            (options.model, folder),
                            prompts=few,
                            dtype=dtype,
                            updates=options.updates,
                            tokens=options.tokens,
                        )
                        show(seen)
                        show(f"other weights: {compare_texts(changed, few, said)}")
    shutdown_groups()


def show(line: str) -> None:
    """Print a finding at once."""
    print(f"    {line}", flush=True)


def load(model: str, dtype: str) -> Any:
    """transformers' model."""
    return AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), trust_remote_code=False
    ).eval()


if __name__ == "__main__":
    main()
