"""Separate hosts on one machine, made of Linux namespaces: a cluster for launchers, without the machines.

A host has its own network, host name, processes, mounts, shared memory, and sshd with a key. The file system is shared,
as on a cluster. Nothing has a name outside, so that two test runs cannot clash. However the tests end, the kernel takes
each host down with its first process.
"""

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# The host's first process: prepares the host, prints so, and lives as long as its standard input is open.
_FIRST_PROCESS = r"""
set -eu
folder=$1
name=$2
hostname "$name"
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir /run/sshd
mount --bind "$folder/$name/hosts" /etc/hosts
mount --bind "$folder/$name/ssh" /etc/ssh
ip link set lo up
echo ready
read -r _
/usr/sbin/sshd -f /etc/ssh/sshd_config -E "$folder/$name/sshd.log"
echo listening
cat > /dev/null
"""

_SSHD = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PidFile none
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 100
"""

_SSH = """\
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
BatchMode yes
"""


@dataclass(frozen=True)
class Host:
    """One of the hosts: its name, its address, and the process that holds it."""

    name: str
    address: str
    interface: str
    process: subprocess.Popen[str]
    pid: int  # of its first process, in this machine's namespace
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, in a folder; its output goes to a file."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-p", "-m", "-i", f"--wd={folder}", "--"]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*enter, *command], env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.started.append(process)
        return process

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, timeout_seconds: float
    ) -> int:
        """Run a command on the host to its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it took longer; its processes live on until the host is taken down.
        """
        running = self.start(command, environment, folder, log)
        try:
            return running.wait(timeout_seconds)
        finally:
            running.kill()
            running.wait()

    def find(self, matches: Callable[[list[bytes]], bool]) -> list[int]:
        """Return the pids, in this machine's namespace, of the host's processes whose words match."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                is_local = (folder / "ns" / "pid").readlink() == Path(f"/proc/{self.pid}/ns/pid").readlink()
            except OSError:
                continue  # it has just ended
            if is_local and matches(words):
                pids.append(int(folder.name))
        return sorted(pids)

    def ranks(self) -> list[int]:
        """Return the pids of the host's ranks, in this machine's namespace."""
        return self.find(lambda words: words[1:2] == [b"-u"] and words[2].endswith(b"launcher/train.py"))

    def processes(self) -> list[str]:
        """List the command lines of the host's processes, without those that keep the host up."""
        listed = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-p", "-m", "--", "ps", "-e", "-o", "pid=,stat=,args="],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        daemons = ("sshd: /usr/sbin/sshd", "munged ", "slurmctld ", "slurmd ", "slurmscriptd")
        ignored = (" cat", "/bin/bash", "bash -c", " ps -e", *daemons)
        return [line for line in listed if line.split()[0] != "1" and not any(word in line for word in ignored)]

    def end(self) -> None:
        """End the host and all its processes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        for process in self.started:  # they ended with the host, and are reaped here
            process.wait()


def make_hosts(folder: Path, count: int = 2) -> list[Host]:
    """Start hosts that are joined by a bridge and reach each other by name and by ssh.

    The bridge is on the first host. Interfaces have different names, as on real clusters.
    """
    folder.mkdir(parents=True)
    names = [f"node{number}" for number in range(1, count + 1)]
    addresses = [f"10.73.0.{number}" for number in range(1, count + 1)]
    for host_name in names:
        (folder / host_name).mkdir()
        # As on Debian: its own name means loopback to a host, and an address to the others.
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {host_name}"]
        lines += [f"{address} {name}" for name, address in zip(names, addresses, strict=True) if name != host_name]
        (folder / host_name / "hosts").write_text("".join(f"{line}\n" for line in lines))
    _make_keys(folder, names, addresses)
    hosts: list[Host] = []
    try:
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            hosts.append(_start(folder, name, address, "fabric" if number == 0 else f"port{number}"))
        _join(hosts)
        for host in hosts:
            assert host.process.stdin is not None and host.process.stdout is not None
            host.process.stdin.write("go\n")
            host.process.stdin.flush()
            assert host.process.stdout.readline() == "listening\n", (folder / host.name / "sshd.log").read_text()
        _wait_for_ssh(hosts, folder)
    except BaseException:
        for host in hosts:
            host.end()
        raise
    return hosts


def _make_keys(folder: Path, names: list[str], addresses: list[str]) -> None:
    _make_key(folder / "key")
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    known_hosts = []
    for name, address in zip(names, addresses, strict=True):
        ssh = folder / name / "ssh"
        ssh.mkdir()
        _make_key(ssh / "host_key")
        (ssh / "sshd_config").write_text(_SSHD.format(folder=folder))
        (ssh / "ssh_config").write_text(_SSH.format(folder=folder))
        known_hosts.append(f"{name},{address} {(ssh / 'host_key.pub').read_text()}")
    (folder / "known_hosts").write_text("".join(known_hosts))


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _start(folder: Path, name: str, address: str, interface: str) -> Host:
    apart = ["unshare", "--net", "--uts", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*apart, "/bin/bash", "-c", _FIRST_PROCESS, "host", str(folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "a host could not be made; are you root?"
    pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    return Host(name, address, interface, process, pid)


def _join(hosts: Sequence[Host]) -> None:
    """Join all hosts: each has one end of a pair, and the other end is in the first host's bridge."""
    first = hosts[0]
    _ip(first, "link", "add", first.interface, "type", "bridge")
    for host in hosts[1:]:
        pair = ["link", "add", f"to-{host.name}", "type", "veth", "peer", "name", host.interface]
        _ip(first, *pair, "netns", str(host.pid))
        _ip(first, "link", "set", f"to-{host.name}", "master", first.interface, "up")
    for host in hosts:
        _ip(host, "address", "add", f"{host.address}/24", "dev", host.interface)
        _ip(host, "link", "set", host.interface, "up")


def _ip(host: Host, *words: str) -> None:
    # The pids of other hosts are those of this machine: enter the network alone.
    subprocess.run(["nsenter", "-t", str(host.pid), "-n", "--", "ip", *words], check=True)


def _wait_for_ssh(hosts: Sequence[Host], folder: Path) -> None:
    """Wait until every host answers the first one by its name."""
    log = folder / "ssh.log"

    def answers(host: Host) -> bool:
        ended = hosts[0].run(["ssh", host.name, "hostname"], {"PATH": os.environ["PATH"]}, folder, log, 30)
        return ended == 0 and log.read_text().splitlines()[-1] == host.name

    for host in hosts:
        wait_until(functools.partial(answers, host), 60, log.read_text)


def wait_until(condition: Callable[[], object], seconds: float, describe: Callable[[], object]) -> None:
    """Poll until a condition holds; after so many seconds fail with a description. A missing file is waited for."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError):
            if condition():
                return
        assert time.monotonic() < deadline, describe()
        time.sleep(0.2)
