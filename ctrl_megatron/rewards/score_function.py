"""verl's form of a reward function: ``compute_score(data_source, solution_str, ground_truth,
extra_info)``, called once per text with the columns of a row in verl's form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctrl_megatron.background import advance_wait, gather_results
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError, convert_user_code_errors
from ctrl_megatron.rewards.items import RewardItem, item_rows

_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_COLUMNS = ("data_source", "reward_model")


def is_score_function(function: Callable[..., Any]) -> bool:
    """True where the names of the function's parameters are those of verl's form."""
    try:
        return {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # a function in C may have no signature
        return False


def as_item_reward(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of a list of items that calls ``function``, in verl's form, for each item.
    Further parameters of ``function`` are keyword parameters of the result.

    For a coroutine function the result is a coroutine function too, and all calls run together.
    ``path`` names the function in a UserError for an exception that it raises and for a result
    without a score.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given: Sequence[str] = _PARAMETERS
    else:
        given = [name for name in _PARAMETERS if name in parameters]

    def arguments(items: Sequence[RewardItem]) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in _arguments(path, item, row).items() if name in given}
            for item, row in zip(items, item_rows(path, items), strict=True)
        ]

    async def at_once(items: Sequence[RewardItem], **options: Any) -> list[Any]:
        async def one(item: RewardItem, values: Mapping[str, Any]) -> Any:
            with convert_user_code_errors(f"reward {path!r} failed for {_name(item)}"):
                score = _score(path, await function(**values, **options), item)
            advance_wait()
            return score

        calls = zip(items, arguments(items), strict=True)
        return await gather_results([functools.partial(one, *call) for call in calls])

    def in_turn(items: Sequence[RewardItem], **options: Any) -> list[Any]:
        scores = []
        for item, values in zip(items, arguments(items), strict=True):
            with convert_user_code_errors(f"reward {path!r} failed for {_name(item)}"):
                scores.append(_score(path, function(**values, **options), item))
            advance_wait()
        return scores

    called = getattr(function, "__call__", None)  # noqa: B004  for callable objects
    score: Any = in_turn
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        score = at_once
    functools.update_wrapper(score, function)
    score.reads = getattr(function, "reads", _COLUMNS)
    score.check_row = lambda row, check: _ground_truth(path, row)
    first = inspect.Parameter("items", inspect.Parameter.POSITIONAL_ONLY)
    further = [
        p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY)
        for name, p in parameters.items()
        if name not in _PARAMETERS and p.kind is not p.VAR_POSITIONAL
    ]
    score.__signature__ = inspect.Signature([first, *further])
    return score


def _arguments(path: str, item: RewardItem, row: Row) -> dict[str, Any]:
    return {
        "data_source": row["data_source"],
        "solution_str": item.text,
        "ground_truth": _ground_truth(path, row),
        "extra_info": row.extra.get("extra_info") or {},
    }


def _ground_truth(path: str, row: Row) -> Any:
    model = row["reward_model"]
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise UserError(
            f"{row.place or row.id}: column 'reward_model' has no ground_truth, which the reward "
            f"{path!r} reads"
        )
    return model["ground_truth"]


def _score(path: str, answer: Any, item: RewardItem) -> Any:
    """The score in a result; ``check_returned_rewards`` refuses a score that is no number."""
    score = answer.get("score") if isinstance(answer, Mapping) else answer
    if score is not None:
        return score
    what = f"a dict with the keys {', '.join(map(str, answer))}" if answer else repr(answer)
    raise UserError(
        f"reward {path!r} returned {what} for {_name(item)}",
        remedy="return a number, or a dict with the key 'score'",
    )


def _name(item: RewardItem) -> str:
    return "a text without a row" if item.row is None else f"row {item.row.id}"
