"""The ranks that have the model or the services of a role to themselves (``placement``). Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.config.actor_rollout_ref import REFERENCE, RoleLayout
from ctrl_megatron.config.algorithm import VALUE_MODEL, Where
from ctrl_megatron.config.coerce import coerce_value
from ctrl_megatron.config.keys import Condition, value_at_key
from ctrl_megatron.config.reward_model import REWARD_MODEL
from ctrl_megatron.config.schema import Config
from ctrl_megatron.errors import UserError

_FORMS = "write a list of ranks, {hosts: [HOST]} or {share: SHARE}"


ROLES: Mapping[str, tuple[Condition, str]] = {
    "critic": (VALUE_MODEL, "critic.megatron"),
    "reference": (REFERENCE, "actor_rollout_ref.ref.megatron"),
    "reward_model": (REWARD_MODEL, "reward_model.megatron"),
}
"""Role -> (the condition under which a run has its model, the group of its layout)."""
SERVICES = ("rollout", "sandbox")
"""Roles without a model, whose ranks start the engines or the sandboxes of their hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateRanks:
    """Ranks that have the models or the services of some roles and nothing else."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ascending."""
    layout: RoleLayout
    """The sizes of the roles' models; 1 where they have none."""

    @property
    def config_key(self) -> str:
        """The configuration key of the ranks."""
        return f"placement.{self.roles[0]}"

    @property
    def ranks_per_model_copy(self) -> int:
        """Ranks that hold one copy of each model."""
        return self.layout.tensor_model_parallel_size * self.layout.pipeline_model_parallel_size


def separate_role_ranks(config: Config, world_size: int) -> tuple[SeparateRanks, ...]:
    """The ranks of every role that does not share the actor's, of a run of ``world_size`` ranks.

    UserError for ranks that do not exist or belong to several roles in part, for an order of a
    host's ranks that the engines do not have, and for layouts that do not divide them.
    """
    each = config.trainer.n_gpus_per_node
    roles = [role for role, (condition, _) in ROLES.items() if condition.is_met(config)]
    where = {role: value_at_key(config, f"placement.{role}") for role in (*roles, *SERVICES)}
    found: dict[tuple[int, ...], list[str]] = {}
    # A share takes what the others leave.
    for role in sorted(where, key=lambda role: "share" in where[role]):
        taken = {rank for ranks in found for rank in ranks}
        ranks = _ranks(f"placement.{role}", where[role], world_size, each, taken)
        if not ranks:
            continue
        if ranks not in found and (both := sorted(taken.intersection(ranks))):
            raise UserError(
                f"rank {both[0]} has another role too, and only a part of its ranks",
                key=f"placement.{role}",
                remedy="name exactly the ranks of the other role, or none of them",
            )
        found.setdefault(ranks, []).append(role)
    apart = tuple(
        SeparateRanks(roles=tuple(roles), ranks=ranks, layout=_layout(config, roles, ranks))
        for ranks, roles in found.items()
    )
    _check_order(apart, world_size, each)
    return apart


def _ranks(name: str, where: Where, world_size: int, each: int, taken: set[int]) -> tuple[int, ...]:
    """The ranks that a key names, ascending."""
    if not isinstance(where, dict):
        return _numbered(name, where, world_size)
    if len(where) != 1 or not where.keys() <= _BY_FORM.keys():
        raise UserError(f"cannot be {where}", key=name, remedy=_FORMS)
    ((form, value),) = where.items()
    return _BY_FORM[form](f"{name}.{form}", value, world_size, each, taken)


def _numbered(name: str, ranks: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    if len({*ranks}) < len(ranks) or any(not 0 < rank < world_size for rank in ranks):
        raise UserError(
            f"{list(ranks)} are not different ranks above 0 of a run of {world_size}",
            key=name,
            remedy=f"name ranks from 1 to {world_size - 1}, each once; rank 0 has the actor",
        )
    return tuple(sorted(ranks))


def _of_hosts(
    name: str, value: Any, world_size: int, each: int, taken: set[int]
) -> tuple[int, ...]:
    hosts = _typed(name, tuple[int, ...], value)
    last = world_size // each - 1
    if not hosts or len({*hosts}) < len(hosts) or any(not 0 < host <= last for host in hosts):
        raise UserError(
            f"{list(hosts)} are not different hosts above 0 of a run on {last + 1}",
            key=name,
            remedy=f"name hosts from 1 to {last}, each once; host 0 has the actor"
            if last
            else "name ranks, or take more hosts",
        )
    return tuple(rank for rank in range(world_size) if rank // each in hosts)


def _last(name: str, value: Any, world_size: int, each: int, taken: set[int]) -> tuple[int, ...]:
    share = _typed(name, float, value)
    count = share * world_size
    free = [rank for rank in range(world_size) if rank not in taken]
    if not 0 < share < 1 or abs(count - round(count)) > 1e-6 or round(count) >= len(free):
        raise UserError(
            f"{share:g} of {world_size} ranks is {count:g}, which leaves the actor none or is not "
            f"a whole number",
            key=name,
            remedy=f"give a multiple of 1/{world_size} below {len(free)}/{world_size}",
        )
    return tuple(free[len(free) - round(count) :])


_BY_FORM: Mapping[str, Callable[..., tuple[int, ...]]] = {"hosts": _of_hosts, "share": _last}


def _typed(name: str, hint: Any, value: Any) -> Any:
    try:
        return coerce_value(hint, value)
    except UserError as error:
        raise UserError(f"{name} {error}", remedy=_FORMS) from None


def _layout(config: Config, roles: list[str], ranks: tuple[int, ...]) -> RoleLayout:
    groups = [ROLES[role][1] for role in roles if role in ROLES]
    if groups and "rollout" in roles:
        raise UserError(
            f"the engines would share their devices with the model of {roles[0]}",
            key="placement.rollout",
            remedy=f"name other ranks than those of placement.{roles[0]}",
        )
    if not groups:
        return RoleLayout()
    layouts = [value_at_key(config, group) for group in groups]
    if len({*layouts}) > 1:
        raise UserError(
            f"the roles {' and '.join(roles)} have the same ranks and different layouts",
            key=" and ".join(groups),
            remedy="set both to the same sizes, or name other ranks",
        )
    made = SeparateRanks(roles=tuple(roles), ranks=ranks, layout=layouts[0])
    data, rest = divmod(len(ranks), made.ranks_per_model_copy)
    if rest:
        raise UserError(
            f"its {len(ranks)} ranks are not divided by {groups[0]}.tensor_model_parallel_size="
            f"{layouts[0].tensor_model_parallel_size} x pipeline_model_parallel_size="
            f"{layouts[0].pipeline_model_parallel_size}",
            key=made.config_key,
            remedy=f"name a multiple of {made.ranks_per_model_copy} ranks, or change the sizes",
        )
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini % data:
        raise UserError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} does not divide over its {data} "
            "data-parallel ranks",
            key=made.config_key,
            remedy=f"use a multiple of {data}",
        )
    return made.layout


def _check_order(apart: tuple[SeparateRanks, ...], world_size: int, each: int) -> None:
    of_rank = {rank: one for one in apart for rank in one.ranks}
    for rank in range(1, world_size):
        if rank % each and rank not in of_rank and (before := of_rank.get(rank - 1)):
            raise UserError(
                f"rank {rank} of the actor comes behind rank {rank - 1} on one host, and engines "
                "take a host's first GPUs",
                key=before.config_key,
                remedy="name the last ranks of a host",
            )
