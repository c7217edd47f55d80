"""The next step's samples are drawn while a step trains, and a checkpoint holds them."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.config import load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.errors import UserError
from ctrl_megatron.pipeline.ahead import SavedDraws, begin_ahead, report_staleness
from ctrl_megatron.pipeline.batch import DrawsAhead, Sample, make_batch
from ctrl_megatron.pipeline.sampling import draw_samples
from ctrl_megatron.types import Completion, VersionSpan

R = "actor_rollout_ref.rollout."
AHEAD = [
    f"{R}staleness=1",
    f"{R}placement=dedicated",
    f"{R}n_gpus_per_node=1",
    "algorithm.rollout_correction.rollout_is=token",
    f"{R}n=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
ROWS = 12


class Slow:
    """An engine whose every call takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.version = seconds, "actor@0"

    async def generate(self, prompts: Any, params: Any, *, finished: Any) -> list[Any]:
        version = self.version
        await asyncio.sleep(self.seconds)
        return [
            [
                Completion(
                    token_ids=(prompt[0], sample, params.seed % 97),
                    log_probs=(-1.0, -0.5, -0.25),
                    finish_reason="stop",
                    spans=(VersionSpan(version, 0, 3),),
                )
                for sample in range(params.n)
            ]
            for prompt in prompts
        ]


class Rank:
    """One of ``ranks`` data ranks; ``others`` are the workers whose values it can gather."""

    def __init__(self, engine: Slow, *, rank: int = 0, ranks: int = 1, steps: int = 100) -> None:
        self.config = load_config(None, AHEAD, "none")
        rows = tuple(Row(id=f"row/{number}") for number in range(ROWS))
        prompts = tuple((number,) for number in range(ROWS))
        self.train = PromptTable(rows=rows, prompts=prompts, dropped=0)
        self.sampler = ResumableSampler(ROWS, seed=3)
        self.peek, self.total_steps, self.step = self.sampler.peek, steps, 0
        self.background, self.engine = BackgroundLoop(), engine
        self.codec = SimpleNamespace(eos_token_ids=(0,))
        self.ahead = DrawsAhead()
        self.device = SimpleNamespace(to_engine=self._push, version=self._version)
        self.gathered: list[Any] = []
        self.groups: Any = SimpleNamespace(
            place=SimpleNamespace(dp=rank),
            layout=SimpleNamespace(data=ranks),
            is_leader=True,
            from_leader=lambda value: value,
            from_data_ranks=lambda value: [value, *self.gathered],
            on_any=lambda *flags: flags,
        )
        self.stop: Any = SimpleNamespace(agreed=lambda groups: False)
        self.waiting = SimpleNamespace(together=lambda future, what: future.result(20))

    def _version(self, role: str, step: int) -> str:
        return f"{role}@{step}"

    def _push(self, role: str, step: int) -> str:
        self.engine.version = self._version(role, step)
        return self.engine.version

    def begin(self, work: Any) -> Any:
        return self.background.submit(work())

    def wait(self, begun: Any, what: str) -> Any:
        return begun.result(20)

    def means(self, values: Any) -> dict[str, float]:
        return {name: float(value.mean()) for name, value in values.items()}

    def rollout(self, *, ahead: bool = True) -> tuple[list[Sample], float]:
        """(the samples of the next step, how many updates old they are)."""
        worker: Any = self
        rows = self.sampler.next_batch(4)
        samples = draw_samples(worker, rows, mini_batch_size=4)
        if ahead:
            begin_ahead(worker, lambda row, completion: None)
        batch = make_batch(samples, pad_token_id=0)
        return samples, report_staleness(worker, batch).metrics["rollout/staleness"]


