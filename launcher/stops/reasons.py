"""Reasons to stop beside signals: a launcher that has died, a time limit, a stop file.

Each is called again and again, and returns the reason once there is one (see ``StopFlag.add_source``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from longstride.data_pipelines.durable import write_over
from longstride.data_pipelines.plain_files import open_plain, read_plain
from longstride.launcher.output import say

LEAVE_AT_ONCE = "leave at once"  # the reason in a stop file by which ranks leave without saving
_MOST_REASON_BYTES = 1000
_LAUNCH = "deepspeed.launcher.launch"
_RUNNERS = ("deepspeed", "sshd")  # in the command line of the process that started launch
_MOST_LINKS = 4  # launch, a shell or two, the runner


class TimeIsUp:
    """The run has lived for ``train.max_seconds``; ``started``: when, by time.time(); None: when this process did."""

    def __init__(self, max_seconds: float, started: float | None) -> None:
        started = started or psutil.Process().create_time()
        # Monotonic from here on: setting the clock must not move the end.
        self._max_seconds, self._end = max_seconds, time.monotonic() + started + max_seconds - time.time()

    def __call__(self) -> str | None:
        return f"train.max_seconds={self._max_seconds:g}" if time.monotonic() >= self._end else None


class StopFile:
    """A file in the run folder that holds the reason: it reaches rank 0 on hosts that no signal reaches.

    Its name belongs to one launch, so that a file left behind stops no other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = path.with_name(f"{path.name}.begun")
        self._made_folder = False

    def __call__(self) -> str | None:
        """The reason in the file; None while there is none."""
        try:
            if self.path not in self.path.parent.iterdir():  # NFS asks its server for a listing, unlike for one file
                return None
            return read_plain(self.path, _MOST_REASON_BYTES, follow_links=False).decode().strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def write(self, reason: str) -> None:
        """Asks for a stop; says so where the disk is full or gone."""
        try:
            self._made_folder = self._made_folder or not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_over(self.path, reason.encode())
        except OSError as error:
            say(f"{self.path}: {error.strerror}; only processes on this host are told to stop")

    def mark_begun(self) -> None:
        """Tells whoever started this rank that its run now takes steps, so that a stop has something to save."""
        with suppress(OSError):  # a full disk: a stop may then cost the steps that no checkpoint has
            open_plain(self._begun, "ab", follow_links=False).close()

    def has_begun(self) -> bool:
        """Whether the run has said so, on whatever host."""
        try:
            return self._begun in self.path.parent.iterdir()  # as above: a server is asked for a listing
        except OSError:
            return False

    def remove(self) -> None:
        """Removes the file, and the run folder too if ``write`` made it and it is still empty."""
        with suppress(OSError):  # a run has begun in the folder
            self._begun.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            if self._made_folder:
                self.path.parent.rmdir()


class LauncherGone:
    """A process between this rank and its launcher has ended, so nobody watches over the rank any more.

    On one host DeepSpeed starts runner → launch → ranks; under pdsh, ssh's server → shell → launch → ranks. A signal
    that kills the runner leaves the others alone, so each rank watches all the links above it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # Without RANK a user started this process from a shell, which may well end first.
        self._links = _links_to_launcher() if "RANK" in environment else []

    def __call__(self) -> str | None:
        gone = any(_parent_of(child) != parent for child, parent in self._links)
        return "the end of its launcher" if gone else None


def _links_to_launcher() -> list[tuple[int, int]]:
    """(process, its parent) for each link from this process up to DeepSpeed's runner or ssh's server.

    Fewer where an unknown process stands above: it may be the user's shell, which a run outlives.
    """
    parent = os.getppid()
    links = [(os.getpid(), parent)]
    if not _command_line_holds(parent, (_LAUNCH,)):
        return links  # torchrun, srun or mpirun
    for _ in range(_MOST_LINKS - 1):
        above = _parent_of(parent)
        if above is None:
            break
        child, parent = parent, above
        if child == os.getppid() and parent == 1 and not _command_line_holds(1, _RUNNERS):
            return [(child, -1)]  # launch is an orphan: its runner died before this rank began
        links.append((child, parent))
        # A shell of pdsh has launch, and so the word deepspeed, in its own command line.
        if _command_line_holds(parent, _RUNNERS) and not _command_line_holds(parent, (_LAUNCH,)):
            return links
    return links[:2]


def _parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def _command_line_holds(pid: int, words: tuple[str, ...]) -> bool:
    try:
        line = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
    return any(word in line for word in words)
