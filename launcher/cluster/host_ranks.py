"""The ranks of a run on the hosts of a hostfile: how they are started, and on which of them after a loss."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from longstride.kernels import ConfigError
from longstride.launcher.cluster.host_checks import (
    check_reachable,
    end_launches,
    launch_pattern,
    meeting_address,
    unreachable,
)
from longstride.launcher.cluster.hostfile import Hosts
from longstride.launcher.cluster.launchers import (
    free_meeting_port,
    launcher_command,
    launcher_environment,
    needed_files,
    reaches_by_ssh,
    tell_hosts,
)
from longstride.launcher.cluster.remaining import fewer_slots, usable_world_sizes
from longstride.launcher.cluster.restarts import NoHostAnswersError
from longstride.launcher.cluster.supervisor import Launch
from longstride.launcher.config import RunConfig


class HostRanks:
    """Checked hosts, which answer and have the program."""

    def __init__(self, config: RunConfig, arguments: argparse.Namespace, hosts: Hosts) -> None:
        """Asks every host.

        Raises:
            ConfigError: one does not answer or lacks the program, or the first one's address cannot be told.
        """
        self._config, self._arguments, self._hosts = config, arguments, hosts
        self._by_ssh = reaches_by_ssh(hosts, arguments.launcher_args)
        self._answering = list(hosts.slots)
        self._pattern = ""  # of the newest launch
        self._address = arguments.master_addr or meeting_address(list(hosts.slots))
        if self._by_ssh:
            check_reachable(list(hosts.slots), needed_files())

    def launch(self, arguments: argparse.Namespace, resume: str, output: Path, started: float) -> Launch:
        """What starts them, at a meeting place of its own."""
        hosts = self._hosts.meeting(self._address, arguments.master_port or free_meeting_port())
        self._pattern = launch_pattern(hosts.master_addr, hosts.master_port)
        named = argparse.Namespace(**vars(arguments) | {"resume": resume})
        file = output / f".stop-{secrets.token_hex(8)}"
        command = launcher_command(named, None, hosts)
        environment = launcher_environment(tell_hosts(hosts, output))
        return Launch([*command, f"--stop-file={file}", f"--started={started!r}"], environment, file)

    def after_loss(self) -> str:
        """Takes the hosts that still answer; says how many processes that makes.

        Raises:
            NoHostAnswersError: none does, so that this host's own link may be what is lost.
            ConfigError: the batch does not divide over what is left, or the launcher cannot leave one out.
        """
        lost = unreachable(list(self._hosts.slots), needed_files()) if self._by_ssh else {}
        self._answering = [host for host in self._hosts.slots if host not in lost]
        if not lost:
            return f"with {self._hosts.num_processes} processes on the same hosts"
        left = self._hosts.without(lost)
        if not left.slots:
            raise NoHostAnswersError("no host answers any more; what runs there runs on")
        if left.launcher != "pdsh":
            raise ConfigError(f"{', '.join(lost)} answers no more; write a hostfile without it, and --resume auto")
        sizes = usable_world_sizes(self._config, left.num_processes)
        if not sizes:
            raise ConfigError(f"{left.num_processes} slots are left, and the batch divides over no such number")
        left = left.taking(fewer_slots(left.slots, sizes[0]))
        if next(iter(left.slots)) != next(iter(self._hosts.slots)):
            self._address = meeting_address(list(left.slots))
        self._hosts = left
        return f"with {left.num_processes} processes, as {', '.join(lost)} answers no more"

    def end_left(self) -> None:
        """Ends what is left of the newest launch where a host answers; MPI's and SLURM's own daemons see to it."""
        if self._by_ssh and self._hosts.launcher == "pdsh":
            end_launches(self._answering, self._pattern)
