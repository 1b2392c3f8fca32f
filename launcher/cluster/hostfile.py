"""A hostfile: the hosts of a run and how many processes each takes, checked before anything starts.

The file is the deepspeed launcher's (a host a line, ``node1 slots=4``, # before a comment), and so are the filters:
``--include node1@node2:0,2`` takes those hosts (with all slots, or those), ``--exclude`` everything but those.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from longstride.kernels import ConfigError

Slots = dict[str, list[int]]  # of each host, in the order of the file


@dataclass(frozen=True)
class Hosts:
    """Where a run's ranks are started, by what, and where they meet."""

    launcher: str
    hostfile: Path
    slots: Slots
    master_addr: str = ""  # known once the hosts have been asked
    master_port: int = 0
    filtered: bool = False  # fewer than the file names

    @property
    def num_processes(self) -> int:
        """Of all hosts."""
        return sum(map(len, self.slots.values()))

    @property
    def include(self) -> str:
        """The filter that leaves these of the file; nothing where they are all."""
        each = (f"{host}:{','.join(map(str, slots))}" for host, slots in self.slots.items())
        return "@".join(each) if self.filtered else ""

    def without(self, lost: Container[str]) -> Hosts:
        """Those that are left."""
        return self.taking({host: slots for host, slots in self.slots.items() if host not in lost})

    def taking(self, slots: Slots) -> Hosts:
        """These of the slots alone."""
        return replace(self, slots=slots, filtered=self.filtered or slots != self.slots)

    def meeting(self, address: str, port: int) -> Hosts:
        """The same hosts, whose ranks meet there."""
        return replace(self, master_addr=address, master_port=port)


_ENTRY = re.compile(r"(?P<host>[A-Za-z0-9][\w.:@-]*)(?:\s+slots=(?P<slots>\d+))?", re.ASCII)
_GOOD = "such as `node1 slots=4`"


def read_hostfile(path: Path) -> Slots:
    """The hosts of a file with their slots, numbered from 0.

    Raises:
        ConfigError: it is not there, cannot be read, or a line of it is none of a hostfile.
    """
    if not path.is_file():
        raise ConfigError(f"--hostfile={path}: no such file; write one with a line for each host, {_GOOD}")
    hosts: Slots = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--hostfile={path}: is no text; write a line for each host, {_GOOD}") from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        entry = _ENTRY.fullmatch(text)
        where = f"{path}:{number}: {text}"
        if entry is None or entry["slots"] is None:
            raise ConfigError(f"{where}: must be a host and its number of processes, {_GOOD}")
        if "@" in entry["host"]:
            user, _, host = entry["host"].rpartition("@")
            rule = "must be without a user, as @ separates hosts in filters"
            raise ConfigError(f"{where}: {rule}; put User {user} for {host} in ~/.ssh/config")
        if int(entry["slots"]) < 1:
            raise ConfigError(f"{where}: must have at least one slot; or put # before the line")
        if entry["host"] in hosts:
            raise ConfigError(f"{where}: {entry['host']} has a line already; give all its slots in one")
        hosts[entry["host"]] = list(range(int(entry["slots"])))
    if not hosts:
        raise ConfigError(f"--hostfile={path}: names no host; write a line for each, {_GOOD}")
    return hosts


def chosen_hosts(hosts: Mapping[str, list[int]], include: str = "", exclude: str = "") -> Slots:
    """What ``--include`` or ``--exclude`` leaves of the hosts, in the order of the file.

    Raises:
        ConfigError: both are given, one is malformed or names what is not there, or nothing is left.
    """
    if include and exclude:
        raise ConfigError(f"--exclude={exclude}: cannot be given with --include; give one of them")
    if include:
        named = _parse("--include", include, hosts)
        left = {host: named[host] for host in hosts if host in named}
    elif exclude:
        named = _parse("--exclude", exclude, hosts)
        left = {host: [slot for slot in slots if slot not in named.get(host, ())] for host, slots in hosts.items()}
    else:
        left = {host: list(slots) for host, slots in hosts.items()}
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise ConfigError(f"--exclude={exclude}: leaves no host of {', '.join(hosts)}")
    return left


def _parse(option: str, text: str, hosts: Mapping[str, list[int]]) -> Slots:
    """The hosts and slots that a filter names; a host without slots stands for all of them."""
    named: Slots = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            raise ConfigError(f"{option}={text}: {host or '(nothing)'} is not in the hostfile; {', '.join(hosts)} are")
        slots = hosts[host]
        if colon:
            if re.fullmatch(r"\d+(,\d+)*", numbers, re.ASCII) is None:
                raise ConfigError(f"{option}={text}: must be HOST@HOST or HOST:SLOT,SLOT; such as {host}:0")
            slots = sorted({int(number) for number in numbers.split(",")})
            missing = [slot for slot in slots if slot not in hosts[host]]
            if missing:
                last = len(hosts[host]) - 1
                raise ConfigError(f"{option}={text}: {host} has no slot {missing[0]}; 0 to {last} are there")
        named[host] = sorted({*named.get(host, []), *slots})
    return named
