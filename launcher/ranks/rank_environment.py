"""Environment variables of a rank: those that launchers set, and those that torch, DeepSpeed and gloo read.

srun, Open MPI and MPICH have their own variables for a process's place, which are translated. The deepspeed launcher's
and torchrun's RANK take precedence. mpirun's precede srun's: under SLURM, mpirun starts its helpers by srun, and srun's
variables describe the helpers. No MPI library is loaded, and no program is run.

In a CPU run, ranks communicate by gloo. It binds to the address of the host's own name, or to loopback if that fails,
and then other hosts cannot reach it. Interface names may differ between hosts, so no environment file can set one for
all. Each rank therefore uses the interface of its route to the meeting place. NCCL needs no help: it finds active
interfaces itself, tries loopback last, and may use several at once.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import re
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import longstride
from longstride.kernels import ConfigError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Ports below those of outgoing connections (32768 and up on Linux).
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_NAMES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
}
_ADVICE = {
    "openmpi": "start by `longstride train --launcher openmpi`, or name them in ~/.deepspeed_env or by mpirun -x",
    "mpich": "start by `longstride train --launcher mpich`, or name them by mpirun -genv",
    "slurm": "export it before srun",
}


def adopt_launcher_variables(environment: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the variables of mpirun or srun.

    Changes nothing for a process that torchrun or the deepspeed launcher started, or that is alone.

    Raises:
        ConfigError: a variable is not a number, they contradict each other, or the meeting place is unknown.
    """
    if "RANK" in environment:
        return
    if "OMPI_COMM_WORLD_RANK" in environment:
        source = "openmpi"
    # `srun --mpi=pmi2` also sets PMI_RANK, but no local rank.
    elif "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        source = "mpich"
    # salloc's shell and batch scripts have no step. There the user starts the program.
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        source = "slurm"
    else:
        return
    place = {name: environment.get(name, "") for name in _NAMES[source]}
    if not all(text.isascii() and text.isdecimal() for text in place.values()):
        shown = ", ".join(f"{name}={text or '(missing)'}" for name, text in place.items())
        raise ConfigError(f"environment: {shown}: all three must be integers")
    rank, local_rank, world_size = place.values()
    if int(world_size) == 1:
        return  # alone
    set_size = environment.get("WORLD_SIZE", world_size)
    if set_size != world_size:
        raise ConfigError(f"environment: WORLD_SIZE={set_size}: {_NAMES[source][2]} is {world_size}; leave it out")
    # First, because a rank needs its number to know whether it reports mistakes.
    environment.update({"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size})
    if source == "slurm":
        hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
        if hosts is not None and "MASTER_ADDR" not in environment:
            environment["MASTER_ADDR"] = end_host(hosts)  # tasks are assigned to the hosts in order
        if "SLURM_JOB_ID" in environment and "MASTER_PORT" not in environment:
            environment["MASTER_PORT"] = str(job_port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        number = f"{_NAMES[source][0]}={rank}"
        raise ConfigError(f"environment: {number} given without {' and '.join(missing)}; {_ADVICE[source]}")


def end_host(node_list: str, *, last: bool = False) -> str:
    """Return the first or last host of SLURM's list: node07 or login1 for ``node[07-12,15],login1``."""
    problem = ConfigError(f"environment: SLURM_STEP_NODELIST={node_list}: must be hosts, such as node[01-04,07]")
    entries = re.findall(r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+", node_list)
    if ",".join(entries) != node_list or not entries:
        raise problem
    # Brackets contain ranges such as 07-12,15, with leading zeros.
    end = -1 if last else 0
    return re.sub(r"\[(.*?)\]", lambda ranges: ranges[1].split(",")[end].split("-")[end], entries[end])


def job_port(job: str, step: str = "0") -> int:
    """Return a port for a step of a job, the same for all its ranks and another one for the next jobs."""
    if not (job.isascii() and job.isdecimal()):
        raise ConfigError(f"environment: SLURM_JOB_ID={job}: must be an integer")
    # A prime factor keeps the steps of a job apart from the first steps of the next jobs.
    steps = int(step) if step.isascii() and step.isdecimal() else 0
    return _FIRST_PORT + (int(job) + 1009 * steps) % _NUM_PORTS


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the interface towards MASTER_ADDR for gloo, unless the user has, or there is only this host."""
    if "MASTER_ADDR" not in environment or GLOO_INTERFACE in environment:
        return
    towards = [environment["MASTER_ADDR"]]
    if environment.get("SLURM_STEP_NUM_NODES", "1") != "1" and "SLURM_STEP_NODELIST" in environment:
        # The meeting host may resolve its own name to loopback, as in Debian's /etc/hosts. It therefore uses the route
        # to the last host. Launchers by ssh set an address, which is never loopback.
        towards.append(end_host(environment["SLURM_STEP_NODELIST"], last=True))
    for host in towards:
        name = interface_towards(host)
        if name is not None:
            environment[GLOO_INTERFACE] = name
            return


def interface_towards(host: str) -> str | None:
    """Return the interface on which this host sends to another; None if it is loopback or unknown."""
    source = source_address(host)
    if source is None or is_loopback(source):
        return None
    import psutil  # required by deepspeed; Python itself cannot list the addresses of interfaces

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == source for address in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or address always means this host."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def source_address(host: str) -> str | None:
    """Return the address from which this host sends to another, by its routes; None without a route."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # chooses the route, and sends nothing on a datagram socket
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def processor_name() -> str:
    """Return the processor's name, or its architecture if the system does not know it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def code_digest() -> str:
    """Return a SHA-256 (hexadecimal) over the Python files of this package and their relative paths.

    A version does not suffice: a checkout has none, and the usual mistake is older code of the same version.
    """
    root, digest = Path(longstride.__file__).parent, hashlib.sha256()
    for parent, folders, names in os.walk(root, followlinks=True):  # in a checkout the packages are links
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("."):  # a leading dot marks an editor's file
                content = Path(parent, name).read_bytes()
                place = Path(parent, name).relative_to(root).as_posix()
                digest.update(f"{place}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
