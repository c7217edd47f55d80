"""Samples of later steps are drawn while a step trains, and a checkpoint holds them."""

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
from ctrl_megatron.resharding.device import ActorVersions
from ctrl_megatron.steps.ahead import SavedDraws, begin_draws_ahead, report_staleness
from ctrl_megatron.steps.batch import make_batch
from ctrl_megatron.steps.draws import DrawsAhead
from ctrl_megatron.steps.sample import Sample
from ctrl_megatron.steps.sampling import draw_samples
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
TWO = f"{R}staleness=2"
IN_FLIGHT = f"{R}update_in_flight=true"
ROWS = 12


class Slow:
    """An engine whose every call takes ``seconds``. The weights of its end draw the last token."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.version, self.calls = seconds, "actor@0", 0

    async def generate(self, prompts: Any, params: Any, *, finished: Any) -> list[Any]:
        begun, number, self.calls = self.version, self.calls, self.calls + 1
        ended = await self._draw(number)
        spans = (VersionSpan(begun, 0, 3),)
        if ended != begun:
            spans = (VersionSpan(begun, 0, 2), VersionSpan(ended, 2, 3))
        return [
            [
                Completion(
                    token_ids=(prompt[0], sample, params.seed % 97),
                    log_probs=(-1.0, -0.5, -0.25),
                    finish_reason="stop",
                    spans=spans,
                )
                for sample in range(params.n)
            ]
            for prompt in prompts
        ]

    async def _draw(self, number: int) -> str:
        """The weights of the last token."""
        await asyncio.sleep(self.seconds)
        return self.version


class Late(Slow):
    """An engine that ends the draw of a step when that step has come, and not before."""

    step = 0

    async def _draw(self, number: int) -> str:
        while self.step < number:
            await asyncio.sleep(0.005)
        return self.version


class Crossed(Slow):
    """An engine whose calls after the first one end with the next weights."""

    pushed: list[str]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        pushed = self.__dict__.setdefault("pushed", [])
        if name == "version" and value not in pushed:
            pushed.append(value)

    async def _draw(self, number: int) -> str:
        before = len(self.pushed)
        while number and len(self.pushed) == before:
            await asyncio.sleep(0.005)
        return self.pushed[before] if number else self.version


class Rank:
    """One of ``ranks`` data ranks; ``others`` are the workers whose values it can gather."""

    def __init__(
        self, engine: Slow, *more: str, rank: int = 0, ranks: int = 1, steps: int = 100
    ) -> None:
        self.config = load_config(None, [*AHEAD, *more], "none")
        rows = tuple(Row(id=f"row/{number}") for number in range(ROWS))
        prompts = tuple((number,) for number in range(ROWS))
        self.train = PromptTable(rows=rows, prompts=prompts, dropped=0)
        self.sampler = ResumableSampler(ROWS, seed=3)
        self.peek, self.total_steps, self.step = self.sampler.peek, steps, 0
        self.background, self.engine = BackgroundLoop(), engine
        self.codec = SimpleNamespace(eos_token_ids=(0,))
        self.ahead = DrawsAhead()
        self.device_owner = SimpleNamespace(
            to_engine=self._push,
            version=self._version,
            versions={"actor": ActorVersions()},
            update_count=lambda role: self.updates,
        )
        self.role, self.updates, self.steps_per_update = "actor", 0, 1
        self.gathered: list[Any] = []
        self.groups: Any = SimpleNamespace(
            place=SimpleNamespace(dp=rank),
            layout=SimpleNamespace(data=ranks),
            is_leader=True,
            broadcast_from_leader=lambda value: value,
            gather_data_ranks=lambda value: [value, *self.gathered],
            any_rank=lambda *flags: flags,
        )
        self.stop: Any = SimpleNamespace(requested_on_any_rank=lambda groups: False)
        self.wait_conditions = SimpleNamespace(wait_together=lambda future, what: future.result(20))

    def _version(self, role: str, step: int) -> str:
        return self.device_owner.versions["actor"].name(step // self.steps_per_update, step)

    def _push(self, role: str, step: int) -> str:
        self.engine.version = self._version(role, step)
        return self.engine.version

    def begin_on_leader(self, work: Any) -> Any:
        return self.background.submit(work())

    def wait_for_leader(self, begun: Any, what: str) -> Any:
        return begun.result(20)

    def global_means(self, values: Any) -> dict[str, float]:
        return {name: float(value.mean()) for name, value in values.items()}

    def train_until(self, calls: int) -> None:
        """Take as long as it takes until so many draws have begun."""
        ends = time.monotonic() + 20
        while self.engine.calls < calls:
            assert time.monotonic() < ends
            time.sleep(0.005)

    def rollout(self, *, ahead: bool = True) -> tuple[list[Sample], float]:
        """(the samples of the next step, how many updates old they are)."""
        worker: Any = self
        self.updates = self.step // self.steps_per_update
        rows = self.sampler.next_batch(4)
        samples = draw_samples(worker, rows, mini_batch_size=4)
        if ahead:
            begin_draws_ahead(worker, lambda row, completion: None)
        batch = make_batch(samples, pad_token_id=0)
        return samples, report_staleness(worker, batch).metrics["rollout/staleness"]


@pytest.mark.parametrize(
    ("more", "ages"),
    [
        (None, [0, 0, 0, 0, 0, 0]),
        ((), [0, 1, 1, 1, 1, 1]),
        ((TWO,), [0, 1, 2, 1, 2, 1]),
        ((f"{R}staleness=3",), [0, 1, 2, 3, 1, 2]),
    ],
)
def test_a_draw_may_take_all_the_training_before_its_step(
    more: tuple[str, ...] | None, ages: list[int]
) -> None:
    """So a step takes the longer of drawing and training, and a quick draw makes up for a slow one
    that began beside it.
    """
    engine = Late(0.0)
    rank = Rank(engine, *(more or ()), steps=len(ages))
    for step, age in enumerate(ages):
        rank.step = engine.step = step
        assert rank.rollout(ahead=more is not None)[1] == age
        begun = sum(number - age <= step for number, age in enumerate(ages))
        rank.train_until(begun)
        assert engine.calls == begun
    rank.background.close()


def test_updates_in_flight_reach_what_is_being_drawn_and_keep_the_bound() -> None:
    rank = Rank(Crossed(0.0), TWO, IN_FLIGHT, steps=6)
    for step in range(6):
        rank.step = step
        samples, age = rank.rollout()
        versions = {span.version for one in samples for span in one.completion.spans}
        # Weights draw two tokens, and those of the next step the third.
        begun = max(0, step - 2)
        assert versions == ({f"actor@{begun}", f"actor@{begun + 1}"} if step else {"actor@0"})
        assert age == pytest.approx([0, 2 / 3, 5 / 3][min(step, 2)])
        rank.train_until(min(6, step + 3))
    rank.background.close()


def test_samples_do_not_depend_on_when_they_are_drawn_but_for_their_weights() -> None:
    ranks = [Rank(Slow(0.0)) for _ in range(2)]
    for step in range(4):
        drawn = []
        for rank, ahead in zip(ranks, (True, False), strict=True):
            rank.step = step
            drawn.append(rank.rollout(ahead=ahead)[0])
        one, two = ([(s.uid, s.row_id, s.completion.token_ids) for s in d] for d in drawn)
        assert one == two and len(one) == 8


@pytest.mark.parametrize("more", [(), (TWO,), (TWO, IN_FLIGHT)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_holds_later_steps_for_any_number_of_data_ranks(
    ranks: int, more: tuple[str, ...]
) -> None:
    savers: Any = [Rank(Slow(0.01), *more, rank=rank, ranks=ranks) for rank in range(ranks)]
    for saver in savers:
        saver.rollout()
        saver.step = 1
    for other in savers[1:]:
        # What the other rank gives when all gather, draw by draw.
        saved = SavedDraws(other)
        other.waiting_draws = [
            [(p, g) for (p, _), g in zip(saved._mine(d.rows), d.groups.result(20), strict=True)]
            for d in saved._there(other.ahead.all_draws())
        ]
        gathered = iter(other.waiting_draws)
        savers[0].groups.gather_data_ranks = lambda value, more=gathered: [value, next(more)]
    state = json.loads(json.dumps(SavedDraws(savers[0]).state_dict()))
    count = 2 if more else 1
    assert state["versions"] == [0, 1]
    assert [(d["step"], d["version"], len(d["groups"])) for d in state["draws"]] == [
        (step, "actor@0", 4) for step in range(1, count + 1)
    ]
    expected = list[dict[str, Sample]]()
    for step in range(1, count + 1):
        for saver in savers:
            saver.step = step
        expected.append({s.uid: s for saver in savers for s in saver.rollout(ahead=False)[0]})
    for data in (1, 2):
        found: list[dict[str, Sample]] = [{} for _ in expected]
        for number in range(data):
            # Draws nothing itself.
            rank: Any = Rank(Slow(60.0), *more, rank=number, ranks=data)
            rank.sampler.next_batch(4)
            rank.step = rank.updates = 1
            SavedDraws(rank).load_state_dict(state)
            for step, samples in enumerate(found, start=1):
                rank.step = step
                drawn, age = rank.rollout(ahead=False)
                assert age == step
                samples.update({sample.uid: sample for sample in drawn})
            rank.background.close()
        for samples, others in zip(found, expected, strict=True):
            assert {u: (s.row_id, s.completion) for u, s in samples.items()} == {
                u: (s.row_id, s.completion) for u, s in others.items()
            }


def test_a_run_with_a_lower_bound_leaves_older_draws_out() -> None:
    saver: Any = Rank(Slow(0.0), TWO)
    saver.rollout()
    saver.step = 1
    state = SavedDraws(saver).state_dict()
    assert [draw["step"] for draw in state["draws"]] == [1, 2]
    rank: Any = Rank(Slow(0.0))
    SavedDraws(rank).load_state_dict(state)
    assert [draw.step for draw in rank.ahead.all_draws()] == [1]
    for one in (saver, rank):
        one.background.close()


def test_a_stop_saves_without_texts_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctrl_megatron.steps.ahead._STOP_ROUNDS", 1)
    rank: Any = Rank(Slow(0.0))
    rank.rollout()
    rank.ahead.draw_of_step(1).groups.result(20)
    rank.step, rank.engine.seconds = 1, 60.0
    rank.rollout()
    rank.stop.requested_on_any_rank = lambda groups: True
    # Step 1, which was stopped, is there, and what it has begun is drawn again when it is repeated.
    assert [draw["step"] for draw in SavedDraws(rank).state_dict()["draws"]] == [1]
    rank.step = 2
    assert SavedDraws(rank).state_dict()["draws"] == []
    rank.background.close()


def test_samples_that_are_too_old_end_the_run() -> None:
    rank: Any = Rank(Slow(0.0))
    samples, _ = rank.rollout()
    for rank.step in (1, 2):
        rank.device_owner.version("actor", rank.step)
    with pytest.raises(RuntimeError, match="samples are 2 to 2 updates old, and at most"):
        report_staleness(rank, make_batch(samples, pad_token_id=0))
    rank.background.close()


@pytest.mark.parametrize("saved_after", [3, 4])
def test_steps_without_an_update_make_no_sample_older(saved_after: int) -> None:
    """Also across a resume, where the weights keep their name. Only the fourth step updates."""
    rank: Any = Rank(Slow(0.0))
    resumed: Any = Rank(Slow(60.0))  # draws nothing itself
    for one in (rank, resumed):
        one.steps_per_update = 4
    for rank.step in range(saved_after):
        assert rank.rollout()[1] == 0.0
    rank.step = resumed.step = saved_after
    resumed.sampler.load_state_dict(rank.sampler.state_dict())
    resumed.updates = saved_after // 4
    SavedDraws(resumed).load_state_dict(SavedDraws(rank).state_dict())
    for one in (rank, resumed):
        assert one.rollout(ahead=False)[1] == saved_after // 4
        one.background.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (f"{R}placement=colocated", "the engines need devices of their own"),
        ("algorithm.rollout_correction.rollout_is=none", "correct for it with"),
        ("algorithm.filter_groups.enable=true", "turn one off"),
        ("algorithm.adv_estimator=remax", "greedy baseline would come from other weights"),
        ("dag.custom_pipeline_fn=mine:build", "only the built-in pipelines do"),
        (f"{R}staleness=-1", "must be 0 or more"),
    ],
)
def test_what_does_not_go_together_is_refused(changed: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, [*AHEAD, changed], "none")
