"""Which ranks to give to the models beside the actor: a proposal for ``placement``. Pure.

The arithmetic of the passes decides, and the memory plan: all ranks compute equally fast, passes of
worlds that the graph lets run at the same time overlap, and a step also generates, for a share of
its time that the caller names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ctrl_megatron.config import Config, check_world_size
from ctrl_megatron.config.placement import ROLES
from ctrl_megatron.errors import UserError
from ctrl_megatron.memory.activations import Kernels
from ctrl_megatron.memory.budget import MemoryBudget, memory_budget
from ctrl_megatron.memory.fit import phase_over_limit, with_changed_keys
from ctrl_megatron.memory.shapes import ModelShapes
from ctrl_megatron.models.flops import model_flops
from ctrl_megatron.models.shape import AnyShape
from ctrl_megatron.parallel.layout import World, world_of_role, worlds_of

_EVERY_ROLE = ("actor", "rollout", *ROLES)
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
GENERATION = 0.5
"""Share of a step of one world that generates, where nothing else is known."""
_SHARES = (1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Floating-point operations of a step's parts over all rows; 0 for a part that it lacks."""

    generate: float
    """The time of the engines as so many operations of their ranks."""
    old_log_prob: float
    ref_log_prob: float
    reward_model: float
    values: float
    critic_update: float
    actor_update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCandidate:
    """A placement and what it promises."""

    keys: Mapping[str, Any]
    """Configuration key -> value; empty for one world."""
    worlds: tuple[World, ...]
    budget: MemoryBudget
    fault: str | None
    """Why it does not fit; None if it does."""
    step: float
    """Time of a step, as a share of that of one world."""
    idle: Mapping[str, float]
    """World -> the share of a step in which its ranks wait."""

    @property
    def overrides(self) -> list[str]:
        return [f"{name}={_text(value)}" for name, value in self.keys.items()]


def step_flops(config: Config, shapes: ModelShapes, *, generation: float) -> StepFlops:
    """The work of one step with rows of full length. ``generation`` is the share of a step's time
    that generation takes in one world, below 1.
    """
    actor = config.actor_rollout_ref.actor
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    length, answer = config.max_critique_sequence_tokens, config.data.max_response_length

    def passes(shape: AnyShape | None, times: int, *, backward: bool, head: bool = True) -> float:
        if shape is None:
            return 0.0
        return float(
            times
            * model_flops(
                shape,
                tokens=rows * length,
                pairs=rows * length * (length + 1) // 2,
                projected_tokens=rows * answer if head else 0,
                backward=backward,
            )
        )

    trainer = StepFlops(
        generate=0.0,
        old_log_prob=passes(shapes.actor, 1, backward=False),
        ref_log_prob=passes(shapes.reference, 1, backward=False),
        reward_model=passes(shapes.reward_model, 1, backward=False, head=False),
        values=passes(shapes.value, 1, backward=False, head=False),
        critic_update=passes(shapes.value, config.value_epochs, backward=True, head=False),
        actor_update=passes(shapes.actor, actor.ppo_epochs, backward=True),
    )
    computed = sum(world_busy_flops(trainer, _EVERY_ROLE))
    return replace(trainer, generate=computed * generation / (1 - generation))


def world_busy_flops(work: StepFlops, roles: tuple[str, ...]) -> tuple[float, float, float]:
    """The work of a world in the three parts of a step that all worlds begin together: draw; the
    passes before the advantages; the updates."""
    before = after = 0.0
    if "actor" in roles:
        before, after = work.old_log_prob, work.actor_update
    if "reference" in roles:
        before += work.ref_log_prob
    if "reward_model" in roles:
        before += work.reward_model
    if "critic" in roles:
        before, after = before + work.values, after + work.critic_update
    return work.generate if "rollout" in roles else 0.0, before, after


def step_time_and_idle_shares(
    work: StepFlops, worlds: tuple[World, ...], *, ahead: bool = False
) -> tuple[float, dict[str, float]]:
    """(the time of a step in operations of one rank, world -> the share in which it waits). Engines
    on ranks of their own draw ``ahead`` of the training."""
    parts = {}
    for world in worlds:
        roles = tuple(r for r in _EVERY_ROLE if world_of_role(worlds, r) is world)
        parts[world.name] = [one / len(world.ranks) for one in world_busy_flops(work, roles)]
    drawn, *trained = map(max, zip(*parts.values(), strict=True))
    overlaps = ahead and world_of_role(worlds, "rollout").serves
    step = max(drawn, sum(trained)) if overlaps else drawn + sum(trained)
    return step, {name: 1 - sum(own) / step for name, own in parts.items()}


