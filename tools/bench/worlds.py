"""Measure messages between worlds over gloo: ``python tools/bench/worlds.py --megabytes 100``.

Real processes on this machine, without models. First rows go from four data ranks to two, back to
four and to one, and every row's fields must arrive once, with the values that the node of the other
world computed for it, and whole groups in one place. Then two worlds sleep at the same time in the
branches of a diamond, which must join. Then one rank sends fields of so many megabytes to another
world, in turn with one tensor of as many bytes over the same group, which is the medium's raw rate.
The best of ten tries counts for both, because other work on the machine only slows them down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel  # noqa: F401  before the processes are forked
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.config import load_config
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import always, node
from ctrl_megatron.graph.executor import Executor
from ctrl_megatron.graph.world_link import WorldReport
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.parallel.groups import join_worlds
from ctrl_megatron.parallel.layout import Layout, World
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.pipeline import NodeOutput, NodeRole, Pipeline, TaskGraph
from ctrl_megatron.run.worlds import MultiWorldLink

Report = dict[str, Any]
ROWS, GROUP, PROMPT, RESPONSE = 6, 2, 4, 8
"""Rows of a data rank, samples of a group, and tokens, where nothing is measured."""
WIDE_RESPONSE, FIELDS, TRIES = 1024, 16, 10
"""The measured message has so many fields of float32 with so many tokens a row."""
SLEEP_SECONDS = 1.0


def rows_of(rank: int, count: int, response: int) -> TensorDict:
    """The batch of a data rank: groups of two, whose first token is the row's number."""
    first = rank * count
    numbers = torch.arange(first, first + count)
    batch = TensorDict(
        {
            "prompts": numbers[:, None].repeat(1, PROMPT),
            "responses": numbers[:, None].repeat(1, response),
            "attention_mask": torch.ones(count, PROMPT + response, dtype=torch.int64),
            "response_mask": torch.ones(count, response, dtype=torch.bool),
            "mini_batch": torch.zeros(count, dtype=torch.int64),
        },
        batch_size=[count],
    )
    uids = [f"group {number // GROUP}" for number in numbers.tolist()]
    batch["uid"] = NonTensorStack(*uids)
    batch["problem_id"] = NonTensorStack(*uids)
    return batch


def _number(batch: TensorDict) -> torch.Tensor:
    """The number of every row, as a column of the responses' shape."""
    return batch["responses"][:, :1].float().expand(-1, batch["responses"].shape[1]).clone()


def redistributions(report: Report) -> TaskGraph:
    """4 -> 2 -> 4 -> 1: each node computes from the field of the one before."""

    @node(needs=always("response_mask"), writes=("values",))
    def double(worker: Any, batch: TensorDict) -> NodeOutput:
        report["critic"] = _seen(batch)
        return NodeOutput(fields={"values": 2 * _number(batch)})

    @node(needs=always("values"), writes=("mixed",))
    def add(worker: Any, batch: TensorDict) -> NodeOutput:
        report["actor"] = _seen(batch)
        right = torch.equal(batch["values"], 2 * _number(batch))
        report["right"] = right and report.get("right", True)
        return NodeOutput(fields={"mixed": batch["values"] + 1})

    @node(needs=always("mixed"), writes=("ref_log_prob",))
    def check(worker: Any, batch: TensorDict) -> NodeOutput:
        report["reference"] = _seen(batch)
        report["right"] = torch.equal(batch["mixed"], 2 * _number(batch) + 1)
        return NodeOutput(fields={"ref_log_prob": batch["mixed"]})

    return (
        Pipeline("redistributions")
        .add_node("draw", draw)
        .add_node("double", double, ["draw"], node_role=NodeRole.CRITIC)
        .add_node("add", add, ["double"])
        .add_node("check", check, ["add"], node_role=NodeRole.REFERENCE)
        .build()
    )


def _seen(batch: TensorDict) -> list[tuple[int, str]]:
    return list(zip(batch["responses"][:, 0].tolist(), texts(batch["uid"]), strict=True))


def draw(worker: Any, batch: TensorDict) -> NodeOutput:
    """Hands the rows on as new ones, which are dealt when they are sent."""
    return NodeOutput(batch=batch.copy())


def diamond(report: Report) -> TaskGraph:
    """Two branches that sleep, in two worlds, and a node that waits for both."""

    def slept() -> None:
        began = time.monotonic()
        time.sleep(SLEEP_SECONDS)
        report["span"] = began, time.monotonic()

    @node(writes=("old_log_probs",))
    def left(worker: Any, batch: TensorDict) -> NodeOutput:
        slept()
        return NodeOutput(fields={"old_log_probs": _number(batch)})

    @node(needs=always("response_mask"), writes=("values",))
    def right(worker: Any, batch: TensorDict) -> NodeOutput:
        slept()
        return NodeOutput(fields={"values": _number(batch)})

    @node(needs=always("old_log_probs", "values"), writes=())
    def joins(worker: Any, batch: TensorDict) -> NodeOutput:
        report["joined"] = torch.equal(batch["old_log_probs"], batch["values"])
        return NodeOutput()

    return (
        Pipeline("diamond")
        .add_node("draw", draw)
        .add_node("right", right, ["draw"], node_role=NodeRole.CRITIC)
        .add_node("left", left, ["draw"], node_role=NodeRole.ACTOR)
        .add_node("joins", joins, ["left", "right"])
        .build()
    )


