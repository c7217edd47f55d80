"""Worlds: on which ranks a node runs, and the rows that travel between them.

Every rank walks the same order of nodes and runs those of its own world. Where a node needs what
nodes of another world have written, the leaders of that world send it to the leaders of the node's,
rank to rank: each gets the rows that are dealt to it, and groups stay whole. A message leaves as
soon as its writer is done and is received just before the node, so worlds run at the same time
wherever the graph lets them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.background import AbandonableCall
from ctrl_megatron.config import Config
from ctrl_megatron.errors import ServiceFault
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.node import Node, NodeOutput
from ctrl_megatron.graph.siirl_names import NodeRole
from ctrl_megatron.graph.world_link import (
    Action,
    ReceiveMessage,
    RunNode,
    SendMessage,
    WorldMessage,
    WorldReport,
)
from ctrl_megatron.parallel.groups import JoinedGroups
from ctrl_megatron.parallel.layout import World, world_of_role
from ctrl_megatron.parallel.signed_objects import signed_pickle, verified_unpickle
from ctrl_megatron.parallel.stop import StopFlag, StopRequested
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.steps.batch import OF_SAMPLES, join_samples, pad_columns, sample_sizes
from ctrl_megatron.steps.sampling import deal_rows

T = TypeVar("T")
HOME = "actor"
"""The world of every role without one of its own: it has rank 0 and the engines."""
ROLES: Mapping[NodeRole, str] = {
    NodeRole.CRITIC: "critic",
    NodeRole.REFERENCE: "reference",
    NodeRole.REWARD_MODEL: "reward_model",
}
"""The worlds of the roles that may have one of their own."""
_ROWS = ("prompts", "responses", "attention_mask", "response_mask", "mini_batch")
_ROWS += ("uid", "problem_id")
_PIECE_BYTES = 4 << 20
"""A message travels in pieces of this size: one is copied while another is under way."""
_FOREVER = float("inf")
"""The sender's work has limits of its own."""


def plan_step(
    graph: TaskGraph, order: Sequence[Node], world_of: Callable[[Node], str], config: Config
) -> dict[str, list[Action]]:
    """World -> the actions of its ranks in a step, in order. Pure.

    A world that finishes its part of an order in which dependencies come first never waits for one
    that waits for it.
    """
    before: dict[str, list[Action]] = defaultdict(list)
    after: dict[str, list[Action]] = defaultdict(list)
    sent: dict[tuple[str, str], set[str]] = defaultdict(set)
    numbers = itertools.count()
    # Other policies' batches stay at home.
    first = [node for node in order if not node.agent_group]
    for node in order:
        ancestors, target = graph.get_ancestors(node.node_id), world_of(node)
        above = [other for other in first if other.node_id in ancestors]
        for source in dict.fromkeys(map(world_of, above)):
            theirs = [other for other in above if world_of(other) == source]
            new = [other for other in theirs if other.node_id not in sent[source, target]]
            if source == target or not new:
                continue
            sent[source, target] |= {other.node_id for other in theirs}
            if target == HOME:
                wanted = [name for other in new for name in other.written_fields]
            else:
                later = first[first.index(node) :]
                wanted = [
                    n for one in later if world_of(one) == target for n in one.needed_fields(config)
                ]
            fields = [
                name
                for name in dict.fromkeys(wanted)
                if (writer := _writer(first, above, name)) and world_of(writer) == source
            ]
            if not fields and all(_follows(graph, one, above, source, world_of) for one in new):
                continue
            message = WorldMessage(
                number=next(numbers), node=node, source=source, to=target, fields=tuple(fields)
            )
            before[node.node_id].append(ReceiveMessage(message))
            after[new[-1].node_id].append(SendMessage(message))
    programs: dict[str, list[Action]] = defaultdict(list)
    for node in order:
        programs[world_of(node)] += [*before[node.node_id], RunNode(node), *after[node.node_id]]
    return programs


def _follows(
    graph: TaskGraph,
    node: Node,
    above: Sequence[Node],
    source: str,
    world_of: Callable[[Node], str],
) -> bool:
    """Whether a node ``above`` of a world other than ``source``, which is waited for anyway, has
    waited for ``node``."""
    others = (one for one in above if world_of(one) != source)
    return any(node.node_id in graph.get_ancestors(one.node_id) for one in others)


