"""The nodes of a search tree, their parquet files, and the vote of several critiques."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import fsum, prod
from os import PathLike
from typing import Any, Literal, TypeVar, cast

from ctrl_megatron.data.rows import read_parquet, write_parquet
from ctrl_megatron.errors import UserError
from ctrl_megatron.prompts import parse_judgment

NodeType = Literal["root", "generation", "critique_revision"]
Record = TypeVar("Record")
_SECONDS = "sandbox_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchNode:
    """A problem (``root``), a first solution (``generation``), or a critique of the parent's
    solution with the revision that follows (``critique_revision``).
    """

    task_id: str
    """The problem's id."""
    hash: str
    """Name of the node, made from its place in the tree; equal in every run."""
    node_type: NodeType
    prev_hash: str = ""
    """The parent's ``hash``; empty for a root."""
    depth: int = 0
    solution: str = ""
    """The raw answer; the parent's answer where the critique stopped the chain or there is none."""
    sanitized_solution: str = ""
    """The code block of ``solution``."""
    critique: str = ""
    """The critique before the revision."""
    judgment: bool | None = None
    """Judgment of the majority of the critiques; None where no critique has a judgment."""
    votes: int = 0
    """Number of critiques with a judgment."""
    votes_correct: int = 0
    """Number of critiques that judge the parent's solution correct."""
    stopped: bool = False
    """True where the chain ends because the parent's solution was judged correct."""
    truncated: bool = False
    """True where the solution was cut at the limit of tokens."""
    error: str = ""
    """Reason why there is no answer; such a node has no children."""
    success: bool | None = None
    """True where the solution passes every test; None without a sandbox."""
    pass_rate: float | None = None
    """Share of tests that the solution passes; None without a sandbox."""
    prompt_tokens: int | None = None
    """Prompt tokens of all requests of the node; None where a server does not report them."""
    completion_tokens: int | None = None
    """Completion tokens of all answers of the node; None where a server does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticScore:
    """The critic's votes on the solution at the end of a chain."""

    hash: str
    """Hash of the node."""
    votes: int
    votes_correct: int
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class CritiqueVote:
    """The result of one or several critiques of the same solution."""

    judgment: bool | None
    votes: int
    votes_correct: int
    critique: str
    """The first critique with the judgment of the majority."""


def majority_vote(critiques: Sequence[str]) -> CritiqueVote:
    """The majority of the judgments. A tie counts as incorrect, so that the solution is revised.

    Critiques without a judgment do not vote; without any vote the judgment is None. The critiques
    are independent draws, so the first one of the majority is as good as a random one. Raises
    ValueError without a critique.
    """
    if not critiques:
        raise ValueError("no critique to vote")
    judgments = [parse_judgment(critique) for critique in critiques]
    votes = sum(judgment is not None for judgment in judgments)
    correct = sum(judgment is True for judgment in judgments)
    majority = None if votes == 0 else 2 * correct > votes
    return CritiqueVote(majority, votes, correct, critiques[judgments.index(majority)])


def node_hash(prev_hash: str, name: str) -> str:
    """The hash of the child ``name`` of the node ``prev_hash``. A root is the child of "" that is
    named by its problem's id.
    """
    return hashlib.blake2b(f"{prev_hash}\n{name}".encode(), digest_size=8).hexdigest()


def may_have_children(node: SearchNode) -> bool:
    """True where the node may have children."""
    return not node.stopped and not node.error


def leaves_of(nodes: Sequence[SearchNode]) -> list[SearchNode]:
    """The ends of all chains, in order."""
    parents = {node.prev_hash for node in nodes}
    return [node for node in nodes if node.hash not in parents]


def layer_statistics(nodes: Sequence[SearchNode], widths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for every layer of the tree from the first solutions on: ``nodes``, ``stopped``,
    ``errors``, ``judged_correct`` (share of the judgments), ``solved`` and ``pass_rate`` (means
    over problems of their chains; a chain that has ended keeps its values), tokens. Unknown values
    are None. ``widths`` as in ``TreeOptions``: children of each node, not nodes of a layer."""
    tasks = {node.task_id for node in nodes}
    table, ended = [], list[SearchNode]()
    for depth in range(1, len(widths)):
        layer = [node for node in nodes if node.depth == depth]
        judged = [node.judgment for node in layer if node.judgment is not None]
        row: dict[str, Any] = {
            "layer": "first solutions" if depth == 1 else f"turn {depth - 1}",
            "nodes": len(layer),
            "stopped": sum(node.stopped for node in layer),
            "errors": sum(bool(node.error) for node in layer),
            "judged_correct": sum(judged) / len(judged) if judged else None,
        }
        for name, field in (("solved", "success"), ("pass_rate", "pass_rate")):
            # A node counts with its share of the chains of its problem.
            shares = [
                (getattr(node, field), 1 / prod(widths[: node.depth + 1]))
                for node in (*layer, *ended)
            ]
            known = all(value is not None for value, _ in shares)
            row[name] = fsum(v * share for v, share in shares) / len(tasks) if known else None
        for name in ("prompt_tokens", "completion_tokens"):
            row[name] = sum_if_known(getattr(node, name) for node in layer)
        table.append(row)
        ended += [node for node in layer if not may_have_children(node)]
    return table


def best_leaves(
    leaves: Sequence[SearchNode], scores: Mapping[str, CriticScore]
) -> list[SearchNode]:
    """Best of n: for every problem the leaf with the largest share of judgments "Correct"; the
    first of equal ones. A leaf without a judgment or without an answer comes last.
    """

    def share(leaf: SearchNode) -> float:
        score = scores[leaf.hash]
        unanswered = leaf.error and leaf.node_type == "generation"
        return score.votes_correct / score.votes if score.votes and not unanswered else -1.0

    best: dict[str, SearchNode] = {}
    for leaf in leaves:
        other = best.setdefault(leaf.task_id, leaf)
        if share(leaf) > share(other):
            best[leaf.task_id] = leaf
    return list(best.values())


def write_records(
    path: str | PathLike[str],
    records: Sequence[Any],
    record: type[Any],
    *,
    sandbox_seconds: float | None = None,
) -> None:
    """Write dataclass instances to a parquet file, whole or not at all."""
    import pyarrow as pa

    types = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
    names = [(f.name, str(f.type).removesuffix(" | None")) for f in fields(record)]
    about = {} if sandbox_seconds is None else {_SECONDS: repr(sandbox_seconds)}
    schema = pa.schema([(name, types.get(type_, pa.string())) for name, type_ in names], about)
    write_parquet(path, pa.Table.from_pylist([asdict(r) for r in records], schema=schema))


def read_records(
    path: str | PathLike[str], record: type[Record]
) -> tuple[list[Record], float | None]:
    """(records, seconds of judging in the sandbox) that ``write_records`` wrote. Raises
    ``UserError`` for another file."""
    table = read_parquet(path)
    wanted = [f.name for f in fields(cast(Any, record))]
    if table.column_names != wanted:
        raise UserError(
            f"its columns are not those of {record.__name__}", file=path, remedy="remove it"
        )
    seconds = (table.schema.metadata or {}).get(_SECONDS.encode())
    return [record(**row) for row in table.to_pylist()], None if seconds is None else float(seconds)


def sum_if_known(counts: Iterable[int | None]) -> int | None:
    """The sum of ``counts``; None where one of them is unknown."""
    known = list(counts)
    return None if any(count is None for count in known) else sum(c for c in known if c is not None)
