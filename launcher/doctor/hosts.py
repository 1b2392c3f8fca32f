"""The hosts of a run: whether each answers, and has the versions, code, cards and data that this one has."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longstride.kernels import ConfigError
from longstride.launcher.doctor.findings import CHILD_SECONDS, ROOT, Finding, parsed
from longstride.launcher.output import exit_codes

_ALIKE = ("python", "torch", "triton", "deepspeed", "code")


def read_hosts(arguments: argparse.Namespace) -> dict[str, list[int]] | None:
    """The hosts with their slots; None for this one alone.

    Raises:
        ConfigError: the hostfile or an option is wrong.
    """
    if arguments.hostfile is None:
        return None
    from longstride.launcher.cluster import hosts

    if arguments.processes is not None:
        raise ConfigError(f"--processes={arguments.processes}: {arguments.hostfile} tells it; change its slots")
    return hosts.read_hostfile(arguments.hostfile)


def examine_hosts(
    slots: dict[str, list[int]], arguments: argparse.Namespace, here: dict[str, Any], content: list[str]
) -> Iterator[Finding]:
    """Asks all hosts at once what they have; ``here``: what this one has. ``content``: the run as JSON, if any."""
    from longstride.launcher.cluster import hosts

    try:
        hosts.check_program(arguments.launcher)
        yield Finding("launcher", "ok", arguments.launcher)
    except ConfigError as error:
        yield Finding("launcher", "broken", str(error))
    words = [sys.executable, "-m", "longstride.launcher.doctor.answer", *content]
    script = f"cd {shlex.quote(str(Path.cwd()))} 2>&-; PYTHONPATH={shlex.quote(ROOT)} timeout {CHILD_SECONDS:g} "
    for host, ended in hosts.ask(list(slots), script + shlex.join(words), CHILD_SECONDS + 60).items():
        if isinstance(ended, str):
            yield Finding(host, "broken", ended, f"`ssh {host} true` must work without a password")
            continue
        there = parsed(ended)
        if isinstance(there, str):
            mend = f"`ssh {host} true` must work without a password"
            if ended.returncode != exit_codes.SSH_FAILED:
                mend = f"{sys.executable} and this code must be there at the same path"
            yield Finding(host, "broken", there, mend)
            continue
        yield from _compared(host, len(slots[host]), here, there)


def _compared(host: str, processes: int, here: dict[str, Any], there: dict[str, Any]) -> Iterator[Finding]:
    """What a host has otherwise than this one."""
    well = True
    for name in _ALIKE:
        if there.get(name) != here.get(name):
            well = False
            text = f"{name} is {there.get(name, 'not installed')} there, and {here.get(name, 'not installed')} here"
            yield Finding(host, "broken", text, "install the same on all hosts")
    cards = there.get("devices", {}).get("cards", [])
    if cards and processes > len(cards):
        well = False
        yield Finding(host, "broken", f"{processes} slots and {len(cards)} GPUs", f"write slots={len(cards)}")
    if "no data" in there:
        well = False
        yield Finding(host, "broken", f"data: {there['no data']}", "give all hosts the same data at the same path")
    elif "data" in here and there.get("data") != here["data"]:
        well = False
        yield Finding(host, "broken", "has other data than this host", "give all hosts the same data")
    if well:
        data = ", the same data" if "data" in here else ""
        yield Finding(host, "ok", f"answers; the same versions and code{data}; {len(cards) or 'no'} GPUs")
