"""Place the ranks of a run: on this host or several, by which command line, and on fewer after a loss.

A shell that ssh opens on a host has none of this shell's environment. Without PATH it does not find the programs next
to this Python. Without OMP_NUM_THREADS each rank takes every core. Therefore each start writes a new environment file
into the run folder, and the deepspeed launcher applies it on all hosts. The user's own files (`~/.deepspeed_env`,
`./.deepspeed_env`, or the one that DS_ENV_FILE names) override it line by line. The file does not set the network
interface, which may have another name on each host; each rank finds its own.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from longstride.kernels import ConfigError
from longstride.launcher import train
from longstride.launcher.cluster.hosts import Hosts, end_launches, launch_pattern, meeting_address, unreachable
from longstride.launcher.cluster.supervisor import Launch
from longstride.launcher.config import RunConfig
from longstride.launcher.data import WeightSource
from longstride.launcher.output import counting, say
from longstride.launcher.verbs import TRUST_OPTION

VISIBLE = "CUDA_VISIBLE_DEVICES"  # without a number of processes, the deepspeed launcher takes all of these
_COUNT_SECONDS = 120.0
SLURM_WAIT_SECONDS = 60  # for the remaining ranks to end after the first
_ENVIRONMENT_FILE = "DS_ENV_FILE"  # the variable by which the deepspeed launcher finds the file
_USUAL_FILE = ".deepspeed_env"
# Variables that all hosts get: search paths, threads, the kind of device, network settings.
_EXPORTED = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|OMP_\w+|MKL_NUM_THREADS|DS_ACCELERATOR|(?:GLOO|NCCL|TORCH_NCCL|UCX|FI)_\w+"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SSH_OPTIONS = "PDSH_SSH_ARGS_APPEND"
# Without these, ssh and therefore pdsh wait for a lost host until TCP gives up.
_KEEP_ALIVE = ("-oServerAliveInterval=10", "-oServerAliveCountMax=3")
_MEETING_PORTS = range(20000, 32000)  # below the ports that systems choose for outgoing connections
# Every host must have these at the same path: Python, and the script of the ranks. In a checkout the script is
# launcher/train.py, not its link in longstride/.
TRAINING_SCRIPT = str(Path(train.__file__).resolve())
NEEDED_FILES = (sys.executable, TRAINING_SCRIPT)


def launcher_command(
    arguments: argparse.Namespace, resume: str, processes: int | None, hosts: Hosts | None = None
) -> list[str]:
    """Return the command line of `deepspeed launcher/train.py …` for the arguments of `longstride train`.

    ``processes`` is their number on this host; None leaves it to the launcher. ``hosts`` is None for this host alone.
    """
    if hosts is None:
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command += ["--master_port", str(arguments.master_port or free_port("127.0.0.1", range(1)))]
    else:
        command = [sys.executable, "-m", "longstride.launcher.cluster.deepspeed_runner"]
        command += ["--hostfile", str(hosts.hostfile), "--launcher", hosts.launcher]
        command += ["--force_multi", "--no_ssh_check"]  # otherwise a single host of the file means this one
        command += ["--master_addr", hosts.master_addr, "--master_port", str(hosts.master_port)]
        command += [f"--include={hosts.include}"] if hosts.include else []
        words = []  # each launcher's own, to place ranks and to let them end by themselves; the user's come after them
        if hosts.launcher == "openmpi":
            words = ["--bind-to", "none"]  # otherwise a rank, with its threads and loader workers, gets one core
        if hosts.launcher == "slurm":
            slots = len(next(iter(hosts.slots.values())))
            # Without these srun kills ranks that are about to end, and reports the kill instead of their code.
            words = ["--kill-on-bad-exit=0", f"--wait={SLURM_WAIT_SECONDS}", f"--ntasks-per-node={slots}"]
            words += [f"--nodes={len(hosts.slots)}", f"--nodelist={','.join(hosts.slots)}"]
        command += [f"--launcher_args={shlex.join([*words, *shlex.split(arguments.launcher_args)])}"]
    # Otherwise it prints each rank's environment and command line. A rank itself reports how it ended.
    command += ["--log_level", "critical"]
    if processes is not None:
        command += ["--num_gpus", str(processes)]  # the number of processes, on a CPU too
    command += [TRAINING_SCRIPT, "--config", str(arguments.config), "--resume", resume]
    command += [TRUST_OPTION] if arguments.trust_checkpoint else []
    source = WeightSource.of(arguments, "auto", elsewhere=True)  # has been checked
    command += [] if source is None else source.words()
    if arguments.replay is not None:
        command += ["--replay", arguments.replay]
    if arguments.profile is not None:
        command += ["--profile", arguments.profile]
    return command + arguments.overrides


def free_port(address: str = "", ports: range = _MEETING_PORTS) -> int:
    """Choose a port of a range that is free on this host; port 0 stands for any.

    The deepspeed launcher always chooses the same port, so two runs would clash.
    """
    while True:
        with socket.socket() as free:
            try:
                free.bind((address, random.choice(ports)))
            except OSError:
                continue
            return free.getsockname()[1]


def launcher_environment(environment_file: Path | None = None) -> dict[str, str]:
    """Return the launcher's own environment; for several hosts it names their environment file.

    Without a GPU it sets DS_ACCELERATOR. DeepSpeed would choose the same, but with a warning in each process.
    """
    environment = {} if torch.accelerator.is_available() else {"DS_ACCELERATOR": "cpu"}
    environment |= os.environ
    if environment_file is not None:
        environment[_ENVIRONMENT_FILE] = str(environment_file)
        # These follow the user's options, as ssh uses the first value.
        environment[_SSH_OPTIONS] = " ".join(filter(None, [os.environ.get(_SSH_OPTIONS), *_KEEP_ALIVE]))
    return environment


def write_hosts_environment(hosts: Hosts, run: Path) -> Path:
    """Write the environment file of all hosts into the run folder; return its path."""
    homes = []
    with suppress(RuntimeError):  # the user has no home
        homes.append(Path.home())
    variables = host_environment(launcher_environment(), [*homes, Path.cwd()])
    if hosts.launcher == "slurm":  # srun itself passes on the whole environment
        variables = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    variables |= {"MASTER_ADDR": hosts.master_addr, "MASTER_PORT": str(hosts.master_port)}
    if hosts.launcher != "pdsh":
        variables, omitted = plain_values(variables, commas=hosts.launcher != "slurm")
        for name in omitted:
            say(f"{name} is not passed on to the hosts, because {hosts.launcher} would truncate its value")
    return write_environment_file(run, variables)


def host_environment(environment: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return the variables of every host: some of this environment, overridden by the user's files in ``folders``.

    ConfigError names a line that is not an assignment. The launcher would end with a traceback.
    """
    variables = {name: value for name, value in sorted(environment.items()) if _EXPORTED.fullmatch(name)}
    user_file = environment.get(_ENVIRONMENT_FILE)
    files = [folder / (_USUAL_FILE if user_file is None else user_file) for folder in folders]
    if user_file is not None and not any(path.is_file() for path in files):
        raise ConfigError(f"{_ENVIRONMENT_FILE}={user_file}: no such file; name one, or leave the variable out")
    for path in filter(Path.is_file, dict.fromkeys(files)):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, sign, value = line.strip().partition("=")
            if not sign or _NAME.fullmatch(name) is None:
                raise ConfigError(f"{path}:{number}: {line.strip()}: must be NAME=value, such as OMP_NUM_THREADS=4")
            variables[name] = value
    return variables


