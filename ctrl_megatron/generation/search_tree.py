"""The search tree: first solutions of every problem, then turns of critique and revision.

Source: CTRL (arXiv 2502.03492, section 4.2, test-time scaling over turns). A layer has its width
times as many nodes as the layer before it: ``1 5 1 1`` is one root per problem, five first
solutions of each, and two turns of one critique and one revision. A turn sees the problem, the
latest solution and its critique, so conversations do not grow.

A layer is divided into parts with fixed places, and every part is saved when it is finished. A part
depends only on the layer before it and on its place, so a run that was killed continues with the
missing parts and ends with the same files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import Progress

from ctrl_megatron.background import gather_results
from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.chat import Chat, ChatAnswer
from ctrl_megatron.generation.search_nodes import (
    CriticScore,
    Record,
    SearchNode,
    majority_vote,
    may_have_children,
    node_hash,
    read_records,
    sum_if_known,
    write_records,
)
from ctrl_megatron.generation.solutions import grading_job_of_attempt
from ctrl_megatron.prompts import (
    critique_messages,
    generation_messages,
    revision_messages,
    sanitized_answer,
)
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.grading import CachedJudge, Judge
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest
from ctrl_megatron.types import Attempt, Message, Problem, SamplingParams

_TOO_LONG = "the prompt of the {} leaves no room for an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """The shape of the tree and the sampling of its texts. Raises UserError for impossible
    options.
    """

    widths: tuple[int, ...]
    """Children of each node of the layer before; the first entry is 1, for the roots."""
    solution: SamplingParams
    critique: SamplingParams
    revision: SamplingParams
    """``n``, ``seed`` and ``rows`` of the three are not read."""
    critiques: int = 1
    """Number of critiques of a solution, whose majority decides."""
    stop_when_correct: bool = False
    """True to end a chain at a solution that is judged correct."""
    seed: int = 0
    part_size: int = 32
    """Number of nodes that are drawn and saved together."""
    parts_at_once: int = 2
    """Number of parts at the same time, so that one is judged while another is drawn."""

    def __post_init__(self) -> None:
        widths = " ".join(map(str, self.widths))
        if len(self.widths) < 2 or self.widths[0] != 1 or min(self.widths) < 1:
            raise UserError(
                f"--widths {widths}: must be 1 (the problem), the number of first solutions and, "
                "for every turn, the number of revisions, e.g. 1 5 1 1"
            )
        if self.critiques < 1:
            raise UserError(f"--critiques {self.critiques}: must be at least 1")
        if self.widths[1] > 1 and self.solution.temperature == 0:
            raise UserError(
                f"--widths {widths}: {self.widths[1]} first solutions are equal at --temperature 0"
            )
        if self.critiques > 1 and self.critique.temperature == 0:
            raise UserError(
                f"--critiques {self.critiques}: they are equal at --critique-temperature 0"
            )
        later = max(self.widths[2:], default=1)
        if later > 1 and self.critique.temperature == self.revision.temperature == 0:
            raise UserError(
                f"--widths {widths}: {later} revisions are equal at --critique-temperature 0"
            )


class MeteredJudge:
    """A judge that adds up the seconds that programs ran."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.seconds = 0.0

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """The judge's answer; adds the run times of the tests to ``seconds``."""
        result = await self._judge.submit(request)
        runs = (case.exec_info.run_result for case in result.tests)
        self.seconds += sum(run.execution_time or 0.0 for run in runs if run is not None)
        return result

    async def identity(self) -> object:
        return await self._judge.identity()


