"""The variables that a rank finds in its environment, and those that torch, DeepSpeed and gloo read there.

srun, Open MPI and MPICH name a process's place by variables of their own, which are translated. A launcher's variables
win over everything (the deepspeed launcher and torchrun set RANK). Then come mpirun's before srun's: under SLURM,
mpirun starts its helpers by srun, whose variables describe the helpers and not the ranks. No MPI library is loaded,
and no program is run.

Gloo, by which the ranks of a CPU run talk, binds to what the host's own name resolves to, and to loopback where that
fails: then a rank of another host is never heard. An interface by name would do, but hosts may name theirs differently,
so no environment file can hold one name for all of them. Each rank asks its own kernel instead: the route to where the
ranks meet leads over the right interface. NCCL is left alone: it looks for interfaces that are up by itself, takes
loopback last, and may use several at once.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import longstride
from longstride.kernels import ConfigError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Ports below those that systems give to outgoing connections (32768 and up on Linux).
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_NAMES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
}
_HOW = {
    "openmpi": "start by `longstride train --launcher openmpi`, or name them in ~/.deepspeed_env or by mpirun -x",
    "mpich": "start by `longstride train --launcher mpich`, or name them by mpirun -genv",
    "slurm": "export it before srun",
}


def adopt_place(environment: MutableMapping[str, str]) -> None:
    """Sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the variables of mpirun or srun.

    Changes nothing for a process that torchrun or the deepspeed launcher started, or that is alone.

    Raises:
        ConfigError: a variable is no number, they contradict each other, or nothing says where the ranks meet.
    """
    source = None if "RANK" in environment else _source(environment)
    if source is None:
        return
    place = {name: environment.get(name, "") for name in _NAMES[source]}
    if not all(text.isascii() and text.isdecimal() for text in place.values()):
        shown = ", ".join(f"{name}={text or '(missing)'}" for name, text in place.items())
        raise ConfigError(f"environment: {shown}: must be whole numbers, all three")
    rank, local_rank, world_size = place.values()
    if int(world_size) == 1:
        return  # alone, however it was started
    given = environment.get("WORLD_SIZE", world_size)
    if given != world_size:
        raise ConfigError(f"environment: WORLD_SIZE={given}: {_NAMES[source][2]} is {world_size}; leave it out")
    # Before the meeting place: a rank that knows its number knows whether it has to report a mistake.
    environment.update({"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size})
    if source == "slurm":
        hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
        if hosts is not None and "MASTER_ADDR" not in environment:
            environment["MASTER_ADDR"] = end_host(hosts)  # tasks are dealt to the hosts in the order of their list
        if "SLURM_JOB_ID" in environment and "MASTER_PORT" not in environment:
            environment["MASTER_PORT"] = str(job_port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        number = f"{_NAMES[source][0]}={rank}"
        raise ConfigError(f"environment: {number} given without {' and '.join(missing)}; {_HOW[source]}")


def _source(environment: Mapping[str, str]) -> str | None:
    """Whose variables give the place of this process; None where none do."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "openmpi"
    # `srun --mpi=pmi2` sets PMI_RANK as well, but no local rank.
    if "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        return "mpich"
    # In salloc's shell, and in a batch script itself, there is no step: a program there is started by its user.
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return "slurm"
    return None


def end_host(node_list: str, *, last: bool = False) -> str:
    """The first or the last name of SLURM's list of hosts, such as node07 and login1 of ``node[07-12,15],login1``.

    Raises:
        ConfigError: it is no such list.
    """
    problem = ConfigError(f"environment: SLURM_STEP_NODELIST={node_list}: must be hosts, such as node[01-04,07]")
    entries = re.findall(r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+", node_list)
    if ",".join(entries) != node_list or not entries:
        raise problem
    # In brackets stand ranges such as 07-12,15, the zeros in front included.
    end = -1 if last else 0
    return re.sub(r"\[(.*?)\]", lambda ranges: ranges[1].split(",")[end].split("-")[end], entries[end])


def job_port(job: str, step: str = "0") -> int:
    """A port for a step of a job: the same for all its ranks, another one for the next jobs of a host.

    Raises:
        ConfigError: the job's number is none.
    """
    if not (job.isascii() and job.isdecimal()):
        raise ConfigError(f"environment: SLURM_JOB_ID={job}: must be a whole number")
    # A prime between steps and jobs: the steps of a job do not meet the next jobs' first steps.
    steps = int(step) if step.isascii() and step.isdecimal() else 0
    return _FIRST_PORT + (int(job) + 1009 * steps) % _NUM_PORTS


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Names the interface towards MASTER_ADDR for gloo, unless the user has, or only this host takes part."""
    if "MASTER_ADDR" not in environment or GLOO_INTERFACE in environment:
        return
    towards = [environment["MASTER_ADDR"]]
    if environment.get("SLURM_STEP_NUM_NODES", "1") != "1" and "SLURM_STEP_NODELIST" in environment:
        # The host where the ranks meet may resolve its own name to loopback (Debian's /etc/hosts does): it asks for
        # the route to the last host. Launchers by ssh give an address instead, which no host takes for loopback.
        towards.append(end_host(environment["SLURM_STEP_NODELIST"], last=True))
    for host in towards:
        name = interface_towards(host)
        if name is not None:
            environment[GLOO_INTERFACE] = name
            return


def interface_towards(host: str) -> str | None:
    """The interface by which this host sends to another; None where it is loopback or unknown."""
    source = source_address(host)
    if source is None or is_loopback(source):
        return None
    import psutil  # which deepspeed asks for; Python itself cannot list the addresses of interfaces

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == source for address in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address always means this host itself."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # another name
        return False


def source_address(host: str) -> str | None:
    """The address from which this host sends to another, by its routes alone; None where it has no route."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # of a datagram socket: chooses the route and sends nothing
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def code_digest() -> str:
    """SHA-256 (hexadecimal) over the Python files of this package, their places below it included.

    A version would not do: a checkout has none, and an older one of the same version is the usual mistake.
    """
    root, digest = Path(longstride.__file__).parent, hashlib.sha256()
    for parent, folders, names in os.walk(root, followlinks=True):  # in a checkout the rooms are links
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("."):  # with a dot: an editor's
                content = Path(parent, name).read_bytes()
                place = Path(parent, name).relative_to(root).as_posix()
                digest.update(f"{place}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