def placement_candidates(
    config: Config,
    shapes: ModelShapes,
    *,
    gpu_memory: int,
    generation: float,
    kernels: Kernels = "te",
) -> list[PlacementCandidate]:
    """Placements of the roles that the configuration trains with: all on one world, and shares of
    the ranks for some roles. Only those that the layout and the batch sizes allow; the first is one
    world where that is allowed.
    """
    size = config.trainer.nnodes * config.trainer.n_gpus_per_node
    work = step_flops(config, shapes, generation=generation)
    whole = sum(world_busy_flops(work, _EVERY_ROLE)) / size
    found: dict[tuple[tuple[int, ...], ...], PlacementCandidate] = {}
    one_world = config.replace_groups(placement=config.placement.services_only)
    ahead = config.actor_rollout_ref.rollout.staleness > 0
    for keys in _placements(config, size):
        changed = with_changed_keys(one_world, keys)
        try:
            check_world_size(changed, size)
            worlds = worlds_of(size, changed)
            budget = memory_budget(changed, shapes, gpu_memory=gpu_memory, kernels=kernels)
        except UserError:
            # The layout or the batches do not divide over these ranks.
            continue
        step, idle = step_time_and_idle_shares(work, worlds, ahead=ahead)
        candidate = PlacementCandidate(
            keys=keys,
            worlds=worlds,
            budget=budget,
            fault=phase_over_limit(changed, budget),
            step=step / whole,
            idle=idle,
        )
        found.setdefault(tuple(world.ranks for world in worlds), candidate)
    return list(found.values())


def choose_placement(found: list[PlacementCandidate]) -> PlacementCandidate:
    """The candidate that fits with the shortest step. In one world no rank waits, so that is one
    world where it fits. UserError with the reason of the first candidate if none fits.
    """
    fitting = [one for one in found if one.fault is None]
    if not fitting:
        reason = found[0].fault if found else "no share of the ranks suits layout and batch sizes"
        raise UserError(
            f"no placement fits: {reason}",
            key="placement",
            remedy="take more GPUs, or see ctrl-plan without --placement for other remedies",
        )
    return min(fitting, key=lambda one: (one.step, len(one.worlds)))


def with_auto_placement(
    config: Config, shapes: ModelShapes, *, gpu_memory: int, kernels: Kernels = "te"
) -> tuple[Config, str]:
    """The configuration with the placement that ``placement.auto`` stands for, written out, and the
    table of what was considered. UserError as ``choose_placement``.
    """
    found = placement_candidates(
        config, shapes, gpu_memory=gpu_memory, generation=GENERATION, kernels=kernels
    )
    chosen = choose_placement(found)
    one_world = config.replace_groups(placement=config.placement.services_only)
    chosen_config = with_changed_keys(one_world, chosen.keys)
    return chosen_config, proposal_table(found, chosen, generation=GENERATION)


def _placements(config: Config, size: int) -> Iterator[dict[str, Any]]:
    """One world, then shares for each role that exists, in the actor's layout."""
    roles = [role for role, (condition, _) in ROLES.items() if condition.is_met(config)]
    if config.algorithm.filter_groups.enable:
        # The actor's ranks compare rewards while they draw.
        roles = [role for role in roles if role != "reward_model"]
    own = config.actor_rollout_ref.actor.megatron
    layout = {name: getattr(own, name) for name in _SIZES if getattr(own, name) > 1}
    shares = (None, *(share for share in _SHARES if (share * size).is_integer()))
    for chosen in product(shares, repeat=len(roles)):
        keys = dict[str, Any]()
        for role, share in zip(roles, chosen, strict=True):
            if share is not None:
                keys[f"placement.{role}"] = {"share": share}
                keys |= {f"{ROLES[role][1]}.{name}": count for name, count in layout.items()}
        yield keys


def _text(value: Any) -> str:
    return f"{{share: {value['share']:g}}}" if isinstance(value, dict) else str(value)


def proposal_table(
    found: list[PlacementCandidate], chosen: PlacementCandidate, *, generation: float
) -> str:
    """A line per candidate with its worlds, its step and its idle times, and the proposal."""
    order = sorted(found, key=lambda one: (one.fault is not None, one.step))
    lines = [f"{'step':>6}  {'fullest GPU':>11}  worlds (ranks, idle)"]
    for one in order:
        worlds = ", ".join(
            f"{' and '.join(world.roles)} ({len(world.ranks)}, {one.idle[world.name]:.0%})"
            for world in one.worlds
        )
        use = one.budget.fullest_phase.total / one.budget.gpu_memory
        mark = "" if one.fault is None else "  does not fit"
        lines.append(f"{one.step:>6.2f}  {use:>11.0%}  {worlds}{mark}")
    keys = (
        " ".join(f"'{key}'" for key in chosen.overrides)
        or "one world: leave the placement of models out"
    )
    lines += [
        "",
        f"proposal: {keys}",
        f"step: a share of that of one world, in which generation takes {generation:.0%} "
        "(--generation); rows of full length, ranks that all compute equally fast",
    ]
    return "\n".join(lines)
