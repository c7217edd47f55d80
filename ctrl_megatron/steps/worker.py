"""The worker of one rank: models, services and state; the first argument of every node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ctrl_megatron.algorithms import AdaptiveKLController, FixedKLController
from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.checkpoint.store import (
    POLICY_FOLDER,
    REFERENCE_FOLDER,
    VALUE_FOLDER,
    model_folder,
)
from ctrl_megatron.config import Config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.tokens import TextCodec
from ctrl_megatron.errors import ServiceFault, ServiceLost, UserError
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.models.policy import BasePolicy, Policy
from ctrl_megatron.models.value import ValueModel
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.resharding.device import DeviceOwner, Role
from ctrl_megatron.rewards import JudgeCounts, RewardItem, RewardSum, Scores
from ctrl_megatron.rewards.plan import weights_at
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.engine import CountedEngine
from ctrl_megatron.steps.draws import DrawsAhead, LeftoverGroups
from ctrl_megatron.steps.reward_reader import RankRewardModel
from ctrl_megatron.types import FinishReason, Message

T = TypeVar("T")
Conversation = Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAnswer:
    """The proxy's answer to a conversation."""

    text: str
    tokens: int | None
    """Length in the proxy's tokens; None where its server does not report it."""
    version: str
    """The weights that drew it: ``proxy``, ``proxy:NAME`` or ``api:MODEL``."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFailure:
    """The proxy was asked and gave no answer, in any attempt."""

    error: str


ProxyListener = Callable[[int, ProxyAnswer | ProxyFailure | None], None]
"""Called with every answer as soon as it is there: (the conversation's number, the answer)."""


class Proxy(Protocol):
    """A frozen model that answers conversations greedily."""

    @property
    def can_overlap(self) -> bool:
        """Whether it can answer while the actor's engines draw."""
        ...

    async def probe_servers(self) -> str:
        """The servers of the proxy and their model, for the first lines of a run; empty where the
        run's own engines answer. UserError where no server can be used (leaders only).
        """
        ...

    def prepare(self, step: int) -> None:
        """Get ready to answer, until the actor's engines draw again. ``step`` is the number of
        training steps that are finished. Collective.
        """
        ...

    async def answer(
        self, conversations: Sequence[Conversation], max_tokens: int, on_answer: ProxyListener
    ) -> list[ProxyAnswer | ProxyFailure | None]:
        """The likeliest answer of up to ``max_tokens`` tokens to each conversation; None where a
        conversation leaves no room for one in the proxy's context. Leaders only. ``on_answer`` has
        been called with every answer when it returns.
        """
        ...

    async def close(self) -> None:
        """Close the connections of its own."""
        ...


def require_on_rank(part: T | None, what: str) -> T:
    """``part``, which this rank has; UserError where it is None because the ranks of another world
    have it. ``what`` names it."""
    if part is None:
        raise UserError(
            f"a node uses {what}, which is on the ranks of another world",
            key="placement",
            remedy="give the node a role whose world has it, or let both share a world",
        )
    return part


@dataclass(slots=True, kw_only=True)
class RolloutWorker:
    """The parts of a rank that generate texts and judge them."""

    config: Config
    groups: ProcessGroups
    background: BackgroundLoop
    stop: StopFlag
    codec: TextCodec
    engine: CountedEngine | None
    """All engines that the worker's policy draws with; None on ranks that are not its leaders."""
    owner: DeviceOwner | None
    """Who has the device, engine or trainer, and which weights the engines have; None on ranks of a
    world without engines."""
    role: Role = "actor"
    """The policy whose weights the engines draw with for this worker."""
    max_model_len: int
    """Longest sequence of the engine, in tokens."""
    proxy: Proxy | None = None
    """The source of revisions; None if no node asks for revisions."""
    rewards: RewardSum | None
    """Every reward function of the run; None on ranks that are not leaders, and if no node reads
    ``reward``."""
    reward_weights: Mapping[str, float]
    """Reward function -> weight before ``reward.schedule``; ``reward/mean`` is the mean of the
    first one."""
    validation: PromptTable | None
    pending: dict[str, asyncio.Task[ProxyAnswer | ProxyFailure | None]] = field(
        default_factory=dict
    )
    """The proxy's answers that were asked for before ``chain.revise`` needs them, by the text of
    their conversation (leaders only)."""
    timeline: Timeline = field(default_factory=Timeline)
    restarts: Callable[[], dict[str, float]] = dict
    """How often this rank has started services again, by the metric's name."""
    step: int = 0
    """Training steps that are finished."""

    @property
    def step_weights(self) -> dict[str, float]:
        """Reward function -> its weight in the step that is being trained."""
        return weights_at(self.reward_weights, self.config.reward.stages, self.step + 1)

    @property
    def device_owner(self) -> DeviceOwner:
        """``owner``; UserError on ranks of a world without engines."""
        return require_on_rank(self.owner, "the engines")

    @property
    def wait_conditions(self) -> WaitRules:
        """The conditions under which all ranks wait together."""
        limit = self.config.trainer.wait_timeout
        return WaitRules(groups=self.groups, stop=self.stop, limit=limit)

    def run_on_leader(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        what: str = "work of the leaders",
        *,
        stoppable: bool = True,
    ) -> T:
        """The result of ``work`` on the leader, on all ranks of its model copy. Collective.

        ``what`` names it in the log if it takes long. Raises StopRequested, on all ranks, if a stop
        is requested while any leader waits, unless ``stoppable`` is false, ServiceLost, on all
        ranks, if the engines that it asks are lost, and WaitedTooLong after
        ``trainer.wait_timeout``.
        """
        return self.wait_for_leader(self.begin_on_leader(work), what, stoppable=stoppable)

    def begin_on_leader(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T] | None:
        """Start ``work`` on the leader, which gets its future; None on other ranks.
        ``wait_for_leader`` returns the result on all ranks."""
        return self.background.submit(work()) if self.groups.is_leader else None

    def wait_for_leader(self, begun: Future[T] | None, what: str, *, stoppable: bool = True) -> T:
        """The result of what ``begin_on_leader`` started; as ``run_on_leader`` otherwise."""
        return self.groups.broadcast_from_leader(
            self.wait_conditions.wait_together(begun, what, stoppable=stoppable)
        )

    def wait_for_draws(self) -> None:
        """Wait until the engines draw nothing for a later step, so that their weights may change.
        Collective.
        """

    async def score(self, items: Sequence[RewardItem]) -> Scores:
        """The rewards of the items from every reward function (leaders only)."""
        if self.rewards is None:
            raise UserError(
                "worker.score: no node of the pipeline says that it uses rewards",
                remedy='put @node(uses=("rewards",)) of ctrl_megatron.pipeline on the function',
            )
        return await self.rewards.score(items)

    def count_judge_requests(self) -> JudgeCounts:
        """Counts of requests to the services that judge since ``judged_rate_metrics``, over all
        ranks. Collective.

        Raises ServiceFault, on all ranks, where they failed for all of it, or for more than
        ``reward.max_failed_share`` of it. What the cache answers they were not asked, and to refuse
        the tests of a row is no failure.
        """
        local = JudgeCounts() if self.rewards is None else self.rewards.judging
        judging = sum(
            self.groups.gather_data_ranks(self.groups.broadcast_from_leader(local)), JudgeCounts()
        )
        limit = self.config.reward.max_failed_share
        if judging.failed > limit * judging.asked or 0 < judging.failed == judging.asked:
            raise ServiceFault(
                f"{judging.failed} of {judging.asked} programs could not be judged, and "
                f"reward.max_failed_share={limit:g}: {judging.error}. Their step is not used. "
                "Repair the service and start the run again: it continues from its newest "
                "checkpoint"
            )
        return judging

    def judged_rate_metrics(self) -> dict[str, float]:
        """``reward/judged_rate``: of the programs that ``count_judge_requests`` counts, that the
        cache answered or whose row's tests were refused, the share that was judged; and
        ``reward/unjudgeable_rate``. {} where there was none of them. The count begins anew.
        Collective; raises as ``count_judge_requests``."""
        judging = self.count_judge_requests()
        if self.rewards is not None:
            self.rewards.pop_judge_counts()
        every = judging.asked + judging.cached + judging.refused
        unknown = judging.failed + judging.refused
        if not every:
            return {}
        rates = {
            "judged_rate": 1 - unknown / every,
            "unjudgeable_rate": judging.unjudgeable / every,
        }
        return {f"reward/{name}": rate for name, rate in rates.items()}

    def close(self) -> None:
        if self.engine is not None:
            self.background.run_before_close(self.engine.close())
        if self.proxy is not None:
            self.background.run_before_close(self.proxy.close())
        if self.owner is not None:
            self.owner.close()
        if self.rewards is not None:
            self.background.run_before_close(self.rewards.close())
        self.background.close()


@dataclass(slots=True, kw_only=True)
class DAGWorker(RolloutWorker):
    """Models, services and state of one rank. Every rank has one; there is no controller."""

    train: PromptTable
    draw: Callable[[int], list[int]]
    """n -> positions of the next n rows of the data, the same on every rank."""
    peek: Callable[[int, int], list[list[int]]] | None = None
    """(n, count) -> what the next ``count`` calls of ``draw(n)`` will return; None where nothing
    draws."""
    total_steps: int = 0
    """Training steps of the whole run."""
    ahead: DrawsAhead = field(default_factory=DrawsAhead)
    """Samples drawn for later steps while one trains (``rollout.staleness``)."""
    counted: dict[str, Counters] = field(default_factory=dict)
    """The engines' counters at the end of the last step (rank 0)."""
    leftover: LeftoverGroups = field(default_factory=LeftoverGroups)
    """Groups that dynamic sampling has not used yet."""
    actor: Policy | None
    """The policy that the worker trains; None if another world has it."""
    reference: Policy | BasePolicy | None
    """The frozen reference of the KL; None if the objective has no KL, or if another world has
    it."""
    value: ValueModel | None
    """The value model, if the estimator reads values."""
    reward_model: RankRewardModel | None = None
    """The model that rewards texts; None if the run has none, or if another world has it."""
    kl_controller: FixedKLController | AdaptiveKLController
    peak_flops: float
    """Peak of one device, in flop/s."""
    elsewhere: Sequence[tuple[float, float]] = ()
    """``performance.pass_flops_and_seconds`` of the other worlds in the last step."""
    agents: Sequence[DAGWorker] = field(default=(), repr=False, compare=False)
    """The workers of all policies that learn, by the number of their ``agent_group``, which share
    services and rows; this one alone where none are given."""

    def __post_init__(self) -> None:
        self.agents = self.agents or (self,)

    @property
    def policy(self) -> Policy:
        """``actor``; UserError where another world has it."""
        return require_on_rank(self.actor, "the actor")

    def close(self) -> None:
        # A rank may lead a further policy alone.
        rewards = [agent.rewards for agent in self.agents if agent.rewards is not None]
        self.rewards = next(iter(rewards), None)
        for engine in {id(agent.engine): agent.engine for agent in self.agents[1:]}.values():
            if engine is not None and engine is not self.engine:
                self.background.run_before_close(engine.close())
        RolloutWorker.close(self)

    def wait_for_draws(self) -> None:
        for draw in self.ahead.all_draws():
            # One whose engines are lost is begun anew when its step comes.
            with suppress(ServiceLost):
                self.wait_conditions.wait_together(
                    draw.groups, f"texts of {draw.version} from the engines"
                )

    @property
    def temperature(self) -> float:
        """Temperature of all log-probs: the sampling temperature, or 1 if sampling is greedy."""
        return self.config.actor_rollout_ref.rollout.temperature or 1.0

    @property
    def trained_models(self) -> dict[str, ParallelModel]:
        """The models of this policy that learn, by the name of their folder in a checkpoint."""
        models = {POLICY_FOLDER: self.actor, VALUE_FOLDER: self.value}
        return {
            model_folder(kind, self.role): model
            for kind, model in models.items()
            if model is not None
        }

    @property
    def refreshed_reference(self) -> Policy | None:
        """The reference, if it gets the actor's weights every few steps; None if there is none or
        it stays as it is."""
        refreshed = self.config.refreshes_reference and isinstance(self.reference, Policy)
        return self.reference if refreshed else None  # type: ignore[return-value]

    @property
    def saved_models(self) -> dict[str, ParallelModel]:
        """The models of this policy that a checkpoint contains, by the name of their folder: those
        of ``trained_models``, and a reference that changes."""
        reference = self.refreshed_reference
        folder = model_folder(REFERENCE_FOLDER, self.role)
        return self.trained_models | ({} if reference is None else {folder: reference})

    @property
    def has_actor(self) -> bool:
        """Whether the actor, whose engines may need the device, is on this rank."""
        return self.actor is not None

    @property
    def actor_learns(self) -> bool:
        """False in the steps of ``trainer.critic_warmup`` and of another policy's turn."""
        return self.config.learns_in(self.step)

    def global_means(self, values: dict[str, torch.Tensor]) -> dict[str, float]:
        """Global mean of each vector, its NaN left out, over the data-parallel ranks. Collective.

        A name without a value on any rank is left out.
        """
        names = sorted(values)
        known = [values[n][~values[n].isnan()] for n in names]
        local = torch.tensor(
            [[float(v.double().sum()), float(v.numel())] for v in known], dtype=torch.float64
        ).reshape(-1, 2)
        totals = self.groups.sum_over_data(local).tolist()
        return {n: s / c for n, (s, c) in zip(names, totals, strict=True) if c}
