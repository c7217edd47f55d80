"""Requests, completions, specs and errors as JSON, between client and server. Pure.

Chunks of weights are plain data already (``weight_chunks.WeightChunk``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ctrl_megatron.rollout.engine import EngineBroken, EngineError
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec, VersionSpan

Json = dict[str, Any]

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, EngineBroken, EngineError)
}
"""Errors that keep their type on the way; every other one arrives as EngineError."""


def error_to_json(error: BaseException) -> Json:
    """An error as the other side will raise it."""
    kind = type(error).__name__
    if kind in ERRORS:
        return {"kind": kind, "message": str(error)}
    return {"kind": "EngineError", "message": f"{kind}: {error}"}


def error_from_json(data: Json) -> Exception:
    """The error to raise."""
    return ERRORS[data["kind"]](data["message"])


def params_from_json(data: Json) -> SamplingParams:
    """Inverse of ``dataclasses.asdict``."""
    return SamplingParams(**{**data, "stop_token_ids": tuple(data["stop_token_ids"])})


def completion_to_json(completion: Completion) -> Json:
    """A completion with one-letter keys: there are many."""
    return {
        "t": completion.token_ids,
        "l": completion.log_probs,
        "f": completion.finish_reason,
        "s": [(span.version, span.start, span.end) for span in completion.spans],
    }


def completion_from_json(data: Json) -> Completion:
    """Inverse of ``completion_to_json``."""
    return Completion(
        token_ids=tuple(data["t"]),
        log_probs=tuple(data["l"]),
        finish_reason=data["f"],
        spans=tuple(VersionSpan(*span) for span in data["s"]),
    )


def specs_to_json(specs: Sequence[TensorSpec]) -> list[Json]:
    """Tensor specs, fields by name."""
    return [asdict(spec) for spec in specs]


def specs_from_json(data: list[Json]) -> tuple[TensorSpec, ...]:
    """Inverse of ``specs_to_json``."""
    return tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data)
