"""The state of torch's launcher in the store in which hosts meet, as JSON.

torch keeps it as a pickle, and the store takes it from whoever reaches the port: what a stranger
writes there would run in every launcher.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

_NODES = ("participants", "last_heartbeats")
_SETS = ("wait_list", "redundancy_list")


class RendezvousStateError(ValueError):
    """The store's value is no state of a rendezvous."""


class StateAsJson:
    """Takes the place of ``pickle`` where torch writes and reads the state."""

    PickleError = RendezvousStateError

    @staticmethod
    def dumps(state: Any) -> bytes:
        """``state``, torch's ``_RendezvousState``; equal states give equal bytes."""
        fields = dict(vars(state))
        for name in _NODES:
            fields[name] = sorted([_words(node), value] for node, value in fields[name].items())
        for name in _SETS:
            fields[name] = sorted(_words(node) for node in fields[name])
        return json.dumps(fields, sort_keys=True, default=datetime.isoformat).encode()

    @staticmethod
    def loads(text: bytes) -> Any:
        """The state that ``dumps`` has written; RendezvousStateError for anything else."""
        try:
            return _state(json.loads(text))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise RendezvousStateError(f"no state of a rendezvous: {error!r}") from error


def install_json_state() -> None:
    """Let torch's rendezvous in this process write and read its state by ``StateAsJson``."""
    dynamic_rendezvous.pickle = StateAsJson  # type: ignore[attr-defined]


def _state(fields: dict[str, Any]) -> Any:
    state = dynamic_rendezvous._RendezvousState()  # pyright: ignore[reportPrivateUsage]
    if fields.keys() != vars(state).keys():
        raise ValueError(f"fields {sorted(fields)}, not {sorted(vars(state))}")
    deadline = fields["deadline"]
    read = {
        "round": int(fields["round"]),
        "complete": fields["complete"] is True,
        "closed": fields["closed"] is True,
        "deadline": deadline and _time(deadline),
        "participants": {_node(node): int(rank) for node, rank in fields["participants"]},
        "last_heartbeats": {_node(node): _time(at) for node, at in fields["last_heartbeats"]},
    }
    read |= {name: {_node(node) for node in fields[name]} for name in _SETS}
    vars(state).update(read)
    return state


def _time(text: str) -> datetime:
    """A time with its zone."""
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return time


def _words(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(words: Any) -> Any:
    address, pid, number = words
    made = dynamic_rendezvous._NodeDesc  # pyright: ignore[reportPrivateUsage]
    return made(str(address), int(pid), int(number))
