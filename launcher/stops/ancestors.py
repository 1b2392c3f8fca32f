"""Whether the processes that started this rank still live: a rank whose launcher was killed is to save and end.

DeepSpeed's chain on one host is runner → launch → ranks; under pdsh, ssh's server → shell → launch → ranks. A signal
that kills the runner leaves the rest alone, so each rank looks at the links above it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

_LAUNCH = "deepspeed.launcher.launch"
_RUNNERS = ("deepspeed", "sshd")  # in the command line of whoever started launch
_NOBODY = -1
_MOST_LINKS = 4  # launch, a shell or two, the runner
_LOST = "the end of its launcher"


class LauncherGone:
    """A reason to stop once a process between this rank and its launcher has ended; never for a rank by itself."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Without RANK nobody started this process but a person, whose shell may well end before it.
        self._chain = _chain() if "RANK" in environment else []

    def __call__(self) -> str | None:
        if any(_parent_of(child) != parent for child, parent in self._chain):
            return _LOST
        return None


def _chain() -> list[tuple[int, int]]:
    """Process and parent, from this process up to its launcher's first."""
    parent = os.getppid()
    links = [(os.getpid(), parent)]
    if not _says(parent, (_LAUNCH,)):
        return links  # torchrun, srun or mpirun: what stands above it may be a person's shell
    for _ in range(_MOST_LINKS - 1):
        above = _parent_of(parent)
        if above is None:
            break
        child, parent = parent, above
        if child == os.getppid() and parent == 1 and not _says(1, _RUNNERS):
            return [(child, _NOBODY)]  # launch was adopted: it had lost its runner before this rank began
        links.append((child, parent))
        # A shell of pdsh has launch in its own command line, and so the name of DeepSpeed.
        if _says(parent, _RUNNERS) and not _says(parent, (_LAUNCH,)):
            return links
    return links[:2]  # an unknown one: what stands above the parent of launch may be a person's shell


def _parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def _says(pid: int, words: tuple[str, ...]) -> bool:
    """Whether a process's command line holds one of the words."""
    try:
        line = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
    return any(word in line for word in words)
