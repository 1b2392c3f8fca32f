"""Hostfiles, their filters, and what is found wrong with hosts and launchers. Real hosts are in tests/cluster."""

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster.hosts import (
    check_program,
    end_launches,
    filter_hosts,
    find_mpirun,
    launch_pattern,
    meeting_address,
    read_hostfile,
    unreachable,
)
from tests.harness.programs import Programs

VERSIONS = {"openmpi": "echo 'mpirun (Open MPI) 5.0.11'", "mpich": "echo 'HYDRA build details:'"}
HOSTS = {"node1": [0, 1], "node2": [0, 1, 2]}


def test_hostfile_is_read_as_the_deepspeed_launcher_reads_it(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    path = tmp_path / "hostfile"
    path.write_text("# a rack\nnode1 slots=2\n\n  node2.rack-7\tslots=3  # the new one\n10.0.0.3 slots=1\n")
    hosts = read_hostfile(path)
    assert hosts == {"node1": [0, 1], "node2.rack-7": [0, 1, 2], "10.0.0.3": [0]}
    assert {host: len(slots) for host, slots in hosts.items()} == dict(_parse_hostfile(path.read_text().splitlines()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no host; write a line for each, such as `node1 slots=4`"),
        ("# node1 slots=2\n", "contains no host"),
        ("node1 slots=2\nnode2\n", "2: node2: must be a host and its number of processes, such as `node1 slots=4`"),
        ("node1 slots = 2\n", "1: node1 slots = 2: must be"),
        ("node1 slots=2 max_slots=4\n", "1: node1 slots=2 max_slots=4: must be"),
        ("node1 slots=-1\n", "1: node1 slots=-1: must be"),
        ("-oProxyCommand=sh slots=1\n", "1: -oProxyCommand=sh slots=1: must be"),
        ("me@node1 slots=1\n", "1: me@node1 slots=1: must not contain a user, because @ separates hosts in filters"),
        ("node1 slots=0\n", "1: node1 slots=0: must have at least one slot"),
        ("node1 slots=1\nnode1 slots=2\n", "node1 already has a line; give all its slots in one line"),
    ],
)
def test_wrong_hostfile_is_one_line_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_hostfile(path)
    assert str(path) in str(refused.value) and message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_missing_and_binary_hostfiles_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; write one with a line for each host"):
        read_hostfile(tmp_path / "hostfile")
    (tmp_path / "hostfile").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text"):
        read_hostfile(tmp_path / "hostfile")


@pytest.mark.parametrize(
    ("include", "exclude"),
    [("", ""), ("node2", ""), ("node2@node1:1", ""), ("node2:2,0", ""), ("", "node1"), ("", "node1:0@node2:1,2")],
)
def test_filters_leave_what_the_deepspeed_launcher_would(include: str, exclude: str) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    pool = {host: len(slots) for host, slots in HOSTS.items()}
    assert filter_hosts(HOSTS, include, exclude) == dict(parse_inclusion_exclusion(pool, include, exclude))


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("node1", "node2", "--exclude=node2: cannot be given with --include"),
        ("node9", "", "--include=node9: node9 is not in the hostfile; node1, node2 are"),
        ("node1:2", "", "--include=node1:2: node1 has no slot 2; its slots are 0 to 1"),
        ("node1:a", "", "--include=node1:a: must be HOST@HOST or HOST:SLOT,SLOT; such as node1:0"),
        ("", "node1@node2", "--exclude=node1@node2: excludes all hosts: node1, node2"),
    ],
)
def test_wrong_filter_is_one_line(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        filter_hosts(HOSTS, include, exclude)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("pdsh", "--launcher=pdsh: pdsh is not on PATH; install pdsh"),
        ("openmpi", "--launcher=openmpi: mpirun is not on PATH; install openmpi-bin"),
        ("mpich", "--launcher=mpich: mpirun is not on PATH; install mpich"),
        ("slurm", "--launcher=slurm: srun is not on PATH; install slurm-client"),
    ],
)
def test_missing_program_is_told_with_its_package(
    launcher: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Programs(tmp_path / "bin", monkeypatch, alone=True)
    with pytest.raises(ConfigError) as refused:
        check_program(launcher)
    assert message in str(refused.value)


def test_mpirun_of_the_other_library_is_passed_over_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(tmp_path / "bin", monkeypatch, alone=True)
    openmpi = programs.add("mpirun", VERSIONS["openmpi"])
    programs.add("ompi_info")
    check_program("openmpi")
    assert find_mpirun("openmpi") == str(openmpi)
    with pytest.raises(
        ConfigError, match=r"--launcher=mpich: .*/mpirun belongs to another library; install mpich, and put"
    ):
        check_program("mpich")
    mpich = programs.add("mpirun.mpich", VERSIONS["mpich"])  # as Debian names it
    assert find_mpirun("mpich") == str(mpich)


def test_meeting_address_is_the_first_hosts_as_others_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"node1": "10.0.0.1", "here": "127.0.1.1", "lost": "127.0.1.1"}

    def resolve(host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if host not in known:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, 0, 0, "", (known[host], 0))]

    monkeypatch.setattr("longstride.launcher.cluster.hosts.socket.getaddrinfo", resolve)
    monkeypatch.setattr("longstride.launcher.cluster.hosts.source_address", {"node2": "10.0.0.7"}.get)
    assert meeting_address(["node1", "node2"]) == "10.0.0.1"
    assert meeting_address(["here", "node2"]) == "10.0.0.7"  # its own name means loopback to this host
    assert meeting_address(["elsewhere"]) == "127.0.0.1"  # all ranks are on one host
    with pytest.raises(ConfigError, match="alias has no known address; give it with --master-addr"):
        meeting_address(["alias", "node2"])
    with pytest.raises(ConfigError, match="lost is this host and has no route to node9; give its addr"):
        meeting_address(["lost", "node9"])


