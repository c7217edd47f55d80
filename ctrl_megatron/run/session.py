"""The frame of every run: training, fine-tuning and evaluation begin and end here.

Ranks meet; a failure on one ends all; Ctrl-C, SIGTERM and SIGHUP request a stop; engines and a
sandbox start on every host, and none of them outlives the run.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.checkpoint.run_directory import (
    RunLock,
    removed_directory_error,
    require_shared_directory,
)
from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_launch, read_restart_count
from ctrl_megatron.errors import FAILED, STOPPED, begin_lines_of_errors, open_user_code_note
from ctrl_megatron.metrics import Gauge, MetricsServer
from ctrl_megatron.metrics.output import ignore_closed_output
from ctrl_megatron.parallel.failure import FailureWatch, StuckThreadStartDetector
from ctrl_megatron.parallel.groups import (
    JoinedGroups,
    ProcessGroups,
    RankSet,
    join_worlds,
    shutdown_groups,
)
from ctrl_megatron.parallel.layout import World, layout_for, world_of_role, worlds_of
from ctrl_megatron.parallel.stacks import StackFile
from ctrl_megatron.parallel.stop import StopFlag, StopRequested
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender
from ctrl_megatron.rollout.fleet import Services
from ctrl_megatron.run.measured_dtype import require_one_dtype


@dataclass(slots=True, kw_only=True)
class Session:
    """The parts of a run on a rank that exist before its models."""

    config: Config
    joined: JoinedGroups
    worlds: tuple[World, ...]
    """All worlds of the run, that of rank 0 first."""
    background: BackgroundLoop
    stop: StopFlag
    watch: FailureWatch
    at_end: list[Callable[[], None]]
    """Functions to call at the end of the run, last to first, also after a failure."""
    served: MetricsServer | None
    """Serves the run's metrics, on rank 0 and where ``trainer.metrics_port`` is set."""

    @property
    def groups(self) -> ProcessGroups:
        return self.joined.groups

    @property
    def all_ranks(self) -> RankSet:
        return self.joined.everyone

    def groups_of_policy(self, number: int) -> ProcessGroups:
        """The groups of the layout of the policy with that ``agent_group``."""
        return self.joined.of_policy(number).groups

    def has_role(self, role: str) -> bool:
        """Whether this rank's world has the model of a role."""
        return world_of_role(self.worlds, role) is self.joined.world

    def raise_if_stop_requested_on_any_rank(self) -> None:
        """Raise StopRequested on all ranks of this world if a stop was requested on any.
        Collective: every rank of the world calls it."""
        if self.stop.requested_on_any_rank(self.groups):
            raise StopRequested

    def start_services(
        self,
        *,
        max_model_len: int,
        proxy_model_len: int | None = None,
        judges: bool = True,
        policy: int = 0,
        beside: Sequence[Services] = (),
    ) -> Services:
        """Start the engines for sequences of ``max_model_len`` tokens, the proxy's own for
        ``proxy_model_len`` tokens and, if the run ``judges`` programs, the sandboxes; return when
        all of them answer. Those of a further ``policy`` are its own engines alone, ``beside``
        those of other policies.

        If one of them dies, that is the failure of the rank that started it. Raises StopRequested,
        on all ranks, if a stop is requested meanwhile. Collective over all ranks of the run.
        """
        if self.stop.requested_on_any_rank(self.all_ranks):
            raise StopRequested
        with begin_lines_of_errors(f"policies.agent{policy}." if policy else ""):
            services = self._services(policy, max_model_len, proxy_model_len, judges, beside)
        self.at_end.append(services.stop)
        services.start()
        services.wait()
        if self.served is not None:
            self.served.add_gauges(services.gauges)
        return services

    def _services(
        self,
        policy: int,
        max_model_len: int,
        proxy_model_len: int | None,
        judges: bool,
        beside: Sequence[Services],
    ) -> Services:
        return Services(
            self.config.agents[policy],
            self.joined.of_policy(policy),
            self.worlds,
            self.watch,
            self.background,
            self.stop,
            max_model_len=max_model_len,
            proxy_model_len=proxy_model_len,
            judges=judges,
            beside=beside,
        )


