"""The network interface by which this host reaches the others.

Gloo, which the ranks of a CPU run talk by, binds to what the own host name resolves to, and to loopback where that
fails: then a rank of another host is never heard. An interface by name would do, but hosts may name theirs differently,
so no environment file can hold one name for all of them. Each rank asks its own kernel instead: the route to where the
ranks meet leads over an interface, which is the one. NCCL is left alone: it looks for interfaces that are up by itself,
takes loopback last, and may use several at once.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping

from longstride.launcher.ranks.rank_environment import end_host

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Names the interface towards MASTER_ADDR for gloo, unless a person has, or no host but this one takes part."""
    if "MASTER_ADDR" not in environment or GLOO_INTERFACE in environment:
        return
    towards = [environment["MASTER_ADDR"]]
    if environment.get("SLURM_STEP_NUM_NODES", "1") != "1" and "SLURM_STEP_NODELIST" in environment:
        # To the host where the ranks meet its own name may mean loopback (Debian's /etc/hosts says so): it asks for the
        # way to the last host. Launchers by ssh give an address instead, which no host takes for loopback.
        towards.append(end_host(environment["SLURM_STEP_NODELIST"], last=True))
    for host in towards:
        name = interface_towards(host)
        if name is not None:
            environment[GLOO_INTERFACE] = name
            return


def interface_towards(host: str) -> str | None:
    """The interface whose address this host would send from to another; None where it is loopback or cannot be told."""
    source = source_address(host)
    if source is None or is_loopback(source):
        return None
    import psutil  # which deepspeed asks for; Python itself cannot list the addresses of interfaces

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == source for address in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is always this machine's own."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # another name
        return False


def source_address(host: str) -> str | None:
    """The address this host would send from to another, by its routes alone; None where it knows no way there."""
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
