"""Several engines as one ``Engine``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.engine import (
    CompletionListener,
    CountedEngine,
    EngineMemory,
    PauseMode,
    SleepLevel,
)
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec

if TYPE_CHECKING:
    from ctrl_megatron.rollout.weight_chunks import WeightChunk

T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    """An engine and this pool's requests to it."""

    name: str
    engine: CountedEngine
    sequences: int = 0
    """Number of completions that it is drawing."""
    tokens: int = 0
    """Tokens of its running requests: of the prompts, and the most that may be drawn."""
    drawn: int = 0
    """Tokens drawn since the last ``take_drawn_token_counts``."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """A part of a call, and the engine that draws it."""

    prompts: list[list[int]]
    params: SamplingParams
    finished: CompletionListener | None
    member: _Member | None = None
    """None while the part waits for an engine."""

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + self.sequences * self.params.max_tokens


class EnginePool:
    """Distributes prompts over all engines.

    Each prompt goes to the engine with the fewest outstanding tokens; all its completions come from
    there, so the prompt is computed once. Where all engines have ``at_once`` completions of this
    pool under way, further prompts wait until an engine has room: long answers hold up their own
    engine only. Draws do not depend on the engine (``SamplingParams.rows``), so what
    an engine was asked for goes to the others if it is lost. Any other failure of an engine, and
    the loss of all, ends the call at once.

    ``joins_calls`` says that the engines draw for several calls together; engines that serve one
    call after another get their share in few large calls. ``first`` is the number of the engine
    that gets the first prompt: several pools over the same engines should begin with different
    ones. A pool belongs to the event loop of its first call.
    """

    def __init__(
        self,
        engines: Mapping[str, CountedEngine],
        *,
        at_once: int,
        joins_calls: bool,
        first: int = 0,
    ) -> None:
        members = [_Member(name, engine) for name, engine in engines.items()]
        first %= len(members)
        self._members, self._first = members, first
        self._at_once, self._joins_calls = at_once, joins_calls
        self._freed = asyncio.Event()

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        finished: CompletionListener | None = None,
    ) -> list[list[Completion]]:
        calls, tasks = self._calls(len(prompts), params.n), []
        names, lost = params.prompt_names(len(prompts)), set[str]()
        try:
            async with asyncio.TaskGroup() as group:
                for call in range(calls):
                    start, end = (len(prompts) * i // calls for i in (call, call + 1))
                    part = _Part(
                        prompts=prompts[start:end],
                        params=replace(params, rows=names[start:end]),
                        finished=None if finished is None else _from(start * params.n, finished),
                    )
                    await self._take_room(part, lost)
                    task = group.create_task(self._draw(part, lost))
                    # Also one that is cancelled before it has begun.
                    task.add_done_callback(partial(self._release, part))
                    tasks.append(task)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answer for task in tasks for answer in task.result()]

    def _calls(self, prompts: int, n: int) -> int:
        """The number of about equal parts into which the prompts are divided."""
        if self._joins_calls:
            return prompts
        in_a_round = len(self._members) * max(1, self._at_once // n)
        return min(prompts, len(self._members) * -(-prompts // in_a_round))

    async def _draw(self, part: _Part, lost: set[str]) -> list[list[Completion]]:
        """The part's completions; ``lost`` are the names of the engines that its call has lost."""
        while True:
            assert part.member is not None
            try:
                return await part.member.engine.generate(
                    part.prompts, part.params, finished=part.finished
                )
            except ServiceLost:
                lost.add(part.member.name)
                if len(lost) == len(self._members):
                    raise
            self._release(part)
            await self._take_room(part, lost)

    async def _take_room(self, part: _Part, lost: Collection[str]) -> None:
        """Wait for an engine with room for the part and take it."""
        while True:
            free = [
                member
                for member in [*self._members[self._first :], *self._members[: self._first]]
                if member.name not in lost
                and (not member.sequences or member.sequences + part.sequences <= self._at_once)
            ]
            if free:
                part.member = min(free, key=lambda member: member.tokens)
                part.member.sequences += part.sequences
                part.member.tokens += part.tokens
                return
            self._freed.clear()
            await self._freed.wait()

    def _release(
        self, part: _Part, task: asyncio.Task[list[list[Completion]]] | None = None
    ) -> None:
        """Give the part's room back; ``task`` has drawn it if it ended with a result."""
        member, part.member = part.member, None
        # ``_draw`` released it after a loss and found no other engine.
        if member is None:
            return
        member.sequences -= part.sequences
        member.tokens -= part.tokens
        if task is not None and not task.cancelled() and task.exception() is None:
            member.drawn += sum(len(c.token_ids) for group in task.result() for c in group)
        self._freed.set()

    def take_drawn_token_counts(self) -> list[int]:
        """The tokens that each engine has drawn for this pool since the last call."""
        drawn = [member.drawn for member in self._members]
        for member in self._members:
            member.drawn = 0
        return drawn

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """Let all engines read each chunk; they must be on the host to which it was sent.

        The next chunk is requested when all of them have read the one before.
        """
        shared = _SharedChunks(chunks, len(self._members))
        try:
            async with asyncio.TaskGroup() as group:
                for reader, member in enumerate(self._members):
                    group.create_task(member.engine.update(specs, shared.read(reader), version))
        except BaseExceptionGroup as failures:
            # The others wait for the one that failed, and are cancelled half-way.
            raise failures.exceptions[0] from None

    async def pause(self, mode: PauseMode) -> None:
        await self._all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._all(lambda engine: engine.resume())

    async def sleep(self, level: SleepLevel) -> None:
        await self._all(lambda engine: engine.sleep(level))

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        await self._all(lambda engine: engine.wake(tags))

    async def checksums(self) -> dict[str, str]:
        """The checksums of all engines; RuntimeError names two engines with different weights."""
        first, *others = await self._all(lambda engine: engine.checksums())
        for member, held in zip(self._members[1:], others, strict=True):
            differing = sorted(name for name in first | held if first.get(name) != held.get(name))
            if differing:
                raise RuntimeError(
                    f"engine {member.name} has other weights than engine "
                    f"{self._members[0].name}: {len(differing)} tensors differ: {differing[:5]}"
                )
        return first

    async def token_log_probs(self, tokens: list[int]) -> list[list[float]]:
        every = await self._all(lambda engine: engine.token_log_probs(tokens))
        return [log_probs for one in every for log_probs in one]

    async def health(self) -> None:
        await self._all(lambda engine: engine.health())

    async def counters(self) -> dict[str, Counters]:
        every = await self._all(lambda engine: engine.counters())
        return {name: counters for one in every for name, counters in one.items()}

    async def close(self) -> None:
        await self._all(lambda engine: engine.close())

    async def _all(self, ask: Callable[[CountedEngine], Awaitable[T]]) -> list[T]:
        """Call every engine at the same time; a failure is raised when all calls have ended, so
        that the state of the other engines is known."""
        calls = [ask(member.engine) for member in self._members]
        found = await asyncio.gather(*calls, return_exceptions=True)
        for failure in found:
            if isinstance(failure, BaseException):
                raise failure
        return cast("list[T]", found)


def _from(first: int, finished: CompletionListener) -> CompletionListener:
    """The listener for a part of a call whose first completion has the number ``first``."""
    return lambda place, completion: finished(first + place, completion)


class _SharedChunks:
    """A stream of chunks that several engines read in step."""

    def __init__(self, chunks: AsyncIterator[WeightChunk], readers: int) -> None:
        self._chunks, self._all_asked = chunks, asyncio.Barrier(readers)
        self._chunk: WeightChunk | None = None

    async def read(self, reader: int) -> AsyncIterator[WeightChunk]:
        while True:
            # An engine that requests a chunk has read the one before.
            if await self._all_asked.wait() == 0:
                self._chunk = await anext(self._chunks, None)
            await self._all_asked.wait()
            if self._chunk is None:
                return
            yield {**self._chunk, "reader": reader}
