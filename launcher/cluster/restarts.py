"""`longstride train --max-restarts N`: starts again, on what is left, what a dying process or host has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from longstride.kernels import ConfigError
from longstride.launcher.cluster.progress import Progress, read_progress, saved_steps
from longstride.launcher.cluster.supervisor import Launch, Outcome, Wish
from longstride.launcher.output import exit_codes

_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0
_MOST_IN_VAIN = 3  # attempts in a row that bring nothing new


class NoHostAnswersError(Exception):
    """Not one: the hosts may be well, and this one cut off from them for a while."""


class Resuming:
    """How each attempt resumes: as a person said until the run has begun, and from the newest checkpoint then."""

    def __init__(self, run: Path, resume: str) -> None:
        self._run, self._resume = run, resume
        # A run that goes on from a step moves aside what lies beyond it: until then, the newest one is not its own.
        self._beyond = self._marks(int(resume)) if resume not in ("auto", "never") else set()

    def next(self) -> str:
        """What --resume is to be for an attempt after the first."""
        if self._resume in ("auto", "never"):
            return "auto"
        if self._beyond and self._beyond <= self._marks(int(self._resume)):
            return self._resume
        return "auto"

    def _marks(self, step: int) -> set[tuple[int, int]]:
        """The checkpoints beyond a step, each with what tells it from another one of its name."""
        folders = {each: self._run / "checkpoints" / f"step-{each:08d}" for each in saved_steps(self._run)}
        return {(each, folder.stat().st_ino) for each, folder in folders.items() if each > step}


def run_with_restarts(
    run: Path,
    resume: str,
    max_restarts: int,
    wish: Wish,
    launch: Callable[[str], Launch],
    attempt: Callable[[Launch], Outcome],
    after_loss: Callable[[], str],
    vacate: Callable[[Launch], None],
) -> int:
    """Attempts until one ends as no further one could mend; returns the exit code.

    ``launch`` makes what starts the ranks, for a way to resume; ``after_loss`` finds what is left to start them on, in
    words for a person, and raises ConfigError where that is nothing, or NoHostAnswersError where it cannot tell;
    ``vacate`` ends what a launch has left elsewhere, and raises ConfigError where it cannot.
    """
    resuming, furthest = Resuming(run, resume), _Furthest(run, from_nothing=resume == "never")
    left, in_vain, wait = max_restarts, 0, _FIRST_WAIT_SECONDS
    started, on = launch(resume), ""
    ended, answered = attempt(started), True
    while True:
        if ended.code not in exit_codes.RESTARTABLE or max_restarts == 0:
            if ended.code == exit_codes.HUNG:  # of what is unforeseen, a traceback has told
                _say(f"ended: {ended.told}")
            return ended.code
        if answered:
            in_vain, wait = (0, _FIRST_WAIT_SECONDS) if furthest.is_new() else (in_vain + 1, wait)
        if in_vain == _MOST_IN_VAIN:
            saved = furthest.best.saved
            _say(f"ended: {ended.told}; {in_vain} attempts in a row came no further than step {saved}: given up")
            return ended.code
        if left == 0:
            _say(f"ended: {ended.told}; no restart is left of {max_restarts}")
            return ended.code
        try:
            if not _pause(wish, wait):
                left, wait = left - 1, min(2 * wait, _LONGEST_WAIT_SECONDS)
                on = after_loss()
            vacate(started)
            if wish.asked is not None:
                return exit_codes.STOPPED if wish.at_once else exit_codes.REQUEUE
            resume = resuming.next()
            started = launch(resume)
        except NoHostAnswersError as error:
            _say(f"ended: {ended.told}; {error}; restarts left: {left}")
            # As long as networks take to come back; the ranks may train on meanwhile, which is no attempt's progress.
            ended, answered, wait = Outcome(exit_codes.HUNG, str(error)), False, _LONGEST_WAIT_SECONDS
            continue
        except ConfigError as error:  # not a person's mistake, but what the loss has left
            _say(f"ended: {ended.told}; {error}")
            return ended.code
        _say(f"ended: {ended.told}; going on from {_place(run, resume)} {on}; restarts left: {left}")
        ended, answered = attempt(started), True


class _Furthest:
    """How far any attempt has come."""

    def __init__(self, run: Path, *, from_nothing: bool) -> None:
        self._run = run
        self.best = Progress(saved=0 if from_nothing else read_progress(run).saved, recorded=0)

    def is_new(self) -> bool:
        """Whether the newest attempt has come further than all before."""
        come, before = read_progress(self._run), self.best
        self.best = Progress(max(come.saved, before.saved), max(come.recorded, before.recorded))
        return self.best != before


def _pause(wish: Wish, seconds: float) -> bool:
    """Waits, unless a stop is asked for; whether it is."""
    end = time.monotonic() + seconds
    while wish.asked is None and (left := end - time.monotonic()) > 0:
        wish.listen(left)
    return wish.asked is not None


def _place(run: Path, resume: str) -> str:
    """Where an attempt will go on, as far as names tell."""
    if resume != "auto":
        return f"step {resume}"
    saved = saved_steps(run)
    return f"step {max(saved)}" if saved else "the start"


def _say(line: str) -> None:
    print(f"longstride: {line}", file=sys.stderr, flush=True)
