"""The search tree on a scripted model: shape, what is asked, stops, votes, best of n; a tree that
was killed ends with the same file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.progress import Progress

from ctrl_megatron.errors import UserError
from ctrl_megatron.generation.chat import ChatAnswer, ChatError
from ctrl_megatron.generation.search_nodes import (
    CriticScore,
    SearchNode,
    best_leaves,
    layer_statistics,
    leaves_of,
    majority_vote,
    read_records,
    write_records,
)
from ctrl_megatron.generation.search_tree import SearchTree, TreeOptions
from ctrl_megatron.prompts import JUDGED_CORRECT, JUDGED_INCORRECT
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest
from ctrl_megatron.types import Message, Problem, SamplingParams

PROBLEMS = [
    Problem(
        id=f"p{number}",
        statement=f"Problem number {number}.",
        prompter_type="mbppplus",
        selected_uts=("assert f() == 1", "assert f() == 2"),
        entry_point="f",
    )
    for number in range(3)
]
DRAWN = SamplingParams(max_tokens=16, temperature=0.7)
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
Answer = Callable[[str, Random], str | None]


def options(*widths: int, **further: Any) -> TreeOptions:
    texts = {"solution": DRAWN, "critique": DRAWN, "revision": GREEDY}
    return TreeOptions(widths=widths, **{**texts, "part_size": 4, **further})


class ScriptedChat:
    """Answers by ``answer(last message, random stream)``; None for a prompt that does not fit.
    Fails at call ``fails_at``, by an error or by the end of the process.
    """

    def __init__(self, answer: Answer, *, fails_at: int = 0, killed: bool = False) -> None:
        self.answer, self.fails_at, self.killed = answer, fails_at, killed
        self.calls = 0
        self.asked: list[Sequence[Message]] = []

    async def complete(
        self, conversations: Sequence[Sequence[Message]], params: SamplingParams
    ) -> list[list[ChatAnswer]]:
        self.calls += 1
        number = self.calls
        # Later calls of other parts overtake this one.
        await asyncio.sleep(0.001 * (number % 3))
        if number == self.fails_at:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ChatError("the server is gone")
        self.asked += conversations
        answers = []
        for row, messages in zip(
            params.prompt_names(len(conversations)), conversations, strict=True
        ):
            streams = [Random(f"{params.seed}/{row}/{j}") for j in range(params.n)]
            texts = [self.answer(messages[-1]["content"], stream) for stream in streams]
            answers.append([_answer(text) for text in texts if text is not None])
        return answers

    async def close(self) -> None:
        pass


def _answer(text: str) -> ChatAnswer:
    return ChatAnswer(text=text, finish_reason="stop", prompt_tokens=10, completion_tokens=1)


def solution(asked: str, stream: Random) -> str:
    """Some program, which passes no test, one or both."""
    return f"Sure.\n```python\n# passes {stream.randrange(3)} {stream.random():.6f}\n```"


def critique(asked: str, stream: Random) -> str:
    return (
        f"{stream.random():.6f}\n{stream.choice([JUDGED_CORRECT, JUDGED_INCORRECT, 'Who knows'])}"
    )


class CountingSandbox:
    """``# passes N`` passes the first N tests; a test runs for a quarter of a second."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    async def submit(self, request: SubmitRequest) -> EvalResult:
        await asyncio.sleep(0.002)
        self.programs.append(request.completion)
        passes = int(request.completion.partition("# passes ")[2][:1])
        run = {"status": "Finished", "return_code": 0, "execution_time": 0.25}
        tests = [
            {"passed": i < passes, "exec_info": {"status": "Success", "run_result": run}}
            for i in range(2)
        ]
        return EvalResult.model_validate(
            {"id": 0, "accepted": passes == 2, "extracted_code": "", "tests": tests}
        )

    async def identity(self) -> object:
        return "counting"


class Grown:
    """A tree and what it was made with."""

    def __init__(
        self,
        directory: Path,
        chosen: TreeOptions,
        *,
        generator: ScriptedChat | None = None,
        critic: ScriptedChat | None = None,
        judged: bool = True,
    ) -> None:
        self.generator = generator or ScriptedChat(solution)
        self.critic = critic or ScriptedChat(critique)
        self.sandbox, self.options = CountingSandbox(), chosen
        self.tree = SearchTree(
            directory,
            PROBLEMS,
            chosen,
            generator=self.generator,
            critic=self.critic,
            judge=self.sandbox if judged else None,
            progress=Progress(disable=True),
        )
        self.nodes = asyncio.run(self.tree.grow())
        self.file = directory / "nodes.parquet"
        write_records(self.file, self.nodes, SearchNode)

    def of(self, depth: int) -> list[SearchNode]:
        return [node for node in self.nodes if node.depth == depth]


