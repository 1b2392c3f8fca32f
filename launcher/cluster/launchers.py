"""The command lines and environments by which launchers start the ranks, on this host or on those of a hostfile.

A shell that ssh opens on a host has none of this shell's environment. Without PATH it does not find the programs beside
this Python; without OMP_NUM_THREADS each rank takes every core. So `longstride train` writes an environment file into
the run folder, a new one at each start, and the deepspeed launcher hands it to all hosts. The user's own files
(`~/.deepspeed_env`, `./.deepspeed_env`, or the one that DS_ENV_FILE names) override it line by line. The network
interface is not in it: hosts may name theirs differently, so each rank finds its own.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from longstride.kernels import ConfigError
from longstride.launcher import train
from longstride.launcher.cluster.hosts import Hosts
from longstride.launcher.data import FromOptions
from longstride.launcher.output import say
from longstride.launcher.verbs import TRUST_OPTION

SLURM_WAIT_SECONDS = 60  # that the other ranks may take to end after the first has
_ENVIRONMENT_FILE = "DS_ENV_FILE"  # the variable by which the deepspeed launcher finds the file
_USUAL_FILE = ".deepspeed_env"
# Handed on where they are set: where programs and libraries are, threads, the kind of device, the use of the network.
_HANDED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|OMP_\w+|MKL_NUM_THREADS|DS_ACCELERATOR|(?:GLOO|NCCL|TORCH_NCCL|UCX|FI)_\w+"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SSH_OPTIONS = "PDSH_SSH_ARGS_APPEND"
# Without them ssh, and so pdsh, waits for a host that is gone for as long as TCP does.
_KEEP_ALIVE = ("-oServerAliveInterval=10", "-oServerAliveCountMax=3")
_MEETING_PORTS = range(20000, 32000)  # below those that systems choose by themselves for outgoing connections
# What every host must have at the same path as this one: Python, and the file that every rank runs. In a checkout that
# is launcher/train.py, not its link in longstride/.
TRAINING_SCRIPT = str(Path(train.__file__).resolve())
NEEDED_FILES = (sys.executable, TRAINING_SCRIPT)


def launcher_command(
    arguments: argparse.Namespace, resume: str, processes: int | None, hosts: Hosts | None = None
) -> list[str]:
    """The command line of `deepspeed launcher/train.py …`.

    ``processes``: on this host; None leaves their number to the launcher. ``hosts``: None for this host alone.
    """
    if hosts is None:
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command += ["--master_port", str(arguments.master_port or free_port("127.0.0.1", range(1)))]
    else:
        command = [sys.executable, "-m", "longstride.launcher.cluster.deepspeed_runner"]
        command += ["--hostfile", str(hosts.hostfile), "--launcher", hosts.launcher]
        command += ["--force_multi", "--no_ssh_check"]  # or it would take a single host of the file for this one
        command += ["--master_addr", hosts.master_addr, "--master_port", str(hosts.master_port)]
        command += [f"--include={hosts.include}"] if hosts.include else []
        command += [f"--launcher_args={_launcher_args(arguments.launcher_args, hosts)}"]
    # Else it prints each rank's environment and command line; how a rank ended, the rank says itself.
    command += ["--log_level", "critical"]
    if processes is not None:
        command += ["--num_gpus", str(processes)]  # of processes, on a CPU too
    command += [TRAINING_SCRIPT, "--config", str(arguments.config), "--resume", resume]
    command += [TRUST_OPTION] if arguments.trust_checkpoint else []
    source = FromOptions.of(arguments, "auto", elsewhere=True)  # checked already
    command += [] if source is None else source.words()
    if arguments.replay is not None:
        command += ["--replay", arguments.replay]
    if arguments.profile is not None:
        command += ["--profile", arguments.profile]
    return command + arguments.overrides


def _launcher_args(given: str, hosts: Hosts) -> str:
    """The user's --launcher-args, after what each launcher needs to place ranks and to let them end by themselves."""
    words = []
    if hosts.launcher == "openmpi":
        words = ["--bind-to", "none"]  # else a rank, with all its threads and loader workers, is bound to one core
    if hosts.launcher == "slurm":
        slots = len(next(iter(hosts.slots.values())))
        # Without these srun kills ranks that are about to end by themselves, and reports the kill, not their code.
        words = ["--kill-on-bad-exit=0", f"--wait={SLURM_WAIT_SECONDS}", f"--ntasks-per-node={slots}"]
        words += [f"--nodes={len(hosts.slots)}", f"--nodelist={','.join(hosts.slots)}"]
    return shlex.join([*words, *shlex.split(given)])


