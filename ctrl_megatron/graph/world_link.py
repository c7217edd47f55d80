"""What a rank does in a step, and the interface of its world to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensordict import TensorDict

from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.node import Node, NodeOutput
from ctrl_megatron.metrics.timeline import Phase
from ctrl_megatron.models.parallel_model import SkippedUpdate


@dataclass(frozen=True, slots=True)
class Run:
    """Run a node of this world."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a node of the world ``to`` needs from ``source``."""

    number: int
    node: Node
    source: str
    to: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message, of whose fields all are there."""

    message: Parcel


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the message."""

    message: Parcel


Action = Run | Send | Receive


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What the ranks of one world have done in a step, for the others."""

    rank: int = 0
    """The run's number of the world's first rank."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    skipped: tuple[tuple[str, SkippedUpdate, tuple[str, ...]], ...] = ()
    """Updates that were not made: (model, why, names of rows)."""
    passes: tuple[float, float] = (0.0, 0.0)
    """Floating-point operations, and the seconds of all ranks together that they took."""
    sampler: Mapping[str, Any] = field(default_factory=dict)
    """State of the rows' sampler, which is right in the world of rank 0."""


class Between(Protocol):
    """The way from this rank's world to the others. All methods are collective."""

    @property
    def is_home(self) -> bool:
        """Whether this is the world of rank 0, which draws and deals the rows."""
        ...

    def program(self, graph: TaskGraph, order: Sequence[Node]) -> Sequence[Action]:
        """What this rank does in a step."""
        ...

    def begin(self) -> None:
        """Meet before a step. Raises StopRequested, or what another world has ended with."""
        ...

    def new_rows(self) -> None:
        """The rows of this world's batch are others than before."""
        ...

    def send(self, message: Parcel, batch: TensorDict) -> None:
        """Begin to send; returns at once."""
        ...

    def receive(self, message: Parcel, batch: TensorDict) -> NodeOutput:
        """The message, as what this world's batch gets. Raises what its sender has ended with."""
        ...

    def abandon(self, rest: Sequence[Action], why: BaseException) -> None:
        """Tell the others instead of doing the rest of a step."""
        ...

    def finish(self, news: News) -> list[News]:
        """Meet at the end of a step; the other worlds' news. Raises as ``begin``."""
        ...

    def meet(self) -> None:
        """Meet outside of steps. Raises what another world has ended with."""
        ...

    def tell(self, why: BaseException, *, changed: bool) -> bool:
        """Let the others raise ``why`` too, unless they know; returns whether any world has begun
        to change weights in a step that did not end (``changed`` of this one)."""
        ...


class OneWorld:
    """``Between`` where all ranks are one world."""

    is_home = True

    def program(self, graph: TaskGraph, order: Sequence[Node]) -> Sequence[Action]:
        return [Run(node) for node in order]

    def begin(self) -> None: ...

    def new_rows(self) -> None: ...

    def send(self, message: Parcel, batch: TensorDict) -> None: ...

    def receive(self, message: Parcel, batch: TensorDict) -> NodeOutput:
        raise AssertionError("one world has no messages to itself")

    def abandon(self, rest: Sequence[Action], why: BaseException) -> None: ...

    def finish(self, news: News) -> list[News]:
        return []

    def meet(self) -> None: ...

    def tell(self, why: BaseException, *, changed: bool) -> bool:
        return changed
