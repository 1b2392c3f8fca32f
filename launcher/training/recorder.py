"""What a training run reports: metrics.jsonl and its progress; its lines go to DeepSpeed's monitors too."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.durable import flush_folder
from longstride.data_pipelines.plain_files import open_plain
from longstride.launcher.models import ModelData
from longstride.launcher.output import file_names, metrics_file
from longstride.launcher.training.monitors import Monitors
from longstride.launcher.training.progress import Progress

_MOST_WAITING = 100_000  # lines of some 500 bytes


def device_seconds(device: torch.device) -> float:
    """The clock once the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Recorder:
    """Writes on rank 0 only; on the other ranks every call does nothing. A full disk is reported and ends nothing."""

    def __init__(self, run: Path, engine: DeepSpeedEngine, is_first: bool, steps: int) -> None:
        self._run, self._is_first = run, is_first
        if is_first:
            self._lines = LineFile(run / file_names.METRICS, self.say)
            self._progress = Progress(steps, engine.global_steps, sys.stderr)
            self._monitors = Monitors(engine, self.say)

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line and hands its numbers to DeepSpeed's monitors."""
        if not self._is_first:
            return
        self._lines.append(json.dumps(line), f"step {line['step']}")
        self._monitors.write(line)

    def samples(self, step: int, data: ModelData, drawn: np.ndarray, files: Sequence[Path]) -> None:
        """Hands samples of a step, (S, bytes) uint8, that were written to files, to DeepSpeed's monitors."""
        if self._is_first:
            self._monitors.samples(step, data, drawn, files)

    def flush(self) -> None:
        """Brings all lines to the disk: a checkpoint that outlives a power cut has those of its steps.

        Where it cannot, that is said, and costs no checkpoint.
        """
        if self._is_first:
            try:
                self._lines.flush()
            except OSError as error:
                self.say(f"{error.filename}: {error.strerror}; a power cut now may cost lines")

    def advance(self, line: dict[str, Any]) -> None:
        """Shows how far the run is after the step of a line."""
        if self._is_first:
            with contextlib.suppress(OSError):  # a log on a disk that is full
                self._progress.advance(line)

    def go_back(self, step: int, reason: str) -> None:
        """Shows that the run goes on from an earlier step."""
        if self._is_first:
            with contextlib.suppress(OSError):
                self._progress.rewind(step, reason)

    def say(self, text: str) -> None:
        """A line of its own above the bar."""
        if self._is_first:
            with contextlib.suppress(OSError):
                self._progress.say(text)

    def rewind(self, step: int, line: dict[str, Any]) -> Path | None:
        """Cuts the lines after a step, to which the step of ``line`` goes back; returns the copy that keeps them all.

        Raises:
            OSError: there is no room for the copy; nothing has changed, and lines that wait still do.
        """
        if not self._is_first:
            return None
        self._lines.settle()
        copy = metrics_file.cut_metrics(self._run, step, "rewind", f"{json.dumps(line)}\n")
        self._lines.close()
        self._lines = LineFile(self._run / file_names.METRICS, self.say)
        self._monitors.write(line)
        self._monitors.rewind(step)
        return copy

    def close(self) -> None:
        """Closes the file and leaves the bar as it is."""
        if self._is_first:
            self._lines.close()
            self._monitors.close()
            with contextlib.suppress(OSError):
                self._progress.close()


class LineFile:
    """A file to which whole lines are appended; a line that cannot be written waits for the next try."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file = open_plain(path, "ab", follow_links=False)
        self._waiting: list[bytes] = []
        self._first = ""  # what the oldest waiting line is about
        self._dropped = 0

    def append(self, text: str, about: str) -> None:
        """Writes a line, after those that wait; ``about`` names it where it cannot be written."""
        waited = len(self._waiting)
        self._waiting.append(f"{text}\n".encode())
        if waited == _MOST_WAITING:
            self._waiting.pop(0)
            self._dropped += 1
        reason = self._write()
        if reason is not None and not waited:
            self._first = about
            self._say(f"{self._path}: {reason}; lines from {about} on wait in memory until there is room")
        elif reason is None and waited:
            self._say_made_up(waited)

    def _say_made_up(self, waited: int) -> None:
        lost = f"; {self._dropped} more are lost" if self._dropped else ""
        self._say(f"{self._path}: {waited} lines from {self._first} on have been made up for{lost}")
        self._dropped = 0

    def settle(self) -> None:
        """Writes the lines that wait. Raises OSError where it cannot; then they wait on."""
        waited = len(self._waiting)
        reason = self._write() if waited else None
        if reason is not None:
            raise OSError(errno.ENOSPC, f"{reason}, and lines from {self._first} on wait", str(self._path))
        if waited:
            self._say_made_up(waited)

    def flush(self) -> None:
        """Brings the lines, those that wait and the file's name to the disk. Raises OSError where it cannot."""
        self.settle()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        flush_folder(self._path.parent)

    def close(self) -> None:
        """Tries once more, and says what is lost."""
        if self._waiting and self._write() is not None:
            count = len(self._waiting) + self._dropped
            self._say(f"{self._path}: {count} line{'s' if count > 1 else ''} from {self._first} on are lost")
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self) -> str | None:
        """Writes all lines that wait; or returns why it cannot, and then no part of them stays in the file."""
        text = b"".join(self._waiting)
        try:
            before = self._file.seek(0, os.SEEK_END)
            try:
                if self._file.write(text) == len(text):
                    self._waiting.clear()
                    return None
                reason = os.strerror(errno.ENOSPC)  # there was room for a part
            except OSError as error:
                reason = error.strerror or str(error)
            self._file.truncate(before)
        except OSError as error:
            reason = error.strerror or str(error)
        return reason
