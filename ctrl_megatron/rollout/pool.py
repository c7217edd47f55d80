"""Several engines as one ``Engine``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

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
    """Tokens drawn since the last ``take_drawn``."""


class EnginePool:
    """Distributes prompts over all engines.

    Each prompt goes to the engine with the fewest outstanding tokens; all its completions come from
    there, so the prompt is computed once. Where all engines have ``at_once`` completions of this
    pool under way, further prompts wait until an engine has room: long answers hold up their own
    engine only. Draws do not depend on the engine (``SamplingParams.rows``). The first
    failure of an engine ends the call at once.

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
        names = params.names(len(prompts))
        try:
            async with asyncio.TaskGroup() as group:
                for call in range(calls):
                    start, end = (len(prompts) * i // calls for i in (call, call + 1))
                    part = prompts[start:end]
                    sequences = len(part) * params.n
                    member = await self._with_room_for(sequences)
                    tokens = sum(map(len, part)) + sequences * params.max_tokens
                    member.sequences += sequences
                    member.tokens += tokens
                    named = replace(params, rows=names[start:end])
                    heard = None if finished is None else _from(start * params.n, finished)
                    draws = member.engine.generate(part, named, finished=heard)
                    task = group.create_task(draws)
                    # Also one that is cancelled before it has begun.
                    task.add_done_callback(partial(self._release, member, sequences, tokens))
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

    async def _with_room_for(self, sequences: int) -> _Member:
        while True:
            free = [
                member
                for member in [*self._members[self._first :], *self._members[: self._first]]
                if not member.sequences or member.sequences + sequences <= self._at_once
            ]
            if free:
                return min(free, key=lambda member: member.tokens)
            self._freed.clear()
            await self._freed.wait()

    def _release(
        self,
        member: _Member,
        sequences: int,
        tokens: int,
        task: asyncio.Task[list[list[Completion]]],
    ) -> None:
        member.sequences -= sequences
        member.tokens -= tokens
        if not task.cancelled() and task.exception() is None:
            member.drawn += sum(len(c.token_ids) for group in task.result() for c in group)
        self._freed.set()

    def take_drawn(self) -> list[int]:
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
        readers = {id(member.engine): i for i, member in enumerate(self._members)}
        await self._all(
            lambda engine: engine.update(specs, shared.read(readers[id(engine)]), version)
        )

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

    async def health(self) -> None:
        await self._all(lambda engine: engine.health())

    async def counters(self) -> dict[str, Counters]:
        every = await self._all(lambda engine: engine.counters())
        return {name: counters for one in every for name, counters in one.items()}

    async def close(self) -> None:
        await self._all(lambda engine: engine.close())

    async def _all(self, ask: Callable[[CountedEngine], Awaitable[T]]) -> list[T]:
        """Call every engine at the same time; the first failure cancels the other calls."""

        async def one(engine: CountedEngine) -> T:
            return await ask(engine)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(member.engine)) for member in self._members]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def _from(first: int, finished: CompletionListener) -> CompletionListener:
    """The listener for a part of a call whose first completion has the number ``first``."""
    return lambda place, completion: finished(first + place, completion)


class _SharedChunks:
    """A stream of chunks that several engines read in step."""

    def __init__(self, chunks: AsyncIterator[WeightChunk], readers: int) -> None:
        self._chunks, self._all_asked = chunks, asyncio.Barrier(readers)
        self._chunk: WeightChunk | None = None

    async def read(self, reader: int) -> AsyncIterator[WeightChunk]:
        """Yield every chunk to the engine of that number."""
        while True:
            # An engine that requests a chunk has read the one before.
            if await self._all_asked.wait() == 0:
                self._chunk = await anext(self._chunks, None)
            await self._all_asked.wait()
            if self._chunk is None:
                return
            yield {**self._chunk, "reader": reader}
