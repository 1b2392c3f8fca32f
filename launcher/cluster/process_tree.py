"""The processes below this one on this host, those whose parents have ended included. Linux; elsewhere less is seen."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

_SET_CHILD_SUBREAPER = 36  # prctl(2)
# What tells a process that it is a rank. SLURM's own words are not among them: a batch script has them too.
_RANK_WORDS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_KILL_SECONDS = 30.0  # that the system may take to end what was killed


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents end, in place of the system's first one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every process below this one that has not ended."""
    return [each for each in psutil.Process().children(recursive=True) if not _is_dead(each)]


def local_ranks() -> list[psutil.Process]:
    """The ranks among the descendants, without the processes that they started themselves."""
    ranks = {each.pid: each for each in descendants() if _is_rank(each)}
    return [each for each in ranks.values() if _parent(each) not in ranks]


def reap_adopted(own_child: int) -> None:
    """Lets go of ended processes that were adopted; the status of the child that this one started is not touched."""
    while sys.platform == "linux":
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == own_child:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def kill_all(own_child: int) -> None:
    """Kills every descendant, and those that they start meanwhile, until none is left."""
    end = time.monotonic() + _KILL_SECONDS
    while (left := descendants()) and time.monotonic() < end:
        for each in left:
            with suppress(psutil.Error):
                each.kill()
        time.sleep(0.02)
        reap_adopted(own_child)


def _is_rank(process: psutil.Process) -> bool:
    try:
        told = not {*process.environ()}.isdisjoint(_RANK_WORDS)
    except psutil.Error:
        return False
    return told and not _ignores_stops(process.pid)


def _ignores_stops(pid: int) -> bool:
    """Whether a process ignores SIGTERM, as loader workers do, which have the environment of their rank."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    ignored = next((int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")), 0)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return True


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None
