"""`longstride train --max-restarts N`: after a process or host has died, starts the run again on what is left."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longstride.data_pipelines.plain_files import open_plain, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.cluster.placement import HostRanks, LocalRanks, NoHostAnswersError
from longstride.launcher.cluster.supervisor import Launch, Outcome, StopRequest
from longstride.launcher.config import load_json_object
from longstride.launcher.output import exit_codes, file_names, metrics_file, say
from longstride.launcher.ranks import check_unlocked
from longstride.launcher.stops import StopFile

_FIRST_WAIT_SECONDS = 1.0  # before a restart; it doubles with each attempt in vain
_LONGEST_WAIT_SECONDS = 60.0
_MOST_IN_VAIN = 3  # attempts in a row that come no further
_POLL_SECONDS = 1.0
_UNLOCK_SECONDS = 60.0  # for the system, or a file server, to free the lock of a process that was killed
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_TAIL_BYTES = 1 << 16
_MOST_DIGITS = 32  # of a step, in a file of its own


def run_with_restarts(
    run: Path,
    resume: str,
    max_restarts: int,
    placement: LocalRanks | HostRanks,
    request: StopRequest,
    supervise: Callable[[Launch], Outcome],
    stop_seconds: float,
) -> int:
    """Launches the ranks until the run ends in a way that a restart cannot mend; returns the exit code.

    ``stop_seconds``: how long ranks that have lost their launcher may take to save and end.
    """
    option = ResumeOption(run, resume)
    furthest = Progress(saved=0 if resume == "never" else read_progress(run).saved, recorded=0)
    left, in_vain, wait = max_restarts, 0, _FIRST_WAIT_SECONDS
    launch, placed = placement.launch(resume), ""
    ended, attempted = supervise(launch), True
    while True:
        if ended.code not in exit_codes.RESTARTABLE or max_restarts == 0:
            if ended.code == exit_codes.HUNG:  # UNFORESEEN has had its traceback
                say(f"ended: {ended.description}")
            return ended.code
        if attempted:
            before, furthest = furthest, furthest.at_least(read_progress(run))
            in_vain, wait = (0, _FIRST_WAIT_SECONDS) if furthest != before else (in_vain + 1, wait)
        if in_vain == _MOST_IN_VAIN:
            step = furthest.saved
            say(f"ended: {ended.description}; {in_vain} attempts in a row came no further than step {step}: given up")
            return ended.code
        if left == 0:
            say(f"ended: {ended.description}; no restart is left of {max_restarts}")
            return ended.code
        try:
            if not _stop_comes(request, wait):
                left, wait = left - 1, min(2 * wait, _LONGEST_WAIT_SECONDS)
                placed = placement.shrink()
            vacate(run, launch.stop_file, request, stop_seconds, placement.end_elsewhere)
            if request.signal is not None:
                return exit_codes.STOPPED if request.at_once else exit_codes.REQUEUE
            resume = option.for_restart()
            launch = placement.launch(resume)
        except NoHostAnswersError as error:
            say(f"ended: {ended.description}; {error}; restarts left: {left}")
            # Networks take long to come back. The ranks may train on meanwhile, so this counts as no attempt in vain.
            ended, attempted, wait = Outcome(exit_codes.HUNG, str(error)), False, _LONGEST_WAIT_SECONDS
            continue
        except ConfigError as error:  # no mistake of the user, so no exit code 2: the loss has left too little
            say(f"ended: {ended.description}; {error}")
            return ended.code
        steps = saved_steps(run)
        where = "the best step" if resume == "best" else f"step {resume}"
        if resume == "auto":
            where = f"step {max(steps)}" if steps else "the start"
        say(f"ended: {ended.description}; going on from {where} {placed}; restarts left: {left}")
        ended, attempted = supervise(launch), True


def _stop_comes(request: StopRequest, seconds: float) -> bool:
    """Waits before a restart; returns at once, and true, where a stop is requested."""
    end = time.monotonic() + seconds
    while request.signal is None and (left := end - time.monotonic()) > 0:
        request.listen(left)
    request.tell()
    return request.signal is not None


def vacate(
    run: Path, stop_file: Path, request: StopRequest, stop_seconds: float, end_elsewhere: Callable[[], None]
) -> None:
    """Returns once no rank of a launch writes to the run folder any more, or once leaving at once is requested.

    Rank 0 holds the lock of the folder. Its stop file asks it to stop; it saves within ``stop_seconds``, and all ranks
    end. ``end_elsewhere`` ends ranks on other hosts that are left.

    Raises:
        ConfigError: something still writes there, such as another run.
    """

    def is_free() -> bool:
        try:
            check_unlocked(run)
        except ConfigError:
            return False
        return True

    def comes_free(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (free := is_free()) and not request.at_once and (left := end - time.monotonic()) > 0:
            request.listen(min(left, _POLL_SECONDS))
            request.tell()  # the stop file asks already
        return free

    file = StopFile(stop_file)
    try:
        free = is_free()
        if not free:
            file.write("the loss of its launcher")
            free = comes_free(stop_seconds)
        if not request.at_once:
            end_elsewhere()  # even where the lock is free: ranks other than 0 may be left
        if not free and not comes_free(_UNLOCK_SECONDS) and not request.at_once:
            check_unlocked(run)
    finally:
        file.remove()


class ResumeOption:
    """The value of --resume for each attempt: the user's until the run has begun, then the newest checkpoint."""

    def __init__(self, run: Path, resume: str) -> None:
        self._run, self._resume = run, resume
        # A run that resumes from an older step moves the checkpoints beyond it aside. While they are all there, it has
        # not begun, and the newest checkpoint is not its own.
        self._beyond = self._checkpoints_beyond(int(resume)) if resume not in ("auto", "best", "never") else set()
        self._before = self._checkpoints_beyond(0)  # the best one is not known here: a run has begun once these change

    def for_restart(self) -> str:
        """The value for an attempt after the first."""
        if self._beyond and self._beyond <= self._checkpoints_beyond(int(self._resume)):
            return self._resume
        if self._resume == "best" and self._before == self._checkpoints_beyond(0):
            return self._resume
        return "auto"

    def _checkpoints_beyond(self, step: int) -> set[tuple[int, int]]:
        """(step, inode of its folder) of each checkpoint after a step: a new one of the same step has another inode."""
        folders = {each: self._run / file_names.CHECKPOINTS / f"step-{each:08d}" for each in saved_steps(self._run)}
        return {(each, folder.stat().st_ino) for each, folder in folders.items() if each > step}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come by the files in its folder: the newest steps; 0 before the first."""

    saved: int
    recorded: int

    def at_least(self, other: Progress) -> Progress:
        """The further of both in each respect."""
        return Progress(max(self.saved, other.saved), max(self.recorded, other.recorded))


def read_progress(run: Path) -> Progress:
    """How far a run has come, by the names of its checkpoints and the last whole lines of metrics.jsonl."""
    try:
        with open_plain(run / file_names.METRICS, follow_links=False) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        lines = []
    recorded = max((line["step"] for line in map(metrics_file.parse_line, lines) if line), default=0)
    return Progress(max(saved_steps(run), default=0), recorded)


def saved_steps(run: Path) -> list[int]:
    """The steps that have a checkpoint; its content is not looked at."""
    try:
        names = [path.name for path in (run / file_names.CHECKPOINTS).iterdir()]
    except OSError:
        return []
    return [int(match[1]) for match in map(_STEP_FOLDER.fullmatch, names) if match]


def is_done(run: Path, last_step: int | None) -> bool:
    """Whether the last step of a run is saved, or the one after which `train.stop_when` ended it.

    ``last_step``: None for a run given in epochs; its config.json then says how many steps they are. A known step comes
    first: an earlier start with fewer steps may have written that file.
    """
    saved = saved_steps(run)
    with suppress(OSError, ValueError):
        if int(read_plain(run / file_names.OVER, _MOST_DIGITS, follow_links=False)) in saved:
            return True
    if last_step is None:
        try:
            last_step = load_json_object(run / file_names.CONFIG, follow_links=False)["train"]["steps"]
        except (ConfigError, KeyError, TypeError):
            return False
    return last_step in saved
