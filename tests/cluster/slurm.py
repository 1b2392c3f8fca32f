"""A real SLURM on the test hosts: munged and slurmctld on the first, a slurmd on each."""

import os
import secrets
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Host, wait_until

_CONFIGURATION = """\
ClusterName=longstride
# The controller's own name means loopback to itself.
SlurmctldHost={controller.name}({controller.address})
AuthType=auth/munge
# A requeued job waits for so many seconds.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=20
MinJobAge=600
SchedulerParameters=batch_sched_delay=0,sched_interval=2
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """The running cluster; commands go through its first host."""

    folder: Path
    hosts: Sequence[Host]
    environment: dict[str, str]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which a user reaches it."""
        return {"SLURM_CONF": self.environment["SLURM_CONF"]}

    def command(self, *words: str, log: Path | None = None, folder: Path | None = None, timeout: float = 120) -> str:
        """Run a command as a user, check that it succeeds, and return its output."""
        out = self.folder / f"command-{secrets.token_hex(4)}.log"
        code = self.hosts[0].run(words, self.environment, folder or self.folder, log or out, timeout)
        text = (log or out).read_text()
        assert code == 0, f"{words}: {code}\n{text}"
        return text

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", maxsplit=1) for word in words if "=" in word)

    def wait_for(
        self, number: str, states: Sequence[str], timeout_seconds: float, log: Path, restarts: int = 0
    ) -> dict[str, str]:
        """Wait until a job is in one of the states, after so many restarts."""
        job: dict[str, str] = {}

        def is_there() -> bool:
            job.update(self.job(number))
            return job["JobState"] in states and int(job["Restarts"]) >= restarts

        wait_until(is_there, timeout_seconds, lambda: f"{job}, not {states}:\n{log.exists() and log.read_text()}")
        return job


def start_slurm(hosts: Sequence[Host], folder: Path) -> Slurm:
    """Start all daemons in the foreground of their hosts; they end with the hosts."""
    folder.mkdir()
    (folder / "state").mkdir()
    cores = os.cpu_count() or 1
    # SLURM only counts cores, so each host may promise more than this machine has.
    nodes = "".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs={max(4, cores)} State=UNKNOWN\n" for host in hosts
    )
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(controller=hosts[0], folder=folder, nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/root"),
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LANG": "C.UTF-8",
    }
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    _start(hosts[0], munged, environment, folder)
    _wait(lambda: (folder / "munge.socket").exists(), folder)
    _start(hosts[0], ["slurmctld", "-D"], environment, folder)
    for host in hosts:
        _start(host, ["slurmd", "-D", "-N", host.name], environment, folder)
    slurm = Slurm(folder, hosts, environment)

    def all_idle() -> bool:
        try:
            return slurm.command("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle"] * len(hosts)
        except AssertionError:
            return False  # the controller is not there yet

    _wait(all_idle, folder)
    return slurm


def _start(host: Host, command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    return host.start(command, environment, folder, folder / f"{command[0]}-{host.name}.out")


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    wait_until(condition, 90, lambda: "\n".join(f"{log}:\n{log.read_text()}" for log in folder.glob("*.log")))
