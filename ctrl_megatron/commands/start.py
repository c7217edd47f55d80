"""The start and end of every command: it reads arguments, checks the input and starts ranks. A
command that ends early prints one line and returns an exit code.

Wrong input is printed once for all ranks, with exit code 2, as are refusals of the system: a full
disk, a path without write permission. Ctrl-C and SIGTERM give 130. A fault of the program prints
its traceback once: the launcher ends the ranks that wait after the first.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ctrl_megatron.commands.hub import is_hub_id, pinned_models, with_hub_models
from ctrl_megatron.commands.launcher import RestartLimit, ranks_to_start, start_ranks
from ctrl_megatron.config import Config, Purpose, check_world_size, load_config, require_files_exist
from ctrl_megatron.config.elastic import config_for_world_size
from ctrl_megatron.config.environment import (
    Launch,
    read_launch,
    read_log_level,
    set_device_variables,
)
from ctrl_megatron.config.flags import CommandParser, count_flag
from ctrl_megatron.config.translation import CONFIG_FORMATS
from ctrl_megatron.errors import STOPPED, WRONG_INPUT, UserError, find_user_error

# When this file is loaded, so that processes which a command spawns are quiet too.
warnings.filterwarnings("ignore", module=r"megatron|torch")
# Megatron looks at the gradient of a view, which the CPU platform passes on.
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")

_OUTPUT_CLOSED = 128 + signal.SIGPIPE
"""Exit code if the reader of the output has closed the pipe, as the shell reports SIGPIPE."""
_FIRST_WAITS, _OTHERS_WAIT = 10.0, 60.0
"""Seconds that the first rank of a machine, and its other ranks, wait for the launcher to end
them.
"""
_UNLIMITED = 1 << 60
"""Bytes of a device that is not counted."""
_AGAIN_SECONDS = 0.1
"""Pause before an interrupt that Python has discarded is raised again."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Main = Callable[[Sequence[str] | None], int]


def command_entry_point(
    name: str, *, stopped: str = "nothing was changed"
) -> Callable[[Main], Callable[..., int]]:
    """Decorator of a command's ``main``: turns UserErrors and signals into lines and exit codes.

    ``stopped`` describes the state that a signal leaves.
    """

    def decorate(body: Main) -> Callable[..., int]:
        @functools.wraps(body)
        def main(arguments: Sequence[str] | None = None) -> int:
            launcher = os.getppid()
            with _signals() as received:
                try:
                    code = body(arguments)
                    sys.stdout.flush()
                    return code
                except SystemExit:
                    raise
                except BaseException as error:
                    if isinstance(error, OSError) and _unread():
                        return _OUTPUT_CLOSED
                    # A signal in the middle of an import may be raised as another exception.
                    fault = None if received else _output_fault(error) or find_user_error(error)
                    if not received and fault is None:
                        try:
                            _let_rank_0_speak(launcher)
                        except KeyboardInterrupt:
                            return STOPPED  # the launcher's signal: rank 0 has reported the error
                        raise
            return (
                _stopped(name, stopped) if fault is None else report_refusal(name, fault, launcher)
            )

        return main

    return decorate