def by_hash(nodes: Sequence[SearchNode]) -> dict[str, SearchNode]:
    return {node.hash: node for node in nodes}


def test_five_solutions_and_two_turns_of_each(tmp_path: Path) -> None:
    grown = Grown(tmp_path, options(1, 5, 1, 1))
    known = by_hash(grown.nodes)
    assert len(known) == len(grown.nodes) == 3 * (1 + 5 + 5 + 5)
    assert Counter((n.depth, n.node_type) for n in grown.nodes) == {
        (0, "root"): 3,
        (1, "generation"): 15,
        (2, "critique_revision"): 15,
        (3, "critique_revision"): 15,
    }
    for node in grown.nodes:
        if node.depth:
            parent = known[node.prev_hash]
            assert (parent.depth, parent.task_id) == (node.depth - 1, node.task_id)
            passes = int(node.solution.partition("# passes ")[2][0])
            assert (node.pass_rate, node.success) == (passes / 2, passes == 2)
            assert node.sanitized_solution == node.solution.removeprefix("Sure.\n")
    assert Counter(n.prev_hash for n in grown.of(2)) == {n.hash: 1 for n in grown.of(1)}
    assert len({n.solution for n in grown.nodes if n.depth}) == 45  # every text has its stream
    assert [n.completion_tokens for n in grown.of(1)] == [1] * 15
    assert [n.completion_tokens for n in grown.of(3)] == [2] * 15
    assert [n.prompt_tokens for n in grown.of(3)] == [20] * 15
    assert len(grown.sandbox.programs) == 45
    assert grown.tree.sandbox_seconds == 45 * 2 * 0.25
    assert read_records(grown.file, SearchNode)[0] == grown.nodes


def test_a_turn_sees_the_problem_the_latest_solution_and_its_critique(tmp_path: Path) -> None:
    grown = Grown(tmp_path, options(1, 2, 1, 1))
    known = by_hash(grown.nodes)
    asked = {messages[-1]["content"]: messages for messages in grown.generator.asked}
    for node in grown.of(3):
        parent = known[node.prev_hash]
        request = next(messages for text, messages in asked.items() if node.critique in text)
        assert [m["role"] for m in request] == ["user", "assistant", "user"]
        assert request[1]["content"] == parent.sanitized_solution
        number = node.task_id[1:]
        assert f"Problem number {number}." in request[0]["content"]
        about = next(
            messages[0]["content"]
            for messages in grown.critic.asked
            if parent.sanitized_solution in messages[0]["content"]
        )
        assert f"Problem number {number}." in about and parent.critique not in about


def test_widths_below_the_first_turn_multiply(tmp_path: Path) -> None:
    grown = Grown(tmp_path, options(1, 2, 3, 2), judged=False)
    assert [len(grown.of(depth)) for depth in range(4)] == [3, 6, 18, 36]
    assert {n.success for n in grown.nodes} == {None}
    assert grown.tree.sandbox_seconds is None
    assert len({n.critique for n in grown.of(2)}) == 18


@pytest.mark.parametrize("killed", [False, True], ids=["failed", "killed"])
@pytest.mark.parametrize("fails_at", [4, 8, 11])
def test_a_tree_goes_on_in_the_middle_of_a_layer(
    tmp_path: Path, fails_at: int, killed: bool
) -> None:
    whole = Grown(tmp_path / "whole", options(1, 5, 1, 1))
    broken = tmp_path / "broken"
    chat = ScriptedChat(solution, fails_at=fails_at, killed=killed)
    if killed:
        pid = os.fork()
        if pid == 0:
            Grown(broken, options(1, 5, 1, 1), generator=chat)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    else:
        with pytest.raises(ChatError):
            Grown(broken, options(1, 5, 1, 1), generator=chat)
    saved = len(list(broken.rglob("*.parquet")))
    # 15 nodes of a layer in parts of 4: the failing call belongs to the middle of a layer.
    assert saved % 4 and saved < 12
    again = Grown(broken, options(1, 5, 1, 1))
    assert again.file.read_bytes() == whole.file.read_bytes()
    assert again.generator.calls == 12 - saved
    assert again.tree.sandbox_seconds == whole.tree.sandbox_seconds


