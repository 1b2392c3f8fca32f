"""The place of a process as srun, Open MPI and MPICH tell it, put into the words that torch and DeepSpeed read.

A launcher's own words win over everything (the deepspeed launcher and torchrun set RANK). Then come those of mpirun
before those of srun: under SLURM, mpirun starts its helpers by srun, whose words about a step are then the helpers' and
not the ranks'. All of it is a function of the environment: no MPI library is loaded, and no program is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from longstride.kernels import ConfigError

MASTER = ("MASTER_ADDR", "MASTER_PORT")
# Ports below those that systems give to outgoing connections (32768 and up on Linux).
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_WORDS = {
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
    """Puts RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where mpirun or srun tell them by other names.

    Changes nothing for a process that torchrun or the deepspeed launcher started, or that is alone.

    Raises:
        ConfigError: what is told is no number, contradicts itself, or lacks where the ranks meet.
    """
    source = None if "RANK" in environment else _source(environment)
    if source is None:
        return
    place = _place(environment, source)
    environment.update(place)  # a rank that knows its number knows whether it is the one to tell a mistake
    if place:
        environment.update(_meeting_place(environment, source))


def _place(environment: Mapping[str, str], source: str) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE in a launcher's words; nothing for a process alone."""
    told = [environment.get(word, "") for word in _WORDS[source]]
    place = dict(zip(_WORDS[source], told, strict=True))
    if not all(text.isascii() and text.isdecimal() for text in told):
        shown = ", ".join(f"{word}={text or '(missing)'}" for word, text in place.items())
        raise ConfigError(f"environment: {shown}: must be whole numbers, all three")
    rank, local_rank, world_size = told
    if int(world_size) == 1:
        return {}  # alone, however it was started
    given = environment.get("WORLD_SIZE", world_size)
    if given != world_size:
        raise ConfigError(f"environment: WORLD_SIZE={given}: {_WORDS[source][2]} is {world_size}; leave it out")
    return {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}


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


def _source(environment: Mapping[str, str]) -> str | None:
    """Whose words tell the place of this process; None where none do."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "openmpi"
    # `srun --mpi=pmi2` sets PMI_RANK as well, but no local rank.
    if "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        return "mpich"
    # In the shell of salloc, and in a batch script itself, there is no step: whoever starts a program there starts one.
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return "slurm"
    return None


def _meeting_place(environment: Mapping[str, str], source: str) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT as far as the environment lacks them and SLURM's words lead to them."""
    place = {name: environment[name] for name in MASTER if name in environment}
    if source == "slurm":
        hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
        if hosts is not None and "MASTER_ADDR" not in place:
            place["MASTER_ADDR"] = end_host(hosts)  # tasks are dealt to the hosts in the order of their list
        if "SLURM_JOB_ID" in environment and "MASTER_PORT" not in place:
            place["MASTER_PORT"] = str(job_port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]))
    missing = [name for name in MASTER if name not in place]
    if missing:
        word = _WORDS[source][0]
        raise ConfigError(
            f"environment: {word}={environment[word]} given without {' and '.join(missing)}; {_HOW[source]}"
        )
    return place
