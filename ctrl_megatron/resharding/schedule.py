"""The order of a push's phases, and the time that a plan takes at given speeds. Pure.

A push moves in buckets. Each is filled (ranks copy their rectangles into messages), exchanged
(messages go to the ranks that receive for the workers) and loaded (a worker copies them into its
weights). The phases of different buckets run at the same time; ``push_steps`` says in which order a
rank begins them and waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Literal

from ctrl_megatron.resharding.plan import PushPart, PushPlan

Phase = Literal["fill", "exchange", "load"]
Way = Literal["rank", "host", "network"]
"""How bytes reach a worker: from the same rank, from another rank of its host, from elsewhere."""
WAYS: tuple[Way, ...] = ("rank", "host", "network")
Side = Literal["sent", "got"]
SIDES: tuple[Side, ...] = ("sent", "got")
IN_FLIGHT = 3
"""Buckets whose memory is in use at the same time: one is filled, one exchanged, one loaded."""


Act = Literal["begin", "end", "meet"]
"""A rank begins a phase of a bucket, waits until it has ended, or waits for all other ranks."""
Step = tuple[Act, Phase, int]
"""(act of a rank, its phase, number of its bucket)."""


def push_steps(buckets: int) -> Iterator[Step]:
    """The acts of every rank in a push, in this order; senders execute them, and ``simulate_push``
    too.

    A bucket is exchanged only when the ranks' memory for it is free, and loaded only when all ranks
    have received their part of it. All ranks meet once for each bucket.
    """
    for turn in range(buckets + 2):
        filled, exchanged, loaded = turn, turn - 1, turn - 2
        if IN_FLIGHT <= filled < buckets:
            yield "end", "load", filled - IN_FLIGHT
        yield "meet", "load", loaded
        if loaded >= 0:
            yield "begin", "load", loaded
        if filled < buckets:
            yield "begin", "fill", filled
            yield "end", "fill", filled
            yield "begin", "exchange", filled
        if 0 <= exchanged < buckets:
            yield "end", "exchange", exchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBandwidths:
    """Bytes per second of one rank, in each direction."""

    network: float = 50e9
    """Between hosts: a rank's share of its host's network cards."""
    host: float = 200e9
    """To another rank of the host."""
    copy: float = 1000e9
    """Inside a device's memory."""


@dataclass(slots=True)
class PushTraffic:
    """The bytes that every rank sends and gets in a push, by the way that they take."""

    sent: dict[tuple[Way, int], float] = field(default_factory=dict)
    got: dict[tuple[Way, int], float] = field(default_factory=dict)

    def add(self, other: PushTraffic) -> None:
        for mine, theirs in ((self.sent, other.sent), (self.got, other.got)):
            for key, size in theirs.items():
                mine[key] = mine.get(key, 0) + size

    def total_and_max_bytes(self, way: Way) -> tuple[float, float, float]:
        """(all bytes on this way, the most that a rank sends, the most that a rank gets)."""
        sent, got = (
            [size for (own, _), size in side.items() if own == way]
            for side in (self.sent, self.got)
        )
        return sum(got), max(sent, default=0), max(got, default=0)

    def copy_seconds(self, side: Side, rank: int, speeds: RankBandwidths) -> float:
        """Seconds in which a rank copies in its memory what it sends or gets."""
        own = self.sent if side == "sent" else self.got
        return sum(own.get((way, rank), 0) for way in WAYS) / speeds.copy

    def link_seconds(self, side: Side, rank: int, speeds: RankBandwidths) -> float:
        """Seconds in which a rank's links carry what it sends or gets."""
        own = self.sent if side == "sent" else self.got
        host, network = (own.get((way, rank), 0) for way in WAYS[1:])
        return max(host / speeds.host, network / speeds.network)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPushTime:
    """The simulated time of a push."""

    seconds: float
    busy: dict[Phase, float]
    """The sum of each phase's durations on the rank that spends most on it; for an exchange the
    seconds that the busiest link needs for the plan's bytes, below which no push can be."""
    buckets: int
    largest: int
    """Most bytes of a bucket for one worker."""
    load: PushTraffic


def push_table(plan: PushPlan, time: SimulatedPushTime, speeds: RankBandwidths) -> str:
    engines, giga = len(plan.takers), 1e9
    lines = [
        f"push from shard to shard: {plan.engine_bytes() / giga:.1f} GB into each of {engines} "
        f"engines of {plan.cut.tensor} workers",
        "",
        f"{'way':<20} {'GB':>9} {'most sent':>10} {'most got':>10}  by one rank",
    ]
    names: dict[Way, str] = {
        "rank": "inside a rank",
        "host": "inside a host",
        "network": "between hosts",
    }
    for way, name in names.items():
        total, sent, got = (size / giga for size in time.load.total_and_max_bytes(way))
        lines.append(f"{name:<20} {total:>9.1f} {sent:>10.2f} {got:>10.2f}")
    lines += ["", f"{'phase':<20} {'seconds':>9}  on the rank that is busiest with it"]
    lines += [f"{phase:<20} {seconds:>9.3f}" for phase, seconds in time.busy.items()]
    lines += [
        "",
        f"{time.seconds:.3f} s with {time.buckets} buckets of at most {time.largest / giga:.2f} GB "
        f"for a worker, {IN_FLIGHT} in flight",
        f"floor: {time.busy['exchange']:.3f} s, the busiest link alone at "
        f"{speeds.network / giga:g} GB/s between hosts and {speeds.host / giga:g} GB/s inside",
    ]
    return "\n".join(lines)


