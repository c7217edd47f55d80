"""The actions of a rank in a step, and the interface of its world to the others."""

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
class RunNode:
    """Run a node of this world."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMessage:
    """The fields that a node of the world ``to`` needs from nodes of ``source``."""

    number: int
    node: Node
    source: str
    to: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send the message; all of its fields have been computed."""

    message: WorldMessage


@dataclass(frozen=True, slots=True)
class ReceiveMessage:
    """Wait for the message."""

    message: WorldMessage


Action = RunNode | SendMessage | ReceiveMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReport:
    """One world's metrics, timings and skipped updates of a step, sent to all worlds."""

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


class WorldLink(Protocol):
    """Communication with the ranks of the other worlds. All methods are collective."""

    @property
    def has_rank_zero(self) -> bool:
        """Whether this is the world of rank 0, which draws and deals the rows."""
        ...

    def plan_actions(self, graph: TaskGraph, order: Sequence[Node]) -> Sequence[Action]:
        """The actions of this rank in a step, in their order."""
        ...

    def wait_before_step(self) -> None:
        """Wait for all worlds before a step. Raises StopRequested, or another world's error."""
        ...

    def notify_rows_changed(self) -> None:
        """Forget which rows the other worlds have: this world's batch has others from now on."""
        ...

    def send(self, message: WorldMessage, batch: TensorDict) -> None:
        """Begin to send; returns at once."""
        ...

    def receive(self, message: WorldMessage, batch: TensorDict) -> NodeOutput:
        """The fields of the message for this world's batch. Raises the error of its sender."""
        ...

    def abandon_step(self, rest: Sequence[Action], why: BaseException) -> None:
        """A step has failed here: send ``why`` for every message that ``rest`` would still send, so
        that no other world waits for it, and receive and drop those for this world."""
        ...

    def wait_after_step(self, report: WorldReport) -> list[WorldReport]:
        """Wait for all worlds at the end of a step; returns the reports of the others. Raises as
        ``wait_before_step``."""
        ...

    def synchronize_worlds(self) -> None:
        """Wait for all worlds outside of a step. Raises the error of another world."""
        ...

    def propagate_error(self, why: BaseException, *, weights_changed: bool) -> bool:
        """Propagate the error ``why`` to all worlds. Returns True if any world had already started
        to update weights in this step (``weights_changed`` says it of this one)."""
        ...


class SingleWorld:
    """``WorldLink`` where all ranks are one world."""

    has_rank_zero = True

    def plan_actions(self, graph: TaskGraph, order: Sequence[Node]) -> Sequence[Action]:
        return [RunNode(node) for node in order]

    def wait_before_step(self) -> None: ...

    def notify_rows_changed(self) -> None: ...

    def send(self, message: WorldMessage, batch: TensorDict) -> None: ...

    def receive(self, message: WorldMessage, batch: TensorDict) -> NodeOutput:
        raise AssertionError("one world has no messages to itself")

    def abandon_step(self, rest: Sequence[Action], why: BaseException) -> None: ...

    def wait_after_step(self, report: WorldReport) -> list[WorldReport]:
        return []

    def synchronize_worlds(self) -> None: ...

    def propagate_error(self, why: BaseException, *, weights_changed: bool) -> bool:
        return weights_changed
