"""`deepspeed.launcher.runner` for several hosts, with corrections that long runs need. The command line is the same.

| launcher | DeepSpeed 0.19 | here |
|---|---|---|
| pdsh | passes words to the remote shell unquoted: JSON loses its quotes | quotes each word |
| pdsh | pdsh replaces %h and %n by the host's name and number, in overrides too | in --node_rank only |
| pdsh | on a stop it ends *every* run by the same Python on those hosts | this run alone |
| pdsh | prints how it starts each rank, whatever --log_level says | obeys --log_level |
| mpich | starts each rank by a helper that loses its exit code | starts the rank, which knows MPICH's variables |
| openmpi, mpich | starts the first mpirun on PATH, even the other library's | starts the library's own |
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import MPICHRunner, OpenMPIRunner, PDSHRunner

from longstride.launcher.cluster.hosts import find_mpirun, launch_pattern

_NODE_RANK = "--node_rank=%n"  # pdsh puts the number of the host here


class QuotingPdsh(PDSHRunner):
    """pdsh: its words go through a shell on every host."""

    def parse_user_args(self) -> list[str]:
        """The words for train.py, each quoted."""
        return [shlex.quote(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: dict[str, str], active_resources: Any
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """The command, the command that ends it, and the environment."""
        command, kill, environment = super().get_cmd(environment, active_resources)
        prefix = kill.index("pkill -f ")  # before it come pdsh's own words, the same in both commands
        launch = command.index("deepspeed.launcher.launch") + 1
        command = [*command[:launch], f"--log_level={self.args.log_level}", *command[launch:]]
        command = [*command[:prefix], *map(_escape_for_pdsh, command[prefix:])]
        where = launch_pattern(self.args.master_addr, self.args.master_port)
        kill = [*kill[:prefix], "pkill", "-f", "--", _escape_for_pdsh(shlex.quote(where))]
        return command, kill, environment


def _escape_for_pdsh(word: str) -> str:
    """A word that pdsh passes on unchanged: it would replace %h, %n and %u."""
    return word if word == _NODE_RANK else word.replace("%", "%%")


class RightOpenMpi(OpenMPIRunner):
    """Open MPI's own mpirun."""

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        """The command."""
        return [find_mpirun("openmpi"), *super().get_cmd(environment, active_resources)[1:]]


class RightMpich(MPICHRunner):
    """MPICH's own mpirun, starting the ranks without a helper."""

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        """The command."""
        command = super().get_cmd(environment, active_resources)
        helper = next(at for at, word in enumerate(command) if Path(word).name == "launcher_helper.py")
        script = command.index(self.user_script, helper)
        return [find_mpirun("mpich"), *command[1:helper], *command[script:]]


def main(arguments: list[str]) -> None:
    """Runs a command line of `deepspeed.launcher.runner`."""
    runner.PDSHRunner, runner.OpenMPIRunner, runner.MPICHRunner = QuotingPdsh, RightOpenMpi, RightMpich
    runner.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
