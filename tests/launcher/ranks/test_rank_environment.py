"""The place of a process in the words of srun, Open MPI and MPICH; the environments are real ones, cut short."""

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.ranks.rank_environment import adopt_launcher_variables, end_host, job_port

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_NTASKS": "6",  # of the job, not of the step
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "2", "MPI_LOCALRANKID": "0", "PMI_SIZE": "4", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}


def adopted(environment: dict[str, str]) -> dict[str, str]:
    """What is new in an environment."""
    changed = dict(environment)
    adopt_launcher_variables(changed)
    return {name: value for name, value in changed.items() if environment.get(name) != value}


def test_srun_tells_the_place_and_where_to_meet() -> None:
    found = adopted(SRUN)
    assert found == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node2",
        "MASTER_PORT": str(job_port("4711")),
    }
    assert Ranks.from_environment(SRUN | found) == Ranks(3, 1, 4)
    assert adopted(SRUN | MEETING) == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize("words", [OPENMPI, MPICH])
def test_mpirun_tells_the_place(words: dict[str, str]) -> None:
    environment = words | MEETING
    found = adopted(environment)
    assert found.items() <= {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items()
    assert Ranks.from_environment(environment | found) == Ranks(2, 0, 4)
    # Under SLURM, srun starts the helper of mpirun, and its words are about that.
    helper = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert Ranks.from_environment(helper | environment | adopted(helper | environment)) == Ranks(2, 0, 4)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"} | SRUN,  # torchrun or the deepspeed launcher in a step
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},  # a batch script, or salloc's shell
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # `srun --pty bash`
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},  # `srun --mpi=pmi2` gives no local rank; srun's own words do
    ],
)
def test_process_that_is_no_rank_stays_alone(environment: dict[str, str]) -> None:
    assert adopted(environment) == {}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (OPENMPI, "OMPI_COMM_WORLD_RANK=2 given without MASTER_ADDR and MASTER_PORT; start by `longstride train"),
        (MPICH | {"MASTER_ADDR": "a"}, "PMI_RANK=2 given without MASTER_PORT; start by"),
        (MPICH | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8: PMI_SIZE is 4; leave it out"),
        (SRUN | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID=x"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, r"SLURM_LOCALID=\(missing\)"),
        ({k: v for k, v in SRUN.items() if "NODELIST" not in k}, "SLURM_PROCID=3 given without MASTER_ADDR; export"),
        (SRUN | {"SLURM_STEP_NODELIST": "node[1-"}, r"SLURM_STEP_NODELIST=node\[1-: must be hosts"),
        (SRUN | {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID=x: must be an integer"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(environment: dict[str, str], message: str) -> None:
    changed = dict(environment)
    with pytest.raises(ConfigError, match=message) as refused:
        adopt_launcher_variables(changed)
    assert len(str(refused.value).splitlines()) == 1


def test_rank_that_lacks_a_meeting_place_knows_whether_it_is_to_tell() -> None:
    environment = dict(OPENMPI)
    with pytest.raises(ConfigError):
        adopt_launcher_variables(environment)
    assert environment["RANK"] == "2"


@pytest.mark.parametrize(
    ("listed", "first", "last"),
    [
        ("node1", "node1", "node1"),
        ("node[1-2]", "node1", "node2"),
        ("node[07-12,15],login1", "node07", "login1"),
        ("r[1-2]n[01-03]", "r1n01", "r2n03"),
        ("a,b[3,5]", "a", "b5"),
    ],
)
def test_lists_of_hosts_have_two_ends(listed: str, first: str, last: str) -> None:
    assert (end_host(listed), end_host(listed, last=True)) == (first, last)


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    ports = [job_port(str(job), str(step)) for job in range(100, 200) for step in range(5)]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 32768 for port in ports)
