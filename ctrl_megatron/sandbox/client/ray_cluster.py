"""Runs one sandbox service on every node of a Ray cluster (``tools/serve_sandbox_ray.py``).

An actor on each node starts the service as its child, so the service ends with the actor, and the
actor ends with the deploying program. Ray places and monitors processes; requests do not pass
through it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctrl_megatron.sandbox.access import publish_endpoints
from ctrl_megatron.sandbox.client.embedded import EmbeddedSandbox
from ctrl_megatron.sandbox.limits import Level

_ANSWER_SECONDS = 10.0
_SHOWN = 500


class NodeFailure(RuntimeError):
    """A node could not start its service; the text names the node and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Options of every node's service."""

    token: str
    """Bearer token that clients must send."""
    workers: int | None = None
    """Number of workers; None for one per processor of the node."""
    isolation: Level = "strict"
    port: int = 0
    """0 uses a free port on each node, which remains when the service is replaced."""
    start_seconds: float = 60.0
    drain_seconds: float = 20.0


class NodeService:
    """The actor of one node."""

    def __init__(self, options: ServiceOptions, port: int) -> None:
        self._options = options
        host = _ray().util.get_node_ip_address()
        self._service = EmbeddedSandbox.start(
            workers=options.workers,
            isolation=options.isolation,
            start_seconds=options.start_seconds,
            host=host,
            port=port,
            token=options.token,
        )

    def about(self) -> tuple[str, dict[str, Any]]:
        """The service's address and the isolation that it reached."""
        return self._service.endpoint, self._service.isolation

    def check(self) -> None:
        """Raise ``RuntimeError`` with the service's last output if it has ended."""
        if not self._service.alive():
            text = self._service.log().strip()[-_SHOWN:]
            raise RuntimeError(f"the service ended: {text or 'it wrote nothing'}")

    def stop(self) -> None:
        """Wait for running requests, then end the service."""
        self._service.stop(self._options.drain_seconds)


@dataclass(slots=True)
class Deployment:
    """Services on all nodes of the cluster that this process is connected to."""

    options: ServiceOptions
    endpoints_file: Path
    """File that contains the addresses, separated by commas, in the form of
    ``sandbox.endpoint``."""
    failed: list[str] = field(default_factory=list)
    """Failures of the last ``reconcile``, one sentence each."""
    _nodes: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Actor and address of each node's service, by node id."""
    _ports: dict[str, int] = field(default_factory=dict)

    @property
    def endpoints(self) -> dict[str, str]:
        """Address of each node's service, by node id."""
        return {name: endpoint for name, (_, endpoint) in self._nodes.items()}

    def reconcile(self) -> list[str]:
        """Start missing services, replace ended ones, and forget nodes that have left. Returns what
        was done and what failed, one sentence each. The next call tries failed nodes again.
        """
        alive = {n["NodeID"]: n["NodeManagerAddress"] for n in _ray().nodes() if n["Alive"]}
        faults, report = self._faults(), []
        for name in [name for name in self._nodes if name in faults or name not in alive]:
            actor, endpoint = self._nodes.pop(name)
            report.append(f"{endpoint}: {faults.get(name, 'its node left')}")
            _ray().kill(actor)
        missing = {name: address for name, address in alive.items() if name not in self._nodes}
        report += self._start(missing) + self.failed
        if report:
            publish_endpoints(self.endpoints_file, sorted(self.endpoints.values()))
        return report

    def require_all(self) -> None:
        """Raise ``NodeFailure`` if the last ``reconcile`` could not start a service."""
        if self.failed:
            raise NodeFailure("; ".join(self.failed))

    def stop(self) -> None:
        """Drain and end every service, and remove the file of addresses."""
        self.endpoints_file.unlink(missing_ok=True)
        ending = [actor.stop.remote() for actor, _ in self._nodes.values()]
        _within(self.options.drain_seconds + _ANSWER_SECONDS, ending)
        for actor, _ in self._nodes.values():
            _ray().kill(actor)
        self._nodes.clear()

    def _faults(self) -> dict[str, str]:
        """Reasons of failed services by node id. A service that is slow to answer may be busy and
        counts as well.
        """
        asked = {actor.check.remote(): name for name, (actor, _) in self._nodes.items()}
        answered = _within(_ANSWER_SECONDS, list(asked))
        return {asked[ref]: why for ref in answered if (why := _failure(ref, _ANSWER_SECONDS))}

    def _start(self, wanted: Mapping[str, str]) -> list[str]:
        """Start services on the nodes ``wanted`` (id -> address), all at the same time; returns
        what was started, one sentence each.
        """
        actors = {name: self._actor(name) for name in wanted}
        asked = {name: actor.about.remote() for name, actor in actors.items()}
        report, self.failed = [], []
        for name, reference in asked.items():
            why = _failure(reference, self.options.start_seconds + _ANSWER_SECONDS)
            if why:
                self.failed.append(f"node {wanted[name]}: no service: {why}")
                _ray().kill(actors[name])
                continue
            endpoint, isolation = _ray().get(reference)
            self._nodes[name] = actors[name], endpoint
            self._ports[name] = int(endpoint.rsplit(":", 1)[1])
            report.append(f"node {wanted[name]}: {endpoint}, {isolation['level']}")
        return report

    def _actor(self, name: str) -> Any:
        place = _ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
        # Reserves no processor of Ray: the trainer needs them, and programs arrive in bursts.
        where = {"num_cpus": 0, "scheduling_strategy": place(name, soft=False)}
        port = self._ports.get(name, self.options.port)
        return _ray().remote(NodeService).options(**where).remote(self.options, port)


def connect(address: str | None, **further: Any) -> None:
    """Join a running cluster, by default the one of ``RAY_ADDRESS`` or of this machine, and upload
    this package. Raises ``ConnectionError`` if there is none, ``ImportError`` without Ray.
    """
    package = {"py_modules": [str(Path(__file__).resolve().parents[2])]}
    _ray().init(address=address or "auto", log_to_driver=False, runtime_env=package, **further)


def _within(seconds: float, references: list[Any]) -> list[Any]:
    """The calls that have ended within ``seconds``, with or without success."""
    if not references:
        return []
    return _ray().wait(references, num_returns=len(references), timeout=seconds)[0]


def _failure(reference: Any, seconds: float) -> str:
    """The reason why a call failed, without Ray's own trace; empty if it succeeded."""
    try:
        _ray().get(reference, timeout=seconds)
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        return f"{type(cause).__name__}: {cause}".strip().splitlines()[-1]
    return ""


def _ray() -> Any:
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("Ray is not installed: pip install 'ctrl_megatron[ray]'") from error