def simulate_push(plan: PushPlan, bucket_bytes: int, speeds: RankBandwidths) -> SimulatedPushTime:
    """The time of a push whose ranks execute ``push_steps``.

    A phase of a bucket runs beside other phases, after the same phase of the bucket before. A link
    carries one bucket after the other in each direction. A rank has its part of a bucket when all
    senders of the bucket have sent theirs, which is not sooner than it has sent its own.
    """
    buckets, ranks = plan.buckets(bucket_bytes), range(len(plan.host_of_rank))
    load_of, total = _Loads(plan), PushTraffic()
    loads: list[PushTraffic] = []
    for bucket in buckets:
        loads.append(PushTraffic())
        for part in bucket:
            loads[-1].add(load_of(part))
        total.add(loads[-1])
    ends: dict[Phase, list[list[float]]] = {"fill": [], "exchange": [], "load": []}
    now, sending, getting = ([0.0] * len(ranks) for _ in range(3))
    for act, phase, number in push_steps(len(buckets)):
        if act == "meet":
            now = [max(now)] * len(ranks)
        elif act == "end":
            now = [max(pair) for pair in zip(now, ends[phase][number], strict=True)]
        elif phase == "exchange":
            out, into = (
                [loads[number].link_seconds(side, rank, speeds) for rank in ranks] for side in SIDES
            )
            sending = [
                max(sent, began) + size if size else sent
                for sent, began, size in zip(sending, now, out, strict=True)
            ]
            all_sent = max((sending[rank] for rank in ranks if out[rank]), default=0.0)
            getting = [
                max(all_sent, got + size) if size else got
                for got, size in zip(getting, into, strict=True)
            ]
            ends[phase].append(
                [
                    max(now[r], sending[r] if out[r] else 0, getting[r] if into[r] else 0)
                    for r in ranks
                ]
            )
        else:
            side: Side = "sent" if phase == "fill" else "got"
            last = ends[phase][-1] if number else now
            ends[phase].append(
                [max(now[r], last[r]) + loads[number].copy_seconds(side, r, speeds) for r in ranks]
            )
    links = [max(total.link_seconds(side, r, speeds) for side in SIDES) for r in ranks]
    fills, reads = (max(total.copy_seconds(side, rank, speeds) for rank in ranks) for side in SIDES)
    return SimulatedPushTime(
        seconds=max(ends["load"][-1]),
        busy={"fill": fills, "exchange": max(links), "load": reads},
        buckets=len(buckets),
        largest=max(plan.max_worker_bytes(bucket) for bucket in buckets),
        load=total,
    )


class _Loads:
    """The load of every part; the layers of a stage whose parts are alike have the same."""

    def __init__(self, plan: PushPlan) -> None:
        self._plan = plan
        self._alike = cache(self._sizes)
        self._found: dict[object, PushTraffic] = {}

    def __call__(self, part: PushPart) -> PushTraffic:
        sizes, turns = self._alike(part.pattern, part.number)
        key = sizes, part.pp, part.layer if turns else None
        if key not in self._found:
            self._found[key] = self._load(part)
        return self._found[key]

    def _sizes(self, pattern: int, number: int) -> tuple[object, bool]:
        flows = self._plan.patterns[pattern][number]
        sizes = tuple((flow.mesh, flow.at, flow.worker, flow.num_bytes) for flow in flows)
        return sizes, any(self._plan.sends_whole(flow) for flow in flows)

    def _load(self, part: PushPart) -> PushTraffic:
        plan, load = self._plan, PushTraffic()
        for flow in plan.flows(part):
            size, takers = flow.num_bytes, plan.receiving_ranks_by_worker[flow.worker]
            for share in plan.shares(part, flow):
                own = size * (share.end - share.begin) / share.of
                for giver, taker in pairwise((share.giver, *(takers[e] for e in share.engines))):
                    same_host = plan.host_of_rank[giver] == plan.host_of_rank[taker]
                    way: Way = "rank" if giver == taker else "host" if same_host else "network"
                    load.sent[way, giver] = load.sent.get((way, giver), 0) + own
                    load.got[way, taker] = load.got.get((way, taker), 0) + own
        return load