@contextmanager
def session(config: Config, *, apart: bool = False) -> Iterator[Session]:
    """The context of a run on this rank: a failure on any rank ends all ranks and prints the first
    cause. With ``apart`` roles may have worlds of their own (``placement``).

    A stop that is requested before training begins ends the context and is no failure.
    """
    ignore_closed_output()
    stop, run_dir = StopFlag().install(), Path(config.trainer.run_dir)
    at_end = [open_user_code_note()]
    one_at_a_time = threading.Lock()

    def clean_up() -> None:
        # The watch and the main thread may both call this. The second one waits for the first,
        # because it ends the process afterwards.
        with one_at_a_time, ExitStack() as last_first:
            # One that fails, e.g. without a file descriptor, does not keep the others from ending.
            while at_end:
                last_first.callback(at_end.pop(0))

    with stop.end_on_stop(_end_alone):
        worlds = _worlds(config, apart=apart)
        own = [one.actor_rollout_ref.actor for one in config.agents[1:]] if apart else []
        joined = join_worlds(
            worlds,
            further=[layout_for(len(worlds[0].ranks), actor) for actor in own],
            seed=config.trainer.seed,
            timeout_seconds=config.trainer.distributed_timeout,
            launch=read_launch(),
        )
        everyone = joined.everyone
        # Names in /dev/shm: pushes and exports of a killed rank leave them behind.
        at_end.append(SharedMemorySender(joined.groups).close)
        watch = FailureWatch(everyone, timeout=config.trainer.failure_timeout, clean_up=clean_up)
        watch.add_check(StuckThreadStartDetector(config.trainer.failure_timeout), hang=True)
    background, locked = BackgroundLoop(), False
    try:
        try:
            lock = RunLock(run_dir)
            if everyone.is_first:
                at_end.append(lock.acquire().release)
                watch.add_check(lock.lost_error)
            require_shared_directory(run_dir, everyone.broadcast_from_first(lock.holder))
            require_one_dtype(everyone.all_gather(config.actor_rollout_ref.model_dtype))
            served = serve_metrics(config, stop, watch) if everyone.is_first else None
            if served is not None:
                at_end.append(served.close)
            everyone.barrier()
            locked = True
            stacks = StackFile(run_dir, everyone.rank)
            at_end.append(stacks.close)
            watch.set_stack_file(stacks)
            yield Session(
                config=config,
                joined=joined,
                worlds=worlds,
                background=background,
                stop=stop,
                watch=watch,
                at_end=at_end,
                served=served,
            )
        except StopRequested:
            watch.stop_watching_others()
            if everyone.is_first:
                print("stopped as asked before anything was trained", flush=True)
        watch.close()
        background.close()
    except BaseException as error:
        if locked and not run_dir.is_dir() and isinstance(error, Exception):
            error = removed_directory_error(run_dir)
        code = FAILED
        try:
            code = watch.report_failure(error)
            clean_up()
            with suppress(OSError):  # a full disk, which has been reported
                sys.stdout.flush()
        except Exception:
            traceback.print_exc()
        finally:
            # Destructors of a broken process group can hang; nothing of value is left in this
            # process.
            watch.exit_process(code)
    clean_up()
    shutdown_groups()
    stop.restore()


def _end_alone() -> None:
    """End a rank that has not met the others and therefore has nothing to save or to report."""
    if read_launch().rank == 0:
        print("stopped by a signal before the ranks had met", flush=True)
    FailureWatch.exit_process(STOPPED)


def serve_metrics(config: Config, stop: StopFlag, watch: FailureWatch) -> MetricsServer | None:
    """The server of the run's metrics; None if the configuration does not ask for one."""
    if config.trainer.metrics_port is None:
        return None

    def trouble() -> str:
        return watch.ending or ("a stop was requested" if stop.is_set else "")

    served = MetricsServer(
        config.trainer.metrics_host, config.trainer.metrics_port, trouble=trouble
    )
    restarts = Gauge("ctrl_restarts", "Starts after the first one.", [({}, read_restart_count())])
    served.add_gauges(lambda: [restarts])
    return served


def _worlds(config: Config, *, apart: bool) -> tuple[World, ...]:
    size, actor = read_launch().world_size, config.actor_rollout_ref.actor
    if apart:
        return worlds_of(size, config)
    layout = layout_for(size, actor)
    return (World(ranks=tuple(range(size)), layout=layout),)
