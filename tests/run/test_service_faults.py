"""What a run, a draw and a validation do when the services that judge have failed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ctrl_megatron.config import load_config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.errors import ServiceFault, UserError
from ctrl_megatron.graph.declarations import as_node_function
from ctrl_megatron.graph.graph import StepReport
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.pipeline import NodeOutput, NodeType, Pipeline
from ctrl_megatron.rewards import JudgeCounts, RewardOutcome, RewardSum
from ctrl_megatron.run.loop import Schedule, TrainingLoop
from ctrl_megatron.steps.batch import make_batch
from ctrl_megatron.steps.chain import judge_programs
from ctrl_megatron.steps.draws import LeftoverGroups
from ctrl_megatron.steps.dynamic_sampling import DynamicSampling
from ctrl_megatron.steps.sample import Sample, SampleRewards
from ctrl_megatron.steps.worker import RolloutWorker
from ctrl_megatron.types import Completion

FAULT = ServiceFault("3 of 3 programs could not be judged")


def loop_that_fails(place: str) -> tuple[TrainingLoop, list[tuple[int, Any]]]:
    """A loop over ten rows, whose second step fails ``before`` or ``after`` its update, or whose
    ``validation`` after it does; and the list of its saves: step and state of the sampler.
    """

    def node(name: str) -> Any:
        def run(worker: Any, batch: TensorDict) -> NodeOutput:
            if name == place and worker.step == 1:
                raise FAULT
            return NodeOutput()

        return run

    def validate(worker: Any) -> dict[str, float]:
        raise FAULT

    report = StepReport(validate=validate if place == "validation" else None)
    pipeline = Pipeline("p", report=report)
    pipeline.add_node("before", node("before"))
    pipeline.add_node("update", node("update"), ["before"], node_type=NodeType.MODEL_TRAIN)
    pipeline.add_node("after", node("after"), ["update"])
    saves: list[tuple[int, Any]] = []
    nothing: Any = lambda *_, **__: None  # noqa: E731
    names = ("begin_step", "end_step", "say", "log", "add_stage")
    worker: Any = SimpleNamespace(
        step=0,
        trained_models={},
        saved_models={},
        groups=SimpleNamespace(all_gather=lambda value: [value], is_first=False, rank=0),
        timeline=Timeline(),
        stop=SimpleNamespace(requested_on_any_rank=lambda groups: False),
        background=None,
    )
    worker.agents = [worker]
    store: Any = SimpleNamespace(
        save=lambda models, step, state: saves.append((step, state["sampler"])),
        wait_for_save=nothing,
        pop_save_report=nothing,
    )
    loop = TrainingLoop(
        worker=worker,
        graph=pipeline.build(),
        sampler=ResumableSampler(10, seed=1),
        store=store,
        recorder=SimpleNamespace(**dict.fromkeys(names, nothing)),  # type: ignore[arg-type]
        schedule=Schedule(batch_size=2, total_steps=3, test_freq=2),
    )
    return loop, saves


def test_the_state_before_the_step_is_saved_and_its_rows_are_drawn_again() -> None:
    loop, saves = loop_that_fails("before")
    with pytest.raises(ServiceFault):
        loop.run()
    ((step, state),) = saves
    assert step == 1
    whole, resumed = ResumableSampler(10, seed=1), ResumableSampler(10, seed=1)
    resumed.load_state_dict(state)
    assert resumed.next_batch(2) == [whole.next_batch(2) for _ in range(2)][1]


def test_weights_that_a_failed_step_has_begun_to_change_are_not_saved() -> None:
    loop, saves = loop_that_fails("after")
    with pytest.raises(ServiceFault):
        loop.run()
    assert saves == []


def test_a_validation_that_failed_keeps_the_steps_before_it() -> None:
    loop, saves = loop_that_fails("validation")
    with pytest.raises(ServiceFault):
        loop.run()
    assert [step for step, _ in saves] == [2]


class Rank:
    """The only rank of a run, whose judge has the given outcomes."""

    def __init__(self, outcomes: list[RewardOutcome], *settings: str) -> None:
        filtered = "algorithm.filter_groups.enable=true"
        rollout = "actor_rollout_ref.rollout.n=2"
        self.config = load_config(None, [filtered, rollout, *settings], "none")
        self.groups: Any = SimpleNamespace(
            broadcast_from_leader=lambda value: value, gather_data_ranks=lambda value: [value]
        )
        critic = SimpleNamespace(judge_solutions=self._judge)
        self.rewards = RewardSum({"critic": critic})  # type: ignore[dict-item]
        self.outcomes, self.leftover, self.draws = outcomes, LeftoverGroups(), 0
        self.reward_weights = self.step_weights = {"critic": 1.0, "mine:f": 1.0}
        self.step = 0

    async def _judge(self, texts: Any, rows: Any) -> list[RewardOutcome]:
        return self.outcomes

    def run_on_leader(self, work: Any, what: str = "") -> Any:
        return asyncio.run(work())

    def draw(self, count: int) -> list[int]:
        self.draws += 1
        return list(range(count))

    def count_judge_requests(self) -> JudgeCounts:
        return RolloutWorker.count_judge_requests(self)  # type: ignore[arg-type]

    def judged_rate_metrics(self) -> dict[str, float]:
        return RolloutWorker.judged_rate_metrics(self)  # type: ignore[arg-type]

    def global_means(self, values: dict[str, torch.Tensor]) -> dict[str, float]:
        return {}


LOST, JUDGED = RewardOutcome(reward=None, error="gone"), RewardOutcome(reward=0.0)


def test_programs_that_are_all_lost_end_a_validation_whatever_the_limit() -> None:
    for limit in ("0.2", "1"):
        rank: Any = Rank([LOST, LOST], f"reward.max_failed_share={limit}")
        with pytest.raises(ServiceFault, match=rf"^2 of 2 programs .*={limit}: gone\."):
            judge_programs(rank, ["a", "b"], [Row(id="1"), Row(id="2")])


def sample(uid: str, *, critic: float | None, mine: float | None) -> Sample:
    total = None if critic is None or mine is None else critic + mine
    return Sample(
        uid=uid,
        row_id="p/1",
        mini_batch=0,
        prompt=(1,),
        completion=Completion(token_ids=(2,), log_probs=(0.0,), finish_reason="stop", spans=()),
        outcome=SampleRewards(total=total, rewards={"critic": critic, "mine:f": mine}),
    )


def drawing(worker: Any, drawn: list[Sample], judging: JudgeCounts) -> DynamicSampling:
    def draw(_: Any, batch: TensorDict) -> NodeOutput:
        worker.rewards.judging += judging
        return NodeOutput(batch=make_batch(drawn, pad_token_id=0))

    return DynamicSampling((as_node_function(draw),), lambda samples: {}, ())


def test_dynamic_sampling_ends_with_the_first_draw_that_services_failed() -> None:
    worker: Any = Rank([])
    drawn = [sample("a", critic=None, mine=1.0), sample("a", critic=0.0, mine=1.0)]
    node = drawing(worker, drawn, JudgeCounts(asked=1, failed=1, error="connection refused"))
    with pytest.raises(ServiceFault, match=r"^1 of 1 programs .*: connection refused\."):
        node(worker, TensorDict({}, batch_size=[0]))
    assert worker.draws == 1


def test_dynamic_sampling_names_the_function_that_never_returned_a_number() -> None:
    worker: Any = Rank([])
    drawn = [sample("a", critic=float(n), mine=None) for n in range(2)]
    node = drawing(worker, drawn, JudgeCounts(asked=2))
    with pytest.raises(UserError, match=r"^reward\.reward_funcs: mine:f returned None for every"):
        node(worker, TensorDict({}, batch_size=[0]))
    assert worker.draws == 1