@contextmanager
def _handled(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let each of the signals call ``on_signal``, unless it is ignored (as under nohup)."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Let the first of these signals raise KeyboardInterrupt; yield the received signals.

    Python discards an exception that is raised in a destructor or a weak reference's callback, such
    as the callbacks of import locks; the interrupt is then raised again.
    """
    received: list[int] = []
    discarded, before = False, sys.unraisablehook

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal discarded
        received.append(number)
        if len(received) == 1 or discarded:
            discarded = False
            raise KeyboardInterrupt

    def on_discarded(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal discarded
        if not received or unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
            return
        discarded = True
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), received[0]))
        again.daemon = True
        again.start()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    sys.unraisablehook = on_discarded
    try:
        with _handled(on_signal):
            yield received
    finally:
        sys.unraisablehook = before


def run_child(words: Sequence[str], cwd: Path) -> int:
    """Run another command, wait for its end, and return its exit code.

    The first SIGINT, SIGTERM or SIGHUP is passed on, and takes its effect here when the child has
    ended: it has ranks to end and a state to save, for which ``subprocess.run`` gives it a quarter
    of a second. It has a process group of its own, so that a Ctrl-C does not reach it twice.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1 and child is not None:
            child.send_signal(number)

    with _handled(pass_on):
        child = subprocess.Popen(words, cwd=cwd, process_group=0)
        if received:  # while it was started
            child.send_signal(received[0])
        code = child.wait()
    if received:
        signal.raise_signal(received[0])
    return code


def _stopped(name: str, left: str) -> int:
    launch = _launch()
    if launch is None or launch.rank == 0:
        print(f"{name}: stopped; {left}", file=sys.stderr, flush=True)
    return STOPPED


def _unread() -> bool:
    """Whether standard output is a pipe whose reader has closed it, as ``| head`` does."""
    try:
        looked = select.poll()
        looked.register(sys.stdout.fileno(), 0)
        closed = any(event & select.POLLERR for _, event in looked.poll(0))
    except (OSError, ValueError):
        return False  # not a file
    if closed:
        _give_up_output()
    return closed


def _output_fault(error: BaseException) -> UserError | None:
    """The UserError if standard output cannot be written, else None."""
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_output()
        return find_user_error(error)
    return None


def _give_up_output() -> None:
    """Discard unwritten output; otherwise Python would try to write it again at exit."""
    from ctrl_megatron.metrics.output import discard_output

    with suppress(OSError, ValueError):
        discard_output(sys.stdout.fileno())


def _launch() -> Launch | None:
    """The place of this process among the ranks; None where that is the fault itself, which names
    the variable."""
    try:
        return read_launch()
    except ValueError:
        return None


def load_checked_config(path: str, overrides: Sequence[str], purpose: Purpose) -> Config:
    """Set the log level of the environment and return the checked configuration, whose models have
    been downloaded where they are ids on the Hugging Face Hub. Raises UserError.
    """
    logging.basicConfig(level=read_log_level())
    # This logger reports at each start that its feature is disabled.
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    config = load_config(path, overrides, purpose)
    require_files_exist(config, purpose, elsewhere=is_hub_id)
    config = with_hub_models(config, purpose)
    require_files_exist(config, purpose)
    if config.actor_rollout_ref.model.dtype == "auto":
        from ctrl_megatron.run.measured_dtype import resolve_auto_dtype  # it imports torch

        config = resolve_auto_dtype(config)
    return config


def report_refusal(name: str, error: UserError, launcher: int) -> int:
    """Print why the command ``name`` does not run; return the exit code. ``launcher`` is the
    process that started this one.

    All ranks find the same fault. Rank 0 prints it and ends; the others wait here until the
    launcher ends them. If it does not, this is another machine or rank 0 found no fault: then the
    first rank of the machine prints the fault.
    """
    launch = _launch()
    _let_rank_0_speak(launcher)
    if launch is None or launch.local_rank == 0:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
    return WRONG_INPUT


def _let_rank_0_speak(launcher: int) -> None:
    """On ranks other than 0, wait long enough for the launcher to end this one after rank 0, unless
    the launcher has ended itself.
    """
    launch = _launch()
    if launch is not None and launch.rank > 0:
        wait = _FIRST_WAITS if launch.local_rank == 0 else _OTHERS_WAIT
        deadline = time.monotonic() + wait
        while os.getppid() == launcher and time.monotonic() < deadline:
            time.sleep(_AGAIN_SECONDS)


def load_config_or_launch(
    name: str,
    purpose: Purpose,
    arguments: Sequence[str] | None,
    description: str | None,
    check: Callable[[Config], object],
) -> Config | int:
    """The checked configuration of this rank; with ``--nproc-per-node``, the exit code of the
    ranks, which start if ``check`` raises no UserError.
    """
    parser = CommandParser(description)
    add_config_arguments(parser)
    add_run_arguments(parser)
    parser.add_argument(
        "--max-restarts",
        type=count_flag(0),
        default=0,
        metavar="N",
        help="start the ranks again after a failure, N times in a row without a new checkpoint",
    )
    parser.add_argument(
        "--launcher",
        choices=("torch", "ray"),
        default="torch",
        help="who starts the ranks of --nproc-per-node: torch on this machine, or ray on "
        "trainer.nnodes machines of a cluster (RAY_ADDRESS)",
    )
    options = parser.parse_intermixed_args(arguments)
    launch, ranks, on_ray = read_launch(), ranks_to_start(options), options.launcher == "ray"
    if on_ray and ranks is None:
        raise UserError(
            "it starts the ranks that --nproc-per-node counts, those of one machine",
            key="--launcher ray",
            remedy="add --nproc-per-node",
        )
    overrides = config_overrides(options)
    config = load_checked_config(options.config, overrides, purpose)
    if config.translation and ranks is None and launch.rank == 0:
        print("\n".join(config.translation), flush=True)
    hosts = config.trainer.nnodes if on_ray else 1
    world_size = launch.world_size if ranks is None else ranks * hosts
    config = config_for_world_size(config, world_size)
    if purpose == "rl" and config.placement.auto:
        config, considered = _placed(config)
        if ranks is None and launch.rank == 0:
            print(f"placement=auto:\n{considered}", flush=True)
    check_world_size(config, world_size, purpose)
    if ranks is None:
        set_device_variables(config.most_tensor_ranks)
        return config
    with _ranks_warn():
        check(config)
    restarts = _restarts(config, options.max_restarts) if options.max_restarts else None
    # One process measures what auto stands for.
    dtype = f"actor_rollout_ref.model.dtype={config.actor_rollout_ref.model_dtype}"
    words = ["--config", options.config, *overrides, *pinned_models(config), dtype]
    if on_ray:
        from ctrl_megatron.commands.ray_launcher import start_on_ray

        gpus = ranks + (config.engine_gpus_per_node if purpose == "rl" else 0)
        return start_on_ray(name, hosts, ranks, words, gpus=gpus, restarts=restarts)
    return start_ranks(name, ranks, words, restarts=restarts)


def _placed(config: Config) -> tuple[Config, str]:
    """The configuration with the ranks that ``placement.auto`` stands for here, and the table of
    what was considered."""
    from ctrl_megatron.memory.proposal import with_auto_placement
    from ctrl_megatron.memory.shapes import model_shapes
    from ctrl_megatron.models.layer_spec import has_transformer_engine
    from ctrl_megatron.run.checks.machine import gpu_of_rank

    gib, gpu = config.placement.gpu_memory, gpu_of_rank()
    if gib is not None:
        memory = int(gib * 2**30)
    else:
        # Devices of one kind differ by less than what is cut off here.
        memory = _UNLIMITED if gpu is None else gpu[1] >> 30 << 30
    kernels = "te" if has_transformer_engine() else "torch"
    return with_auto_placement(
        config, model_shapes(config, "rl"), gpu_memory=memory, kernels=kernels
    )


def _restarts(config: Config, most: int) -> RestartLimit:
    """At most so many restarts in a row. UserError if a restarted run would not resume."""
    if config.trainer.resume_mode == "disable":
        raise UserError(
            "trainer.resume_mode=disable lets every restart begin with step 1",
            key="--max-restarts",
            remedy="use trainer.resume_mode=auto, with a new trainer.experiment_name to start over",
        )
    from ctrl_megatron.checkpoint.store import checkpoints_in

    checkpoints = Path(config.trainer.run_dir) / "checkpoints"

    def saved() -> int:
        return max((one.step for one in checkpoints_in(checkpoints)), default=0)

    return RestartLimit(most=most, saved=saved)


@contextmanager
def _ranks_warn() -> Iterator[None]:
    """Log no warnings in the body, which checks what rank 0 is about to check."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def add_config_arguments(parser: CommandParser) -> None:
    """The file of the configuration, and the trainer whose keys it has."""
    parser.add_argument("--config", required=True, help="YAML file, e.g. examples/ctrl_7b.yaml")
    parser.add_argument(
        "--config-format",
        choices=CONFIG_FORMATS,
        help="the trainer whose keys the file and the overrides have; default: this one's",
    )


def config_overrides(options: argparse.Namespace) -> list[str]:
    """The overrides, after the one that ``--config-format`` stands for."""
    form = options.config_format
    return [*([] if form is None else [f"config_format={form}"]), *options.overrides]


def add_run_arguments(parser: CommandParser) -> None:
    """Arguments of every command that runs on ranks: their number, and configuration settings."""
    parser.add_argument(
        "--nproc-per-node", type=count_flag(), metavar="N", help="start N ranks on this machine"
    )
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. trainer.experiment_name=mine")
    # Pipelines and reward functions of the user may be in the current directory.
    sys.path.append(os.getcwd())