def transfer(report: Report) -> TaskGraph:
    """A message of many fields, after the rows have been dealt with another."""
    names = [f"field_{number}" for number in range(FIELDS)]

    @node(needs=always("response_mask"), writes=("values",))
    def describe_servers(worker: Any, batch: TensorDict) -> NodeOutput:
        return NodeOutput(fields={"values": batch["response_mask"][:, 0].float()})

    @node(needs=always("values"), writes=(*names,))
    def give(worker: Any, batch: TensorDict) -> NodeOutput:
        fields = {name: torch.rand(batch["responses"].shape) for name in names}
        report["began"] = time.monotonic()
        return NodeOutput(fields=fields)

    @node(needs=lambda config: dict.fromkeys(names, ""), writes=())
    def take(worker: Any, batch: TensorDict) -> NodeOutput:
        report["ended"] = time.monotonic()
        report["bytes"] = sum(batch[name].nbytes for name in names)
        return NodeOutput()

    return (
        Pipeline("transfer")
        .add_node("draw", draw)
        .add_node("describe_servers", describe_servers, ["draw"], node_role=NodeRole.CRITIC)
        .add_node("give", give, ["describe_servers"])
        .add_node("take", take, ["give"], node_role=NodeRole.CRITIC)
        .build()
    )


def raw(mail: Any, size: int, rank: int) -> Report:
    """One tensor from rank 0 to rank 1."""
    tensor = torch.ones(size, dtype=torch.uint8)
    dist.barrier(group=mail)
    if rank == 0:
        began = time.monotonic()
        dist.send(tensor, 1, group=mail)
        return {"began": began}
    dist.recv(tensor, 0, group=mail)
    return {"ended": time.monotonic()}


def _rank(
    rank: int, sizes: Sequence[int], port: int, what: str, rows: int, response: int, results: Any
) -> None:
    size = sum(sizes)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    worlds, first = list[World](), 0
    for roles, count in zip(((), ("critic",), ("reference",)), sizes, strict=False):
        ranks = tuple(range(first, first + count))
        worlds.append(World(ranks=ranks, layout=Layout(data=count), roles=roles or ("actor",)))
        first += count
    joined, stop, config = (
        join_worlds(worlds, seed=1, timeout_seconds=300.0),
        StopFlag(),
        load_config(None, [], "none"),
    )
    link = MultiWorldLink(joined, worlds, config, stop, 0)
    worker: Any = SimpleNamespace(
        groups=joined.groups,
        background=BackgroundLoop(),
        timeline=Timeline(),
        stop=stop,
        config=config,
        wait_conditions=WaitRules(groups=joined.groups, stop=stop, limit=300.0),
    )
    reports = []
    for _ in range(TRIES if what == "transfer" else 1):
        report: Report = {}
        graph = GRAPHS[what](report)
        own = (
            rows_of(rank, rows, response) if link.has_rank_zero else TensorDict({}, batch_size=[0])
        )
        link.wait_before_step()
        Executor(graph, worker, link=link).run_step(own)
        link.wait_after_step(WorldReport())
        reports.append(report)
        if what == "transfer":
            reports.append(raw(joined.mail, rows * response * 4 * FIELDS, rank))
    results.put((rank, reports))
    worker.background.close()


GRAPHS: dict[str, Callable[[Report], TaskGraph]] = {
    "redistributions": redistributions,
    "diamond": diamond,
    "transfer": transfer,
}


def run(what: str, sizes: Sequence[int], rows: int = ROWS, response: int = RESPONSE) -> list[Any]:
    """The reports of all ranks; the worlds have so many data ranks: actor, critic, reference."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    forks = multiprocessing.get_context("fork")
    results = forks.Queue()
    ranks = range(sum(sizes))
    given = (sizes, port, what, rows, response, results)
    processes = [forks.Process(target=_rank, args=(rank, *given), daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=300.0) for _ in ranks)
    finally:
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in ranks]


def redistributed() -> Report:
    """Whether each of the 24 rows arrived once at each place, with its group and right values."""
    reports = [one[0] for one in run("redistributions", (4, 2, 1))]
    wanted = [(number, f"group {number // GROUP}") for number in range(4 * ROWS)]
    arrived = {
        place: [row for one in reports for row in one.get(place, ())]
        for place in ("critic", "actor", "reference")
    }
    places = [{uid for _, uid in one["critic"]} for one in reports if "critic" in one]
    return {
        "once": all(sorted(rows) == wanted for rows in arrived.values()),
        "whole_groups": not set.intersection(*places),
        "right": all(one["right"] for one in reports if "right" in one),
    }


def joined_diamond() -> Report:
    """Seconds in which both branches ran, and whether they were joined."""
    actor, critic = (one[0] for one in run("diamond", (1, 1)))
    both = min(actor["span"][1], critic["span"][1]) - max(actor["span"][0], critic["span"][0])
    return {"overlap_seconds": both, "joined": actor["joined"]}


def rates(megabytes: int) -> Report:
    """Bytes per second of a message between worlds and of the medium."""
    rows = max(GROUP, megabytes * 1_000_000 // (WIDE_RESPONSE * 4 * FIELDS))
    sender, receiver = run("transfer", (1, 1), rows - rows % GROUP, WIDE_RESPONSE)
    size = receiver[0]["bytes"]
    seconds = [there["ended"] - here["began"] for here, there in zip(sender, receiver, strict=True)]
    message, medium = (min(seconds[kind::2]) for kind in (0, 1))
    return {
        "bytes": size,
        "message_gb_per_second": size / message / 1e9,
        "raw_gb_per_second": size / medium / 1e9,
        "share_of_raw": medium / message,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    options = parser.parse_args()
    found = {"redistributions": redistributed(), "diamond": joined_diamond()}
    print(json.dumps(found | {"rates": rates(options.megabytes)}, indent=2))


if __name__ == "__main__":
    main()