def test_a_tree_that_is_there_gets_further_turns(tmp_path: Path) -> None:
    Grown(tmp_path, options(1, 5))
    more = Grown(tmp_path, options(1, 5, 1))
    assert more.generator.calls == 4  # the turn's parts only
    assert len(more.nodes) == 3 * 11


def test_a_chain_stops_when_its_solution_is_judged_correct(tmp_path: Path) -> None:
    grown = Grown(tmp_path, options(1, 5, 1, 1, stop_when_correct=True))
    known = by_hash(grown.nodes)
    stopped = [node for node in grown.nodes if node.stopped]
    assert 0 < len(stopped) < 15
    parents = {node.prev_hash for node in grown.nodes}
    for node in grown.nodes:
        assert node.stopped == (node.judgment is True)
        assert not (node.stopped and node.hash in parents)
        if node.stopped:
            parent = known[node.prev_hash]
            assert (node.solution, node.pass_rate) == (parent.solution, parent.pass_rate)
            assert node.completion_tokens == 1  # its critique only
    assert len(grown.of(3)) == 15 - sum(node.depth == 2 for node in stopped)
    # Nothing is run for what was kept.
    revised = sum(node.depth > 0 for node in grown.nodes) - len(stopped)
    assert len(grown.sandbox.programs) == revised


@pytest.mark.parametrize(
    ("judgments", "expected"),
    [
        ("c", (True, 1, 1, 0)),
        ("i", (False, 1, 0, 0)),
        ("n", (None, 0, 0, 0)),
        ("icc", (True, 3, 2, 1)),
        ("cii", (False, 3, 1, 1)),
        ("ci", (False, 2, 1, 1)),
        ("nci", (False, 2, 1, 2)),
        ("ncn", (True, 1, 1, 1)),
        ("nn", (None, 0, 0, 0)),
    ],
)
def test_the_majority_of_the_judgments_holds(
    judgments: str, expected: tuple[bool | None, int, int, int]
) -> None:
    said = {"c": JUDGED_CORRECT, "i": JUDGED_INCORRECT, "n": "none"}
    texts = [f"{number} {said[j]}" for number, j in enumerate(judgments)]
    majority, votes, correct, first = expected
    found = majority_vote(texts)
    assert (found.judgment, found.votes, found.votes_correct) == (majority, votes, correct)
    assert found.critique == texts[first]


def test_critiques_vote_in_the_tree(tmp_path: Path) -> None:
    grown = Grown(tmp_path, options(1, 5, 1, critiques=3))
    assert {n.votes for n in grown.of(2)} >= {1, 2, 3}
    for node in grown.of(2):
        expected = None if node.votes == 0 else 2 * node.votes_correct > node.votes
        assert node.judgment == expected
        assert (node.completion_tokens, node.prompt_tokens) == (4, 40)
    assert {n.judgment for n in grown.of(2)} >= {True, False}


