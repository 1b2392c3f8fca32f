"""The command lines by which launchers start the ranks of a run, on this host or on those of a hostfile."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import socket
import sys
from pathlib import Path

import torch

from longstride.kernels import ConfigError
from longstride.launcher import train
from longstride.launcher.cluster.environment import (
    ENVIRONMENT_FILE,
    host_environment,
    plain_values,
    write_host_environment,
)
from longstride.launcher.cluster.host_checks import check_program
from longstride.launcher.cluster.hostfile import Hosts, chosen_hosts, read_hostfile
from longstride.launcher.config import TRUST_OPTION

HOSTFILE = Path("/job/hostfile")  # where the deepspeed launcher looks for one
LAUNCHERS = ("pdsh", "openmpi", "mpich", "slurm")
SLURM_WAIT_SECONDS = 60  # that the other ranks may take to end after the first has
_SSH_WORDS = "PDSH_SSH_ARGS_APPEND"
# Without them ssh, and so pdsh, waits for a host that is gone for as long as TCP does.
_KEEP_ALIVE = ("-oServerAliveInterval=10", "-oServerAliveCountMax=3")
_PORTS = range(20000, 32000)  # below those that systems give to outgoing connections


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that spread a run over hosts."""
    parser.add_argument(
        "--hostfile",
        type=Path,
        default=None,
        metavar="FILE",
        help=f"lines such as `node1 slots=4` (default: {HOSTFILE} if it is there, or this host alone)",
    )
    parser.add_argument("--launcher", choices=LAUNCHERS, default=None, help="of several hosts (default: pdsh)")
    parser.add_argument(
        "--include", default="", metavar="HOST[:SLOT,…][@…]", help="of the hostfile; these alone (pdsh, slurm)"
    )
    parser.add_argument("--exclude", default="", metavar="HOST[:SLOT,…][@…]", help="of the hostfile (pdsh, slurm)")
    parser.add_argument("--master-addr", default=None, metavar="ADDRESS", help="of the first host (default: asked for)")
    parser.add_argument("--master-port", type=int, default=None, metavar="PORT", help="there (default: a free one)")
    parser.add_argument(
        "--launcher-args", default="", metavar="WORDS", help="for pdsh, mpirun or srun; one text: --launcher-args='-v'"
    )


