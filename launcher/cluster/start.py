"""`longstride train`: starts the deepspeed launcher around launcher/train.py, and watches over it."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from pathlib import Path

import torch

from longstride.kernels.errors import ConfigError
from longstride.launcher import train
from longstride.launcher.cluster.host_ranks import HostRanks
from longstride.launcher.cluster.launchers import add_host_arguments, find_hosts, launcher_command, launcher_environment
from longstride.launcher.cluster.left_behind import vacate
from longstride.launcher.cluster.progress import is_done
from longstride.launcher.cluster.remaining import VISIBLE, count_accelerators, first_visible, usable_world_sizes
from longstride.launcher.cluster.restarts import run_with_restarts
from longstride.launcher.cluster.supervisor import Launch, Wish, alone_seconds, supervise, supervised_signals
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data import check_data, check_output, check_replay
from longstride.launcher.output import lasting_output
from longstride.launcher.ranks import check_unlocked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `longstride train`."""
    train.add_arguments(parser)
    parser.add_argument(
        "--processes", type=int, default=None, metavar="N", help="on this host (default: one a GPU, or one on a CPU)"
    )
    add_host_arguments(parser)
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again, from the newest checkpoint on what is left, after a process or host died (default: 0)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks and stays with them to the end; returns the run's exit code.

    Raises:
        ConfigError: the configuration or the run folder is wrong, told here once instead of by every rank.
        DataError: so is the data folder.
    """
    started = time.time()
    config = load_config(arguments.config, arguments.overrides)
    ranks = _check(config, arguments)
    output = Path(config.train.output).absolute()
    replayed, timeout = arguments.replay is not None, config.train.timeout_seconds
    with supervised_signals() as signals, lasting_output():
        wish = Wish(signals)
        return run_with_restarts(
            output,
            arguments.resume,
            arguments.max_restarts,
            wish,
            lambda resume: ranks.launch(arguments, resume, output, started),
            lambda launch: supervise(launch, wish, timeout, lambda: replayed or is_done(output, config.train.steps)),
            ranks.after_loss,
            lambda launch: vacate(output, launch.stop_file, wish, alone_seconds(timeout), ranks.end_left),
        )


class LocalRanks:
    """The ranks of a run on this host: how they are started, and on what after a loss."""

    def __init__(self, config: RunConfig, processes: int | None) -> None:
        """Counts the GPUs.

        Raises:
            ConfigError: there are fewer GPUs than processes, or they are not named as the launcher knows them.
        """
        self._config = config
        self._processes = processes  # None: the launcher takes every GPU that it may see
        on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available()
        self._accelerators = 0 if on_cpu else torch.accelerator.device_count()
        self._environment = launcher_environment()
        if self._accelerators and torch.cuda.is_available():
            if processes is not None and processes > self._accelerators:
                raise ConfigError(f"--processes={processes}: each takes a GPU, and {self._accelerators} can be seen")
            if os.environ.get(VISIBLE):
                self._take(processes or self._accelerators)

    def launch(self, arguments: argparse.Namespace, resume: str, output: Path, started: float) -> Launch:
        """What starts them, at a meeting place of its own."""
        named = argparse.Namespace(**vars(arguments) | {"resume": resume})
        file = output / f".stop-{secrets.token_hex(8)}"
        command = launcher_command(named, self._processes)
        return Launch([*command, f"--stop-file={file}", f"--started={started!r}"], self._environment, file)

    def after_loss(self) -> str:
        """Takes as many GPUs as are left; says how many processes that makes.

        Raises:
            ConfigError: the batch divides over no number of processes that could be started.
        """
        if self._accelerators == 0:
            return f"with {_counted(self._processes)}"
        there = count_accelerators()
        before = self._processes or self._accelerators
        if there >= before:
            return f"with {_counted(before)}"
        sizes = usable_world_sizes(self._config, there)
        if not sizes:
            raise ConfigError(
                f"{there} of {self._accelerators} GPUs are left, and the batch divides over no such number"
            )
        self._take(sizes[0])
        return f"with {_counted(sizes[0])}, as {there} GPUs are left of {before}"

    def end_left(self) -> None:
        """Nothing: of a launch on this host nothing is left."""

    def _take(self, count: int) -> None:
        """The first GPUs of those that may be seen.

        By the environment, as the launcher passes over what it says of GPUs once it is given a number.
        """
        self._environment = first_visible(self._environment, count)
        self._processes, self._accelerators = None, count


def _check(config: RunConfig, arguments: argparse.Namespace) -> LocalRanks | HostRanks:
    """Everything that can be found wrong before a process is started."""
    if arguments.replay is None:
        check_output(config.train.output, arguments.resume)
        check_unlocked(Path(config.train.output))
    else:
        check_replay(config, arguments.resume, arguments.replay)
        if arguments.max_restarts:
            raise ConfigError(f"--max-restarts={arguments.max_restarts}: a replay is not started again; leave it out")
    if arguments.max_restarts < 0:
        raise ConfigError(f"--max-restarts={arguments.max_restarts}: must be at least 0")
    hosts = find_hosts(arguments)
    if hosts is not None:
        config.check_world_size(hosts.num_processes)
        check_data(config, elsewhere=True)
        return HostRanks(config, arguments, hosts)
    processes = arguments.processes
    if processes is None and not torch.cuda.is_available():
        processes = 1  # the launcher would start one a NUMA node
    if processes is not None:
        if processes < 1:
            raise ConfigError(f"--processes={processes}: must be at least 1")
        config.check_world_size(processes)
    check_data(config)
    return LocalRanks(config, processes)


def _counted(processes: int | None) -> str:
    if processes is None:
        return "as many processes"
    return "1 process" if processes == 1 else f"{processes} processes"