def test_the_best_of_n_is_what_most_critiques_call_correct(tmp_path: Path) -> None:
    chosen = options(1, 5, 1, critiques=4, stop_when_correct=True)
    grown = Grown(tmp_path, chosen)
    leaves = leaves_of(grown.nodes)
    assert len(leaves) == 15
    before = grown.critic.calls
    scores = asyncio.run(grown.tree.score_leaves(leaves))
    assert scores.keys() == {leaf.hash for leaf in leaves}
    stopped = [leaf for leaf in leaves if leaf.stopped]
    for leaf in stopped:  # its own votes
        assert scores[leaf.hash].votes_correct == leaf.votes_correct
    parts = -(-(len(leaves) - len(stopped)) // 4)
    assert grown.critic.calls - before == parts
    best = best_leaves(leaves, scores)
    assert [leaf.task_id for leaf in best] == ["p0", "p1", "p2"]
    for leaf in best:
        share = {
            other.hash: s.votes_correct / s.votes if (s := scores[other.hash]).votes else -1
            for other in leaves
            if other.task_id == leaf.task_id
        }
        assert leaf.hash == max(share, key=lambda name: share[name])
    again = asyncio.run(Grown(tmp_path, chosen).tree.score_leaves(leaves))
    assert again == scores


def test_a_leaf_without_an_answer_is_never_the_best() -> None:
    def leaf(name: str, error: str = "") -> SearchNode:
        return SearchNode(task_id="p", hash=name, node_type="generation", depth=1, error=error)

    def score(name: str, votes: int, correct: int) -> CriticScore:
        return CriticScore(
            hash=name, votes=votes, votes_correct=correct, prompt_tokens=0, completion_tokens=0
        )

    leaves = [leaf("silent", "too long"), leaf("unjudged"), leaf("wrong"), leaf("as wrong")]
    scores = {
        "silent": score("silent", 4, 4),
        "unjudged": score("unjudged", 0, 0),
        "wrong": score("wrong", 4, 0),
        "as wrong": score("as wrong", 2, 0),
    }
    assert best_leaves(leaves, scores)[0].hash == "wrong"


def test_what_does_not_fit_is_named_and_ends_its_chain(tmp_path: Path) -> None:
    def first(asked: str, stream: Random) -> str | None:
        return None if "number 0" in asked else solution(asked, stream)

    def criticise(asked: str, stream: Random) -> str | None:
        return None if "number 1" in asked else f"no\n{JUDGED_INCORRECT}"

    def revise(asked: str, stream: Random) -> str | None:
        return None if JUDGED_INCORRECT in asked else first(asked, stream)

    grown = Grown(
        tmp_path,
        options(1, 2, 1, 1),
        generator=ScriptedChat(revise),
        critic=ScriptedChat(criticise),
    )
    errors = {(n.task_id, n.depth): n.error for n in grown.nodes if n.error}
    assert {key: text.split()[4] for key, text in errors.items()} == {
        ("p0", 1): "problem",
        ("p1", 2): "critique",
        ("p2", 2): "revision",
    }
    assert grown.of(3) == []
    known = by_hash(grown.nodes)
    for node in grown.of(2):  # the solution stays
        parent = known[node.prev_hash]
        assert (node.solution, node.success) == (parent.solution, parent.success)
    assert {n.success for n in grown.of(1) if n.task_id == "p0"} == {False}
    assert [row["errors"] for row in layer_statistics(grown.nodes, (1, 2, 1, 1))] == [2, 4, 0]


def test_the_table_of_turns_follows_every_chain(tmp_path: Path) -> None:
    widths = (1, 2, 3, 2)
    grown = Grown(tmp_path, options(*widths, stop_when_correct=True))
    children: dict[str, list[SearchNode]] = {}
    for node in grown.nodes:
        children.setdefault(node.prev_hash, []).append(node)

    def mean(node: SearchNode, depth: int) -> float:
        """Over the chains through ``node``, at ``depth``; one that has ended stays."""
        below = children.get(node.hash, [])
        if node.depth == depth or not below:
            return float(bool(node.success))
        return sum(mean(child, depth) for child in below) / len(below)

    for depth, row in enumerate(layer_statistics(grown.nodes, widths), start=1):
        roots = [mean(root, depth) for root in grown.of(0)]
        assert row["solved"] == pytest.approx(sum(roots) / 3)
        assert row["nodes"] == len(grown.of(depth))
        judgments = [n.judgment for n in grown.of(depth) if n.judgment is not None]
        share = judgments.count(True) / len(judgments) if judgments else None
        assert row["judged_correct"] == share


def test_unknown_tokens_stay_unknown(tmp_path: Path) -> None:
    nodes = Grown(tmp_path, options(1, 2)).nodes
    nodes[-1] = replace(nodes[-1], completion_tokens=None)
    row = layer_statistics(nodes, (1, 2))[0]
    assert (row["completion_tokens"], row["prompt_tokens"]) == (None, 60)


@pytest.mark.parametrize(
    ("widths", "further", "said"),
    [
        ((1,), {}, "--widths 1: must be 1"),
        ((2, 5), {}, "--widths 2 5"),
        ((1, 5, 0), {}, "--widths 1 5 0"),
        ((1, 5), {"solution": GREEDY}, "5 first solutions are equal"),
        ((1, 1, 2), {"critique": GREEDY}, "2 revisions are equal"),
        ((1, 1, 1), {"critique": GREEDY, "critiques": 3}, "--critiques 3: they are equal"),
        ((1, 1, 1), {"critiques": 0}, "at least 1"),
    ],
    ids=str,
)
def test_a_tree_that_cannot_be_is_refused(
    widths: tuple[int, ...], further: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        options(*widths, **further)


def test_a_part_that_does_not_belong_there_is_named(tmp_path: Path) -> None:
    Grown(tmp_path, options(1, 5))
    part = tmp_path / "layers/1-5/000001.parquet"
    nodes, _ = read_records(part, SearchNode)
    write_records(part, nodes[:2], SearchNode)
    with pytest.raises(UserError, match=r"000001\.parquet: 2 records instead of 4; remove it"):
        Grown(tmp_path, options(1, 5))
