"""One run at a time writes to a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from longstride.kernels import ConfigError, Problem
from longstride.launcher.output import file_names, say
from longstride.launcher.ranks.processes import Ranks, gather_objects

_TAKEN = (errno.EAGAIN, errno.EACCES)


@contextmanager
def run_lock(run: Path, ranks: Ranks) -> Iterator[None]:
    """Holds the folder for the block. All ranks must call; the first one locks.

    The lock belongs to its process: forked ones do not share it, and it is free as soon as that one has ended, however
    that happens.

    Raises:
        ConfigError: on every rank, where another process holds it.
    """
    with ExitStack() as held:
        problem = None
        if ranks.is_first:
            run.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((run / file_names.LOCK).open("a+", encoding="utf-8"))
            problem = _lock(file, run)
            if problem is None:
                file.seek(0)
                file.truncate()
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
                file.flush()
        problem = gather_objects(problem, ranks)[0]
        if problem is not None:
            raise ConfigError(problem)
        try:
            yield
        except BaseException:
            if ranks.is_first:
                _leave_no_trace(run)
            raise


def check_unlocked(run: Path) -> None:
    """Whether no other run writes to a folder, as far as can be told before one starts.

    Raises:
        ConfigError: one does.
    """
    if not (run / file_names.LOCK).exists():
        return
    with (run / file_names.LOCK).open("r+", encoding="utf-8") as file:
        problem = _lock(file, run)
    if problem is not None:
        raise ConfigError(problem)


def _leave_no_trace(run: Path) -> None:
    """Removes a run folder that holds nothing but its lock: what was wrong was found before anything was written."""
    with suppress(OSError):
        if [path.name for path in run.iterdir()] == [file_names.LOCK]:
            (run / file_names.LOCK).unlink()
            run.rmdir()


def _lock(file: TextIO, run: Path) -> Problem | None:
    """Takes the lock; what is wrong where another process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            file.seek(0)
            holder = file.readline().strip() or "another process"
            rule = f"another run writes there ({holder}); wait for it, or name another folder"
            return Problem("train.output", rule, str(run))
        say(f"{run}: no locks on this file system; see to it that no second run writes there")
    return None