class SearchTree:
    """A tree whose parts are saved in ``directory``. ``generator`` writes first solutions and
    revisions, ``critic`` critiques. Without a ``judge`` no program runs and ``success`` is None.
    """

    def __init__(
        self,
        directory: Path,
        problems: Sequence[Problem],
        options: TreeOptions,
        *,
        generator: Chat,
        critic: Chat,
        judge: Judge | None,
        progress: Progress,
    ) -> None:
        self._directory, self._options, self._progress = directory, options, progress
        self._problems = {problem.id: problem for problem in problems}
        self._generator, self._critic, self._judge = generator, critic, judge
        self._cache = VerdictCache()
        self.sandbox_seconds: float | None = None if judge is None else 0.0
        """Seconds that programs of this tree ran, in this run and the runs that it continues; None
        without a judge."""

    async def grow(self) -> list[SearchNode]:
        """All nodes, layer by layer. Raises ``ChatError``, ``SandboxError`` and ``UserError``;
        finished parts are saved.
        """
        layer = [
            SearchNode(task_id=name, hash=node_hash("", name), node_type="root")
            for name in self._problems
        ]
        nodes = list(layer)
        for depth, width in enumerate(self._options.widths[1:], start=1):
            places = [(node, k) for node in layer if may_have_children(node) for k in range(width)]
            make = self._generations if depth == 1 else self._turns
            shape = "-".join(map(str, self._options.widths[: depth + 1]))
            layer = await self._in_parts(
                shape,
                "first solutions" if depth == 1 else f"turn {depth - 1}",
                places,
                SearchNode,
                partial(make, depth),
            )
            nodes += layer
        return nodes

    async def score_leaves(self, leaves: Sequence[SearchNode]) -> dict[str, CriticScore]:
        """Hash of a leaf -> the critic's votes on its solution. A chain that a critique stopped has
        these votes already. Raises the exceptions of ``grow``.
        """
        known = {
            leaf.hash: CriticScore(
                hash=leaf.hash,
                votes=leaf.votes,
                votes_correct=leaf.votes_correct,
                prompt_tokens=0,
                completion_tokens=0,
            )
            for leaf in leaves
            if leaf.stopped
        }
        others = [leaf for leaf in leaves if leaf.hash not in known]
        shape = "-".join(map(str, self._options.widths))
        drawn = await self._in_parts(
            f"{shape}-scores", "best of n", others, CriticScore, self._scores
        )
        return known | {score.hash: score for score in drawn}

    async def _in_parts(
        self,
        shape: str,
        title: str,
        places: Sequence[Any],
        record: type[Record],
        make: Callable[[int, Sequence[Any], Judge | None], Awaitable[list[Record]]],
    ) -> list[Record]:
        """The records that ``make`` makes of ``places``, saved in parts in ``layers/<shape>``."""
        folder = self._directory / "layers" / shape
        bar = self._progress.add_task(title, total=len(places))
        slots = asyncio.Semaphore(self._options.parts_at_once)

        async def part(number: int, inside: Sequence[Any]) -> list[Record]:
            file = folder / f"{number:06d}.parquet"
            if file.exists():
                made, seconds = read_records(file, record)
            else:
                async with slots:
                    meter = None if self._judge is None else MeteredJudge(self._judge)
                    made = await make(number * self._options.part_size, inside, meter)
                    seconds = None if meter is None else meter.seconds
                    write_records(file, made, record, sandbox_seconds=seconds)
            if len(made) != len(inside):
                raise UserError(
                    f"{len(made)} records instead of {len(inside)}", file=file, remedy="remove it"
                )
            if self.sandbox_seconds is not None:
                self.sandbox_seconds += seconds or 0.0
            self._progress.advance(bar, len(inside))
            return made

        size = self._options.part_size
        parts = enumerate(places[i : i + size] for i in range(0, len(places), size))
        done = await gather_results([partial(part, number, inside) for number, inside in parts])
        return [made for part_ in done for made in part_]

    async def _generations(
        self, depth: int, start: int, places: Sequence[tuple[SearchNode, int]], judge: Judge | None
    ) -> list[SearchNode]:
        asked = [generation_messages(self._problems[root.task_id]) for root, _ in places]
        params = self._params(self._options.solution, "solution", depth, start, len(asked))
        answers = await self._generator.complete(asked, params)
        nodes = []
        for (root, k), drawn in zip(places, answers, strict=True):
            node = SearchNode(
                task_id=root.task_id,
                hash=node_hash(root.hash, str(k)),
                node_type="generation",
                prev_hash=root.hash,
                depth=depth,
                error="" if drawn else _TOO_LONG.format("problem"),
                **_tokens(drawn),
            )
            nodes.append(_with_solution(node, drawn[0]) if drawn else node)
        return await self._judged(nodes, judge)

    async def _turns(
        self, depth: int, start: int, places: Sequence[tuple[SearchNode, int]], judge: Judge | None
    ) -> list[SearchNode]:
        parents = [parent for parent, _ in places]
        critiques = await self._criticise(parents, depth, start)
        nodes: list[SearchNode] = []
        for (parent, k), drawn in zip(places, critiques, strict=True):
            node = replace(
                parent,
                hash=node_hash(parent.hash, str(k)),
                node_type="critique_revision",
                prev_hash=parent.hash,
                depth=depth,
                error="" if drawn else _TOO_LONG.format("critique"),
                critique="",
                judgment=None,
                votes=0,
                votes_correct=0,
                **_tokens(drawn),
            )
            if drawn:
                result = majority_vote([answer.text for answer in drawn])
                node = replace(
                    node,
                    critique=result.critique,
                    judgment=result.judgment,
                    votes=result.votes,
                    votes_correct=result.votes_correct,
                    stopped=self._options.stop_when_correct and result.judgment is True,
                )
            nodes.append(node)
        revised = [i for i, node in enumerate(nodes) if may_have_children(node)]
        asked = [
            revision_messages(
                self._problems[nodes[i].task_id], parents[i].solution, nodes[i].critique
            )
            for i in revised
        ]
        params = self._params(self._options.revision, "revision", depth, start, len(asked))
        answers = await self._generator.complete(asked, params) if asked else []
        for i, drawn in zip(revised, answers, strict=True):
            if not drawn:
                nodes[i] = replace(nodes[i], error=_TOO_LONG.format("revision"))
                continue
            spent = _tokens([*critiques[i], *drawn])
            nodes[i] = replace(_with_solution(nodes[i], drawn[0]), **spent)
        return await self._judged(nodes, judge)

    async def _scores(
        self, start: int, leaves: Sequence[SearchNode], judge: Judge | None
    ) -> list[CriticScore]:
        critiques = await self._criticise(leaves, len(self._options.widths), start)
        scores = []
        for leaf, drawn in zip(leaves, critiques, strict=True):
            result = majority_vote([answer.text for answer in drawn]) if drawn else None
            scores.append(
                CriticScore(
                    hash=leaf.hash,
                    votes=result.votes if result else 0,
                    votes_correct=result.votes_correct if result else 0,
                    **_tokens(drawn),
                )
            )
        return scores

    async def _criticise(
        self, nodes: Sequence[SearchNode], depth: int, start: int
    ) -> list[list[ChatAnswer]]:
        asked: list[list[Message]] = [
            critique_messages(self._problems[node.task_id], node.solution) for node in nodes
        ]
        params = self._params(self._options.critique, "critique", depth, start, len(asked))
        return await self._critic.complete(asked, replace(params, n=self._options.critiques))

    def _params(
        self, params: SamplingParams, what: str, depth: int, start: int, count: int
    ) -> SamplingParams:
        seed = Random(f"{self._options.seed}/{depth}/{what}").getrandbits(31)
        return replace(params, n=1, seed=seed, rows=tuple(range(start, start + count)))

    async def _judged(self, nodes: Sequence[SearchNode], judge: Judge | None) -> list[SearchNode]:
        """The nodes with the verdicts on their solutions."""
        if judge is None:
            return list(nodes)
        cached, all_at_once = CachedJudge(judge, self._cache), asyncio.Semaphore(len(nodes) or 1)

        async def one(node: SearchNode) -> SearchNode:
            if node.error and node.node_type == "generation":
                return replace(node, success=False, pass_rate=0.0)
            if node.error or node.stopped:
                return node  # it has the parent's solution and verdict
            problem = self._problems[node.task_id]
            attempt = Attempt(id=node.hash, problem=problem, solution=node.solution)
            verdict, _ = await cached.grade(grading_job_of_attempt(attempt), all_at_once)
            return replace(node, success=verdict.accepted, pass_rate=verdict.pass_rate)

        return await gather_results([partial(one, node) for node in nodes])


def _with_solution(node: SearchNode, answer: ChatAnswer) -> SearchNode:
    return replace(
        node,
        solution=answer.text,
        sanitized_solution=sanitized_answer(answer.text),
        truncated=answer.finish_reason == "length",
    )


def _tokens(answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    return {
        name: sum_if_known(getattr(answer, name) for answer in answers)
        for name in ("prompt_tokens", "completion_tokens")
    }


def problem_fingerprint(problems: Sequence[Problem]) -> str:
    """A fingerprint that is equal only for equal problems in the same order."""
    return node_hash("", "\n".join(map(repr, problems)))
