"""Where the ranks of a run are placed: how they are started there, and on what is left after a loss."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from longstride.kernels import ConfigError
from longstride.launcher.cluster.hosts import (
    Hosts,
    check_reachable,
    end_launches,
    launch_pattern,
    meeting_address,
    unreachable,
)
from longstride.launcher.cluster.launchers import (
    NEEDED_FILES,
    free_port,
    launcher_command,
    launcher_environment,
    write_hosts_environment,
)
from longstride.launcher.cluster.supervisor import Launch
from longstride.launcher.config import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the deepspeed launcher takes all of these where it is given no number
_COUNT_SECONDS = 120.0


def accelerators_here() -> int:
    """How many accelerators this process sees, and DeepSpeed would use."""
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available()
    return 0 if on_cpu else torch.accelerator.device_count()


class NoHostAnswersError(Exception):
    """No host answers. They may be well: perhaps only this host has lost its network for a while."""


class LocalRanks:
    """The ranks on this host alone. ``processes``: None for one a GPU. ``started``: the run's start by time.time()."""

    def __init__(self, config: RunConfig, arguments: argparse.Namespace, processes: int | None, started: float) -> None:
        """Counts the GPUs.

        Raises:
            ConfigError: so many processes are no run, there are fewer GPUs, or CUDA_VISIBLE_DEVICES names them by other
                than numbers.
        """
        self._config, self._arguments, self._processes, self._started = config, arguments, processes, started
        self._accelerators = accelerators_here()
        self._environment = launcher_environment()
        if processes or self._accelerators:  # else DeepSpeed starts one a NUMA node, which it counts itself
            config.check_world_size(processes or self._accelerators)
        if self._accelerators and torch.cuda.is_available():
            if processes is not None and processes > self._accelerators:
                raise ConfigError(f"--processes={processes}: each takes a GPU, and {self._accelerators} can be seen")
            if os.environ.get(VISIBLE):
                self._take(processes or self._accelerators)

    def __str__(self) -> str:
        """How many there are."""
        return _counted(self._processes or self._accelerators) if self._processes or self._accelerators else "processes"

    def launch(self, resume: str) -> Launch:
        """What starts the ranks, with a value for --resume."""
        command = launcher_command(self._arguments, resume, self._processes)
        return _launch(command, self._environment, Path(self._config.train.output).absolute(), self._started)

    def shrink(self) -> str:
        """Takes as many of the GPUs that are left as the batch divides over; says how many processes that makes.

        Raises:
            ConfigError: the batch divides over no such number of processes.
        """
        if self._accelerators == 0:
            return "with as many processes" if self._processes is None else f"with {_counted(self._processes)}"
        available = count_accelerators()
        before = self._processes or self._accelerators
        if available >= before:
            return f"with {_counted(before)}"
        taken = largest_run(self._config, {"": range(available)}, f"{available} of {self._accelerators} GPUs")
        self._take(len(taken[""]))
        return f"with {_counted(len(taken['']))}, as {available} GPUs are left of {before}"

    def end_elsewhere(self) -> None:
        """Does nothing: the supervisor has ended all processes on this host."""

    def _take(self, count: int) -> None:
        """Takes the first GPUs by the environment: beside a number of processes the launcher does not read it."""
        self._environment = first_visible(self._environment, count)
        self._processes, self._accelerators = None, count


