"""Hostfiles and their filters: what is read, and the line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster.hostfile import chosen_hosts, read_hostfile

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
        ("", "names no host; write a line for each, such as `node1 slots=4`"),
        ("# node1 slots=2\n", "names no host"),
        ("node1 slots=2\nnode2\n", "2: node2: must be a host and its number of processes, such as `node1 slots=4`"),
        ("node1 slots = 2\n", "1: node1 slots = 2: must be"),
        ("node1 slots=2 max_slots=4\n", "1: node1 slots=2 max_slots=4: must be"),
        ("node1 slots=-1\n", "1: node1 slots=-1: must be"),
        ("-oProxyCommand=sh slots=1\n", "1: -oProxyCommand=sh slots=1: must be"),
        ("me@node1 slots=1\n", "1: me@node1 slots=1: must be without a user, as @ separates hosts in filters"),
        ("node1 slots=0\n", "1: node1 slots=0: must have at least one slot"),
        ("node1 slots=1\nnode1 slots=2\n", "2: node1 slots=2: node1 has a line already; give all its slots in one"),
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
    with pytest.raises(ConfigError, match="is no text"):
        read_hostfile(tmp_path / "hostfile")


@pytest.mark.parametrize(
    ("include", "exclude"),
    [("", ""), ("node2", ""), ("node2@node1:1", ""), ("node2:2,0", ""), ("", "node1"), ("", "node1:0@node2:1,2")],
)
def test_filters_leave_what_the_deepspeed_launcher_would(include: str, exclude: str) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    pool = {host: len(slots) for host, slots in HOSTS.items()}
    assert chosen_hosts(HOSTS, include, exclude) == dict(parse_inclusion_exclusion(pool, include, exclude))


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("node1", "node2", "--exclude=node2: cannot be given with --include"),
        ("node9", "", "--include=node9: node9 is not in the hostfile; node1, node2 are"),
        ("node1:2", "", "--include=node1:2: node1 has no slot 2; 0 to 1 are there"),
        ("node1:a", "", "--include=node1:a: must be HOST@HOST or HOST:SLOT,SLOT; such as node1:0"),
        ("", "node1@node2", "--exclude=node1@node2: leaves no host of node1, node2"),
    ],
)
def test_wrong_filter_is_one_line(include: str, exclude: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen_hosts(HOSTS, include, exclude)
    assert message in str(refused.value)