def test_every_host_that_does_not_answer_or_lacks_the_program_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(tmp_path / "bin", monkeypatch)
    # As ssh: the host's name and then the command, which a shell there runs.
    script = 'while [ "$1" = -o ] || [ "$1" = -p ]; do shift 2; done\nhost=$1; shift\ncase $host in\n'
    script += 'good) eval "$@";;\nbare) eval "${@//test -e/false}";;\n'
    script += "*) echo 'Host key verification failed.' >&2; exit 255;;\nesac"
    programs.add("ssh", script)
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    file = tmp_path / "exists it's"
    file.touch()
    assert not unreachable(["good"], [str(file)])
    assert programs.calls("ssh")[0].startswith("-o BatchMode=yes -o ConnectTimeout=30 -p 2222 good ")
    assert unreachable(["good", "bare", "strange"], [str(file)]) == {
        "bare": f"--hostfile: bare: has no {file}; share the folder, or install at the same path",
        "strange": "--hostfile: strange: Host key verification failed; `ssh strange true` must work without a password",
    }


def test_left_launches_are_ended_by_their_meeting_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use real processes: only the one with that address ends, and the shell that ends it is unharmed."""
    programs = Programs(tmp_path / "bin", monkeypatch)
    programs.add("ssh", 'bash -c "${@: -1}" && touch ' + str(tmp_path / "came-to-its-end"))
    port = 20000 + os.getpid()  # of this test alone
    words = ["sleep 600; : --master_addr=10.0.0.1 --master_port={} --log_level"]
    running = [
        subprocess.Popen(["bash", "-c", words[0].format(each)], start_new_session=True) for each in (port, port + 10**7)
    ]
    try:
        end_launches(["node1"], launch_pattern("10.0.0.1", port))
        assert running[0].wait(10) == -signal.SIGTERM
        assert running[1].poll() is None
        assert (tmp_path / "came-to-its-end").exists()
    finally:
        for each in running:
            with contextlib.suppress(ProcessLookupError):  # ended before it started its sleep
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
