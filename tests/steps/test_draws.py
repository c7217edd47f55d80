"""A completion depends on the run's seed, what it is drawn for, the step, the attempt, the row and
the number of the sample, and not on the data rank, the engine or the prompts beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrl_megatron.config import load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.eval.pairwise import ResponsePair
from ctrl_megatron.eval.transcripts import ChainPlan
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.hf_engine import HfEngine
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.steps import chain, conversation
from ctrl_megatron.steps.draws import DrawsAhead
from ctrl_megatron.steps.proxy import SharedProxy
from ctrl_megatron.steps.sample import Sample
from ctrl_megatron.steps.sampling import draw_samples, draw_seed
from ctrl_megatron.types import Completion, Verdict, VersionSpan

ROWS = 8
ALONE = (1, 1)
"""Data ranks and engines."""
LAYOUTS = [(1, 3), (2, 1), (2, 3), (4, 1), (4, 3)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[HfEngine]:
    """Three engines with the same random weights, large so that rounding draws no other token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=64,
        initializer_range=0.3,
    )
    folder: Path = tmp_path_factory.mktemp("engine")
    LlamaForCausalLM(config).save_pretrained(folder)
    spec = EngineSpec(
        name="hf", model_path=str(folder), dtype="float32", max_model_len=64, max_num_seqs=5
    )
    return [HfEngine(spec) for _ in range(3)]


def rank_of(ranks: int, rank: int, engine: Any, runner: asyncio.Runner, step: int = 7) -> Any:
    """A worker with the members that drawing needs."""
    rows = tuple(Row(id=f"row/{number}") for number in range(ROWS))
    prompts = tuple((1 + number, 20, 40 - number) for number in range(ROWS))
    overrides = ["data.max_response_length=12", "actor_rollout_ref.rollout.n=3"]
    return SimpleNamespace(
        config=load_config(None, overrides, "none"),
        groups=SimpleNamespace(place=SimpleNamespace(dp=rank), layout=SimpleNamespace(data=ranks)),
        train=PromptTable(rows=rows, prompts=prompts, dropped=0),
        codec=SimpleNamespace(eos_token_ids=(0,)),
        engine=engine,
        device_owner=SimpleNamespace(to_engine=lambda role, step: "initial"),
        role="actor",
        step=step,
        begin_on_leader=lambda work: runner.run(work()),
        wait_for_leader=lambda groups, what="": groups,
        ahead=DrawsAhead(),
    )


def drawn(
    layout: tuple[int, int],
    engines: list[HfEngine],
    runner: asyncio.Runner,
    rows: list[int],
    *,
    mini_batch_size: int = 4,
    attempt: int = 0,
    step: int = 7,
) -> dict[tuple[str, int], Sample]:
    """Every sample of a step by the id of its row and its number in the group."""
    ranks, count = layout
    found: dict[tuple[str, int], Sample] = {}
    for rank in range(ranks):
        named = {f"engine {number}": engines[number] for number in range(count)}
        pool = EnginePool(named, at_once=5, joins_calls=False, first=rank)
        worker = rank_of(ranks, rank, pool, runner, step)
        samples = draw_samples(worker, rows, mini_batch_size=mini_batch_size, attempt=attempt)
        for place, sample in enumerate(samples):
            found[sample.row_id, place % 3] = sample
    return found


