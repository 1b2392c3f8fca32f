"""`deepspeed` for several hosts, with what its launchers do otherwise than a long run needs put right.

| launcher | DeepSpeed 0.19 | here |
|---|---|---|
| pdsh | hands words to the remote shell as they are: JSON loses its quotes | each word is quoted |
| pdsh | lets pdsh put a host's name and number in place of %h and %n, in overrides too | where it is meant |
| pdsh | told to stop, ends the ranks of *every* run by the same Python on those hosts | of this run alone |
| mpich | starts each rank by a helper that forgets its exit code | the rank itself; we know MPICH's words |
| pdsh | tells how it starts each rank, whatever --log_level says | as it is told |
| both MPI | starts the mpirun that is first on PATH, be it the other library's | the right one |

Everything else is `deepspeed.launcher.runner`, whose command line this is.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from deepspeed.launcher import runner
from deepspeed.launcher.multinode_runner import MPICHRunner, OpenMPIRunner, PDSHRunner

from longstride.launcher.cluster.host_checks import find_mpirun, launch_pattern

_NODE_RANK = "--node_rank=%n"  # which pdsh fills in


class QuotingPdsh(PDSHRunner):
    """pdsh, whose words pass a shell on every host."""

    def parse_user_args(self) -> list[str]:
        """The words of the run, each quoted."""
        return [shlex.quote(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: dict[str, str], active_resources: Any
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """The command, the one that ends it, and the environment."""
        command, kill, environment = super().get_cmd(environment, active_resources)
        prefix = kill.index("pkill -f ")  # pdsh's own words, the same in both
        launch = command.index("deepspeed.launcher.launch") + 1
        command = [*command[:launch], f"--log_level={self.args.log_level}", *command[launch:]]
        command = [*command[:prefix], *map(_past_pdsh, command[prefix:])]
        where = launch_pattern(self.args.master_addr, self.args.master_port)
        kill = [*kill[:prefix], "pkill", "-f", "--", _past_pdsh(shlex.quote(where))]
        return command, kill, environment


def _past_pdsh(word: str) -> str:
    """A word that pdsh hands on as it is: in all others it puts something in place of %h, %n and %u."""
    return word if word == _NODE_RANK else word.replace("%", "%%")


class FoundOpenMpi(OpenMPIRunner):
    """Open MPI's own mpirun."""

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        """The command."""
        return [find_mpirun("openmpi"), *super().get_cmd(environment, active_resources)[1:]]


class FoundMpich(MPICHRunner):
    """MPICH's own mpirun, which starts the ranks themselves."""

    def get_cmd(self, environment: dict[str, str], active_resources: Any) -> list[str]:
        """The command."""
        command = super().get_cmd(environment, active_resources)
        helper = next(at for at, word in enumerate(command) if Path(word).name == "launcher_helper.py")
        script = command.index(self.user_script, helper)
        return [find_mpirun("mpich"), *command[1:helper], *command[script:]]


def main(arguments: list[str]) -> None:
    """Runs a command line of the deepspeed launcher."""
    runner.PDSHRunner, runner.OpenMPIRunner, runner.MPICHRunner = QuotingPdsh, FoundOpenMpi, FoundMpich
    runner.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