def plain_values(environment: Mapping[str, str], *, commas: bool) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the deepspeed launcher can pass on to mpirun or srun, and the names of the others.

    The launcher quotes all other values, and no shell removes the quotes. Values for srun must have no commas.
    """
    pattern = re.compile(r"[\w@%+=:,./-]*" if commas else r"[\w@%+=:./-]*")
    plain = {name: value for name, value in environment.items() if pattern.fullmatch(value)}
    return plain, [name for name in environment if name not in plain]


def write_environment_file(run: Path, environment: Mapping[str, str]) -> Path:
    """Write a new file ``hosts-N.env`` into the run folder, one assignment a line; return its absolute path.

    Only this user may read it, as the user's own files may contain secrets.
    """
    for name, value in environment.items():
        if "\n" in value or '"' in value:
            raise ConfigError(f"environment: {name} contains a quote or a line break, which no launcher passes on")
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


def local_accelerators() -> int:
    """Return the number of accelerators that this process sees and DeepSpeed would use."""
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available()
    return 0 if on_cpu else torch.accelerator.device_count()


class NoHostAnswersError(Exception):
    """No host answers. Perhaps only this host has lost its network for a while."""


class LocalRanks:
    """The ranks of a run on this host alone: ``processes``, or one per GPU. ``started`` is a time of time.time()."""

    def __init__(self, config: RunConfig, arguments: argparse.Namespace, processes: int | None, started: float) -> None:
        self._config, self._arguments, self._processes, self._started = config, arguments, processes, started
        self._accelerators = local_accelerators()
        self._environment = launcher_environment()
        if processes or self._accelerators:  # otherwise DeepSpeed starts one per NUMA node, and counts these itself
            config.check_world_size(processes or self._accelerators)
        if self._accelerators and torch.cuda.is_available():
            if processes is not None and processes > self._accelerators:
                raise ConfigError(
                    f"--processes={processes}: each needs a GPU, but only {self._accelerators} are visible"
                )
            if os.environ.get(VISIBLE):
                self._use_gpus(processes or self._accelerators)

    def __str__(self) -> str:
        count = self._processes or self._accelerators
        return counting.processes(count) if count else "processes"

    def launch(self, resume: str) -> Launch:
        """Describe how to start the ranks with a value of --resume."""
        command = launcher_command(self._arguments, resume, self._processes)
        return _launch(command, self._environment, Path(self._config.train.output).absolute(), self._started)

    def shrink(self) -> str:
        """Use as many of the remaining GPUs as the batch divides over; return the number of processes in words."""
        if self._accelerators == 0:
            return f"with {'as many processes' if self._processes is None else counting.processes(self._processes)}"
        available = count_accelerators()
        before = self._processes or self._accelerators
        if available >= before:
            return f"with {counting.processes(before)}"
        taken = largest_run(self._config, {"": range(available)}, f"{available} of {self._accelerators} GPUs")
        self._use_gpus(len(taken[""]))
        return f"with {counting.processes(len(taken['']))}, as {available} GPUs are left of {before}"

    def end_elsewhere(self) -> None:
        """Do nothing: the supervisor has ended all processes on this host."""

    def _use_gpus(self, count: int) -> None:
        """Select the first GPUs by the environment, which the launcher reads only without a number of processes."""
        value = self._environment.get(VISIBLE, "")
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not all(name.isdecimal() for name in names):
            raise ConfigError(f"{VISIBLE}={value}: the deepspeed launcher accepts only numbers, such as 0,1")
        selected = (names or [str(number) for number in range(count)])[:count]
        self._environment = {**self._environment, VISIBLE: ",".join(selected)}
        self._processes, self._accelerators = None, count


class HostRanks:
    """The ranks of a run on the hosts of a hostfile. Checks by ssh that each host answers and has the program."""

    def __init__(self, config: RunConfig, arguments: argparse.Namespace, hosts: Hosts, started: float) -> None:
        self._config, self._arguments, self._hosts, self._started = config, arguments, hosts, started
        self._run = Path(config.train.output).absolute()
        # Ranks are otherwise started by srun, or by an agent that the user names.
        self._by_ssh = hosts.launcher != "slurm" and not any(
            "agent" in word or word.startswith(("-launcher", "--launcher"))
            for word in shlex.split(arguments.launcher_args)
        )
        self._answering = list(hosts.slots)
        self._pattern = ""  # matches the newest launch
        self._address = arguments.master_addr or meeting_address(self._answering)
        if self._by_ssh and (problems := unreachable(self._answering, NEEDED_FILES)):
            raise ConfigError(*problems.values())

    def __str__(self) -> str:
        return f"{counting.processes(len(self._hosts.of_ranks))} on {', '.join(self._hosts.slots)}"

    def launch(self, resume: str) -> Launch:
        """Describe how to start the ranks with a value of --resume, at a new port."""
        port = self._arguments.master_port or free_port()
        hosts = replace(self._hosts, master_addr=self._address, master_port=port)
        self._pattern = launch_pattern(hosts.master_addr, hosts.master_port)
        environment = launcher_environment(write_hosts_environment(hosts, self._run))
        command = launcher_command(self._arguments, resume, None, hosts)
        return replace(_launch(command, environment, self._run, self._started), elsewhere=True)

    def shrink(self) -> str:
        """Use the hosts that still answer; return the number of processes in words.

        NoHostAnswersError means that this host may have lost its own network. ConfigError means that the batch does not
        divide over what is left, or that the launcher cannot leave out a host.
        """
        lost = unreachable(list(self._hosts.slots), NEEDED_FILES) if self._by_ssh else {}
        self._answering = [host for host in self._hosts.slots if host not in lost]
        if not lost:
            return f"with {len(self._hosts.of_ranks)} processes on the same hosts"
        remaining = self._hosts.only({host: self._hosts.slots[host] for host in self._answering})
        if not remaining.slots:
            raise NoHostAnswersError("no host answers any more; their processes keep running")
        if remaining.launcher != "pdsh":
            raise ConfigError(f"{', '.join(lost)} does not answer; write a hostfile without it, and --resume auto")
        remaining = remaining.only(largest_run(self._config, remaining.slots, f"{len(remaining.of_ranks)} slots"))
        if next(iter(remaining.slots)) != next(iter(self._hosts.slots)):
            self._address = meeting_address(list(remaining.slots))
        self._hosts = remaining
        return f"with {len(remaining.of_ranks)} processes, as {', '.join(lost)} does not answer"

    def end_elsewhere(self) -> None:
        """End the processes of the newest launch on hosts that answer. MPI and SLURM do this by themselves."""
        if self._by_ssh and self._hosts.launcher == "pdsh":
            end_launches(self._answering, self._pattern)


def _launch(command: list[str], environment: dict[str, str], run: Path, started: float) -> Launch:
    # With --started, the ranks of a restart count max_seconds from the run's start.
    file = run / f".stop-{secrets.token_hex(8)}"
    return Launch([*command, f"--stop-file={file}", f"--started={started!r}"], environment, file)


def largest_run(config: RunConfig, slots: Mapping[str, Sequence[int]], available: str) -> dict[str, list[int]]:
    """Return as many of the first slots as the batch divides over, with the ranks of a context on one host.

    Raises ConfigError, which quotes ``available``, if there are none.
    """
    for size in range(sum(map(len, slots.values())), 0, -1):
        taken: dict[str, list[int]] = {}
        for host, numbers in slots.items():
            count = min(len(numbers), size - sum(map(len, taken.values())))
            if count:
                taken[host] = list(numbers[:count])
        with suppress(ConfigError):
            config.check_world_size(size)
            config.check_hosts([host for host, numbers in taken.items() for _ in numbers])
            return taken
    raise ConfigError(f"{available} are left, and the run cannot be divided over that many")


def count_accelerators() -> int:
    """Count the accelerators in a new process, as torch remembers the first count in a process."""
    code = "import torch; print(torch.accelerator.device_count())"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False
        )
        return int(ended.stdout.split()[-1]) if ended.returncode == 0 else 0
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return 0
