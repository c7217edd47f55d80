"""The records as JSON, for the way between client and host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ctrl_megatron.rollout.engine import Chunk, EngineBroken, EngineError, Slot
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec, VersionSpan

Json = dict[str, Any]

ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "NotImplementedError": NotImplementedError,
    "EngineBroken": EngineBroken,
    "EngineError": EngineError,
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


def params_to_json(params: SamplingParams) -> Json:
    """Sampling parameters, fields by name."""
    return asdict(params)


def params_from_json(data: Json) -> SamplingParams:
    """Inverse of ``params_to_json``."""
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


def specs_to_json(specs: Sequence[TensorSpec]) -> list[list[Any]]:
    """Tensor specs as [name, dtype, shape]."""
    return [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]


def specs_from_json(data: list[list[Any]]) -> tuple[TensorSpec, ...]:
    """Inverse of ``specs_to_json``."""
    return tuple(TensorSpec(name=n, dtype=d, shape=tuple(s)) for n, d, s in data)


def chunk_to_json(chunk: Chunk) -> Json:
    """A chunk's segment, specs and offsets."""
    return {
        "segment": chunk.segment,
        "specs": specs_to_json([slot.spec for slot in chunk.slots]),
        "offsets": [slot.offset for slot in chunk.slots],
    }


def chunk_from_json(data: Json) -> Chunk:
    """Inverse of ``chunk_to_json``."""
    placed = zip(specs_from_json(data["specs"]), data["offsets"], strict=True)
    return Chunk(data["segment"], tuple(Slot(spec, offset) for spec, offset in placed))
