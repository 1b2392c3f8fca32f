"""`deepspeed.launcher.runner` for several hosts, with fixes that long runs need. The command line is the same.

| launcher | DeepSpeed 0.19 | here |
|---|---|---|
| pdsh | passes words to the remote shell unquoted, so JSON loses its quotes | quotes each word |
| pdsh | replaces %h and %n by the host's name and number, in overrides too | replaces them in --node_rank only |
| pdsh | ends *every* run by the same Python on those hosts at a stop | ends this run only |
| pdsh | prints how it starts each rank, whatever --log_level is | obeys --log_level |
| mpich | starts each rank by a helper that loses its exit code | starts the rank, which reads MPICH's variables |
| openmpi, mpich | starts the first mpirun on PATH, even of the other library | starts the library's own mpirun |
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import MPICHRunner, OpenMPIRunner, PDSHRunner

from longstride.launcher.cluster.hosts import find_mpirun, launch_pattern

_NODE_RANK = "--node_rank=%n"  # pdsh replaces %n by the number of the host


class QuotingPdsh(PDSHRunner):
    """A pdsh runner that quotes its words for the shell on every host."""

    def parse_user_args(self) -> list[str]:
        """Return the words for train.py, each quoted."""
        return [shlex.quote(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: dict[str, str], active_resources: Any
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the command, the command that ends it, and the environment."""
        command, kill, environment = super().get_cmd(environment, active_resources)
        prefix = kill.index("pkill -f ")  # pdsh's own words come before it, in both commands
        launch = command.index("deepspeed.launcher.launch") + 1
        command = [*command[:launch], f"--log_level={self.args.log_level}", *command[launch:]]
        command = [*command[:prefix], *map(_escape_for_pdsh, command[prefix:])]
        pattern = launch_pattern(self.args.master_addr, self.args.master_port)
        kill = [*kill[:prefix], "pkill", "-f", "--", _escape_for_pdsh(shlex.quote(pattern))]
        return command, kill, environment


def _escape_for_pdsh(word: str) -> str:
    """Escape a word for pdsh, which would replace %h, %n and %u."""
    return word if word == _NODE_RANK else word.replace("%", "%%")


class RightOpenMpi(OpenMPIRunner):
    """A runner that starts Open MPI's own mpirun."""

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        """Return the command."""
        return [find_mpirun("openmpi"), *super().get_cmd(environment, active_resources)[1:]]


class RightMpich(MPICHRunner):
    """A runner that starts MPICH's own mpirun, and the ranks without a helper."""

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        """Return the command."""
        command = super().get_cmd(environment, active_resources)
        helper = next(at for at, word in enumerate(command) if Path(word).name == "launcher_helper.py")
        script = command.index(self.user_script, helper)
        return [find_mpirun("mpich"), *command[1:helper], *command[script:]]


def main(arguments: list[str]) -> None:
    """Run a command line of `deepspeed.launcher.runner`."""
    runner.PDSHRunner, runner.OpenMPIRunner, runner.MPICHRunner = QuotingPdsh, RightOpenMpi, RightMpich
    runner.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