class HostRanks:
    """The ranks on the hosts of a hostfile."""

    def __init__(self, config: RunConfig, arguments: argparse.Namespace, hosts: Hosts, started: float) -> None:
        """Checks by ssh that each host answers and has the program.

        Raises:
            ConfigError: a host does not, or the address of the first one is not known.
        """
        self._config, self._arguments, self._hosts, self._started = config, arguments, hosts, started
        self._run = Path(config.train.output).absolute()
        # The other ways to start ranks are srun, and an agent that the user names.
        self._by_ssh = hosts.launcher != "slurm" and not any(
            "agent" in word or word.startswith(("-launcher", "--launcher"))
            for word in shlex.split(arguments.launcher_args)
        )
        self._answering = list(hosts.slots)
        self._pattern = ""  # of the newest launch
        self._address = arguments.master_addr or meeting_address(self._answering)
        if self._by_ssh:
            check_reachable(self._answering, NEEDED_FILES)

    def __str__(self) -> str:
        """How many there are, and where."""
        return f"{_counted(len(self._hosts.of_ranks))} on {', '.join(self._hosts.slots)}"

    def launch(self, resume: str) -> Launch:
        """What starts the ranks, with a value for --resume; they meet at a port of their own."""
        port = self._arguments.master_port or free_port()
        hosts = replace(self._hosts, master_addr=self._address, master_port=port)
        self._pattern = launch_pattern(hosts.master_addr, hosts.master_port)
        environment = launcher_environment(write_hosts_environment(hosts, self._run))
        command = launcher_command(self._arguments, resume, None, hosts)
        return replace(_launch(command, environment, self._run, self._started), elsewhere=True)

    def shrink(self) -> str:
        """Takes the hosts that still answer; says how many processes that makes.

        Raises:
            NoHostAnswersError: none answers, so this host's own network may be what is lost.
            ConfigError: no number of processes that is left is a run, or the launcher cannot leave a host out.
        """
        lost = unreachable(list(self._hosts.slots), NEEDED_FILES) if self._by_ssh else {}
        self._answering = [host for host in self._hosts.slots if host not in lost]
        if not lost:
            return f"with {len(self._hosts.of_ranks)} processes on the same hosts"
        left = self._hosts.only({host: self._hosts.slots[host] for host in self._answering})
        if not left.slots:
            raise NoHostAnswersError("no host answers any more; what runs there runs on")
        if left.launcher != "pdsh":
            raise ConfigError(f"{', '.join(lost)} answers no more; write a hostfile without it, and --resume auto")
        left = left.only(largest_run(self._config, left.slots, f"{len(left.of_ranks)} slots"))
        if next(iter(left.slots)) != next(iter(self._hosts.slots)):
            self._address = meeting_address(list(left.slots))
        self._hosts = left
        return f"with {len(left.of_ranks)} processes, as {', '.join(lost)} answers no more"

    def end_elsewhere(self) -> None:
        """Ends what the newest launch has left on hosts that answer. The daemons of MPI and SLURM do so themselves."""
        if self._by_ssh and self._hosts.launcher == "pdsh":
            end_launches(self._answering, self._pattern)


def _launch(command: list[str], environment: dict[str, str], run: Path, started: float) -> Launch:
    """A launch with a stop file of its own; ``--started`` lets ranks of a restart count max_seconds from the start."""
    file = run / f".stop-{secrets.token_hex(8)}"
    return Launch([*command, f"--stop-file={file}", f"--started={started!r}"], environment, file)


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def largest_run(config: RunConfig, slots: Mapping[str, Sequence[int]], left: str) -> dict[str, list[int]]:
    """As many of the first slots as the batch divides over, where no host is cut through those that share a context.

    Raises:
        ConfigError: there are none; names what is ``left``.
    """
    for size in range(sum(map(len, slots.values())), 0, -1):
        with suppress(ConfigError):
            config.check_world_size(size)  # first, as it is quick
            taken = first_slots(slots, size)
            config.check_hosts([host for host, numbers in taken.items() for _ in numbers])
            return taken
    raise ConfigError(f"{left} are left, and the run divides over no such number")


def first_slots(slots: Mapping[str, Sequence[int]], world_size: int) -> dict[str, list[int]]:
    """The first ``world_size`` slots, host by host."""
    taken: dict[str, list[int]] = {}
    for host, numbers in slots.items():
        count = min(len(numbers), world_size - sum(map(len, taken.values())))
        if count:
            taken[host] = list(numbers[:count])
    return taken


def first_visible(environment: Mapping[str, str], count: int) -> dict[str, str]:
    """The environment in which the deepspeed launcher takes the first ``count`` of the visible GPUs.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names them by other than their numbers, which that launcher cannot read.
    """
    value = environment.get(VISIBLE, "")
    named = [name.strip() for name in value.split(",") if name.strip()]
    if not all(name.isdecimal() for name in named):
        raise ConfigError(f"{VISIBLE}={value}: the deepspeed launcher takes numbers alone; such as 0,1")
    chosen = (named or [str(number) for number in range(count)])[:count]
    return {**environment, VISIBLE: ",".join(chosen)}


def count_accelerators() -> int:
    """The accelerators that a new process finds: one that has counted them before may return what it remembers."""
    code = "import torch; print(torch.accelerator.device_count())"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False
        )
        return int(ended.stdout.split()[-1]) if ended.returncode == 0 else 0
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return 0