def free_port(address: str = "", ports: range = _MEETING_PORTS) -> int:
    """One of the ports that is free on this host; port 0 stands for any. By default, one where several hosts can meet.

    The deepspeed launcher's own choice is always the same, so that two runs would clash.
    """
    while True:
        with socket.socket() as free:
            try:
                free.bind((address, random.choice(ports)))
            except OSError:
                continue
            return free.getsockname()[1]


def launcher_environment(environment_file: Path | None = None) -> dict[str, str]:
    """The launcher's own environment; for several hosts it names their environment file.

    Without a GPU it sets the accelerator, which DeepSpeed would choose too, but with a warning in each process.
    """
    environment = {} if torch.accelerator.is_available() else {"DS_ACCELERATOR": "cpu"}
    environment |= os.environ
    if environment_file is not None:
        environment[_ENVIRONMENT_FILE] = str(environment_file)
        # After the user's options: ssh keeps the first value.
        environment[_SSH_OPTIONS] = " ".join(filter(None, [os.environ.get(_SSH_OPTIONS), *_KEEP_ALIVE]))
    return environment


def write_hosts_environment(hosts: Hosts, run: Path) -> Path:
    """Writes the environment file of all hosts into the run folder; returns its path.

    Raises:
        ConfigError: a file of the user's is wrong, or a value cannot be handed on.
    """
    homes = []
    with suppress(RuntimeError):  # the user has none
        homes.append(Path.home())
    handed_on = host_environment(launcher_environment(), [*homes, Path.cwd()])
    if hosts.launcher == "slurm":  # srun hands on the whole environment by itself
        handed_on = {name: value for name, value in handed_on.items() if os.environ.get(name) != value}
    handed_on |= {"MASTER_ADDR": hosts.master_addr, "MASTER_PORT": str(hosts.master_port)}
    if hosts.launcher != "pdsh":
        handed_on, left_out = plain_values(handed_on, commas=hosts.launcher != "slurm")
        for name in left_out:
            say(f"{name} is not handed on to the hosts: {hosts.launcher} cuts its value")
    return write_environment_file(run, handed_on)


def host_environment(environment: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """The variables that every host gets: some of this environment's, overridden by the user's files in ``folders``.

    Raises:
        ConfigError: a line of such a file is no assignment; the launcher would end with a traceback.
    """
    handed_on = {name: value for name, value in sorted(environment.items()) if _HANDED_ON.fullmatch(name)}
    named = environment.get(_ENVIRONMENT_FILE)
    files = [folder / (_USUAL_FILE if named is None else named) for folder in folders]
    if named is not None and not any(path.is_file() for path in files):
        raise ConfigError(f"{_ENVIRONMENT_FILE}={named}: no such file; name one, or leave the variable out")
    for path in filter(Path.is_file, dict.fromkeys(files)):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, sign, value = line.strip().partition("=")
            if not sign or _NAME.fullmatch(name) is None:
                raise ConfigError(f"{path}:{number}: {line.strip()}: must be NAME=value, such as OMP_NUM_THREADS=4")
            handed_on[name] = value
    return handed_on


def plain_values(environment: Mapping[str, str], *, commas: bool) -> tuple[dict[str, str], list[str]]:
    """What the deepspeed launcher can hand on to mpirun, or to srun (no commas), and the names of what it cannot.

    It puts quotes around any other value, and no shell there takes them off again.
    """
    plain = re.compile(r"[\w@%+=:,./-]*" if commas else r"[\w@%+=:./-]*")
    kept = {name: value for name, value in environment.items() if plain.fullmatch(value)}
    return kept, [name for name in environment if name not in kept]


def write_environment_file(run: Path, environment: Mapping[str, str]) -> Path:
    """Writes a new file ``hosts-N.env`` into the run folder, an assignment a line; returns its absolute path.

    Only this user may read it: the user's own files may hold secrets.

    Raises:
        ConfigError: a value holds a quote or a line's end.
    """
    for name, value in environment.items():
        if "\n" in value or '"' in value:
            raise ConfigError(f"environment: {name} holds a quote or a line's end, which no launcher hands on")
    run.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = run.absolute() / f"hosts-{number}.env"
        try:
            with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.writelines(f"{name}={value}\n" for name, value in environment.items())
            return path
        except FileExistsError:
            number += 1
