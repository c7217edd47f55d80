"""The search tree: first solutions of every problem, then turns of critique and revision.

Source: CTRL (arXiv 2502.03492, section 4.2, test-time scaling over turns). A layer multiplies what
the layer before it holds by its width: ``1 5 1 1`` is one root per problem, five first solutions of
each and two turns of one critique and one revision. Each turn sees the problem, the latest solution
and its critique, so conversations do not grow.

A layer is made in parts of fixed places and saved part by part. A part depends on the layer before
it and on its place only, so a run that was killed goes on with the parts that are missing and ends
with the same files.
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

from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.chat import Chat, ChatAnswer
from ctrl_megatron.generation.search_nodes import (
    CriticScore,
    Record,
    SearchNode,
    follows,
    node_hash,
    read_records,
    total,
    vote,
    write_records,
)
from ctrl_megatron.generation.solutions import attempt_job
from ctrl_megatron.prompts import (
    critique_messages,
    generation_messages,
    revision_messages,
    sanitized_answer,
)
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.gathered import gathered
from ctrl_megatron.rewards.grading import CachedJudge, Judge
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest
from ctrl_megatron.types import Attempt, Message, Problem, SamplingParams

_TOO_LONG = "the prompt of the {} leaves no room for an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Shape of the tree and how its texts are drawn. Raises UserError for what cannot be."""

    widths: tuple[int, ...]
    """Children per node of the layer before, the roots' layer (1) included."""
    solution: SamplingParams
    critique: SamplingParams
    revision: SamplingParams
    """Of the three, ``n``, ``seed`` and ``first_row`` are not read."""
    critiques: int = 1
    """Critiques of a solution, which vote."""
    stop_when_correct: bool = False
    """A solution that is judged correct is kept and ends its chain."""
    seed: int = 0
    part_size: int = 32
    """Nodes that are asked for together and saved together."""
    parts_at_once: int = 2
    """So that one is judged while another is drawn."""

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
    """``judge`` with the seconds that programs ran."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.seconds = 0.0

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """As the judge's; adds up the run times of the tests."""
        result = await self._judge.submit(request)
        runs = (case.exec_info.run_result for case in result.tests)
        self.seconds += sum(run.execution_time or 0.0 for run in runs if run is not None)
        return result

    async def identity(self) -> object:
        """The judge's."""
        return await self._judge.identity()


class SearchTree:
    """Grows below ``directory``, which keeps the parts. ``generator`` writes first solutions and
    revisions, ``critic`` criticises. Without a ``judge`` nothing is run and ``success`` is None.
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
        """That programs of this tree ran, in this run and those that it goes on from."""

    async def grow(self) -> list[SearchNode]:
        """All nodes, layer by layer. Raises ``ChatError``, ``SandboxError`` and ``UserError``; what
        is finished by then is saved.
        """
        layer = [
            SearchNode(task_id=name, hash=node_hash("", name), node_type="root")
            for name in self._problems
        ]
        nodes = list(layer)
        for depth, width in enumerate(self._options.widths[1:], start=1):
            places = [(node, k) for node in layer if follows(node) for k in range(width)]
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

    async def score(self, leaves: Sequence[SearchNode]) -> dict[str, CriticScore]:
        """The critic's votes on the leaves' solutions, by hash. A chain that a critique stopped has
        them already. Raises what ``grow`` raises.
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
        """What ``make`` makes of ``places``, saved in parts below ``layers/<shape>``."""
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
                    f"{len(made)} records where {len(inside)} belong", file=file, remedy="remove it"
                )
            if self.sandbox_seconds is not None:
                self.sandbox_seconds += seconds or 0.0
            self._progress.advance(bar, len(inside))
            return made

        size = self._options.part_size
        parts = enumerate(places[i : i + size] for i in range(0, len(places), size))
        done = await gathered([partial(part, number, inside) for number, inside in parts])
        return [made for part_ in done for made in part_]

    async def _generations(
        self, depth: int, start: int, places: Sequence[tuple[SearchNode, int]], judge: Judge | None
    ) -> list[SearchNode]:
        asked = [generation_messages(self._problems[root.task_id]) for root, _ in places]
        params = self._params(self._options.solution, "solution", depth, start)
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
                said = vote([answer.text for answer in drawn])
                node = replace(
                    node,
                    critique=said.critique,
                    judgment=said.judgment,
                    votes=said.votes,
                    votes_correct=said.votes_correct,
                    stopped=self._options.stop_when_correct and said.judgment is True,
                )
            nodes.append(node)
        revised = [i for i, node in enumerate(nodes) if follows(node)]
        asked = [
            revision_messages(
                self._problems[nodes[i].task_id], parents[i].solution, nodes[i].critique
            )
            for i in revised
        ]
        params = self._params(self._options.revision, "revision", depth, start)
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
            said = vote([answer.text for answer in drawn]) if drawn else None
            scores.append(
                CriticScore(
                    hash=leaf.hash,
                    votes=said.votes if said else 0,
                    votes_correct=said.votes_correct if said else 0,
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
        params = self._params(self._options.critique, "critique", depth, start)
        return await self._critic.complete(asked, replace(params, n=self._options.critiques))

    def _params(self, params: SamplingParams, what: str, depth: int, start: int) -> SamplingParams:
        seed = Random(f"{self._options.seed}/{depth}/{what}").getrandbits(31)
        return replace(params, n=1, seed=seed, first_row=start)

    async def _judged(self, nodes: Sequence[SearchNode], judge: Judge | None) -> list[SearchNode]:
        """The nodes with what the sandbox says of their solutions."""
        if judge is None:
            return list(nodes)
        cached, all_at_once = CachedJudge(judge, self._cache), asyncio.Semaphore(len(nodes) or 1)

        async def one(node: SearchNode) -> SearchNode:
            if node.error and node.node_type == "generation":
                return replace(node, success=False, pass_rate=0.0)
            if node.error or node.stopped:
                return node  # the parent's solution, with what was found out about it
            problem = self._problems[node.task_id]
            attempt = Attempt(id=node.hash, problem=problem, solution=node.solution)
            verdict, _ = await cached.grade(attempt_job(attempt), all_at_once)
            return replace(node, success=verdict.accepted, pass_rate=verdict.pass_rate)

        return await gathered([partial(one, node) for node in nodes])


def _with_solution(node: SearchNode, answer: ChatAnswer) -> SearchNode:
    return replace(
        node,
        solution=answer.text,
        sanitized_solution=sanitized_answer(answer.text),
        truncated=answer.finish_reason == "length",
    )


def _tokens(answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """Tokens of all ``answers``, as keyword arguments."""
    return {
        name: total(getattr(answer, name) for answer in answers)
        for name in ("prompt_tokens", "completion_tokens")
    }


def problem_fingerprint(problems: Sequence[Problem]) -> str:
    """Equal only for equal problems in the same order."""
    return node_hash("", "\n".join(map(repr, problems)))
