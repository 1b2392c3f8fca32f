"""`longstride VERB …` in a process of its own, forked from one that has everything imported; and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.processes.asked import Asked

SECONDS = 30.0  # that a command may take over what is hostile
MEMORY_BYTES = 2**30  # above the honest case
_MISTAKE = "longstride: error: "


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command. ``code`` is minus the signal that killed it, or None if it did not end in time."""

    words: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float
    peak_bytes: int  # of resident memory, what the forking process has of its own included

    @property
    def mistakes(self) -> list[str]:
        """The lines that say what was wrong."""
        return [line.removeprefix(_MISTAKE) for line in self.err.splitlines() if line.startswith(_MISTAKE)]

    def check_bounded(self, honest: Outcome | None = None) -> None:
        """Check that it ended in time, within its memory, and without a traceback."""
        assert self.code is not None, f"{self.words}: still running after {self.seconds:.0f} s\n{self.err[-2000:]}"
        assert "Traceback" not in self.err + self.out, f"{self.words}: {self.err[-4000:]}"
        above = self.peak_bytes - (honest.peak_bytes if honest else 0)
        assert above <= MEMORY_BYTES, f"{self.words}: {above / 2**30:.2f} GiB above the honest case"

    def check_refused(self, honest: Outcome | None = None, code: int = 2, most_lines: int = 1) -> str:
        """Check that it ended with ``code`` and within bounds, with its reasons in short lines; return the first."""
        self.check_bounded(honest)
        assert self.code == code, f"{self.words}: exit code {self.code}\n{self.out[-1000:]}{self.err[-2000:]}"
        assert 1 <= len(self.mistakes) <= most_lines, f"{self.words}: {self.err[-3000:]}"
        longest = max(self.mistakes, key=len)
        assert len(longest) <= 1000, f"{self.words}: a line of {len(longest)} characters: {longest[:200]} …"
        return self.mistakes[0]


def words_of(line: str, **names: object) -> list[str]:
    """Split a command line into words, then insert values for its {names}, which may have spaces."""
    return [word.format(**names) for word in line.split()]


def campaign(cases: Iterable[Any]) -> list[Any]:
    """Mark the cases of a parametrised test, (arguments) or an argument, as cases of the campaign."""
    arguments = (case if type(case) is tuple else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.campaign) for case in arguments]


def sampled(cases: Iterable[Any], sample: Iterable[Any] | int) -> list[Any]:
    """Mark the cases outside the sample as cases of the campaign. An integer n takes every n-th case as the sample."""
    cases = list(cases)
    sample = cases[::sample] if isinstance(sample, int) else list(sample)
    assert all(case in cases for case in sample)
    return [case if case in sample else campaign([case])[0] for case in cases]


class Commands(Asked):
    """Runs command lines one after the other; a context manager."""

    def __init__(self, folder: Path, **environment: object) -> None:
        super().__init__("tests/hostile/command_server.py", folder, folder, cwd=folder, **environment)

    def running(self) -> list[psutil.Process]:
        """Return the processes of the current command, for which another thread waits."""
        return list(psutil.Process(self._process.pid).children())

    def __call__(
        self,
        *words: object,
        seconds: float = SECONDS,
        folder: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
        limits: Sequence[tuple[str, int]] = (),
        fault: tuple[Path, str, int] | None = None,
        stdout: str = "",
    ) -> Outcome:
        """Runs a command line and kills what is left of it after so many seconds.

        ``folder``: its working directory. ``environment``: added, None takes away. ``limits``: of the process, by the
        names of the module `resource`, such as ("RLIMIT_NOFILE", 64). ``fault``: folder, kind and number, as
        generators/faults.py has them; ``log`` tells the operations. ``stdout``: "full", a disk without room, or
        "closed", a pipe that nobody reads any more; else what is printed is in the outcome.
        """
        line = tuple(map(str, words))
        case = {
            "words": line,
            "seconds": seconds,
            "folder": str(folder or self._folder),
            "environment": dict(environment or {}),
            "limits": list(limits),
            "stdout": stdout,
            "fault": [str(value) if isinstance(value, Path) else value for value in fault] if fault else None,
        }
        answer = self.ask(case)
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Outcome(line, out=out, err=err, **answer)
