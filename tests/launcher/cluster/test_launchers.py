"""`longstride train` on the hosts of a hostfile: the command line, the environment of hosts, and what is refused."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.cluster.placement import host_environment, plain_values, write_environment_file
from longstride.launcher.cluster.supervisor import Launch, Outcome
from longstride.launcher.output import exit_codes
from tests.harness.programs import Programs
from tests.harness.runs import ROOT
from tests.launcher.cluster.test_hosts import VERSIONS
from tests.launcher.conftest import Refusal
from tests.launcher.test_cli import supervised

Started = Callable[..., tuple[list[str], dict[str, str]]]
SHELL = {
    "PATH": "/venv/bin:/usr/bin",
    "OMP_NUM_THREADS": "4",
    "NCCL_DEBUG": "INFO",
    "DS_ACCELERATOR": "cpu",
    "HOME": "/home/me",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
}
HANDED_ON = {name: SHELL[name] for name in ("DS_ACCELERATOR", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH")}


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text("node1 slots=2\nnode2 slots=2\n")
    return path


@pytest.fixture
def started(
    tmp_path: Path, config_file: Path, hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Return a function of a launcher and more words -> the command line and environment of the launch."""
    launches = supervised(monkeypatch)
    monkeypatch.setattr("longstride.launcher.cluster.placement.meeting_address", lambda hosts: "10.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    programs = Programs(tmp_path / "bin", monkeypatch)
    for name in ("pdsh", "ssh", "ompi_info", "srun", "sinfo"):
        programs.add(name)

    def start(launcher: str, *words: str) -> tuple[list[str], dict[str, str]]:
        programs.add("mpirun", VERSIONS.get(launcher, ""))
        arguments = ["train", "--config", str(config_file), "--hostfile", str(hostfile), "--launcher", launcher]
        assert cli.main([*arguments, *words]) == 0
        launch = launches.pop()
        return launch.command, launch.environment

    return start


def option(command: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in command if word.startswith(f"{name}="))


def test_hosts_go_to_the_deepspeed_launcher(started: Started, hostfile: Path, config_file: Path) -> None:
    command, environment = started("pdsh", "--include=node2", 'model.attention={"type":"dense"}')
    assert command[:3] == [sys.executable, "-m", "longstride.launcher.cluster.deepspeed_runner"]
    assert command[command.index("--hostfile") + 1] == str(hostfile)
    assert command[command.index("--launcher") + 1] == "pdsh"
    assert command[command.index("--master_addr") + 1] == "10.0.0.1"
    assert 20000 <= int(command[command.index("--master_port") + 1]) < 32000
    assert "--include=node2:0,1" in command
    assert "--force_multi" in command  # node2 is one host, and not this one
    script = command.index(str(ROOT / "launcher/train.py"))
    assert command[script + 1 : -2] == [
        *("--config", str(config_file), "--resume", "never", 'model.attention={"type":"dense"}')
    ]
    file = Path(environment["DS_ENV_FILE"])
    assert file == config_file.parent / "run" / "hosts-1.env"
    assert f"PATH={os.environ['PATH']}\n" in file.read_text()


def test_hostfile_of_the_system_is_taken_where_none_is_given(
    started: Started, hostfile: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longstride.launcher.cluster.hosts.HOSTFILE", hostfile)
    launches = supervised(monkeypatch)
    assert cli.main(["train", "--config", str(config_file)]) == 0
    [command] = (launch.command for launch in launches)
    assert command[command.index("--hostfile") + 1] == str(hostfile)
    assert "--num_gpus" not in command


def test_what_openmpi_and_srun_need_stands_before_what_is_given(started: Started) -> None:
    command, environment = started("openmpi", "--launcher-args=--allow-run-as-root --mca plm_ssh_agent 'my ssh'")
    words = shlex.split(option(command, "--launcher_args"))
    assert words == ["--bind-to", "none", "--allow-run-as-root", "--mca", "plm_ssh_agent", "my ssh"]
    written = Path(environment["DS_ENV_FILE"]).read_text()  # the launcher gives mpirun no meeting place
    port = command[command.index("--master_port") + 1]
    assert f"MASTER_ADDR=10.0.0.1\nMASTER_PORT={port}\n" in written
    command, environment = started("slurm", "--launcher-args=--qos=long", "--master-port", "29511")
    words = shlex.split(option(command, "--launcher_args"))
    assert words[:3] == ["--kill-on-bad-exit=0", "--wait=60", "--ntasks-per-node=2"]
    assert words[3:] == ["--nodes=2", "--nodelist=node1,node2", "--qos=long"]
    written = Path(environment["DS_ENV_FILE"]).read_text()  # srun hands on the rest by itself
    assert "MASTER_PORT=29511\n" in written and "PATH=" not in written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--launcher", "pdsh"], "--launcher=pdsh: only applies to several hosts; give --hostfile FILE"),
        (["--include", "node1"], "--include=node1: only applies to several hosts; give --hostfile FILE"),
        (["--hostfile", "gone"], "--hostfile=gone: no such file"),
        (["--hostfile", "{}", "--processes", "2"], "--processes=2: {} already sets this; change `slots=` there"),
        (["--hostfile", "{}", "--master-port", "0"], "--master-port=0: must be from 1 to 65535, such as 29500"),
        (["--hostfile", "{}", "--launcher-args='"], "--launcher-args=': no closing quotation"),
        (["--hostfile", "{}", "--launcher", "mpich", "--include", "node1"], "--include=node1: mpich cannot select"),
        (["--hostfile", "{}", "train.global_batch=6"], "train.global_batch=6: must be a multiple of micro_batch 2 × 4"),
    ],
)
def test_wrong_options_start_and_write_nothing(
    words: list[str],
    message: str,
    started: Started,
    hostfile: Path,
    config_file: Path,
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("longstride.launcher.cluster.hosts.HOSTFILE", hostfile.with_name("none"))
    words = [word.replace("{}", str(hostfile)) for word in words]
    assert message.replace("{}", str(hostfile)) in refusal("train", "--config", config_file, *words)


def test_host_that_is_lost_is_left_out_where_the_launcher_can(
    started: Started, config_file: Path, hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile.write_text("node1 slots=1\nnode2 slots=1\nnode3 slots=2\n")
    ended = [Outcome(exit_codes.HUNG, "a process was lost"), Outcome(0, "done")]
    commands: list[list[str]] = []

    lost: dict[str, str] = {}  # by host, once a launch has ended

    def supervise(launch: Launch, *_: object) -> Outcome:
        commands.append(launch.command)
        lost["node1"] = "no answer"
        return ended.pop(0)

    def unreachable(hosts: list[str], _: object) -> dict[str, str]:
        return {host: line for host, line in lost.items() if host in hosts}

    cleared: list[tuple[list[str], str]] = []
    monkeypatch.setattr("longstride.launcher.cluster.placement.end_launches", lambda *where: cleared.append(where))
    monkeypatch.setattr("longstride.launcher.cluster.start._FIRST_WAIT_SECONDS", 0.0)
    started("openmpi")  # puts the programs in place
    monkeypatch.setattr("longstride.launcher.cluster.start.supervise", supervise)
    monkeypatch.setattr("longstride.launcher.cluster.placement.unreachable", unreachable)
    words = ["train", "--config", str(config_file), "--hostfile", str(hostfile), "--max-restarts", "1"]
    assert cli.main([*words, "train.global_batch=24"]) == 0
    first, second = commands
    assert not any(word.startswith("--include") for word in first)
    assert "--include=node2:0@node3:0,1" in second
    assert second[second.index("--resume") + 1] == "auto"
    port = first[first.index("--master_port") + 1]
    assert cleared == [(["node2", "node3"], f"[-]-master_addr=10.0.0.1 --master_port={port} ")]
    # A batch of 16 does not divide over the three slots that are left.
    ended[:] = [Outcome(exit_codes.HUNG, "a process was lost"), Outcome(0, "done")]
    lost.clear()
    assert cli.main([*words, "train.global_batch=16"]) == 0
    assert "--include=node2:0@node3:0" in commands[-1]
    # MPI's launchers cannot leave a host out.
    ended[:] = [Outcome(exit_codes.HUNG, "a process was lost")]
    lost.clear()
    assert cli.main([*words, "train.global_batch=24", "--launcher=openmpi"]) == exit_codes.HUNG
    assert len(cleared) == 2


def test_host_is_not_cut_through_those_that_share_a_context(
    started: Started, hostfile: Path, config_file: Path, refusal: Refusal
) -> None:
    """Check this after filters, and with unequal slots; start what covers full hosts, or stays within one."""
    hostfile.write_text("node1 slots=2\nnode2 slots=4\nnode3 slots=2\n")
    shared = ("model.heads=4", "train.sequence_parallel=4")
    rule = "must divide the processes of every host, or equal those of several hosts; node2 has ranks 2 to 5; nearest 2"
    line = refusal("train", "--config", config_file, "--hostfile", hostfile, *shared)
    assert line == f"train.sequence_parallel=4: {rule}"
    for words in (["--exclude=node2"], ["--include=node2"], ["--include=node2:1,2@node1"]):
        started("pdsh", *shared, *words)
    started("pdsh", "train.sequence_parallel=2", "train.micro_batch=1")


def test_unequal_hosts_are_for_pdsh_alone(
    started: Started, hostfile: Path, config_file: Path, refusal: Refusal
) -> None:
    hostfile.write_text("node1 slots=3\nnode2 slots=1\n")
    line = refusal("train", "--config", config_file, "--hostfile", hostfile, "--launcher", "slurm")
    assert "slurm needs equal slots on every host, but they differ: node1 3, node2 1; use pdsh" in line
    started("pdsh")


def test_hosts_get_the_paths_of_programs_and_no_secrets(tmp_path: Path) -> None:
    assert host_environment(SHELL, [tmp_path, tmp_path]) == HANDED_ON


def test_files_of_the_user_override_it(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / ".deepspeed_env").write_text("# mine\n\nOMP_NUM_THREADS=2\nNCCL_IB_HCA=mlx5_0\nOTHER=a=b\n")
    (here / ".deepspeed_env").write_text("OMP_NUM_THREADS=3\n")
    environment = host_environment(SHELL, [home, here])
    assert environment == HANDED_ON | {"OMP_NUM_THREADS": "3", "NCCL_IB_HCA": "mlx5_0", "OTHER": "a=b"}
    (tmp_path / "named").write_text("OMP_NUM_THREADS=5\n")
    environment = host_environment(SHELL | {"DS_ENV_FILE": str(tmp_path / "named")}, [home, here])
    assert environment == HANDED_ON | {"OMP_NUM_THREADS": "5"}


def test_wrong_file_of_the_user_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\nexport B=2\n")
    with pytest.raises(ConfigError, match=r"\.deepspeed_env:2: export B=2: must be NAME=value"):
        host_environment({}, [tmp_path])
    with pytest.raises(ConfigError, match="DS_ENV_FILE=gone: no such file"):
        host_environment({"DS_ENV_FILE": "gone"}, [tmp_path])


def test_written_file_is_what_the_launcher_reads_and_never_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    files = [write_environment_file(run, HANDED_ON), write_environment_file(run, {"A": "b=c"})]
    assert [file.name for file in files] == ["hosts-1.env", "hosts-2.env"]
    read = [dict(line.split("=", maxsplit=1) for line in file.read_text().splitlines()) for file in files]
    assert read == [HANDED_ON, {"A": "b=c"}]  # as deepspeed.launcher.runner takes lines apart
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]  # the user's files may hold secrets
    for value in ('a"b', "a\nb"):
        with pytest.raises(ConfigError, match="environment: PATH contains a quote or a line break"):
            write_environment_file(run, {"PATH": value})
    assert len(list(run.iterdir())) == 2


def test_values_that_mpirun_or_srun_would_get_in_quotes_are_left_out() -> None:
    environment = {"PATH": "/a:/b", "COMMAS": "a,b", "BLANKS": "a b"}
    assert plain_values(environment, commas=True) == ({"PATH": "/a:/b", "COMMAS": "a,b"}, ["BLANKS"])
    assert plain_values(environment, commas=False) == ({"PATH": "/a:/b"}, ["COMMAS", "BLANKS"])