def test_a_step_takes_the_longer_of_drawing_and_training() -> None:
    seconds, steps, took = 0.3, 6, dict[bool, float]()
    for ahead in (False, True):
        rank = Rank(Slow(seconds), steps=steps)
        began, ages = time.monotonic(), list[float]()
        for step in range(steps):
            rank.step = step
            ages.append(rank.rollout(ahead=ahead)[1])
            time.sleep(seconds)
        took[ahead] = time.monotonic() - began
        assert ages == [0.0] + [float(ahead)] * (steps - 1)
        rank.background.close()
    assert took[False] - took[True] >= 0.8 * seconds * (steps - 1)


def test_samples_do_not_depend_on_when_they_are_drawn_but_for_their_weights() -> None:
    ranks = [Rank(Slow(0.0)) for _ in range(2)]
    for step in range(4):
        drawn = []
        for rank, ahead in zip(ranks, (True, False), strict=True):
            rank.step = step
            drawn.append(rank.rollout(ahead=ahead)[0])
        one, two = ([(s.uid, s.row_id, s.completion.token_ids) for s in d] for d in drawn)
        assert one == two and len(one) == 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_holds_the_next_step_for_any_number_of_data_ranks(ranks: int) -> None:
    savers: Any = [Rank(Slow(0.01), rank=rank, ranks=ranks) for rank in range(ranks)]
    for saver in savers:
        saver.rollout()
        saver.step = 1
    for other in savers[1:]:
        # What the other rank gives when all gather.
        SavedDraws(other).state_dict()
        mine = SavedDraws(other)._mine(other.ahead.of(1))
        savers[0].gathered.append(
            [(p, g) for (p, _), g in zip(mine, other.ahead.of(1).groups.result(), strict=True)]
        )
    state = json.loads(json.dumps(SavedDraws(savers[0]).state_dict()))
    assert (state["step"], state["version"], len(state["groups"])) == (1, "actor@0", 4)
    expected = {s.uid: s for saver in savers for s in saver.rollout()[0]}
    for count in (1, 2):
        found: dict[str, Sample] = {}
        for number in range(count):
            rank: Any = Rank(Slow(60.0), rank=number, ranks=count)  # draws nothing itself
            rank.step = 1
            rank.sampler.next_batch(4)
            SavedDraws(rank).load_state_dict(state)
            drawn = draw_samples(rank, rank.sampler.next_batch(4), mini_batch_size=4)
            found |= {sample.uid: sample for sample in drawn}
            rank.background.close()
        assert {u: (s.row_id, s.completion) for u, s in found.items()} == {
            u: (s.row_id, s.completion) for u, s in expected.items()
        }


def test_a_stop_saves_without_texts_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctrl_megatron.pipeline.ahead._STOP_ROUNDS", 1)
    rank: Any = Rank(Slow(0.0))
    rank.rollout()
    rank.ahead.of(1).groups.result(20)
    rank.step, rank.engine.seconds = 1, 60.0
    rank.rollout()
    rank.step = 2
    rank.stop.agreed = lambda groups: True
    assert SavedDraws(rank).state_dict() == {}
    rank.step = 1  # the step before, which was stopped, is there
    assert SavedDraws(rank).state_dict()["step"] == 1
    rank.background.close()


def test_samples_that_are_too_old_end_the_run() -> None:
    rank: Any = Rank(Slow(0.0))
    samples, _ = rank.rollout()
    rank.step = 2
    with pytest.raises(RuntimeError, match="samples are 2 to 2 updates old, and at most"):
        report_staleness(rank, make_batch(samples, pad_token_id=0))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (f"{R}placement=colocated", "the engines need devices of their own"),
        ("algorithm.rollout_correction.rollout_is=none", "correct for it with"),
        ("algorithm.filter_groups.enable=true", "turn one off"),
        ("algorithm.adv_estimator=remax", "greedy baseline would come from other weights"),
        ("dag.custom_pipeline_fn=mine:build", "only the built-in pipelines do"),
        (f"{R}staleness=2", "must be 0 or 1"),
    ],
)
def test_what_does_not_go_together_is_refused(changed: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, [*AHEAD, changed], "none")