def find_hosts(arguments: argparse.Namespace) -> Hosts | None:
    """The hosts that the options name, after all checks that start nothing there; None for this host alone.

    Raises:
        ConfigError: an option, the hostfile or the launcher is wrong.
    """
    port = arguments.master_port
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"--master-port={port}: must be from 1 to 65535, such as 29500")
    path = arguments.hostfile if arguments.hostfile is not None else HOSTFILE
    if arguments.hostfile is None and not path.exists():
        for option in ("launcher", "include", "exclude", "master_addr", "launcher_args"):
            if value := getattr(arguments, option):
                raise ConfigError(f"--{option.replace('_', '-')}={value}: is for several hosts; give --hostfile FILE")
        return None
    if arguments.processes is not None:
        raise ConfigError(f"--processes={arguments.processes}: {path} tells it for every host; change its slots")
    hosts = chosen_hosts(read_hostfile(path), arguments.include, arguments.exclude)
    launcher = arguments.launcher or "pdsh"
    if launcher in ("openmpi", "mpich"):
        for option in ("include", "exclude"):
            if value := getattr(arguments, option):
                rule = f"{launcher} cannot choose among slots; write a hostfile without the other hosts"
                raise ConfigError(f"--{option}={value}: {rule}")
    if launcher in ("mpich", "slurm") and len({len(slots) for slots in hosts.values()}) > 1:
        counts = ", ".join(f"{host} {len(slots)}" for host, slots in hosts.items())
        raise ConfigError(f"{path}: {launcher} needs as many slots on every host, and there are {counts}; use pdsh")
    try:
        shlex.split(arguments.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher-args={arguments.launcher_args}: {error}".lower()) from None
    check_program(launcher)
    return Hosts(launcher, path.absolute(), hosts, filtered=bool(arguments.include or arguments.exclude))


def launcher_environment(told: Path | None = None) -> dict[str, str]:
    """The launcher's environment, for several hosts with the file of ``tell_hosts``.

    Without a GPU it names what DeepSpeed would choose, with a warning a process.
    """
    environment = {} if torch.accelerator.is_available() else {"DS_ACCELERATOR": "cpu"}
    environment |= os.environ
    if told is not None:
        environment[ENVIRONMENT_FILE] = str(told)
        # Behind a person's own words, of which ssh takes the first.
        environment[_SSH_WORDS] = " ".join(filter(None, [os.environ.get(_SSH_WORDS), *_KEEP_ALIVE]))
    return environment


def tell_hosts(hosts: Hosts, run: Path) -> Path:
    """Writes what every host must know into the run folder; returns the file."""
    told = host_environment(launcher_environment(), Path.home(), Path.cwd())
    if hosts.launcher == "slurm":  # srun hands on the whole environment by itself
        told = {name: value for name, value in told.items() if os.environ.get(name) != value}
    told |= {"MASTER_ADDR": hosts.master_addr, "MASTER_PORT": str(hosts.master_port)}
    if hosts.launcher != "pdsh":
        told, left_out = plain_values(told, commas=hosts.launcher != "slurm")
        for name in left_out:
            print(f"longstride: {name} is not handed on to the hosts: {hosts.launcher} cuts its value", file=sys.stderr)
    return write_host_environment(run, told)


def reaches_by_ssh(hosts: Hosts, launcher_args: str) -> bool:
    """Whether the launcher starts ranks by plain ssh, rather than by srun or in a way of a person's own."""
    return hosts.launcher != "slurm" and not any(
        "agent" in word or word.startswith(("-launcher", "--launcher")) for word in shlex.split(launcher_args)
    )


def launcher_command(arguments: argparse.Namespace, processes: int | None, hosts: Hosts | None = None) -> list[str]:
    """The command line of `deepspeed launcher/train.py …`; None leaves the number of processes to the launcher."""
    if hosts is None:
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port"]
        command.append(str(arguments.master_port or _free_port()))
    else:
        command = [
            sys.executable,
            "-m",
            "longstride.launcher.cluster.deepspeed_runner",
            "--hostfile",
            str(hosts.hostfile),
        ]
        # Otherwise a single host that is left would be taken for this one.
        command += ["--launcher", hosts.launcher, "--force_multi", "--no_ssh_check"]
        command += ["--master_addr", hosts.master_addr, "--master_port", str(hosts.master_port)]
        command += [f"--include={hosts.include}"] if hosts.include else []
        command += [f"--launcher_args={_launcher_args(arguments.launcher_args, hosts)}"]
    # How it starts each rank would fill the screen, and that a rank ended is told by the rank itself.
    command += ["--log_level", "critical"]
    if processes is not None:
        command += ["--num_gpus", str(processes)]  # on a CPU too this is the number of processes
    command += [str(_script()), "--config", str(arguments.config), "--resume", arguments.resume]
    command += [TRUST_OPTION] if arguments.trust_checkpoint else []
    if arguments.replay is not None:
        command += ["--replay", arguments.replay]
    return command + arguments.overrides


def _launcher_args(given: str, hosts: Hosts) -> str:
    """What a person gave for the launcher, behind what it needs so that ranks are placed and end as ours do."""
    words = []
    if hosts.launcher == "openmpi":
        words = ["--bind-to", "none"]  # or a rank gets one core, with all of its threads and loader workers
    if hosts.launcher == "slurm":
        slots = len(next(iter(hosts.slots.values())))
        # srun must not end ranks that are about to end by themselves: it would report a kill in place of their code.
        words = ["--kill-on-bad-exit=0", f"--wait={SLURM_WAIT_SECONDS}", f"--ntasks-per-node={slots}"]
        words += [f"--nodes={len(hosts.slots)}", f"--nodelist={','.join(hosts.slots)}"]
    return shlex.join([*words, *shlex.split(given)])


def needed_files() -> list[str]:
    """What every host must have at the same path as this one."""
    return [sys.executable, str(_script())]


def free_meeting_port() -> int:
    """A port for the ranks of several hosts, free on this one and not among those that systems choose by themselves."""
    return _free_port(_PORTS)


def _script() -> Path:
    return Path(train.__file__).resolve()


def _free_port(among: range | None = None) -> int:
    """A port for the ranks to meet at: the launcher's own choice is always the same, so that two runs would clash."""
    while True:
        with socket.socket() as free:
            try:
                free.bind(("" if among else "127.0.0.1", random.choice(among) if among else 0))
            except OSError:
                continue
            return free.getsockname()[1]