def _writer(order: Sequence[Node], above: Sequence[Node], field: str) -> Node | None:
    """The last node ``above`` that writes the field, which a node that declares nothing may do
    too; None where those that declare it come later."""
    declared = [node for node in order if field in node.written_fields]
    if declared and not any(node in above for node in declared):
        return None
    return last_writer(above, field)


def last_writer(nodes: Sequence[Node], field: str) -> Node | None:
    """The last of ``nodes`` that may write the field; None if none may."""
    masks = ("response_mask", "loss_mask")
    return next(
        (
            node
            for node in reversed(nodes)
            if node.may_write(field) or (node.filter_plugin is not None and field in masks)
        ),
        None,
    )


def world_of_roles(worlds: Sequence[World]) -> Callable[[Node], str]:
    def world_of(node: Node) -> str:
        # Those of further policies have their models at home.
        role = HOME if node.agent_group else ROLES.get(node.node_role, HOME)
        return world_of_role(worlds, role).name

    return world_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankStatus:
    """The state of one rank, which all ranks exchange."""

    stop: bool = False
    fault: str | None = None
    """The text of a ServiceFault that ended the step."""
    stopped: bool = False
    changed: bool = False
    report: WorldReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowAssignment:
    """The rows of the home world's batch that each data rank of each world gets."""

    number: int
    parts: dict[str, list[list[int]]]
    """World -> the rows of each of its data ranks."""