def tokens(found: dict[tuple[str, int], Sample]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: sample.completion.token_ids for key, sample in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_engines_draw_the_same_samples(
    layout: tuple[int, int], engines: list[HfEngine], runner: asyncio.Runner
) -> None:
    rows = [3, 1, 0, 2, 7, 6, 4, 5]
    alone = drawn(ALONE, engines, runner, rows)
    found = drawn(layout, engines, runner, rows)
    assert len(alone) == ROWS * 3 and tokens(found) == tokens(alone)
    for key, sample in alone.items():
        assert found[key].uid == sample.uid
        assert found[key].completion.log_probs == pytest.approx(
            sample.completion.log_probs, abs=1e-5
        )


def test_the_order_and_the_company_of_a_row_do_not_matter(
    engines: list[HfEngine], runner: asyncio.Runner
) -> None:
    whole = tokens(drawn(ALONE, engines, runner, list(range(ROWS))))
    turned = drawn((2, 3), engines, runner, list(range(ROWS))[::-1], mini_batch_size=2)
    assert tokens(turned) == whole
    few = tokens(drawn(ALONE, engines, runner, [6, 2], mini_batch_size=2))
    assert few == {key: whole[key] for key in few} and len(few) == 6


def test_samples_steps_and_attempts_differ(engines: list[HfEngine], runner: asyncio.Runner) -> None:
    whole = tokens(drawn(ALONE, engines, runner, [0, 1, 2, 3]))
    assert len(set(whole.values())) == len(whole)
    for change in ({"attempt": 1}, {"step": 8}):
        other = tokens(drawn(ALONE, engines, runner, [0, 1, 2, 3], **change))
        assert other.keys() == whole.keys()
        assert set(other.values()).isdisjoint(whole.values())


def test_the_seed_of_a_request_is_a_hash_of_what_it_is_for() -> None:
    digest = hashlib.blake2b(b"4/train/17/2", digest_size=4).digest()
    assert draw_seed(4, "train", 17, 2) == int.from_bytes(digest, "big") // 2
    purposes = [(s, p, n) for s in range(3) for p in ("train", "pairs") for n in range(20)]
    assert len({draw_seed(*given) for given in purposes}) == len(purposes)


class Evaluator:
    """A data rank of an evaluation, whose engine answers with what a draw depends on."""

    def __init__(self, ranks: int, rank: int, batch: int) -> None:
        overrides = [f"data.val_batch_size={batch}", "data.val_files=rows.parquet"]
        self.config = load_config(None, overrides, "none")
        self.timeline = Timeline()
        rows = [
            Row(id=f"row/{n}", problem=f"problem {n}", solution="first", prompter_type="mbppplus")
            for n in range(5)
        ]
        self.validation = SimpleNamespace(rows=rows, prompts=[(n,) for n in range(5)], sets={})
        self.groups = SimpleNamespace(
            place=SimpleNamespace(dp=rank),
            layout=SimpleNamespace(data=ranks),
            gather_data_ranks=lambda mine: [mine],
        )
        self.codec = SimpleNamespace(
            encode_chat=lambda messages, add_generation_prompt: [1, 2, 3],
            decode=lambda answer: str(answer[0]),
            eos_token_ids=(0,),
        )
        self.rewards = SimpleNamespace(
            judge_solutions=self._judge, begin_solution=lambda text, row: None
        )
        self.pending: dict[str, Any] = {}
        self.role = "actor"
        self.background = SimpleNamespace(submit=asyncio.run)
        self.step = 0
        device: Any = SimpleNamespace(to_engine=lambda role, step: role)
        parts: Any = (Greedy(), device, self.codec)
        self.proxy = SharedProxy(*parts, max_model_len=10_000)

    async def _judge(self, programs: list[str], rows: list[Row]) -> list[Any]:
        return [SimpleNamespace(verdict=Verdict(passed=(True,), total=1)) for _ in programs]

    def judged_rate_metrics(self) -> dict[str, float]:
        return {}

    def run_on_leader(self, work: Any, what: str = "") -> Any:
        return asyncio.run(work())


class Greedy:
    """The engines with the proxy's weights."""

    async def generate(self, prompts: Any, params: Any, *, finished: Any) -> Any:
        groups = named(["greedy"] * len(prompts), params)
        for place, (completion,) in enumerate(groups):
            finished(place, completion)
        return groups


def name_draws(worker: Any, role: str, prompts: Any, params: Any, finished: Any = None) -> Any:
    """Completions whose one token is the draw: seed, name of the prompt, number."""
    assert role == "actor"
    return named(params.prompt_names(len(prompts)), params)


def named(names: Any, params: Any) -> Any:
    return [
        [
            Completion(
                token_ids=(f"{params.seed}:{name}:{j}",),  # type: ignore[arg-type]
                log_probs=(),
                finish_reason="stop",
                spans=(VersionSpan("proxy", 0, 1),),
            )
            for j in range(params.n)
        ]
        for name in names
    ]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (2, 100), (2, 3), (4, 2)])
def test_an_evaluation_draws_the_same_on_every_layout(
    monkeypatch: pytest.MonkeyPatch, ranks: int, batch: int
) -> None:
    monkeypatch.setattr(chain, "generate", name_draws)
    monkeypatch.setattr(conversation, "generate", name_draws)
    pairs = [
        ResponsePair(
            pair_id=f"pair/{n}",
            source="s",
            question="q",
            response_a="a",
            response_b="b",
            label="A>B",
        )
        for n in range(5)
    ]
    plan = ChainPlan(samples=2, turns=3, temperature=0.7)

    def draws(ranks: int, batch: int) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for rank in range(ranks):
            worker: Any = Evaluator(ranks, rank, batch)
            turns = conversation.run_conversations(worker, plan, critic="c", seed=3)
            found += [(t.attempt, t.sample, t.turn, t.critique) for t in turns]
            judged = conversation.judge_pairs(worker, plan, pairs=pairs, critic="c", seed=3)
            found += [(p.pair_id, p.answers, p.critiques_a, p.critiques_b) for p in judged]
        return sorted(found, key=str)

    alone = draws(1, 100)
    assert draws(ranks, batch) == alone and len(alone) == 5 * 2 * 3 + 5
    critiques = [one[3] for one in alone if len(one) == 4 and isinstance(one[3], str)]
    assert len(set(critiques)) == len(critiques) == 30
