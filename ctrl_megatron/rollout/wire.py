"""Requests, completions, specs and errors as JSON, between client and server. Pure.

Chunks of weights are plain data without conversion (``weight_chunks.WeightChunk``).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import asdict, astuple
from typing import Any

from ctrl_megatron.rollout.engine import EngineBroken, EngineError, EngineWithoutWeights
from ctrl_megatron.types import Completion, ExpertRoutes, SamplingParams, TensorSpec, VersionSpan

Json = dict[str, Any]

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, EngineBroken, EngineWithoutWeights, EngineError)
}
"""Errors that keep their type; every other one arrives as EngineError."""


def error_to_json(error: BaseException) -> Json:
    kind = type(error).__name__
    if kind in ERRORS:
        return {"kind": kind, "message": str(error)}
    return {"kind": "EngineError", "message": f"{kind}: {error}"}


def error_from_json(data: Json) -> Exception:
    """The exception that ``error_to_json`` wrote."""
    return ERRORS[data["kind"]](data["message"])


def params_from_json(data: Json) -> SamplingParams:
    """Inverse of ``dataclasses.asdict``."""
    tuples = {name: tuple(data[name]) for name in ("rows", "stop_token_ids")}
    return SamplingParams(**{**data, **tuples})


def completion_to_json(completion: Completion) -> list[Any]:
    """A completion's fields without their names, to save space."""
    spans = [astuple(span) for span in completion.spans]
    given = [completion.token_ids, completion.log_probs, completion.finish_reason, spans]
    routes = completion.routes
    packed = None if routes is None else {**asdict(routes), "ids": b64encode(routes.ids).decode()}
    return [*given, completion.order, packed]


def completion_from_json(data: list[Any]) -> Completion:
    """The completion that ``completion_to_json`` wrote."""
    tokens, log_probs, finish_reason, spans, order, packed = data
    routes = None if packed is None else {**packed, "ids": b64decode(packed["ids"])}
    return Completion(
        token_ids=tuple(tokens),
        log_probs=tuple(log_probs),
        finish_reason=finish_reason,
        spans=tuple(VersionSpan(*span) for span in spans),
        order=tuple(order),
        routes=None if routes is None else ExpertRoutes(**routes),
    )


def specs_from_json(data: list[Json]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data)