class MultiWorldLink:
    """``WorldLink`` of several worlds, of which the first has rank 0 and deals the rows."""

    def __init__(
        self,
        joined: JoinedGroups,
        worlds: Sequence[World],
        config: Config,
        stop: StopFlag,
        pad_token_id: int,
    ) -> None:
        self._joined, self._config, self._stop = joined, config, stop
        self._worlds = {world.name: world for world in worlds}
        self._own, self._groups, self._mail = joined.world.name, joined.groups, joined.mail
        self._pad_token_id = pad_token_id
        self._deals = itertools.count()
        self._deal: _RowAssignment | None = None
        self._informed: set[str] = set()
        """The worlds that have the rows of the present deal."""
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._ended: tuple[bool] | None = None

    @property
    def has_rank_zero(self) -> bool:
        return self._own == HOME

    def plan_actions(self, graph: TaskGraph, order: Sequence[Node]) -> Sequence[Action]:
        worlds = [*self._worlds.values()]
        return plan_step(graph, order, world_of_roles(worlds), self._config).get(self._own, ())

    # Between steps

    def wait_before_step(self) -> None:
        self._exchange(_RankStatus(stop=self._stop.is_set))

    def wait_after_step(self, report: WorldReport) -> list[WorldReport]:
        # What was sent has been received: the others have come here too.
        said = self._exchange(_RankStatus(report=report))
        firsts = {world.ranks[0] for name, world in self._worlds.items() if name != self._own}
        return [one.report for rank, one in enumerate(said) if rank in firsts and one.report]

    def synchronize_worlds(self) -> None:
        self._exchange(_RankStatus())

    def propagate_error(self, why: BaseException, *, weights_changed: bool) -> bool:
        if self._ended is None:
            fault = str(why) if isinstance(why, ServiceFault) else None
            said = _RankStatus(fault=fault, stopped=fault is None, changed=weights_changed)
            with suppress(StopRequested, ServiceFault):
                self._exchange(said)
        assert self._ended is not None
        return self._ended[0]

    def _exchange(self, own: _RankStatus) -> list[_RankStatus]:
        # ``wait_after_step`` reads the report of each world's first rank.
        if own.report is not None and not self._groups.is_first:
            own = _RankStatus()
        everyone: list[Any] = [None] * self._joined.everyone.size

        def gather() -> list[_RankStatus]:
            for work, _ in self._sent:
                work.wait()
            dist.all_gather_object(everyone, own, group=self._mail)
            return everyone

        statuses = AbandonableCall(gather, "the other worlds").future.result()
        self._sent.clear()
        faults = [one.fault for one in statuses if one.fault is not None]
        if faults or any(one.stop or one.stopped for one in statuses):
            self._ended = (any(one.changed for one in statuses),)
            raise ServiceFault(faults[0]) if faults else StopRequested
        return statuses

    # Rows

    def notify_rows_changed(self) -> None:
        # Other worlds get new rows with their deal.
        if self.has_rank_zero:
            self._deal = None
            self._informed.clear()

    @property
    def _mine(self) -> list[int]:
        """The dealt rows of this rank, in their order."""
        assert self._deal is not None
        return self._deal.parts[self._own][self._groups.place.dp]

    def send(self, message: WorldMessage, batch: TensorDict) -> None:
        if self.has_rank_zero:
            self._deal = self._deal or self._dealt(batch)
        assert self._deal is not None
        # Tokens come with the deal.
        deal, names = self._deal, tuple(n for n in message.fields if n not in OF_SAMPLES)
        if not self._groups.is_leader:
            return
        new = self.has_rank_zero and message.to not in self._informed
        if new:
            names = tuple(dict.fromkeys((*_ROWS, *names)))
        place = {row: at for at, row in enumerate(self._mine)}
        for data, order in enumerate(deal.parts[message.to]):
            # In the order in which they are kept there, so that nothing has to be sorted.
            rows = [row for row in order if row in place]
            facts = {"number": deal.number, "rows": rows} | ({"deal": deal} if new else {})
            # A node without ``writes`` may write any field, or none.
            fields = {name: batch[name] for name in names if name in batch}
            self._post(message, data, facts, fields, [place[row] for row in rows])
        self._informed.add(message.to)

    def receive(self, message: WorldMessage, batch: TensorDict) -> NodeOutput:
        letters = self._letters(message)
        for facts, _ in letters:
            if "fault" in facts:
                raise ServiceFault(facts["fault"]) if facts["fault"] else StopRequested
        fresh = letters[0][0].get("deal")
        self._deal = fresh or self._deal
        if self._deal is None or letters[0][0]["number"] != self._deal.number:
            raise ValueError(
                f"the node {message.node.node_id!r} gets fields of rows that have been dealt "
                "anew meanwhile; let the node that deals them come first"
            )
        numbers = [row for facts, _ in letters for row in facts["rows"]]
        place = {row: at for at, row in enumerate(numbers)}
        if len(place) != len(numbers) or {*self._mine} != {*numbers}:
            raise RuntimeError(f"rows were lost or sent twice on their way to {self._own}")
        parts = [fields for _, fields in letters]
        taken = [place[row] for row in self._mine]
        if fresh is not None:
            whole = join_samples(parts, pad_token_id=self._pad_token_id, rows=taken)
            return NodeOutput(batch=whole)
        width = batch["responses"].shape[1]
        return NodeOutput(fields={name: _joined(parts, name, taken, width) for name in parts[0]})

    def abandon_step(self, rest: Sequence[Action], why: BaseException) -> None:
        fault = str(why) if isinstance(why, ServiceFault) else ""
        for action in rest:
            if isinstance(action, ReceiveMessage):
                # Received and dropped: its sender waits for that before it meets the others.
                self._letters(action.message)
            elif isinstance(action, SendMessage) and self._groups.is_leader:
                for data in range(self._worlds[action.message.to].layout.data):
                    self._post(action.message, data, {"fault": fault}, {}, ())

    def _dealt(self, batch: TensorDict) -> _RowAssignment:
        there = self._groups.gather_data_ranks(sample_sizes(batch))
        numbers = itertools.count()
        parts = {self._own: [[next(numbers) for _ in part] for part in there]}
        sizes = [size for part in there for size in part]
        shared = self._config.shares_prefixes
        for name, world in self._worlds.items():
            if name != self._own and not world.serves:
                parts[name] = deal_rows(sizes, world.layout.data, shared_prefix=shared)
        return _RowAssignment(number=next(self._deals), parts=parts)

    # Messages

    def _post(
        self,
        message: WorldMessage,
        data: int,
        facts: Mapping[str, Any],
        fields: Mapping[str, Any],
        rows: Sequence[int],
    ) -> None:
        """Begin to send these rows of the fields to the leader of a data rank."""
        head = _Head.of(facts, fields, rows)
        written = torch.frombuffer(bytearray(signed_pickle(head)), dtype=torch.uint8)
        to = _leader(self._worlds[message.to], data)
        taken = torch.tensor(rows, dtype=torch.int64)
        pieces = (fields[name].index_select(0, taken[part]) for name, part in head.pieces())
        for tensor in itertools.chain((torch.tensor([len(written)]), written), pieces):
            work = dist.isend(tensor, to, group=self._mail, tag=message.number)
            self._sent.append((work, tensor))

    def _letters(self, message: WorldMessage) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(facts, fields) of a message from each data rank of its source, on all ranks of the
        copy.
        """
        source = self._worlds[message.source]
        leaders = [_leader(source, data) for data in range(source.layout.data)]

        def receive(tensor: torch.Tensor, leader: int) -> torch.Tensor:
            dist.recv(tensor, leader, group=self._mail, tag=message.number)
            return tensor

        def arrive() -> list[tuple[_Head, dict[str, torch.Tensor]]]:
            letters = []
            for leader in leaders:
                size = int(receive(torch.zeros(1, dtype=torch.int64), leader))
                written = receive(torch.empty(size, dtype=torch.uint8), leader)
                head: _Head = verified_unpickle(written.numpy().tobytes())
                tensors = head.empty()
                for name, part in head.pieces():
                    receive(tensors[name][part], leader)
                letters.append((head, tensors))
            return letters

        groups, what = self._groups, f"the ranks of {message.source}"
        future = AbandonableCall(arrive, what).future if groups.is_leader else None
        waiting = WaitRules(groups=groups, stop=self._stop, limit=_FOREVER)
        letters = waiting.wait_together(future, what, stoppable=False, aloud=False)
        if groups.layout.model_parallel_size > 1:
            heads = groups.broadcast_from_leader([head for head, _ in letters or ()])
            letters = letters or [(head, head.empty()) for head in heads]
            for tensor in (tensor for _, tensors in letters for tensor in tensors.values()):
                dist.broadcast(tensor, group_src=0, group=groups.host_model)
        assert letters is not None
        return [(head.facts, {**head.texts, **tensors}) for head, tensors in letters]


@dataclass(frozen=True, slots=True)
class _Head:
    """The first part of a message: everything but the tensors, whose pieces follow."""

    facts: dict[str, Any]
    texts: dict[str, list[str]]
    forms: dict[str, tuple[torch.dtype, torch.Size]]
    """Field -> the form of its tensor."""

    @classmethod
    def of(cls, facts: Mapping[str, Any], fields: Mapping[str, Any], rows: Sequence[int]) -> _Head:
        """The head of a message with these rows of the fields."""
        tensors = {n: v for n, v in fields.items() if isinstance(v, torch.Tensor)}
        every = {n: texts(v) for n, v in fields.items() if n not in tensors}
        said = {name: [values[row] for row in rows] for name, values in every.items()}
        forms = {n: (v.dtype, torch.Size((len(rows), *v.shape[1:]))) for n, v in tensors.items()}
        return cls(dict(facts), said, forms)

    def empty(self) -> dict[str, torch.Tensor]:
        """Tensors to receive into."""
        return {
            name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self.forms.items()
        }

    def pieces(self) -> Iterator[tuple[str, slice]]:
        """The rows of each field that travel together, in their order."""
        for name, (dtype, shape) in self.forms.items():
            # A tensor without elements has nothing to send.
            of_row = shape[1:].numel() * dtype.itemsize
            many = max(1, _PIECE_BYTES // max(1, of_row))
            for first in range(0, shape[0] if of_row else 0, many):
                yield name, slice(first, first + many)


def _leader(world: World, data: int) -> int:
    return world.ranks[world.layout.rank(dp=data)]


def _joined(
    parts: Sequence[Mapping[str, Any]], name: str, rows: Sequence[int], width: int
) -> torch.Tensor | NonTensorStack:
    """A field of all parts at ``rows``, of ``width`` columns where it has one per token."""
    values = [part[name] for part in parts]
    if not isinstance(values[0], torch.Tensor):
        every = [text for value in values for text in value]
        return NonTensorStack(*[every[row] for row in rows])
    values = [
        value if value.dim() == 1 or value.shape[1] == width else pad_columns(value, width)
        for value in values
    ]
    whole = values[0] if len(values) == 1 else torch.cat(values)
    if [*rows] == [*range(len(whole))]:
        return whole
    return whole[torch.tensor(rows, dtype=torch.int64)]
