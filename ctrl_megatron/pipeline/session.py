"""The frame of every run: training, fine-tuning and evaluation begin and end here.

Ranks meet; a failure on one ends all; Ctrl-C, SIGTERM and SIGHUP request a stop; engines and a
sandbox start on every host, and none of them outlives the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.checkpoint.run_directory import RunLock, removed, require_shared
from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_launch, read_restarts
from ctrl_megatron.errors import STOPPED, note_users_code
from ctrl_megatron.metrics import Gauge, MetricsServer
from ctrl_megatron.metrics.output import keep_going_unread
from ctrl_megatron.parallel.failure import FailureWatch
from ctrl_megatron.parallel.groups import ProcessGroups, initialize, shutdown
from ctrl_megatron.parallel.layout import layout_for
from ctrl_megatron.parallel.stacks import StackFile
from ctrl_megatron.parallel.stop import StopFlag, StopRequested
from ctrl_megatron.pipeline.services import Services
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender


@dataclass(slots=True, kw_only=True)
class Session:
    """The parts of a run on a rank that exist before its models."""

    config: Config
    groups: ProcessGroups
    background: BackgroundLoop
    stop: StopFlag
    watch: FailureWatch
    at_end: list[Callable[[], None]]
    """Functions to call at the end of the run, last to first, also after a failure."""
    served: MetricsServer | None
    """Serves the run's metrics, on rank 0 and where ``trainer.metrics_port`` is set."""

    def check_stop(self) -> None:
        """Raise StopRequested on all ranks if a stop was requested on any. Collective."""
        if self.stop.agreed(self.groups):
            raise StopRequested

    def start_services(
        self, *, max_model_len: int, proxy_model_len: int | None = None, judges: bool = True
    ) -> Services:
        """Start this host's engines for sequences of ``max_model_len`` tokens, the proxy's own for
        ``proxy_model_len`` tokens and, if the run ``judges`` programs, the sandbox.

        If one of them dies, that is this rank's failure. Collective.
        """
        self.check_stop()
        services = Services(
            self.config,
            self.groups,
            self.watch,
            self.background,
            self.stop,
            max_model_len=max_model_len,
            proxy_model_len=proxy_model_len,
            judges=judges,
        )
        self.at_end.append(services.stop)
        services.start()
        if self.served is not None:
            self.served.add(services.gauges)
        return services


@contextmanager
def session(config: Config) -> Iterator[Session]:
    """The context of a run on this rank: a failure on any rank ends all ranks and prints the first
    cause.

    A stop that is requested before training begins ends the context and is no failure.
    """
    keep_going_unread()
    stop, run_dir = StopFlag().install(), Path(config.trainer.run_dir)
    at_end = [note_users_code()]
    one_at_a_time = threading.Lock()

    def clean_up() -> None:
        # The watch and the main thread may both call this. The second one waits for the first,
        # because it ends the process afterwards.
        with one_at_a_time:
            while at_end:
                at_end.pop()()

    with stop.ends_meeting(_end_alone):
        groups = join(config)
        # Names in /dev/shm: pushes and exports of a killed rank leave them behind.
        at_end.append(SharedMemorySender(groups).close)
        watch = FailureWatch(groups, timeout=config.trainer.failure_timeout, clean_up=clean_up)
    background, locked = BackgroundLoop(), False
    try:
        try:
            lock = RunLock(run_dir)
            if groups.is_first:
                at_end.append(lock.take().release)
                watch.guard(lock.lost)
            require_shared(run_dir, groups.from_first(lock.holder))
            served = serve(config, stop, watch) if groups.is_first else None
            if served is not None:
                at_end.append(served.close)
            groups.barrier()
            locked = True
            stacks = StackFile(run_dir, groups.rank)
            at_end.append(stacks.close)
            watch.write_stacks(stacks)
            yield Session(
                config=config,
                groups=groups,
                background=background,
                stop=stop,
                watch=watch,
                at_end=at_end,
                served=served,
            )
        except StopRequested:
            watch.quiet()
            if groups.is_first:
                print("stopped as asked before anything was trained", flush=True)
        watch.close()
        background.close()
    except BaseException as error:
        if locked and not run_dir.is_dir() and isinstance(error, Exception):
            error = removed(run_dir)
        code = watch.report(error)
        clean_up()
        with suppress(OSError):  # a full disk, which has been reported
            sys.stdout.flush()
        # Destructors of a broken process group can hang; nothing of value is left in this process.
        watch.exit(code)
    clean_up()
    shutdown()
    stop.restore()


def _end_alone() -> None:
    """End a rank that has not met the others and therefore has nothing to save or to report."""
    if read_launch().rank == 0:
        print("stopped by a signal before the ranks had met", flush=True)
    FailureWatch.exit(STOPPED)


def serve(config: Config, stop: StopFlag, watch: FailureWatch) -> MetricsServer | None:
    """The server of ``trainer.metrics_port``, if it is set."""
    if config.trainer.metrics_port is None:
        return None

    def trouble() -> str:
        return watch.ending or ("a stop was requested" if stop.is_set else "")

    served = MetricsServer(
        config.trainer.metrics_host, config.trainer.metrics_port, trouble=trouble
    )
    restarts = Gauge("ctrl_restarts", "Starts after the first one.", [({}, read_restarts())])
    served.add(lambda: [restarts])
    return served


def join(config: Config) -> ProcessGroups:
    """Join the other ranks that the launcher started, in the configured layout. Collective."""
    launch, megatron = read_launch(), config.actor_rollout_ref.actor.megatron
    return initialize(
        layout_for(launch.world_size, megatron),
        seed=config.trainer.seed,
        timeout_seconds=config.trainer.distributed_timeout,
        launch=launch,
    )
