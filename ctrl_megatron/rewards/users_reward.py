"""Calls of reward functions that the user wrote: they may block, hang or exit, and the run goes on
or ends with their name.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from ctrl_megatron.background import AbandonableCall, BackgroundLoop
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError, convert_user_code_errors, describe_location
from ctrl_megatron.rewards.grading import RequestCheck
from ctrl_megatron.rewards.items import RewardItem, Rewards, check_returned_rewards

FUNCTION_SECONDS = 1800.0
"""Default of the seconds that a function may take for one batch."""


class UsersReward:
    """A reward function that the user wrote. Its exceptions name the function and its place.

    An ordinary function runs in a thread of its own, a coroutine function at an import path on an
    event loop that the functions of its module share. So one that blocks stops neither the requests
    to engines and sandboxes nor their health checks, and it can be left behind: after ``seconds``,
    and when a stop is requested. Raises ``UserError`` for a function that cannot be called with the
    items and ``options``.
    """

    seconds = FUNCTION_SECONDS

    def __init__(
        self, name: str, function: Callable[..., Any], options: Mapping[str, Any] | None = None
    ) -> None:
        self.name, self._function, self._options = name, function, dict(options or {})
        self.place = describe_location(function)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  its kind is needed
        )
        try:
            inspect.signature(function).bind([], **self._options)
        except ValueError:
            return  # a function in C may have no signature
        except TypeError as error:
            given = "".join(f", {option}=..." for option in self._options)
            raise UserError(
                f"reward {name!r}: {self.place} cannot be called as (items{given}): {error}",
                remedy="let it take the list of items, and its entries of reward.reward_options "
                "by their names",
            ) from error

    def check_row(self, row: Row, check: RequestCheck) -> None:
        """Raise ``UserError`` for a row that the function says by ``check_row`` not to reward."""
        own = getattr(self._function, "check_row", None)
        if own is not None:
            with convert_user_code_errors(
                f"reward {self.name!r} cannot check {row.place or row.id}"
            ):
                own(row, check)

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        """See ``RewardFunction``. Raises ``UserError`` for an exception of the function, for one
        that does not return in time, and for a result that is not one reward per item.
        """
        thread = None if self._is_async else AbandonableCall(partial(self._call, items), self.name)
        loop = _users_loop(self.name.partition(":")[0]) if ":" in self.name else None
        work = self._rewards(items, thread)
        running = asyncio.ensure_future(
            work if loop is None else asyncio.wrap_future(loop.submit(work))
        )
        try:
            if not (await asyncio.wait({running}, timeout=self.seconds))[0]:
                raise self._too_long(len(items), thread, loop)
        finally:
            running.cancel()
        return running.result()

    def _call(self, items: Sequence[RewardItem]) -> Any:
        with convert_user_code_errors(self._failed):
            return self._function(items, **self._options)

    async def _rewards(
        self, items: Sequence[RewardItem], thread: AbandonableCall[Any] | None
    ) -> Rewards:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"the reward {self.name!r}")
        with convert_user_code_errors(self._failed):
            if thread is None:
                returned = await self._call(items)
            else:
                returned = await asyncio.wrap_future(thread.future)
                returned = await returned if inspect.isawaitable(returned) else returned
            return check_returned_rewards(f"{self.name!r} ({self.place})", returned, len(items))

    @property
    def _failed(self) -> str:
        return f"reward {self.name!r} ({self.place}) failed"

    def _too_long(
        self, count: int, thread: AbandonableCall[Any] | None, loop: BackgroundLoop | None
    ) -> UserError:
        where = "it awaits something that does not come"
        if thread is not None and thread.alive():
            where = f"it is at {thread.current_line()}"
        elif loop is not None and loop.running_task_name():
            where = f"its event loop is blocked at {loop.current_line()}"
        return UserError(
            f"reward {self.name!r} ({self.place}) has not returned within {self.seconds:g} s for "
            f"{count} items: {where}",
            remedy="correct it, or raise reward.function_timeout",
        )


@cache
def _users_loop(module: str) -> BackgroundLoop:
    """The event loop of a module's coroutine functions, which may share connections."""
    return BackgroundLoop(f"rewards of {module}")


# A forked process does not have the threads that run the loops.
os.register_at_fork(after_in_child=_users_loop.cache_clear)
